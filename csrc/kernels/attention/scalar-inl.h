// What attention, linear attention too, needs of single numbers. Included inside a target region and an anonymous
// namespace.
#pragma once

#include "kernels/scalar_ops-inl.h"

struct Ops : ScalarOps {
  template <int kDistance>
  static F swap_lanes(F x) {
    return x;
  }
  static F round(F x) { return to_float(to_int(x)); }
  static F times_pow2(F x, F n) { return mul(x, pow2(to_int(n))); }
  static float reduce_max_float(F x) { return x; }
  static float sum16(const F (&x)[16]) {
    F sum[16];
    for (int i = 0; i < 16; ++i) sum[i] = x[i];
    for (int half = 8; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) sum[i] = sum[i] + sum[i + half];
    }
    return sum[0];
  }
};
