// Checkpoint weights -> packed matrix, and back.
#pragma once

#include <cstdint>
#include <memory>

#include "core/layout.h"
#include "core/parallel.h"
#include "core/row_source.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// How codes stand in a checkpoint.
enum class CodeOrder : uint8_t {
  kRows,  ///< row by row
  kGptq,  ///< [k / codes in a word, rows] words of 32 bits, each of neighbours along k, the first one in the lowest
          ///< bits
  kAwq,   ///< [k, rows / 8] words of 8 nibbles of neighbouring rows: 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on
};

/// A stack of `count` matrices of one shape, as checkpoints hold them.
struct RawWeights {
  const uint8_t* weights;  ///< kRows: [count, n, shape.row_bytes()]: nibbles, low nibble = even k, high = odd k; of
                           ///< int8 and int6 bytes
  const void* scales;      ///< [count, n, groups] of shape.scale_type; kE5M3: float8_e4m3fn
  const float* bias;       ///< [count, n] or null
  const uint8_t* zero_points = nullptr;   ///< shape.kind.zero_points: [count, n, groups], 0..15, of int8 0..255
  const float* channel_scales = nullptr;  ///< kE5M3: [count, n], factors of the scales of a column
  const void* minimums = nullptr;         ///< shape.kind.minimums: [count, n, groups] of shape.scale_type
  /// kSuper: the bits of float16, [count, n, k / kSuperK], factors of scales and minimums.
  const uint16_t* super_scales = nullptr;
  const uint16_t* super_minimums = nullptr;
  CodeOrder order = CodeOrder::kRows;  ///< others: count 1, k a multiple of 8, int4 and int8 (kAwq: int4, n of 8)
  int64_t word_stride = 0;             ///< words from one value of k, or word of them, to the next
};

/// Packs `count` matrices, each packed_bytes(shape) bytes, one after the other at `dst`.
/// The bytes do not depend on the kernel. shape must have passed check_shape. raw.bias is read if shape.has_bias.
/// Throws std::invalid_argument for a zero point of nibbles above 15, a code of int6 above 63, a float8_e4m3fn with a
/// sign or that is a NaN, a NaN of e8m0, and, for e2m1, a scale whose half is not exact.
void pack(const Kernel& kernel, const PackedShape& shape, int64_t count, const RawWeights& raw, uint8_t* dst,
          Parallel& parallel);

/// The rows of `raw`, not of CodeOrder::kAwq, as a source, one stack under the other; both must outlive it.
std::unique_ptr<RowSource> tensor_rows(const PackedShape& shape, const RawWeights& raw);

/// Those of CodeOrder::kAwq, for pack_rows() of the same rows of `dst` alone: the codes are put into their places at
/// once.
std::unique_ptr<RowSource> awq_rows(const PackedShape& shape, const RawWeights& raw, int64_t first, int64_t count,
                                    uint8_t* dst, Parallel& parallel);

/// Packs rows [first, first + count) of one matrix, at `dst`: row `first` is the first of the source. first is a
/// multiple of 16, and count, unless these are the last rows. The header is written, too. shape must have passed
/// check_shape; has_bias and two_level() tell whether the source has these. The bytes do not depend on the kernel.
void pack_rows(const Kernel& kernel, const PackedShape& shape, const RowSource& source, int64_t first, int64_t count,
               uint8_t* dst, Parallel& parallel);

/// Likewise, of `raw`, which has these rows alone. Throws as pack() does.
void pack_rows(const Kernel& kernel, const PackedShape& shape, const RawWeights& raw, int64_t first, int64_t count,
               uint8_t* dst, Parallel& parallel);

/// Where unpack writes one matrix. Parts that the matrix does not have are not written, and may be null.
struct UnpackedWeights {
  uint8_t* weights;                    ///< [n, row_bytes()]
  void* scales;                        ///< [n, groups]
  float* bias = nullptr;               ///< [n]
  uint8_t* zero_points = nullptr;      ///< [n, groups]
  float* channel_scales = nullptr;     ///< [n]
  void* minimums = nullptr;            ///< [n, groups]
  uint16_t* super_scales = nullptr;    ///< [n, k / kSuperK]
  uint16_t* super_minimums = nullptr;  ///< [n, k / kSuperK]
};

/// The exact inverse of pack, for one matrix. Throws std::invalid_argument for a zero point of nibbles above 15 and for
/// a scale that `pack` cannot have written.
void unpack(const PackedMatrix& matrix, const UnpackedWeights& to, Parallel& parallel);

}  // namespace w4a8
