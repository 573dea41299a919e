// Checkpoint weights -> packed matrix, and back.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/parallel.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// A stack of `count` matrices of one shape, as checkpoints hold them.
struct RawWeights {
  const uint8_t* weights;  ///< [count, n, k / 2]: low nibble = even k, high = odd k, value + 8
  const void* scales;      ///< [count, n, groups] of shape.scale_dtype
  const float* bias;       ///< [count, n] or null
};

/// Packs `count` matrices, each packed_bytes(shape) bytes, one after the other at `dst`.
/// The bytes do not depend on the kernel. shape must have passed check_shape; shape.has_bias says whether raw.bias is
/// read.
void pack(const Kernel& kernel, const PackedShape& shape, int64_t count, const RawWeights& raw, uint8_t* dst,
          Parallel& parallel);

/// The exact inverse, for one matrix: weights [n, k / 2], scales [n, groups], bias [n] (left alone without bias).
void unpack(const PackedMatrix& matrix, uint8_t* weights, void* scales, float* bias, Parallel& parallel);

}  // namespace w4a8
