// Scales as bits: a power of two more or less, whatever the CPU does with denormals.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/kernel.h"

namespace w4a8 {

/// Floats as bits: uint32_t is float32, uint16_t bfloat16. Infinities and NaN stay what they are.
template <class Bits>
struct FloatBits {
  static constexpr int kMantissa = sizeof(Bits) == 4 ? 23 : 7;
  static constexpr auto kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  static constexpr auto kInfinity = static_cast<Bits>(Bits{0xff} << kMantissa);
  static constexpr auto kLeastNormal = static_cast<Bits>(Bits{1} << kMantissa);

  static Bits load(const uint8_t* src) {
    Bits bits;
    std::memcpy(&bits, src, sizeof(bits));
    return bits;
  }
  static Bits magnitude(Bits x) { return static_cast<Bits>(x & static_cast<Bits>(~kSign)); }
  // A number of exponent 0 or 1 becomes a denormal, whose half is a shift.
  static bool halves(Bits x) { return magnitude(x) >= 2 * kLeastNormal || (x & 1) == 0; }
  static Bits half(Bits x) {
    const Bits size = magnitude(x);
    if (size >= kInfinity) return x;
    return static_cast<Bits>((x & kSign) | (size >= 2 * kLeastNormal ? size - kLeastNormal : size >> 1));
  }
  static Bits twice(Bits x) {
    const Bits size = magnitude(x);
    if (size >= kInfinity) return x;
    const Bits result = static_cast<Bits>(size >= kLeastNormal ? size + kLeastNormal : size << 1);
    return static_cast<Bits>((x & kSign) | std::min(result, kInfinity));
  }
  static Bits sixteenfold(Bits x) { return twice(twice(twice(twice(x)))); }
  static bool has_sixteenfold(Bits x) { return magnitude(x) >= kInfinity || magnitude(sixteenfold(x)) < kInfinity; }
};

/// call(FloatBits<uint32_t or uint16_t>()), as `dtype` has so many bits: float32 or bfloat16.
template <class Call>
auto with_bits_of(DType dtype, Call call) {
  return dtype == DType::kFloat32 ? call(FloatBits<uint32_t>()) : call(FloatBits<uint16_t>());
}

}  // namespace w4a8
