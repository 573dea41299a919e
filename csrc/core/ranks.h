// Sums and gathers across processes ("ranks"), which share memory or send their parts. Each rank multiplies with its
// part of a matrix.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "core/split.h"
#include "core/team.h"

namespace w4a8 {

/// One rank's view of the parts that all ranks of a model add. Every rank makes the same sums in the same order.
class Ranks {
 public:
  static constexpr int kMost = 64;
  /// Bytes of the memory, which begins with zeros and at a multiple of 64.
  static int64_t bytes(int ranks);
  /// Sends this rank's part of a sum to the others and receives theirs: `count` floats of rank r are at byte
  /// `first + r * stride` of the memory. Returns 0, or another number if that failed.
  using Exchange = int32_t (*)(int64_t first, int64_t stride, int64_t count);

  /// memory: of `bytes(ranks)` bytes, which outlives this. rank: 0..ranks - 1. A rank that takes the place of an
  /// earlier one of the same number, between sums, goes on where that one was. timeout: how long to wait for another
  /// rank. exchange: null where all ranks share the memory; else this rank has it alone, and no timeout.
  Ranks(uint8_t* memory, int rank, int ranks, std::chrono::milliseconds timeout, Exchange exchange = nullptr);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  int count() const { return ranks_; }

  /// x[i] becomes the sum of all ranks' x[i] for i < count, added in the order of the ranks, so that all have the same
  /// bits. Throws std::runtime_error, also at all later sums, if another rank has ended, has failed, or does not come
  /// within the timeout.
  void sum(Team& team, float* x, int64_t count);
  /// Of m rows those of this rank: a share of many, all of a few, and where ranks share no memory.
  Range own_rows(int64_t m) const { return m < kMany || exchange_ != nullptr ? Range{0, m} : share(m, ranks_, rank_); }
  /// As sum, of x[m, n], but only this rank's own rows become sums; the others are left as they are.
  void sum_own(Team& team, float* x, int64_t m, int64_t n);
  /// x[m, n], of which each rank has its own rows, becomes the rows of all. Throws as sum does.
  void share_own(Team& team, float* x, int64_t m, int64_t n);
  /// all becomes the `bytes` of every rank's `part`, in the order of the ranks. Throws as sum does.
  void gather(const uint8_t* part, int64_t bytes, uint8_t* all);

 private:
  // What one rank tells the others. sums counts how many it has written, and wraps around.
  struct alignas(128) Told {
    std::atomic<uint32_t> sums;
    std::atomic<uint32_t> waiting;  // ranks that sleep until sums changes
    std::atomic<int32_t> process;   // its id; 0: it has not come yet
    std::atomic<uint32_t> failed;
  };
  static constexpr int64_t kMany = 16;                  // rows of which shares are worth another exchange
  static constexpr int64_t kFloats = int64_t{1} << 18;  // of a rank at once: they stay in a cache
  static constexpr int64_t kHeader = kMost * int64_t{sizeof(Told)};

  Told& told(int rank) const { return reinterpret_cast<Told*>(memory_)[rank]; }
  // Sums take turns with two places of each rank.
  float* place(uint32_t sum, int rank) const {
    return reinterpret_cast<float*>(memory_ + kHeader) + ((sum % 2) * ranks_ + rank) * kFloats;
  }
  void sum_some(Team& team, float* x, int64_t count);
  // Of the numbers of a rank's own rows those that an exchange of `most` of each rank takes behind the first `at`.
  Range piece(int rank, int64_t m, int64_t n, int64_t at, int64_t most) const;
  float* begin();                // this rank's place of the next sum, for its part
  void exchange(int64_t count);  // until the places of all ranks have so many floats
  void tell();
  void await(int rank);
  void sleep(int rank, std::chrono::milliseconds limit);
  [[noreturn]] void fail(int rank, const std::string& what);
  bool has_ended(int rank);

  uint8_t* memory_;
  int rank_;
  int ranks_;
  std::chrono::milliseconds timeout_;
  Exchange exchange_;
  uint32_t sums_;
  std::vector<int> processes_;  // file descriptors that tell whether a rank's process runs; -1: none yet
};

}  // namespace w4a8
