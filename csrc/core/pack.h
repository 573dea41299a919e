// Checkpoint weights -> packed matrix, and back.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/parallel.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// A stack of `count` matrices of one shape, as checkpoints hold them.
struct RawWeights {
  const uint8_t* weights;                ///< [count, n, k / 2]: low nibble = even k, high = odd k; kInt8: [count, n, k]
  const void* scales;                    ///< [count, n, groups] of shape.scale_dtype; e4m3fn for kE5M3, see pack
  const float* bias;                     ///< [count, n] or null
  const uint8_t* zero_points = nullptr;  ///< [count, n, groups]; kInt4ZeroPoints: 0..15; kInt8: null is 128
  const float* channel_scales = nullptr;  ///< kE5M3: [count, n], what the scales of a column are multiplied by
};

/// Packs `count` matrices, each packed_bytes(shape) bytes, one after the other at `dst`.
/// The bytes do not depend on the kernel. shape must have passed check_shape; shape.has_bias says whether raw.bias is
/// read. Scales for kE5M3 are float8_e4m3fn, whose numbers without a sign are all e5m3 numbers, and so are their
/// halves. Throws std::invalid_argument for a zero point above 15 of kInt4ZeroPoints, for a float8_e4m3fn that has a
/// sign or is a NaN, for kE2M1 where half of a scale is not exact, for kInt8 where 16 times a scale is too large.
void pack(const Kernel& kernel, const PackedShape& shape, int64_t count, const RawWeights& raw, uint8_t* dst,
          Parallel& parallel);

/// The exact inverse, for one matrix: weights [n, k / 2] (kInt8: [n, k]), scales [n, groups], bias [n] (left alone
/// without bias), zero_points [n, groups] (left alone unless has_zero_points()), channel_scales [n] (left alone unless
/// kE5M3). Throws std::invalid_argument for a zero point above 15, for an e5m3 scale that is no float8_e4m3fn, and
/// where a scale of upper nibbles is not 16 times that of the lower ones.
void unpack(const PackedMatrix& matrix, uint8_t* weights, void* scales, float* bias, Parallel& parallel,
            uint8_t* zero_points = nullptr, float* channel_scales = nullptr);

}  // namespace w4a8
