// What attention, linear attention too, needs of NEON registers. Included inside a target region and an anonymous
// namespace.
#pragma once

#include "kernels/arm_ops-inl.h"

struct Ops : NeonOps {
  template <int kDistance>
  static W4A8_INLINE F swap_lanes(F x) {
    if constexpr (kDistance == 1) return vrev64q_f32(x);
    if constexpr (kDistance == 2) return vextq_f32(x, x, 2);
  }
  static W4A8_INLINE F round(F x) { return vrndnq_f32(x); }
  static W4A8_INLINE F times_pow2(F x, F n) { return mul(x, pow2(to_int(n))); }
  static W4A8_INLINE float reduce_max_float(F x) { return vmaxnmvq_f32(x); }
  static W4A8_INLINE float sum16(const F (&x)[4]) {
    F sum = vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]));
    sum = vaddq_f32(sum, swap_lanes<2>(sum));
    return vgetq_lane_f32(vaddq_f32(sum, swap_lanes<1>(sum)), 0);
  }
};
