#include "core/attention/attention.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/split.h"

namespace w4a8 {
namespace {

constexpr float kLog2E = 0x1.715476p+0f;
// The most sums of segments that may wait to be merged; beyond, a task has all keys of its rows.
constexpr int64_t kMostPartialBytes = 64 * 1024 * 1024;
constexpr int64_t kTasksPerWorker = 4;

const uint8_t* element(const void* data, int64_t index, DType dtype) {
  return static_cast<const uint8_t*>(data) + index * dtype_bytes(dtype);
}

/// Rows of one sequence that attend to one key head: row r is token r / group of the call, query head r % group.
struct Tile {
  int64_t sequence;
  int64_t head;
  Range rows;
  Range segments;       // that a row sees something of
  int64_t partial = 0;  // where its sums of segments are, in rows
};

/// A run of the segments of a tile.
struct Piece {
  std::size_t tile;
  Range segments;
};

// The keys that a token sees.
Range visible(const PagedCache& cache, const Queries& queries, int64_t sequence, int64_t token) {
  const int64_t length = cache.lengths[sequence];
  const int64_t position = cache.before(sequence) + token;
  const int64_t before = queries.window > 0 ? std::max<int64_t>(0, position - queries.window + 1) : 0;
  const int64_t chunk = queries.chunk > 0 ? position / queries.chunk * queries.chunk : 0;
  if (queries.causal) return {std::max(before, chunk), position + 1};
  const int64_t behind = queries.window > 0 ? std::min(queries.window, length - position) : length - position;
  return {before, position + behind};
}

/// Memory of a worker.
struct TileBuffers {
  TileBuffers(Slicer& slicer, const CacheShape& shape, int64_t rows) {
    const auto floats = [&](int64_t count) { return slicer.take<float>(rows * count); };
    tile.shape = shape;
    begin = slicer.take<int32_t>(rows);
    end = slicer.take<int32_t>(rows);
    tile.begin = begin;
    tile.end = end;
    tile.queries = slicer.take<uint8_t>(rows * query_bytes(shape.key_size));
    tile.rotated = floats(shape.key_size);
    tile.scales = floats(1);
    tile.starts = slicer.take<int32_t>(rows);
    tile.bases = floats(kStepBlocks);
    tile.scores = floats(kStepKeys);
    tile.weights = slicer.take<uint8_t>(rows * kWeightBytes);
    tile.values = slicer.take<uint8_t>(shape.kind == CacheKind::kLatent ? kStepBlocks * shape.value_bytes() : 0);
    tile.most = floats(kHeadStep);
    tile.alpha = floats(1);
    tile.beta = floats(1);
    tile.step_max = floats(1);
    tile.lanes = floats(kHeadStep);
    tile.out = floats(shape.value_size);
    tile.max = floats(1);
    tile.sum = floats(1);
    out = floats(shape.value_size);
    max = floats(1);
    sum = floats(1);
  }
  QueryTile tile = {};
  int32_t* begin;
  int32_t* end;
  float* out;  // of all segments
  float* max;
  float* sum;
};

class Attention {
 public:
  Attention(const Kernel& kernel, const PagedCache& cache, const Queries& queries, void* out)
      : kernel_(kernel),
        functions_(*kernel.attention),
        cache_(cache),
        queries_(queries),
        group_(queries.heads / cache.heads),
        out_(static_cast<uint8_t*>(out)) {
    for (int64_t s = 0; s < cache.sequences; ++s) add_tiles(s);
  }

  void run(Parallel& parallel, Workspace& workspace) {
    if (tiles_.empty()) return;
    SerialParallel serial;
    Parallel& runner = macs_ < kSerialMacs ? serial : parallel;
    const int workers = runner.threads();
    const int64_t partial_rows = cut(workers);
    const int64_t size = cache_.shape.value_size;
    sliced(workspace, [&](Slicer& slicer) {
      partial_out_ = slicer.take<float>(partial_rows * size);
      partial_max_ = slicer.take<float>(partial_rows);
      partial_sum_ = slicer.take<float>(partial_rows);
      buffers_.clear();
      for (int i = 0; i < workers; ++i) buffers_.emplace_back(slicer, cache_.shape, most_rows_);
    });
    const auto attend = [&](int64_t, int64_t task, int worker) {
      run_piece(pieces_[static_cast<std::size_t>(task)], buffers_[static_cast<std::size_t>(worker)]);
    };
    const auto merge = [&](int64_t, int64_t task, int worker) {
      merge_tile(tiles_[static_cast<std::size_t>(task)], buffers_[static_cast<std::size_t>(worker)]);
    };
    const Phase phases[] = {{static_cast<int64_t>(pieces_.size()), attend},
                            {static_cast<int64_t>(tiles_.size()), merge}};
    run_phases(runner, workers, {phases, split_ ? std::size_t{2} : std::size_t{1}});
  }

 private:
  // The last rows first: they see most.
  void add_tiles(int64_t sequence) {
    const int64_t rows = cache_.fresh(sequence) * group_;
    if (rows == 0) return;
    const int64_t parts = ceil_div(rows, kMostQueryRows);
    for (int64_t i = parts; i-- > 0;) {
      const Range range = share(rows, parts, i);
      const Range first = visible(cache_, queries_, sequence, range.begin / group_);
      const Range last = visible(cache_, queries_, sequence, (range.end - 1) / group_);
      const Range segments = {first.begin / kSegmentKeys, ceil_div(last.end, kSegmentKeys)};
      for (int64_t head = 0; head < cache_.heads; ++head) tiles_.push_back({sequence, head, range, segments});
      most_rows_ = std::max(most_rows_, ceil_div(range.size(), kHeadStep) * kHeadStep);
      macs_ += range.size() * (last.end - first.begin) * (cache_.shape.key_size + cache_.shape.value_size);
      segments_ += segments.size() * cache_.heads;
    }
  }

  // Cuts into pieces; returns the number of rows of sums to be merged.
  int64_t cut(int workers) {
    int64_t partial_rows = 0;
    for (Tile& tile : tiles_) {
      tile.partial = partial_rows;
      partial_rows += tile.rows.size() * tile.segments.size();
    }
    const int64_t wanted = kTasksPerWorker * workers;
    const int64_t bytes = (cache_.shape.value_size + 2) * int64_t{sizeof(float)};
    split_ = workers > 1 && static_cast<int64_t>(tiles_.size()) < wanted &&
             segments_ > static_cast<int64_t>(tiles_.size()) && partial_rows <= kMostPartialBytes / bytes;
    const int64_t length = split_ ? ceil_div(segments_, wanted) : std::numeric_limits<int64_t>::max();
    for (std::size_t i = 0; i < tiles_.size(); ++i) {
      const Range all = tiles_[i].segments;
      for (int64_t at = all.begin; at < all.end;) {
        const int64_t end = all.end - at > length ? at + length : all.end;
        pieces_.push_back({i, {at, end}});
        at = end;
      }
    }
    return split_ ? partial_rows : 0;
  }

  void run_piece(const Piece& piece, TileBuffers& own) {
    const Tile& tile = tiles_[piece.tile];
    prepare(tile, own);
    const int64_t rows = tile.rows.size();
    if (!split_) begin_sums(tile, own);
    int64_t last_end = 0;
    int64_t first_begin = own.begin[0];
    for (int64_t r = 0; r < rows; ++r) {
      last_end = std::max<int64_t>(last_end, own.end[r]);
      first_begin = std::min<int64_t>(first_begin, own.begin[r]);
    }
    // Pages in front of a window may be gone: a block that no row sees is replaced by the first visible block.
    const int64_t first_block = first_begin / kBlockKeys;
    for (int64_t s = piece.segments.begin; s < piece.segments.end; ++s) {
      KeySegment segment = {};
      segment.first_key = s * kSegmentKeys;
      segment.count = std::min(kSegmentKeys, last_end - segment.first_key);
      for (int64_t b = 0; b < ceil_div(segment.count, kBlockKeys); ++b) {
        segment.blocks[b] = cache_.block(tile.sequence, tile.head, std::max(first_block, s * kSegmentBlocks + b));
      }
      for (int64_t b = 0; b < kStepBlocks && s + 1 < piece.segments.end; ++b) {
        if ((s + 1) * kSegmentKeys + b * kBlockKeys >= last_end) break;
        segment.next[b] = cache_.block(tile.sequence, tile.head, (s + 1) * kSegmentBlocks + b);
      }
      if (split_) {
        const int64_t row = tile.partial + (s - tile.segments.begin) * rows;
        own.tile.out = partial_out_ + row * cache_.shape.value_size;
        functions_.attend_segment(own.tile, segment);
        std::copy_n(own.tile.max, rows, partial_max_ + row);
        std::copy_n(own.tile.sum, rows, partial_sum_ + row);
      } else {
        functions_.attend_segment(own.tile, segment);
        functions_.merge_segment(rows, cache_.shape.value_size, own.tile.out, own.tile.max, own.tile.sum, own.out,
                                 own.max, own.sum);
      }
    }
    if (!split_) store(tile, own);
  }

  void merge_tile(const Tile& tile, TileBuffers& own) {
    begin_sums(tile, own);
    const int64_t rows = tile.rows.size();
    for (int64_t s = 0; s < tile.segments.size(); ++s) {
      const int64_t row = tile.partial + s * rows;
      functions_.merge_segment(rows, cache_.shape.value_size, partial_out_ + row * cache_.shape.value_size,
                               partial_max_ + row, partial_sum_ + row, own.out, own.max, own.sum);
    }
    store(tile, own);
  }

  void prepare(const Tile& tile, TileBuffers& own) const {
    const void* rows[kMostQueryRows];
    for (int64_t r = 0; r < tile.rows.size(); ++r) {
      const int64_t token = (tile.rows.begin + r) / group_;
      rows[r] =
          element(queries_.data,
                  (cache_.starts[tile.sequence] + token) * queries_.token_stride + head(tile, r) * queries_.head_stride,
                  queries_.dtype);
      const Range range = visible(cache_, queries_, tile.sequence, token);
      own.begin[r] = static_cast<int32_t>(range.begin);
      own.end[r] = static_cast<int32_t>(range.end);
    }
    own.tile.rows = tile.rows.size();
    own.tile.factor = queries_.scale * kLog2E;
    own.tile.soft_cap = queries_.soft_cap * kLog2E;
    functions_.prepare_queries(own.tile, rows, queries_.dtype);
  }
  int64_t head(const Tile& tile, int64_t r) const { return tile.head * group_ + (tile.rows.begin + r) % group_; }

  // Nothing yet, or a sink.
  void begin_sums(const Tile& tile, const TileBuffers& own) const {
    for (int64_t r = 0; r < tile.rows.size(); ++r) {
      own.max[r] = queries_.sinks == nullptr ? kLowestScore : queries_.sinks[head(tile, r)] * kLog2E;
      own.sum[r] = queries_.sinks == nullptr ? 0.0f : 1.0f;
    }
    std::fill_n(own.out, tile.rows.size() * cache_.shape.value_size, 0.0f);
  }

  void store(const Tile& tile, const TileBuffers& own) const {
    const int64_t size = cache_.shape.value_size;
    for (int64_t r = 0; r < tile.rows.size(); ++r) {
      const int64_t token = cache_.starts[tile.sequence] + (tile.rows.begin + r) / group_;
      functions_.finish_row(cache_.shape, own.out + r * size, own.sum[r]);
      kernel_.store_row(own.out + r * size, size, queries_.dtype,
                        out_ + (token * queries_.heads + head(tile, r)) * size * dtype_bytes(queries_.dtype));
    }
  }

  const Kernel& kernel_;
  const AttentionFunctions& functions_;
  const PagedCache& cache_;
  const Queries& queries_;
  const int64_t group_;
  uint8_t* const out_;
  std::vector<Tile> tiles_;
  std::vector<Piece> pieces_;
  std::vector<TileBuffers> buffers_;
  int64_t most_rows_ = 0;
  int64_t macs_ = 0;
  int64_t segments_ = 0;
  bool split_ = false;
  float* partial_out_ = nullptr;
  float* partial_max_ = nullptr;
  float* partial_sum_ = nullptr;
};

}  // namespace

void check_cache_shape(const CacheShape& shape) {
  const auto check = [](const char* name, int64_t size, int64_t least, int64_t most) {
    if (size >= least && size <= most && size % kHeadStep == 0) return;
    throw std::invalid_argument(std::string("the head size of the ") + name + " is " + std::to_string(size) +
                                ", expected a multiple of 16 in " + std::to_string(least) + ".." +
                                std::to_string(most));
  };
  const bool latent = shape.kind == CacheKind::kLatent;
  check("keys", shape.key_size, latent ? 2 * kHeadStep : kHeadStep, latent ? kMostLatentSize : kMostHeadSize);
  check("values", shape.value_size, kHeadStep, latent ? shape.key_size - kHeadStep : kMostHeadSize);
}

void write_cache(const Kernel& kernel, Parallel& parallel, const PagedCache& cache, const NewTokens& tokens,
                 int64_t window) {
  struct Run {
    int64_t number;  // of the block
    int64_t sequence;
    int64_t token;  // of the call, the first one
    int64_t in_block;
    int64_t count;
  };
  std::vector<Run> runs;
  for (int64_t s = 0; s < cache.sequences; ++s) {
    const int64_t end = cache.starts[s + 1];
    int64_t position = cache.before(s);
    for (int64_t t = cache.starts[s]; t < end;) {
      const int64_t in_block = position % kBlockKeys;
      const int64_t count = std::min(end - t, kBlockKeys - in_block);
      runs.push_back({position / kBlockKeys, s, t, in_block, count});
      t += count;
      position += count;
    }
  }
  // A block needs the block before, which another sequence of the call may be writing: sequences that begin alike can
  // share pages from the first step on. So the blocks of a head are written in the order of their numbers.
  std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.number < b.number; });
  const auto write = [&](int64_t, int64_t head, int) {
    for (const Run& run : runs) {
      const bool has_before = run.number > 0 && (window == 0 || window > kBlockKeys);
      const TokensToWrite to_write = {
          element(tokens.keys, run.token * tokens.key_token_stride + head * tokens.key_head_stride, tokens.dtype),
          element(tokens.values, run.token * tokens.value_token_stride + head * tokens.value_head_stride, tokens.dtype),
          tokens.key_token_stride,
          tokens.value_token_stride,
          tokens.dtype,
          run.in_block,
          run.count,
          has_before ? cache.block(run.sequence, head, run.number - 1) : nullptr};
      kernel.attention->write_tokens(cache.shape, to_write, cache.block(run.sequence, head, run.number));
    }
  };
  SerialParallel serial;
  constexpr int64_t kSerialTokens = 64;
  Parallel& runner = cache.tokens() < kSerialTokens ? serial : parallel;
  const Phase phases[] = {{cache.heads, write, 0, true}};
  run_phases(runner, runner.threads(), phases);
}

void attend(const Kernel& kernel, Parallel& parallel, Workspace& workspace, const PagedCache& cache,
            const Queries& queries, void* out) {
  Attention(kernel, cache, queries, out).run(parallel, workspace);
}

}  // namespace w4a8
