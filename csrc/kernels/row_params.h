// Scale and zero point of a row from its extremes (docs/numerics.md sections 1 and 6), shared by every kernel.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/half.h"
#include "kernels/kernel.h"

namespace w4a8 {

struct RowParams {
  float scale;
  RowQuant quant;
};

/// mn <= 0 <= mx, both finite.
static inline RowParams row_params(float mn, float mx) {
  constexpr float kMax = std::numeric_limits<float>::max();
  float scale;
  if (mx - mn > kMax) {
    scale = 127.5f / (mx * 0.5f - mn * 0.5f);
  } else {
    scale = 255.0f / (mx - mn);
    if (scale > kMax) return {1.0f, {1.0f, 0}};  // mx - mn is 0, or below 7.5e-37: all q are 0
  }
  const float low = -128.0f - mn * scale;
  const float high = 127.0f - mx * scale;
  float zp = (-128.0f + mn * scale) + (127.0f + mx * scale) > 0.0f ? low : high;
  zp = zp < -128.0f ? -128.0f : (zp > 127.0f ? 127.0f : zp);
  return {scale, {1.0f / scale, static_cast<int32_t>(std::nearbyint(zp))}};
}

/// The scale that gives a number back from the int8 of an activation group. Its last two bits are zero: then kSumFloat
/// * recip is exact (Rows::shifts).
static inline float cut_recip(float recip) { return bits_float(float_bits(recip) & ~uint32_t{3}); }

struct GroupParams {
  float scale;
  float recip;
};
constexpr int32_t kInfinityBits = 0x7f800000;
/// Of an activation group whose largest |x| has these bits, in [0, kInfinityBits).
static inline GroupParams group_params(int32_t bits) {
  const float scale = 127.0f / bits_float(static_cast<uint32_t>(bits));
  if (scale > std::numeric_limits<float>::max()) return {0.0f, 0.0f};  // |x| is 0, or below 3.8e-37
  return {scale, cut_recip(1.0f / scale)};
}

/// A row with a scale above kMostRecip counts in larger units: its shift might be infinite.
static inline void limit_scales(const RowShape& shape, const QuantizedRow& to) {
  constexpr float kMostRecip = 0x1p104f;
  constexpr float kUnit = 0x1p24f;
  float most = 0.0f;
  for (int64_t part = 0; part < shape.parts(); ++part) {
    const float scale = std::fabs(to.scales[part * to.scales_stride]);
    most = scale > most ? scale : most;
  }
  if (most <= kMostRecip) return;
  to.quant->recip *= kUnit;
  for (int64_t part = 0; part < shape.parts(); ++part) {
    float& scale = to.scales[part * to.scales_stride];
    scale = cut_recip(scale * (1 / kUnit));
  }
}

/// On entry `starts` are minus the sums of q of each part, and `scales` are set. Makes offsets and shifts of these
/// (docs/numerics.md section 3); `starts` become what Rows says.
static inline void finish_row(const RowShape& shape, const QuantizedRow& to) {
  if (shape.scaled()) limit_scales(shape, to);
  const int64_t parts = shape.minimum_group / shape.part;
  for (int64_t g = 0, part = 0; g < shape.offsets(); ++g) {
    float sum = 0.0f;
    for (const int64_t end = part + parts; part < end; ++part) {
      const auto of_part = static_cast<float>(to.starts[part]);
      sum = shape.scaled() ? std::fma(of_part, to.scales[part * to.scales_stride], sum) : of_part;
    }
    to.offsets[g] = sum;
  }
  const int32_t from = shape.scaled() ? kSumBits : 0;
  for (int64_t part = 0; part < shape.parts(); ++part) {
    to.starts[part] = to.starts[part] * shape.zero + from;
    if (!shape.scaled() || to.shifts == nullptr) continue;
    to.shifts[part * to.scales_stride] = -kSumFloat * to.scales[part * to.scales_stride];
  }
}

/// Section 6: the scale before it is rounded to the type of the row, and the range of q.
struct TokenParams {
  float scale;
  float low;
  float high;
  bool symmetric;
};

/// mn <= 0 <= mx, both finite; bits in 2..8.
static inline TokenParams token_params(float mn, float mx, bool symmetric, int bits) {
  constexpr float kLeastScale = 1e-5f;
  const auto levels = static_cast<float>((1 << bits) - 1);
  const auto half = static_cast<float>(1 << (bits - 1));
  float scale;
  if (symmetric) {
    scale = (-mn > mx ? -mn : mx) / (half - 1);
  } else {
    const float span = mx - mn;
    scale = span <= std::numeric_limits<float>::max() ? span / levels : mx / levels - mn / levels;
  }
  scale = scale < kLeastScale ? kLeastScale : scale;
  return {scale, symmetric ? -half : 0.0f, symmetric ? half - 1 : levels, symmetric};
}

/// An integer in [0, params.high], 0 when symmetric. scale: as it is stored.
static inline float token_zero_point(float mn, float scale, const TokenParams& params) {
  if (params.symmetric) return 0.0f;
  // The stored scale may be less than the quotient, so this may be a little more than the largest q.
  const float zero = std::nearbyint(-mn / scale);
  return zero < params.high ? zero : params.high;
}

}  // namespace w4a8
