// exp and log1p in double, rounded later to float. Unlike <cmath> the bits are the same on every CPU and with every C
// library. Additions, multiplications and divisions only; a loop over them is vectorized by the compiler.
#pragma once

#include <bit>
#include <cstdint>

namespace w4a8 {

/// exp(x), relative error < 2e-11, with x clamped to [-300, 300]: beyond, exp(x) as a float, and its root, is 0 or
/// infinity. NaN stays NaN.
inline double exp_of(double x) {
  x = x < -300.0 ? -300.0 : x;
  x = x > 300.0 ? 300.0 : x;
  // exp(x) = 2^n exp(r), n = rint(x / ln 2), |r| <= ln(2) / 2; ln 2 in two parts, of which n times the first is exact.
  constexpr double kShift = 0x1.8p52;  // a sum with it has n in its low bits
  const double shifted = x * 0x1.71547652b82fep+0 + kShift;
  const double n = shifted - kShift;
  const double r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
  double p = 1.0 / 362880;  // Taylor: the next term is below 0.35^10 / 10! = 8e-12
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return p * std::bit_cast<double>((std::bit_cast<uint64_t>(shifted) + 1023) << 52);
}

/// log(1 + y) for y in [0, 2^30], relative error < 1e-10. NaN stays NaN.
inline double log1p_of(double y) {
  if (!(y >= 1e-5)) return y - 0.5 * y * y;  // the next term is y^3 / 3; keeps the bits that 1 + y rounds away
  // log(m 2^n) = n ln 2 + 2 artanh(s), m in [sqrt(1/2), sqrt(2)), s = (m - 1) / (m + 1), |s| < 0.172.
  const auto bits = std::bit_cast<uint64_t>(1.0 + y);
  const uint64_t n = (bits - 0x3fe6a09e667f3bcdu) >> 52;
  const double m = std::bit_cast<double>(bits - (n << 52));
  const double s = (m - 1.0) / (m + 1.0);
  const double q = s * s;
  double p = 1.0 / 13;  // the next term, q^7 / 15, is below 2e-12
  p = p * q + 1.0 / 11;
  p = p * q + 1.0 / 9;
  p = p * q + 1.0 / 7;
  p = p * q + 1.0 / 5;
  p = p * q + 1.0 / 3;
  p = p * q + 1.0;
  return static_cast<double>(n) * 0x1.62e42fefa39efp-1 + 2.0 * s * p;
}

}  // namespace w4a8
