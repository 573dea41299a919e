// Rows of activations that both quantizers are tried with: quantize_row and quantize_token.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "test_util.h"

namespace w4a8::test {

/// check(x) for ranges and offsets over the whole exponent range.
template <class Check>
void for_ranges_and_offsets(Rng& rng, Check check) {
  for (int exponent = -149; exponent <= 127; exponent += 3) {
    for (const float offset : {-2.0f, -1.0f, -0.5f, 0.0f, 0.5f, 1.0f, 2.0f}) {
      std::vector<float> x;
      for (int i = 0; i < 37; ++i) x.push_back(std::ldexp(rng.uniform(-1, 1) + offset, exponent - 2));
      check(x);
    }
  }
}

/// check(x) for rows of these lengths with each of these values everywhere.
template <class Check>
void for_constant_rows(const std::vector<float>& values, Check check) {
  for (const float value : values) {
    for (const std::size_t k : {1u, 2u, 15u, 16u, 17u, 64u}) check(std::vector<float>(k, value));
  }
}

/// check(x) for rows of ones with a value that is not finite, at every place.
template <class Check>
void for_not_finite(const std::vector<std::size_t>& lengths, Check check) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float bad : {NAN, -NAN, kInf, -kInf}) {
    for (const std::size_t k : lengths) {
      for (std::size_t at = 0; at < k; ++at) {
        std::vector<float> x(k, 1.0f);
        x[at] = bad;
        check(x);
      }
    }
  }
}

/// Both, and 41 values from high to low.
inline std::vector<float> between(float low, float high) {
  std::vector<float> x = {low, high};
  for (int i = 0; i <= 40; ++i) x.push_back(low / 40 * static_cast<float>(i) + high / 40 * static_cast<float>(40 - i));
  return x;
}

/// check(x, dtype, bits of its last value) for every finite bfloat16 and float16, in rows of 64.
template <class Check>
void for_all_half_values(Check check) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<float> x;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const float value = ref::widen(bits, ref_type(dtype));
      if (std::isfinite(value)) x.push_back(value);
      if (x.size() < 64) continue;
      check(x, dtype, bits);
      x.clear();
    }
  }
}

}  // namespace w4a8::test
