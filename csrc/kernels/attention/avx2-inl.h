// What attention, linear attention too, needs of 256-bit registers. Included inside a target region and an anonymous
// namespace.
#pragma once

#include "kernels/avx2_ops-inl.h"

struct Ops : Avx2Ops {
  template <int kDistance>
  static W4A8_INLINE F swap_lanes(F x) {
    if constexpr (kDistance == 1) return _mm256_permute_ps(x, 0xb1);
    if constexpr (kDistance == 2) return _mm256_permute_ps(x, 0x4e);
    if constexpr (kDistance == 4) return _mm256_permute2f128_ps(x, x, 0x01);
  }
  static W4A8_INLINE F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static W4A8_INLINE F times_pow2(F x, F n) { return mul(x, pow2(to_int(n))); }
  static W4A8_INLINE float reduce_max_float(F x) {
    x = _mm256_max_ps(x, swap_lanes<4>(x));
    x = _mm256_max_ps(x, swap_lanes<2>(x));
    return _mm256_cvtss_f32(_mm256_max_ps(x, swap_lanes<1>(x)));
  }
  static W4A8_INLINE float sum16(const F (&x)[2]) {
    F sum = _mm256_add_ps(x[0], x[1]);
    sum = _mm256_add_ps(sum, swap_lanes<4>(sum));
    sum = _mm256_add_ps(sum, swap_lanes<2>(sum));
    return _mm256_cvtss_f32(_mm256_add_ps(sum, swap_lanes<1>(sum)));
  }
};
