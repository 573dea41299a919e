// Scales in the forms of a checkpoint and of a packed matrix, as bits: independent of the CPU's treatment of denormals.
//
// Scales of e2m1 are packed halved, since w is twice the number of a nibble. (e8m0 is packed unchanged; kernels halve
// the scale.)
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "kernels/half.h"
#include "kernels/kernel.h"

namespace w4a8 {

/// Floats as bits, with kMantissa bits of mantissa: 23 float32, 7 bfloat16, 10 float16. Infinities and NaN stay, halved
/// or doubled.
template <class BitsType, int kMantissa>
struct FloatScale {
  using Bits = BitsType;
  static constexpr auto kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  static constexpr auto kLeastNormal = static_cast<Bits>(Bits{1} << kMantissa);
  static constexpr auto kInfinity = static_cast<Bits>(kSign - kLeastNormal);

  static Bits magnitude(Bits x) { return static_cast<Bits>(x & static_cast<Bits>(~kSign)); }
  static Bits halved(Bits x) {
    const Bits size = magnitude(x);
    if (size >= kInfinity) return x;
    // A number of exponent 0 or 1 becomes a denormal, whose half is a shift.
    return static_cast<Bits>((x & kSign) | (size >= 2 * kLeastNormal ? size - kLeastNormal : size >> 1));
  }
  static Bits doubled(Bits x) {
    const Bits size = magnitude(x);
    if (size >= kInfinity) return x;
    const auto twice = static_cast<Bits>(size >= kLeastNormal ? size + kLeastNormal : size << 1);
    return static_cast<Bits>((x & kSign) | std::min(twice, kInfinity));
  }

  static float number(Bits given) {
    if constexpr (kMantissa == 10) return float_from_float16(given);
    return bits_float(static_cast<uint32_t>(given) << (8 * (sizeof(float) - sizeof(Bits))));
  }
  static Bits packed(Bits given, bool halve) { return halve ? halved(given) : given; }
  static Bits given(Bits packed, bool halve) { return halve ? doubled(packed) : packed; }
  /// Whether a scale can be packed; if not, the reason in words.
  static bool fits(Bits given, bool halve) {
    return !halve || magnitude(given) >= 2 * kLeastNormal || (given & 1) == 0;
  }
  static std::string describe(Bits) {
    return std::string("a number below ") + (kMantissa == 10 ? "2^-13" : "2^-125") +
           " whose half is not exact, which e2m1 values need";
  }
};

/// float8_e4m3fn without signs, packed as e5m3. There all scales and their halves are normal numbers: the exponent
/// counts from 2^-11, not 2^-7.
struct E5M3Scale {
  using Bits = uint8_t;
  static constexpr int kMost = 0x7e;
  static constexpr Bits kNone = 0xff;  ///< result of `given` for an e5m3 without a float8_e4m3fn

  static constexpr Bits convert(Bits e4m3, bool halve) {
    if (e4m3 == 0) return 0;
    int mantissa = e4m3 & 7;
    int exponent = (e4m3 >> 3) + 4;
    if (exponent == 4) {  // a denormal
      for (exponent = 5; mantissa < 8; --exponent) mantissa *= 2;
      mantissa -= 8;
    }
    return static_cast<Bits>((exponent - (halve ? 1 : 0)) << 3 | mantissa);
  }
  static constexpr std::array<Bits, 256> table(bool halve, bool back) {
    std::array<Bits, 256> result = {};
    result.fill(kNone);
    for (int i = 0; i <= kMost; ++i) {
      const auto e4m3 = static_cast<Bits>(i);
      const Bits e5m3 = convert(e4m3, halve);
      result[back ? e5m3 : e4m3] = back ? e4m3 : e5m3;
    }
    return result;
  }
  static float number(Bits given) {
    const int mantissa = given & 7;
    const int exponent = given >> 3;
    return std::ldexp(static_cast<float>(exponent == 0 ? mantissa : 8 + mantissa), std::max(exponent, 1) - 10);
  }
  static Bits packed(Bits given, bool halve) {
    static constexpr std::array<Bits, 256> kTables[] = {table(false, false), table(true, false)};
    return kTables[halve][given];
  }
  static Bits given(Bits packed, bool halve) {
    static constexpr std::array<Bits, 256> kTables[] = {table(false, true), table(true, true)};
    return kTables[halve][packed];
  }
  static bool fits(Bits given, bool) { return given <= kMost; }
  static std::string describe(Bits given) {
    return "the float8_e4m3fn with bits " + std::to_string(given) + ", expected a number without a sign, 0..126";
  }
};

struct E8M0Scale {
  using Bits = uint8_t;
  static float number(Bits given) { return bits_float(given == 0 ? 0x00400000u : static_cast<uint32_t>(given) << 23); }
  static Bits packed(Bits given, bool) { return given; }
  static Bits given(Bits packed, bool) { return packed; }
  static bool fits(Bits given, bool) { return given != 255; }
  static std::string describe(Bits) { return "255, the NaN of float8_e8m0fnu, expected 0..254"; }
};

struct SuperScale {
  using Bits = uint8_t;  ///< an int8
  static float number(Bits given) { return static_cast<int8_t>(given); }
  static Bits packed(Bits given, bool) { return given; }
  static Bits given(Bits packed, bool) { return packed; }
  static bool fits(Bits, bool) { return true; }
  static std::string describe(Bits) { return {}; }
};

/// call(codec), codec one of the types above.
template <class Call>
auto with_scale_codec(ScaleType type, Call call) {
  switch (type) {
    case ScaleType::kBFloat16: return call(FloatScale<uint16_t, 7>());
    case ScaleType::kFloat16: return call(FloatScale<uint16_t, 10>());
    case ScaleType::kE5M3: return call(E5M3Scale());
    case ScaleType::kE8M0: return call(E8M0Scale());
    case ScaleType::kSuper: return call(SuperScale());
    case ScaleType::kFloat32: break;
  }
  return call(FloatScale<uint32_t, 23>());
}

/// Element i of scales of that type.
template <class Codec>
typename Codec::Bits load_scale(const void* scales, int64_t i) {
  typename Codec::Bits bits;
  std::memcpy(&bits, static_cast<const uint8_t*>(scales) + i * static_cast<int64_t>(sizeof(bits)), sizeof(bits));
  return bits;
}

}  // namespace w4a8
