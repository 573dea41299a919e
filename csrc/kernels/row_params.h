// Scale and zero point of a row from its extremes (docs/numerics.md section 1), shared by every kernel.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/kernel.h"

namespace w4a8 {

struct RowParams {
  float scale;
  RowQuant quant;
};

/// mn <= 0 <= mx, both finite.
static inline RowParams row_params(float mn, float mx) {
  constexpr float kMax = std::numeric_limits<float>::max();
  float scale = 1.0f;
  if (mx - mn > kMax) {
    scale = 127.5f / (mx * 0.5f - mn * 0.5f);
  } else if (mx != mn) {
    scale = 255.0f / (mx - mn);
    if (scale > kMax) scale = 1.0f;
  }
  const float low = -128.0f - mn * scale;
  const float high = 127.0f - mx * scale;
  float zp = (-128.0f + mn * scale) + (127.0f + mx * scale) > 0.0f ? low : high;
  zp = zp < -128.0f ? -128.0f : (zp > 127.0f ? 127.0f : zp);
  return {scale, {1.0f / scale, static_cast<int32_t>(std::nearbyint(zp))}};
}

}  // namespace w4a8
