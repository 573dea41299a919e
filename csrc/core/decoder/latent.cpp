#include "core/decoder/latent.h"

#include <algorithm>

#include "core/split.h"

namespace w4a8 {

int64_t SequenceRun::blocks() const {
  int64_t all = 0;
  for (std::size_t i = 1; i < starts.size(); ++i) all += ceil_div(starts[i] - starts[i - 1], kBlockKeys);
  return all;
}

PagedCache SequenceRun::part_of(const PagedCache& cache) const {
  PagedCache part = cache;
  part.sequences = sequences();
  part.table += first * cache.table_stride;
  part.lengths += first;
  part.starts = starts.data();
  return part;
}

std::vector<SequenceRun> runs_of(const PagedCache& cache, bool apart) {
  std::vector<SequenceRun> runs;
  for (int64_t s = 0; s < cache.sequences; ++s) {
    const bool begins = apart && cache.before(s) == 0 && cache.fresh(s) > 1;
    if (runs.empty() || runs.back().begins != begins) runs.push_back({begins, s, cache.starts[s], {0}});
    SequenceRun& run = runs.back();
    run.starts.push_back(static_cast<int32_t>(cache.starts[s + 1] - run.row));
  }
  return runs;
}

OwnCache::OwnCache(const SequenceRun& run, const CacheShape& shape, int64_t heads, uint8_t* memory) {
  for (std::size_t i = 1; i < run.starts.size(); ++i) lengths_.push_back(run.starts[i] - run.starts[i - 1]);
  const int64_t most = ceil_div(*std::max_element(lengths_.begin(), lengths_.end()), kBlockKeys);
  int32_t page = 0;
  for (const int32_t length : lengths_) {
    const int64_t own = ceil_div(length, kBlockKeys);
    for (int64_t b = 0; b < most; ++b) table_.push_back(b < own ? page++ : 0);
  }
  const int64_t block = shape.block_bytes();
  cache_ = {shape,           memory,        heads * block, block,           kBlockKeys,       heads,
            run.sequences(), table_.data(), most,          lengths_.data(), run.starts.data()};
}

}  // namespace w4a8
