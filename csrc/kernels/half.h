// float32 <-> bfloat16 and float16 in integer arithmetic, for kernels whose ISA has no instruction for it.
#pragma once

#include <cstdint>

namespace w4a8 {

static inline uint32_t float_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
static inline float bits_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }

/// Nearest even; NaN becomes 0x7fc0.
static inline uint16_t bfloat16_from_float(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float float_from_float16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  if (magnitude >= 0x0400u) return bits_float(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
  // Denormal: an integer multiple of 2^-24, exact in float32.
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return bits_float(sign | float_bits(value));
}

/// Nearest even; overflow becomes infinity, NaN 0x7e00.
static inline uint16_t float16_from_float(float x) {
  const uint32_t bits = float_bits(x);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7e00;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more rounds to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 shifts the rounding to multiples of 2^-24, which are the denormals.
    const float shifted = bits_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - ((127u - 15u) << 23)) >> 13));
}

}  // namespace w4a8
