// Where the states of sequences with guessed tokens are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace w4a8::test {

/// Slots of sequences: the last ones first, and nobody has slot 0. Without guesses one a sequence, else one for each
/// token of the longest call, in front of which the slots are in order.
struct GuessedSlots {
  /// calls: how many tokens of each sequence are right. guesses: of each call, wrong ones behind them; -1: none ever.
  GuessedSlots(const std::vector<std::vector<int64_t>>& calls, std::size_t sequences, int64_t guesses)
      : guesses(guesses), accepted(sequences, guesses < 0 ? 0 : 1), sequences_(static_cast<int64_t>(sequences)) {
    if (guesses < 0) return;
    for (const std::vector<int64_t>& counts : calls) {
      each = std::max(each, *std::max_element(counts.begin(), counts.end()) + guesses);
    }
    for (int64_t b = 0; b < sequences_; ++b) {
      for (int64_t t = 0; t < each; ++t) table.push_back(at(b, t));
    }
  }
  int64_t count() const { return sequences_ * each + 1; }
  int32_t at(int64_t b, int64_t t) const { return static_cast<int32_t>((sequences_ - b) * each - t); }
  /// Rows of a sequence in the state of a convolution.
  int64_t rows(int64_t width) const { return width - 2 + each; }
  const int32_t* out_slots() const { return guesses < 0 ? nullptr : table.data(); }

  int64_t guesses;
  int64_t each = 1;
  std::vector<int32_t> accepted;
  std::vector<int32_t> table;

 private:
  int64_t sequences_;
};

}  // namespace w4a8::test
