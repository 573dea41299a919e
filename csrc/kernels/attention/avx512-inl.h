// What attention, linear attention too, needs of 512-bit registers. Included inside a target region and an anonymous
// namespace.
#pragma once

#include "kernels/avx512_ops-inl.h"

struct Ops : Avx512Ops {
  template <int kDistance>
  static W4A8_INLINE F swap_lanes(F x) {
    if constexpr (kDistance == 1) return _mm512_permute_ps(x, 0xb1);
    if constexpr (kDistance == 2) return _mm512_permute_ps(x, 0x4e);
    if constexpr (kDistance == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
    if constexpr (kDistance == 8) return _mm512_shuffle_f32x4(x, x, 0x4e);
  }
  static W4A8_INLINE F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static W4A8_INLINE F times_pow2(F x, F n) { return _mm512_scalef_ps(x, n); }
  static W4A8_INLINE float reduce_max_float(F x) { return _mm512_reduce_max_ps(x); }
  static W4A8_INLINE float sum16(const F (&x)[1]) {
    F sum = _mm512_add_ps(x[0], swap_lanes<8>(x[0]));
    sum = _mm512_add_ps(sum, swap_lanes<4>(sum));
    sum = _mm512_add_ps(sum, swap_lanes<2>(sum));
    sum = _mm512_add_ps(sum, swap_lanes<1>(sum));
    return _mm512_cvtss_f32(sum);
  }
};
