// Checkpoint weights -> packed matrix, and back.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/parallel.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// A stack of `count` matrices of one shape, as checkpoints hold them.
struct RawWeights {
  const uint8_t* weights;                ///< [count, n, k / 2]: low nibble = even k, high = odd k
  const void* scales;                    ///< [count, n, groups] of shape.scale_dtype
  const float* bias;                     ///< [count, n] or null
  const uint8_t* zero_points = nullptr;  ///< kInt4ZeroPoints: [count, n, groups], 0..15
};

/// Packs `count` matrices, each packed_bytes(shape) bytes, one after the other at `dst`.
/// The bytes do not depend on the kernel. shape must have passed check_shape; shape.has_bias says whether raw.bias is
/// read. Throws std::invalid_argument for a zero point above 15, and for kE2M1 where half of a scale is not exact.
void pack(const Kernel& kernel, const PackedShape& shape, int64_t count, const RawWeights& raw, uint8_t* dst,
          Parallel& parallel);

/// The exact inverse, for one matrix: weights [n, k / 2], scales [n, groups], bias [n] (left alone without bias),
/// zero_points [n, groups] (left alone unless kInt4ZeroPoints). Throws std::invalid_argument for a zero point above 15.
void unpack(const PackedMatrix& matrix, uint8_t* weights, void* scales, float* bias, Parallel& parallel,
            uint8_t* zero_points = nullptr);

}  // namespace w4a8
