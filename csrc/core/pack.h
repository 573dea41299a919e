// Checkpoint weights -> packed matrix, and back.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/parallel.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// A stack of `count` matrices of one shape, as checkpoints hold them.
struct RawWeights {
  const uint8_t* weights;  ///< [count, n, shape.row_bytes()]: nibbles, low nibble = even k, high = odd k; int8: bytes
  const void* scales;      ///< [count, n, groups] of shape.scale_type; of kE5M3 float8_e4m3fn
  const float* bias;       ///< [count, n] or null
  const uint8_t* zero_points = nullptr;   ///< shape.kind.zero_points: [count, n, groups], 0..15, of int8 0..255
  const float* channel_scales = nullptr;  ///< kE5M3: [count, n], what the scales of a column are multiplied by
};

/// Packs `count` matrices, each packed_bytes(shape) bytes, one after the other at `dst`.
/// The bytes do not depend on the kernel. shape must have passed check_shape; shape.has_bias says whether raw.bias is
/// read. Throws std::invalid_argument for a zero point above 15 of nibbles, for a float8_e4m3fn that has a sign or is a
/// NaN, for the NaN of e8m0, and beside e2m1 values for a scale whose half is not exact.
void pack(const Kernel& kernel, const PackedShape& shape, int64_t count, const RawWeights& raw, uint8_t* dst,
          Parallel& parallel);

/// The exact inverse, for one matrix: weights [n, row_bytes()], scales [n, groups], bias [n] (left alone without bias),
/// zero_points [n, groups] (left alone without them), channel_scales [n] (left alone unless kE5M3). Throws
/// std::invalid_argument for a zero point above 15 of nibbles and for a scale that `pack` cannot have written.
void unpack(const PackedMatrix& matrix, uint8_t* weights, void* scales, float* bias, Parallel& parallel,
            uint8_t* zero_points = nullptr, float* channel_scales = nullptr);

}  // namespace w4a8
