// The contract between the core and the attention of one kernel: a cache of keys and values in blocks, and the
// softmax over a segment of it. Everything computed is defined bit for bit in docs/numerics.md section 9.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"

namespace w4a8 {

/// What a cache of keys and values holds. The values are part of its format.
enum class CacheKind : uint8_t {
  kInt8 = 0,      ///< keys: rotated, less a reference; values: rotated; both int8 with a scale per token
  kBFloat16 = 1,  ///< both bfloat16
  kLatent = 2,  ///< bfloat16 keys, of which the first value_size channels are the values (multi-head latent attention)
};

/// As operators name it.
constexpr const char* cache_kind_name(CacheKind kind) {
  return kind == CacheKind::kInt8 ? "int8" : (kind == CacheKind::kBFloat16 ? "bfloat16" : "latent");
}

inline constexpr int64_t kBlockKeys = 64;  ///< tokens of a block
inline constexpr int64_t kStepKeys = 128;  ///< keys that share a rounding of the weights: two blocks
inline constexpr int kStepBlocks = kStepKeys / kBlockKeys;
inline constexpr int64_t kSegmentKeys = 512;  ///< keys that are summed by themselves; sums of segments are merged
inline constexpr int64_t kSegmentBlocks = kSegmentKeys / kBlockKeys;
inline constexpr int64_t kItemBytes = 4;  ///< four int8 or two bfloat16, what a dot product takes at once
inline constexpr int64_t kItemLine = kBlockKeys * kItemBytes;  ///< one item of each key of a block
inline constexpr int64_t kHeadStep = 16;                       ///< head sizes are multiples of this
inline constexpr int64_t kMostHeadSize = 512;
inline constexpr int64_t kMostLatentSize = 576;  ///< of kLatent's keys
inline constexpr float kMostWeight = 254;        ///< what the largest weight of a step is rounded from, kInt8
inline constexpr int64_t kMostQueryRows = 96;    ///< of a tile

/// A block: kBlockKeys tokens of one key head. Parts, in this order, and their bytes:
///
///   keys       [key_size / per_item, 64, 4]    item i of token j; an int8 key is kept as code + 128
///   values     [64 / per_item, value_size, 4]  channel c of per_item tokens; kLatent: none
///   int8 only:
///   key scales   float32 [64]
///   value scales float32 [64]                  log2 of the scale
///   reference    bfloat16 [key_size]           subtracted from rotated keys; zeros up to a whole line
struct CacheShape {
  CacheKind kind;
  int64_t key_size;    ///< a multiple of 16, 16..512; kLatent: 32..576
  int64_t value_size;  ///< a multiple of 16, 16..512; kLatent: less than key_size

  constexpr int64_t per_item() const { return kind == CacheKind::kInt8 ? 4 : 2; }
  constexpr int64_t key_items() const { return key_size / per_item(); }
  constexpr int64_t value_items() const { return kBlockKeys / per_item(); }  ///< of a block
  constexpr int64_t values_at() const { return key_items() * kItemLine; }
  constexpr int64_t value_bytes() const { return value_items() * value_size * kItemBytes; }  ///< of a block's values
  constexpr int64_t key_scales_at() const { return values_at() + (kind == CacheKind::kLatent ? 0 : value_bytes()); }
  constexpr int64_t value_scales_at() const { return key_scales_at() + kBlockKeys * 4; }
  constexpr int64_t reference_at() const { return value_scales_at() + kBlockKeys * 4; }
  constexpr int64_t block_bytes() const {
    if (kind != CacheKind::kInt8) return key_scales_at();
    return reference_at() + (2 * key_size + kLineBytes - 1) / kLineBytes * kLineBytes;
  }
};

/// Tokens to be written to one block.
struct TokensToWrite {
  const void* keys;    ///< [count, key_size] of `dtype`, rows key_stride elements apart
  const void* values;  ///< [count, value_size]; kLatent: not read
  int64_t key_stride;
  int64_t value_stride;
  DType dtype;
  int64_t first;          ///< where in the block, 0..63
  int64_t count;          ///< first + count <= 64
  const uint8_t* before;  ///< the full block in front of this one; null: the first key is the reference
};

/// Writes tokens to a block. The one with first = 0 sets the reference of the block, the others read it.
using WriteTokensFn = void (*)(const CacheShape& shape, const TokensToWrite& tokens, uint8_t* block);

/// Up to kMostQueryRows rows that attend to one key head. Arrays of `rows` have room for kMostQueryRows.
struct QueryTile {
  CacheShape shape;
  int64_t rows;
  const int32_t* begin;  ///< [rows] row r sees the keys begin[r] <= key < end[r]
  const int32_t* end;
  float factor;    ///< scores count in log2: scale * log2(e)
  float soft_cap;  ///< cap * log2(e); 0: none

  // What prepare writes.
  uint8_t* queries;  ///< dense rows; room for query_bytes each
  float* rotated;    ///< [rows, key_size]: the rows as floats, kInt8: rotated, times factor
  float* scales;     ///< [rows], kInt8
  int32_t* starts;   ///< [rows], kInt8: -128 times the sum of a row

  // Scratch of a segment.
  float* bases;      ///< [rows, kStepBlocks], kInt8: the row times the references of a step
  float* scores;     ///< [rows, kStepKeys]
  uint8_t* weights;  ///< dense rows; room for kWeightBytes each
  uint8_t* values;   ///< [kStepBlocks], kLatent: the values of a step's blocks; room for value_bytes each
  float* most;       ///< [rows, 16]
  float* alpha;      ///< [rows]
  float* beta;       ///< [rows]
  float* step_max;   ///< [rows]
  float* lanes;      ///< [rows, 16]

  // The result of a segment.
  float* out;  ///< [rows, value_size]
  float* max;  ///< [rows]
  float* sum;  ///< [rows]
};

/// The most bytes that any kernel takes for a row of QueryTile::queries and of QueryTile::weights.
constexpr int64_t query_bytes(int64_t key_size) { return 4 * key_size; }
inline constexpr int64_t kWeightBytes = 4 * kStepKeys;

/// Quantizes or rounds the rows of a tile: rows[r] is [key_size] of dtype.
using PrepareQueriesFn = void (*)(const QueryTile& tile, const void* const* rows, DType dtype);

/// A run of blocks, the keys [first_key, first_key + count) of a segment.
struct KeySegment {
  const uint8_t* blocks[kSegmentBlocks];  ///< one in front of what any row sees may be any block
  const uint8_t* next[kSegmentBlocks];    ///< what is read after these, to be fetched meanwhile; null: nothing
  int64_t first_key;                      ///< a multiple of kSegmentKeys
  int64_t count;                          ///< 1..kSegmentKeys
};

/// Softmax over a segment: out, max and sum of the tile. A row that sees no key of it has max = kLowestScore and sum 0.
using AttendSegmentFn = void (*)(const QueryTile& tile, const KeySegment& segment);
inline constexpr float kLowestScore = -1e29f;

/// out, max, sum of `rows` rows: those of a segment are merged into those of the segments before it.
using MergeSegmentFn = void (*)(int64_t rows, int64_t value_size, const float* segment_out, const float* segment_max,
                                const float* segment_sum, float* out, float* max, float* sum);

/// out[value_size] is rotated back (kInt8) and divided by sum, 0 where that is 0.
using FinishRowFn = void (*)(const CacheShape& shape, float* out, float sum);

struct AttentionFunctions {
  WriteTokensFn write_tokens;
  PrepareQueriesFn prepare_queries;
  AttendSegmentFn attend_segment;
  MergeSegmentFn merge_segment;
  FinishRowFn finish_row;
};

}  // namespace w4a8
