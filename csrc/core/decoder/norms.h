// A norm of a plan, of rows and of heads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/decoder/plan.h"
#include "core/decoder/rows.h"

namespace w4a8 {

/// out[n]: the norm of x, or x without a norm. out may be x.
inline void norm_row(const NormPlan& norm, int64_t n, const float* x, float* out) {
  if (!norm) {
    std::copy_n(x, n, out);
    return;
  }
  if (norm.centered) center(x, n, out);
  rms_norm(norm.centered ? out : x, norm.weight, norm.eps, n, out);
  if (norm.bias != nullptr) add_scaled(norm.bias, 1.0f, n, out);
}

/// Norms runs of `size` numbers, `stride` apart, in their place. weights_step: numbers between the weights of the runs.
inline void norm_runs(NormPlan norm, int64_t runs, int64_t size, int64_t stride, float* x, int64_t weights_step = 0) {
  if (!norm) return;
  for (int64_t i = 0; i < runs; ++i, x += stride, norm.weight += weights_step) norm_row(norm, size, x, x);
}

}  // namespace w4a8
