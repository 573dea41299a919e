// Attention over latents: values are the first channels of keys.
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/unroll-inl.h"

// Lane i is the bit `kBit` of i.
template <class Ops, int kBit>
W4A8_INLINE typename Ops::F bits_of_lanes() {
  float bits[Ops::kLanes];
  for (int i = 0; i < Ops::kLanes; ++i) bits[i] = (i & kBit) != 0 ? 1.0f : 0.0f;
  return Ops::load(bits);
}

// Transposes R registers of R numbers of 64 bits, from those kDistance apart on.
template <class Ops, int kDistance, int R>
W4A8_INLINE void transpose64(typename Ops::F (&x)[R]) {
  if constexpr (kDistance < R) {
    using F = typename Ops::F;
    const F bit = bits_of_lanes<Ops, 2 * kDistance>();
    const F half = Ops::splat(0.5f);
    for_each<R>([&](int i) W4A8_LAMBDA {
      if ((i & kDistance) != 0) return;
      const F a = x[i];
      const F b = x[i + kDistance];
      x[i] = Ops::select_less(bit, half, a, Ops::template swap_lanes<2 * kDistance>(b));
      x[i + kDistance] = Ops::select_less(bit, half, Ops::template swap_lanes<2 * kDistance>(a), b);
    });
    transpose64<Ops, 2 * kDistance>(x);
  }
}

// Two channels of two tokens are 64 bits, of which the middle 16-bit numbers change places.
template <class Ops>
W4A8_INLINE typename Ops::F swap_middles(typename Ops::F x) {
  using I = typename Ops::I;
  const I low = Ops::isplat(0xffff);
  const I own = Ops::int_bits(x);
  const I other = Ops::int_bits(Ops::template swap_lanes<1>(x));
  const I even = Ops::iadd(Ops::iand(own, low), Ops::template shift_left<16>(other));
  const I odd = Ops::iadd(Ops::iand(Ops::template shift_right<16>(other), low), Ops::isub(own, Ops::iand(own, low)));
  return Ops::select_less(bits_of_lanes<Ops, 1>(), Ops::splat(0.5f), Ops::float_bits(even), Ops::float_bits(odd));
}

// The values of a block, as in a block of kBFloat16: item i of the tokens 2 p and 2 p + 1 becomes the channels 2 i and
// 2 i + 1 of pair p.
template <class Ops>
void values_of_keys(const uint8_t* keys, int64_t value_size, uint8_t* values) {
  constexpr int64_t kBytes = 2 * kItemBytes;
  const int64_t stride = value_size * kItemBytes;
  if constexpr (Ops::kLanes == 1) {
    for (int64_t i = 0; i < value_size / 2; ++i) {
      for (int64_t p = 0; p < kBlockKeys / 2; ++p) {
        uint16_t four[4];
        __builtin_memcpy(four, keys + i * kItemLine + p * kBytes, kBytes);
        std::swap(four[1], four[2]);
        __builtin_memcpy(values + p * stride + i * kBytes, four, kBytes);
      }
    }
  } else {
    constexpr int R = Ops::kLanes / 2;
    for (int64_t i = 0; i < value_size / 2; i += R) {
      for (int64_t p = 0; p < kBlockKeys / 2; p += R) {
        typename Ops::F x[R];
        for_each<R>([&](int r) W4A8_LAMBDA {
          x[r] = swap_middles<Ops>(Ops::load_bytes(keys + (i + r) * kItemLine + p * kBytes));
        });
        transpose64<Ops, 1>(x);
        for_each<R>([&](int r) W4A8_LAMBDA {
          Ops::store(reinterpret_cast<float*>(values + (p + r) * stride + i * kBytes), x[r]);
        });
      }
    }
  }
}
