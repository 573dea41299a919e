// The sequences of a step with latent attention. Those that begin in the step may have keys and values of each head.
#pragma once

#include <cstdint>
#include <vector>

#include "core/attention/attention.h"

namespace w4a8 {

/// Sequences of a step that are next to each other. All of them begin in the step with several tokens, or none does.
struct SequenceRun {
  bool begins = false;
  int64_t first = 0;            ///< number of the first sequence
  int64_t row = 0;              ///< number of its first token in the step
  std::vector<int32_t> starts;  ///< [sequences + 1] first tokens in the run

  int64_t sequences() const { return static_cast<int64_t>(starts.size()) - 1; }
  int64_t rows() const { return starts.back(); }
  int64_t blocks() const;  ///< that hold the tokens of this step
  /// These sequences of a cache of all sequences of the step.
  PagedCache part_of(const PagedCache& cache) const;
};

/// All sequences of a step. apart: those that begin there are runs of their own; else all are one run, which does not
/// begin.
std::vector<SequenceRun> runs_of(const PagedCache& cache, bool apart);

/// A cache of the tokens of a run that begins, a page a block. It must stay while the cache is used.
class OwnCache {
 public:
  /// memory: [run.blocks(), heads] blocks of this shape.
  OwnCache(const SequenceRun& run, const CacheShape& shape, int64_t heads, uint8_t* memory);
  const PagedCache& cache() const { return cache_; }

 private:
  std::vector<int32_t> lengths_;
  std::vector<int32_t> table_;  // [sequences, blocks of the longest]
  PagedCache cache_;
};

}  // namespace w4a8
