// Float weights -> codes, scales and zero points, as pack takes them (docs/quantization.md, "Rounding").
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/parallel.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// How hard scales and zero points are searched for: 0 is a rule for each group, 1 and 2 try some scales of each.
inline constexpr int kMostEffort = 2;

/// A stack of `count` matrices of one shape to round.
struct FloatWeights {
  const void* weights;  ///< [count, n, k] of `dtype`
  DType dtype;
  /// [count, k], finite and not negative: factors of the squared errors of weights. If null, or zero in a whole group:
  /// the weight's magnitude plus the root of the mean square of its group (docs/numerics.md, 8).
  const float* importance;
  int64_t importance_stride;  ///< elements from matrix to matrix: k, or 0 for one row of importance for all
};

/// The results. The memory is the caller's.
struct RoundedWeights {
  uint8_t* codes;        ///< [count, n, k / 2]: low nibble = even k, high = odd k; kInt6, kInt8: [count, n, k]
  void* scales;          ///< [count, n, groups] of shape.scale_type
  uint8_t* zero_points;  ///< [count, n, groups], written for kInt4ZeroPoints
};

/// Rounds `count` matrices. The result depends neither on the kernel nor on the threads. shape must have passed
/// check_shape; its scales are float32 or bfloat16. Throws std::invalid_argument if a weight is not finite (results are
/// then incomplete), or if an importance is negative or not finite.
void round_weights(const Kernel& kernel, Parallel& parallel, const PackedShape& shape, int64_t count,
                   const FloatWeights& from, int effort, const RoundedWeights& to);

}  // namespace w4a8
