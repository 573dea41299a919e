// Quantizing a row 16 elements at a time with NEON's own minimum and narrowing. The same answer as quantize_row of
// rows-inl.h, which takes the rows this one is not for: with a NaN or an infinity, or K not a multiple of 16.
// Included inside a target region and an anonymous namespace.
//
//   first pass     FMIN, FMAX keep a NaN, so the extremes tell whether all is finite     (-0 and 0 give the same row)
//   second pass    |rint(x * scale)| <= 256 and |zp| <= 128 fit 16 bits; SQXTN to 8 bits is the clamp
//   sums           SADALP adds two of q to 16 bits, 128 times: |sum| <= 128 * 2 * 128 = 2^15, with 2^15 itself only
//   below 0
#pragma once

#include "kernels/arm_ops-inl.h"
#include "kernels/rows-inl.h"

constexpr int64_t kQuantizeStep = 16;

template <class Ops, DType kType>
void quantize_row_neon_as(const void* x, const RowShape& shape, const QuantizedRow& to) {
  const int64_t k = shape.k;
  using F = typename Ops::F;
  if (k % kQuantizeStep != 0) return quantize_row_as<Ops, kType>(x, shape, to);
  F low[2] = {Ops::splat(0.0f), Ops::splat(0.0f)};
  F high[2] = {low[0], low[0]};
  for (int64_t i = 0; i < k; i += kQuantizeStep) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const F value = Ops::template load_as<kType>(x, i + 4 * v);
      low[v % 2] = vminq_f32(low[v % 2], value);
      high[v % 2] = vmaxq_f32(high[v % 2], value);
    }
  }
  const float mn = vminvq_f32(vminq_f32(low[0], low[1]));
  const float mx = vmaxvq_f32(vmaxq_f32(high[0], high[1]));
  constexpr float kMax = 0x1.fffffep127f;
  if (!(mn >= -kMax && mx <= kMax)) return quantize_row_as<Ops, kType>(x, shape, to);

  const RowParams params = row_params(mn, mx);
  *to.quant = params.quant;
  const F scale = Ops::splat(params.scale);
  const int16x8_t zero_point = vdupq_n_s16(static_cast<int16_t>(params.quant.zero_point));
  constexpr int64_t kMostSummed = 128 * kQuantizeStep;
  int32_t* starts = to.starts;
  for (int64_t begin = 0; begin < k; begin += shape.part) {
    int32x4_t sum = vdupq_n_s32(0);
    for (int64_t i = begin; i < begin + shape.part;) {
      const int64_t end = begin + shape.part - i < kMostSummed ? begin + shape.part : i + kMostSummed;
      int16x8_t sums = vdupq_n_s16(0);
      for (; i < end; i += kQuantizeStep) {
        int16x8_t words[2];
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          const F first = Ops::mul(Ops::template load_as<kType>(x, i + 8 * h), scale);
          const F second = Ops::mul(Ops::template load_as<kType>(x, i + 8 * h + 4), scale);
          words[h] = vuzp1q_s16(vreinterpretq_s16_s32(Ops::to_int(first)), vreinterpretq_s16_s32(Ops::to_int(second)));
          words[h] = vaddq_s16(words[h], zero_point);
        }
        const int8x16_t bytes = vqmovn_high_s16(vqmovn_s16(words[0]), words[1]);
        vst1q_s8(to.q + i, bytes);
        sums = vpadalq_s8(sums, bytes);
      }
      sum = vpadalq_s16(sum, sums);
    }
    *starts++ = -Ops::reduce(sum);
  }
  for (int64_t i = k; i % kLineBytes != 0; i += kQuantizeStep) vst1q_s8(to.q + i, vdupq_n_s8(0));
}

template <class Ops>
void quantize_row_neon(const void* x, DType dtype, const RowShape& shape, const QuantizedRow& to) {
  with_dtype(dtype, [&]<DType kType>() W4A8_LAMBDA {
    if (shape.scaled()) return quantize_groups_as<Ops, kType>(x, shape, to);
    quantize_row_neon_as<Ops, kType>(x, shape, to);
  });
  finish_row(shape, to);
}
