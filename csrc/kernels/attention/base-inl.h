// What all of attention over a cache of blocks works with, once for all instruction sets. Included inside a target
// region and an anonymous namespace. `Ops` are VectorOps with, besides,
//
//   swap_lanes<kDistance>(f)            lane i is lane i ^ kDistance, kDistance < kLanes
//   round(f), times_pow2(f, n)          to a whole number; f * 2^n, n whole in [-125, 125] (any result for other n)
//   reduce_max_float(f)                 the largest lane; any number if a lane is NaN
//   sum16(const F (&)[kVecs])           of 16 lanes: i + (i ^ 8), then ^ 4, ^ 2, ^ 1
//
// and Dot is how it multiplies the items of a cache kind:
//
//   kInt8, kPerItem                     the kind of cache; numbers of an item: 4 int8 or 2 bfloat16
//   Sum, Line, Item                     sums of kLanes keys or channels; their items; an item of one row, broadcast
//   kTileRows, kTileVecs                rows, and registers of keys or channels, of a tile
//   kRowItemBytes                       bytes of an item of a row in scratch
//   zero(), load<kKeys>(p), item(p)     kKeys: keys, which are unsigned, and queries; else values and weights
//   add<kKeys>(sum, line, item)
//   total(sum)                          the sums, as I (int8) or F (bfloat16)
//   store_weights(p, f)                 kLanes whole weights 0..254 (int8), or of bfloat16, to row items

#pragma once

#include "kernels/unroll-inl.h"

// A cache of bfloat16 where there is no instruction for it: widened to floats. The odd number is added first, as
// VDPBF16PS does.
template <class Ops, int kRows, int kVecs>
struct FmaDot {
  static constexpr bool kInt8 = false;
  static constexpr int kTileRows = kRows;
  static constexpr int kTileVecs = kVecs;
  static constexpr int64_t kPerItem = 2;
  static constexpr int64_t kRowItemBytes = 8;
  using Sum = typename Ops::F;
  struct Line {
    typename Ops::F odd;
    typename Ops::F even;
  };
  using Item = Line;
  static W4A8_INLINE Sum zero() { return Ops::splat(0.0f); }
  template <bool kKeys>
  static W4A8_INLINE Line load(const uint8_t* p) {
    const typename Ops::I both = Ops::iload(p);
    return {Ops::float_bits(Ops::iand(both, Ops::isplat(static_cast<int32_t>(0xffff0000u)))),
            Ops::float_bits(Ops::template shift_left<16>(both))};
  }
  template <bool kKeys>
  static W4A8_INLINE Item item(const uint8_t* p) {
    const auto* floats = reinterpret_cast<const float*>(p);
    return {Ops::splat(floats[1]), Ops::splat(floats[0])};
  }
  template <bool kKeys>
  static W4A8_INLINE void add(Sum& sum, Line line, Item item) {
    sum = Ops::fma(line.odd, item.odd, sum);
    sum = Ops::fma(line.even, item.even, sum);
  }
  static W4A8_INLINE typename Ops::F total(Sum sum) { return sum; }
  static W4A8_INLINE void store_weights(uint8_t* p, typename Ops::F weights) {
    Ops::store(reinterpret_cast<float*>(p), weights);
  }
};

// Bytes of the items of a row of scratch: of key_size numbers of a query, or of the weights of kStepKeys keys. Rows are
// dense, so that those of a tile of queries share a first-level cache with a block.
template <class Dot>
constexpr int64_t row_bytes(int64_t numbers) {
  return numbers * Dot::kRowItemBytes / Dot::kPerItem;
}

// 2^x for x <= 125, relative error < 3e-6; 0 below -125, 1 of 0.
template <class Ops>
W4A8_INLINE typename Ops::F vec_exp2(typename Ops::F x) {
  using F = typename Ops::F;
  const F n = Ops::round(x);
  const F f = Ops::sub(x, n);
  F p = Ops::splat(0x1.3a02d0p-7f);
  p = Ops::fma(p, f, Ops::splat(0x1.c9fc48p-5f));
  p = Ops::fma(p, f, Ops::splat(0x1.ec0378p-3f));
  p = Ops::fma(p, f, Ops::splat(0x1.62e12cp-1f));
  p = Ops::fma(p, f, Ops::splat(1.0f));
  return Ops::select_less(x, Ops::splat(-125.0f), Ops::splat(0.0f), Ops::times_pow2(p, n));
}

// x rounded to bfloat16, as a float; 0 where it is below 2^-55, so that no sum of products is denormal. A NaN becomes
// anything: of a weight the sum L is NaN then.
template <class Ops>
W4A8_INLINE typename Ops::F round_to_bfloat16(typename Ops::F x) {
  const typename Ops::I bits = Ops::int_bits(x);
  const typename Ops::I odd = Ops::iand(Ops::template shift_right<16>(bits), Ops::isplat(1));
  const typename Ops::I rounded = Ops::iadd(bits, Ops::iadd(odd, Ops::isplat(0x7fff)));
  const typename Ops::F y = Ops::float_bits(Ops::iand(rounded, Ops::isplat(static_cast<int32_t>(0xffff0000u))));
  return Ops::select_less(Ops::abs(x), Ops::splat(0x1p-55f), Ops::splat(0.0f), y);
}

// Levels of the Walsh-Hadamard transform inside of registers, from lanes kDistance apart on.
template <class Ops, int kDistance, int kRegisters>
W4A8_INLINE void butterflies_of_lanes(typename Ops::F (&x)[kRegisters]) {
  if constexpr (kDistance < Ops::kLanes) {
    float sign[Ops::kLanes];
    for (int i = 0; i < Ops::kLanes; ++i) sign[i] = (i & kDistance) != 0 ? -1.0f : 1.0f;
    const typename Ops::F signs = Ops::load(sign);
    for_each<kRegisters>([&](int i)
                             W4A8_LAMBDA { x[i] = Ops::fma(signs, x[i], Ops::template swap_lanes<kDistance>(x[i])); });
    butterflies_of_lanes<Ops, 2 * kDistance>(x);
  }
}
// Its levels between registers, from those kDistance apart on.
template <class Ops, int kDistance, int kRegisters>
W4A8_INLINE void butterflies_of_registers(typename Ops::F (&x)[kRegisters]) {
  if constexpr (kDistance < kRegisters) {
    for_each<kRegisters>([&](int i) W4A8_LAMBDA {
      if ((i & kDistance) != 0) return;
      const typename Ops::F a = x[i];
      const typename Ops::F b = x[i + kDistance];
      x[i] = Ops::add(a, b);
      x[i + kDistance] = Ops::sub(a, b);
    });
    butterflies_of_registers<Ops, 2 * kDistance>(x);
  }
}
template <class Ops, int kRegisters>
W4A8_INLINE void rotate_registers(float* from, int64_t n) {
  for (int64_t at = 0; at < n; at += kRegisters * Ops::kLanes) {
    typename Ops::F x[kRegisters];
    for_each<kRegisters>([&](int i) W4A8_LAMBDA { x[i] = Ops::load(from + at + i * Ops::kLanes); });
    butterflies_of_lanes<Ops, 1>(x);
    butterflies_of_registers<Ops, 1>(x);
    for_each<kRegisters>([&](int i) W4A8_LAMBDA { Ops::store(from + at + i * Ops::kLanes, x[i]); });
  }
}
// The Walsh-Hadamard transform, without a factor, of the largest power of two that divides n; a sum, a difference. The
// first levels of up to eight registers are computed in them.
template <class Ops>
__attribute__((noinline)) void rotate(float* x, int64_t n) {
  const int64_t size = n & -n;
  const int64_t held = size < 8 * Ops::kLanes ? size : 8 * Ops::kLanes;
  switch (held / Ops::kLanes) {
    case 1: rotate_registers<Ops, 1>(x, n); break;
    case 2: rotate_registers<Ops, 2>(x, n); break;
    case 4: rotate_registers<Ops, 4>(x, n); break;
    default: rotate_registers<Ops, 8>(x, n);
  }
  for (int64_t distance = held; distance < size; distance *= 2) {
    for (int64_t begin = 0; begin < n; begin += 2 * distance) {
      for (int64_t i = begin; i < begin + distance; i += Ops::kLanes) {
        const typename Ops::F a = Ops::load(x + i);
        const typename Ops::F b = Ops::load(x + i + distance);
        Ops::store(x + i, Ops::add(a, b));
        Ops::store(x + i + distance, Ops::sub(a, b));
      }
    }
  }
}

template <class Ops, DType kType>
W4A8_INLINE void widen_row(const void* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += Ops::kLanes) Ops::store(to + i, Ops::template load_as<kType>(from, i));
}
template <class Ops>
void widen_row(const void* from, DType dtype, float* to, int64_t n) {
  switch (dtype) {
    case DType::kFloat32: return widen_row<Ops, DType::kFloat32>(from, to, n);
    case DType::kBFloat16: return widen_row<Ops, DType::kBFloat16>(from, to, n);
    case DType::kFloat16: return widen_row<Ops, DType::kFloat16>(from, to, n);
  }
}

// The largest |x|; NaN if one is not finite. From 0x1.ffp127 on, what bfloat16 would round to infinity, a number counts
// as not finite.
template <class Ops>
float largest(const float* x, int64_t n) {
  typename Ops::I most = Ops::isplat(0);
  for (int64_t i = 0; i < n; i += Ops::kLanes) most = Ops::imax(most, Ops::int_bits(Ops::abs(Ops::load(x + i))));
  const auto bits = static_cast<uint32_t>(Ops::reduce_max(most));
  return bits < 0x7f7f8000u ? bits_float(bits) : bits_float(0x7fc00000u);
}

// What x is multiplied by so that its largest number becomes 127; 0 for rows of almost nothing, and of NaN.
inline float to_codes(float most) { return most > 0x1p-100f ? 127.0f / most : 0.0f; }

// codes = rint(x * inverse), and their sum. 0 for NaN, whose inverse is 0: x is not looked at then.
template <class Ops>
int32_t round_codes(const float* x, float inverse, int8_t* codes, int64_t n) {
  typename Ops::I sum = Ops::isplat(0);
  for (int64_t i = 0; i < n; i += Ops::kLanes) {
    const typename Ops::F y = Ops::mul(inverse == 0.0f ? Ops::splat(0.0f) : Ops::load(x + i), Ops::splat(inverse));
    const typename Ops::I q = Ops::imin(Ops::isplat(127), Ops::imax(Ops::isplat(-127), Ops::to_int(y)));
    Ops::store_int8(codes + i, q);
    sum = Ops::iadd(sum, q);
  }
  return Ops::reduce(sum);
}
