// Activations quantized per token for int4_gemm_w4a8 (docs/numerics.md section 6).
#pragma once

#include <cstdint>

#include "core/parallel.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// Quantizes m rows of k elements to `bits` bits, 2..8. x: contiguous [m, k] of `dtype`; q: [m, k], int8 when
/// symmetric, else uint8; scale: [m] of `dtype`; zero_point: [m], 0 when symmetric, else in [0, 2^bits - 1].
/// A row with a NaN or infinite element: q = 0, scale = NaN, zero_point = 0.
void quantize_per_token(const Kernel& kernel, Parallel& parallel, const void* x, DType dtype, int64_t m, int64_t k,
                        bool symmetric, int bits, uint8_t* q, void* scale, int32_t* zero_point);

/// Quantizes m rows of k elements in groups of 32, 64 or 128 that divide k, as products with matrices of such
/// activation groups do. x: contiguous [m, k] of `dtype`; q: [m, k]; scale: [m, k / group], NaN for a row with a NaN or
/// infinite element.
void quantize_in_groups(const Kernel& kernel, Parallel& parallel, const void* x, DType dtype, int64_t m, int64_t k,
                        int64_t group, int8_t* q, float* scale);

}  // namespace w4a8
