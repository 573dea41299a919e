// The small work of a decoder between its products: docs/numerics.md section 10. Plain C++ in 16 lanes, so that every
// instruction set gives the same bits.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"

namespace w4a8 {

/// The mean of x[i]^2 for i < n.
float mean_square(const float* x, int64_t n);

/// out[i] = x[i] * r * weight[i] for i < n, r = 1 / sqrt(square + eps). out may be x.
void rms_norm_of(const float* x, float square, const float* weight, float eps, int64_t n, float* out);

/// The same with the mean square of x.
inline void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  rms_norm_of(x, mean_square(x, n), weight, eps, n, out);
}

/// out[i] = x[i] - mean of x, for i < n. out may be x.
void center(const float* x, int64_t n, float* out);

/// Turns pairs of a head: of x[i] and x[i + half], or interleaved of x[2i] and x[2i + 1], (a, b) becomes
/// (a cos - b sin, b cos + a sin), i < half. angles: cosines [half], then sines [half].
void rotate(const float* angles, int64_t half, bool interleaved, float* x);

/// x[i] += factor * y[i] for i < n.
void add_scaled(const float* y, float factor, int64_t n, float* x);

/// x[i] *= factors[i] for i < n.
void scale_row(const float* factors, int64_t n, float* x);

/// out[i] = x[i] for i < n, a multiple of 16; x is of dtype.
void load_floats(const void* x, DType dtype, int64_t n, float* out);

/// 1 / (1 + exp(-x)), rounded once from double.
float sigmoid(float x);

}  // namespace w4a8
