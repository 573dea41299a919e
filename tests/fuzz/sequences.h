// What the fuzzers of linear attention have in common: sequences in several calls, and every kernel beside the
// reference.
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "bytes.h"
#include "guarded_buffer.h"
#include "naive.h"

namespace w4a8::fuzz {

inline constexpr DType kRowTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
inline constexpr int64_t kHeadSizes[] = {16, 32, 48, 64, 80, 128, 144, 256};
inline constexpr float kNormEps[] = {1e-6f, 1e-5f, 1.0f, 1e-40f};

/// Sequences of a layer with so many numbers of states, their tokens, and how many of each are in a call.
template <class Problem>
void draw_sequences(Bytes& in, int64_t states, Problem& p) {
  constexpr std::size_t kMostCalls = 4;
  constexpr int64_t kMostWork = 1 << 20;  // numbers of states, times tokens: more than is left to one worker
  p.guard = in.flag() ? test::Guard::kBefore : test::Guard::kAfter;
  const int64_t count = in.integer(1, 3);
  const int64_t most = std::max<int64_t>(1, kMostWork / (states * count));
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < count; ++b) {
    lengths.push_back(std::min(in.integer(1, in.flag() ? 200 : 10), most));
    p.fresh.push_back(in.flag());
  }
  fill(p, lengths, [&](int64_t numbers, float spread) { return floats(in, numbers, spread); });
  std::vector<int64_t> left = lengths;
  while (std::any_of(left.begin(), left.end(), [](int64_t n) { return n > 0; })) {
    const bool last = p.calls.size() + 1 == kMostCalls;
    std::vector<int64_t> counts;
    for (int64_t& n : left) {
      counts.push_back(last ? n : std::min(n, in.integer(0, 100)));
      n -= counts.back();
    }
    p.calls.push_back(counts);
  }
}

/// Ends the process if a kernel, on one worker or on three, differs from the reference.
template <class Problem>
void require_reference(const Problem& problem, const std::string& what) {
  std::set<const LinearAttentionFunctions*> seen;  // kernels share them
  for (const Kernel* kernel : test::supported_kernels()) {
    if (!seen.insert(kernel->linear_attention).second) continue;
    for (const int workers : {1, 3}) {
      const std::string wrong = difference(problem, *kernel, workers);
      require(wrong.empty(), what + ", " + wrong);
    }
  }
}

}  // namespace w4a8::fuzz
