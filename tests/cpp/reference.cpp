#include "reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace w4a8::ref {
namespace {

// Unit roundoff of float32, and half of the smallest denormal: what one operation can be off.
constexpr double kRound = 0x1p-24;
constexpr double kTiny = 0x1p-150;
// docs/numerics.md, section 5: relative errors of the two polynomials.
constexpr double kExpError = 2e-7;
constexpr double kErfcError = 5e-7;
// Where exp leaves the range that matters: float32 overflows at 88.7, and beyond 104 even 1 / exp is zero.
constexpr double kExpLarge = 87;
constexpr double kExpHuge = 104;

// A sign, an exponent and a mantissa of `mantissa_bits` stored bits, out of a finite float. max_exponent is the largest
// biased exponent, the one of infinity.
uint32_t round_to(float x, int mantissa_bits, int exponent_bits) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 31 << (mantissa_bits + exponent_bits);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  const int exponent = static_cast<int>(bits >> 23 & 0xff);
  if (exponent == 0xff) return sign | infinity;
  // value = mantissa * 2^power, mantissa below 2^24
  const uint64_t mantissa = (bits & 0x7fffff) | (exponent == 0 ? 0u : 0x800000u);
  const int power = std::max(exponent, 1) - 127 - 23;
  // The unit in the last place of the target: 2^ulp, not below that of its denormals.
  const int ulp = std::max(std::max(exponent, 1) - 127, 1 - bias) - mantissa_bits;
  const int shift = ulp - power;  // 0..40: bits to round away
  if (shift > 40) return sign;
  const uint64_t unit = uint64_t{1} << shift;
  uint64_t kept = mantissa / unit;
  const uint64_t rest = mantissa % unit;
  if (2 * rest > unit || (2 * rest == unit && kept % 2 == 1)) ++kept;
  // kept * 2^ulp: the hidden bit, if there, adds one to the exponent; a carry out of the mantissa does as well.
  const int base = ulp + mantissa_bits + bias - 1;
  const uint64_t result = (static_cast<uint64_t>(base) << mantissa_bits) + kept;
  return sign | static_cast<uint32_t>(std::min<uint64_t>(result, infinity));
}

// min and max as the document defines them: the second operand if one is NaN.
template <class T>
T min2(T a, T b) {
  return a < b ? a : b;
}
template <class T>
T max2(T a, T b) {
  return a > b ? a : b;
}

// A value with a relative and an absolute error.
struct Approximate {
  double value;
  double relative;
  double absolute;
};

Approximate exact(double value) { return {value, 0, 0}; }

// What float32 holds of a value that is too large for it.
double saturate(double value) {
  return std::fabs(value) > std::numeric_limits<float>::max()
             ? std::copysign(std::numeric_limits<double>::infinity(), value)
             : value;
}

// A product adds one rounding.
Approximate times(const Approximate& a, const Approximate& b) {
  return {saturate(a.value * b.value), a.relative + b.relative + kRound,
          std::fabs(a.value) * b.absolute + std::fabs(b.value) * a.absolute};
}

// x / (1 + exp(-a)), where float knows a up to a relative error of `a_error`.
Approximate logistic(double x, double a, double a_error) {
  const double e = std::exp(-a);
  const double argument = std::min(std::fabs(a), kExpHuge) * a_error;
  // An error of e enters the sum 1 + e with the weight e / (1 + e); then one sum and one quotient.
  const double weight = std::isinf(e) ? 1.0 : e / (1 + e);
  // Between the two limits exp may have overflowed, which makes the quotient 0.
  const bool may_overflow = -a > kExpLarge && -a <= kExpHuge;
  return {x / (1 + e), weight * (kExpError + argument) + 2 * kRound,
          may_overflow ? std::fabs(x) * std::exp(-kExpLarge) : 0};
}

Approximate silu(double x) { return logistic(x, x, 0); }

Approximate gelu(double x) {
  const double z = -x / std::sqrt(2.0);
  const double c = std::erfc(z);
  // z has two roundings (the constant, the product); what erfc makes of them is its condition number.
  const double condition = c > 0 && c < 2 ? std::fabs(z) * 2 / std::sqrt(M_PI) * std::exp(-z * z) / c : 0;
  return {x * (c / 2), kErfcError + 2 * kRound * condition + 2 * kRound, 0};
}

Approximate gelu_tanh(double x) {
  // x^2, x^3, the constant and its product, the sum, the other constant and its product: 7 roundings of terms of one
  // sign. The factor 2 is exact.
  const double t = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
  return logistic(x, 2 * t, 7 * kRound);
}

Approximate xielu(double alpha, double beta, double x) {
  if (x > 0) {
    // alpha and its product with x round; then the sum.
    return {saturate(alpha * x * x + x / 2), kRound, 2 * kRound * std::fabs(alpha) * x * x};
  }
  // The limit is -1e-6 as float32 has it. exp - 1 - x: a difference, which rounds, as beta does; then the sum.
  const double e = std::expm1(min2(static_cast<double>(-1e-6f), x));
  return {saturate(beta * (e - x) + x / 2), kRound,
          std::fabs(beta) * (kExpError * std::fabs(e) + 2 * kRound * std::fabs(e - x))};
}

Approximate activation(int kind, const Numbers& numbers, bool gated, double g, double u) {
  const auto clamped = [&](double v) { return max2(-numbers.limit, min2(numbers.limit, v)); };
  switch (kind) {
    case 0:
    case 1:
    case 2:
    case 3: {
      if (kind == 1 && gated) std::swap(g, u);
      const double c = min2(numbers.limit, g);
      // alpha and the product round, but 1 does not.
      const Approximate gate = logistic(c, numbers.alpha * c, numbers.alpha == 1 ? 0 : 2 * kRound);
      return gated ? times(gate, {clamped(u) + numbers.beta, numbers.beta == 0 ? 0 : kRound, 0}) : gate;
    }
    case 4: {
      Approximate gate = silu(g);
      gate.value = min2(numbers.limit, gate.value);
      return gated ? times(gate, exact(clamped(u))) : gate;
    }
    case 5: return gated ? times(gelu(g), exact(u)) : gelu(g);
    case 6: return gated ? times(gelu_tanh(g), exact(u)) : gelu_tanh(g);
    case 7: {
      const double r = max2(0.0, g);
      const Approximate square = times(exact(r), exact(r));
      return gated ? times(square, exact(u)) : square;
    }
    case 8: {
      const Approximate result = xielu(numbers.alpha, numbers.beta, g);
      return gated ? times(result, exact(u)) : result;
    }
    default: throw std::invalid_argument("the reference has no activation " + std::to_string(kind));
  }
}

}  // namespace

int64_t size_of(Type type) {
  if (type == Type::kF32) return 4;
  return type == Type::kBF16 || type == Type::kF16 ? 2 : 1;
}

float widen(uint32_t bits, Type type) {
  if (type == Type::kF32) return std::bit_cast<float>(bits);
  if (type == Type::kBF16) return std::bit_cast<float>(bits << 16);
  if (type == Type::kE8M0) {
    return bits == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, static_cast<int>(bits) - 127);
  }
  if (type == Type::kE5M3) {
    const int exponent = static_cast<int>(bits >> 3 & 0x1f);
    const int mantissa = static_cast<int>(bits & 7);
    return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -13)
                         : std::ldexp(static_cast<float>(8 + mantissa), exponent - 14);
  }
  const float sign = (bits >> 15 & 1) != 0 ? -1.0f : 1.0f;
  const int exponent = static_cast<int>(bits >> 10 & 0x1f);
  const int mantissa = static_cast<int>(bits & 0x3ff);
  if (exponent == 0x1f) {
    const float special =
        mantissa == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
    return std::copysign(special, sign);
  }
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
}

float widen_e4m3(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 3 & 0xf);
  const int mantissa = static_cast<int>(bits & 7);
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                   : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (bits & 0x80) != 0 ? -size : size;
}

uint32_t narrow(float x, Type type) {
  const bool nan = (std::bit_cast<uint32_t>(x) & 0x7fffffff) > 0x7f800000;
  switch (type) {
    case Type::kF32: return nan ? 0x7fc00000u : std::bit_cast<uint32_t>(x);
    case Type::kBF16: return nan ? 0x7fc0u : round_to(x, 7, 8);
    default: return nan ? 0x7e00u : round_to(x, 10, 5);
  }
}

int twice_e2m1(int nibble) {
  const int mantissa = nibble & 1;
  const int exponent = nibble >> 1 & 3;
  // Exponent 0 is that of 1, without the hidden bit: mantissa / 2. Else (1 + mantissa / 2) * 2^(exponent - 1).
  const int twice = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
  return nibble >= 8 ? -twice : twice;
}

int iq4(int nibble) {
  // kvalues_iq4nl of ggml.
  constexpr int kNumbers[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  return kNumbers[nibble];
}

float cut(float scale) { return std::bit_cast<float>(std::bit_cast<uint32_t>(scale) / 4 * 4); }

void limit_scales(Row& row) {
  if (std::none_of(row.scales.begin(), row.scales.end(), [](float scale) { return std::fabs(scale) > 0x1p104f; }))
    return;
  for (float& scale : row.scales) scale = cut(std::ldexp(scale, -24));
  row.recip = std::ldexp(row.recip, 24);
}

namespace {

Row quantize_groups(const std::vector<float>& x, int64_t group) {
  Row row;
  row.group = group;
  row.scales.assign(x.size() / static_cast<std::size_t>(group), 0.0f);
  for (std::size_t g = 0; g < row.scales.size(); ++g) {
    float most = 0;
    for (std::size_t i = g * static_cast<std::size_t>(group); i < (g + 1) * static_cast<std::size_t>(group); ++i) {
      if (!std::isfinite(x[i])) {
        row.q.assign(x.size(), 0);
        row.scales.assign(row.scales.size(), 0.0f);
        row.recip = std::numeric_limits<float>::quiet_NaN();
        return row;
      }
      most = std::max(most, std::fabs(x[i]));
    }
    float scale = 127.0f / most;
    if (std::isinf(scale)) {
      scale = 0;
    } else {
      row.scales[g] = cut(1.0f / scale);
    }
    for (std::size_t i = g * static_cast<std::size_t>(group); i < (g + 1) * static_cast<std::size_t>(group); ++i) {
      row.q.push_back(static_cast<int>(std::nearbyintf(x[i] * scale)));
    }
  }
  limit_scales(row);
  return row;
}

}  // namespace

Row quantize(const std::vector<float>& x, int64_t activation_group) {
  if (activation_group != -1) return quantize_groups(x, activation_group);
  Row row;
  float mn = 0;
  float mx = 0;
  for (const float value : x) {
    if (!std::isfinite(value)) {
      row.q.assign(x.size(), 0);
      row.recip = std::numeric_limits<float>::quiet_NaN();
      return row;
    }
    mn = std::min(mn, value);
    mx = std::max(mx, value);
  }
  const float range = mx - mn;
  float scale = 255.0f / range;
  if (std::isinf(range)) scale = 127.5f / (mx / 2 - mn / 2);
  if (std::isinf(scale)) {
    row.q.assign(x.size(), 0);
    row.recip = 1;
    return row;
  }
  row.recip = 1.0f / scale;
  const float low = -128.0f - mn * scale;
  const float high = 127.0f - mx * scale;
  const float sum = (-128.0f + mn * scale) + (127.0f + mx * scale);
  const float zero_point = std::nearbyintf(std::clamp(sum > 0 ? low : high, -128.0f, 127.0f));
  row.zero_point = static_cast<int>(zero_point);
  for (const float value : x) {
    row.q.push_back(static_cast<int>(std::clamp(std::nearbyintf(value * scale) + zero_point, -128.0f, 127.0f)));
  }
  return row;
}

float weighted_sum(const Weights& weights, int64_t column) {
  const int64_t groups = weights.k / weights.group;
  float total = 0;
  for (int64_t g = 0; g < groups && !weights.minimums.empty(); ++g) {
    total = std::fma(weights.minimums[static_cast<std::size_t>(column * groups + g)],
                     -static_cast<float>(weights.group), total);
  }
  for (int64_t g = 0; g < groups; ++g) {
    int64_t sum = 0;
    for (int64_t i = 0; i < weights.group; ++i) {
      sum += weights.w[static_cast<std::size_t>(column * weights.k + g * weights.group + i)];
    }
    total = std::fma(weights.scales[static_cast<std::size_t>(column * groups + g)], static_cast<float>(sum), total);
  }
  return total;
}

float dot_minimums(const Row& row, const Weights& weights, int64_t column) {
  if (weights.minimums.empty()) return 0;
  const int64_t groups = weights.k / weights.group;
  const int64_t part = row.scales.empty() ? weights.group : std::min(weights.group, row.group);
  float f = 0;
  for (int64_t g = 0; g < groups; ++g) {
    float sum = 0;
    for (int64_t begin = g * weights.group; begin < (g + 1) * weights.group; begin += part) {
      int64_t q = 0;
      for (int64_t i = begin; i < begin + part; ++i) q += row.q[static_cast<std::size_t>(i)];
      const float scale = row.scales.empty() ? 1.0f : row.scales[static_cast<std::size_t>(begin / row.group)];
      sum = std::fma(static_cast<float>(q), scale, sum);
    }
    f = std::fma(-weights.minimums[static_cast<std::size_t>(column * groups + g)], sum, f);
  }
  return f;
}

namespace {

// With activation groups.
float dot_groups(const Row& row, const Weights& weights, int64_t column) {
  const int64_t groups = weights.k / weights.group;
  const int64_t part = std::min(weights.group, row.group);
  float f = dot_minimums(row, weights, column);
  for (int64_t g = 0; g < groups; ++g) {
    float p = 0;
    for (int64_t begin = g * weights.group; begin < (g + 1) * weights.group; begin += part) {
      int64_t sum = 0;
      for (int64_t i = begin; i < begin + part; ++i) {
        sum +=
            int64_t{row.q[static_cast<std::size_t>(i)]} * weights.w[static_cast<std::size_t>(column * weights.k + i)];
      }
      p = std::fma(static_cast<float>(sum), row.scales[static_cast<std::size_t>(begin / row.group)], p);
    }
    f = std::fma(p, weights.scales[static_cast<std::size_t>(column * groups + g)], f);
  }
  const auto c = static_cast<std::size_t>(column);
  const float scale = weights.channel_scales.empty() ? row.recip : row.recip * weights.channel_scales[c];
  return f * scale + (weights.bias.empty() ? 0.0f : weights.bias[c]);
}

}  // namespace

float dot(const Row& row, const Weights& weights, int64_t column) {
  if (!row.scales.empty()) return dot_groups(row, weights, column);
  const int* w = weights.w.data() + column * weights.k;
  const float bias = weights.bias.empty() ? 0.0f : weights.bias[static_cast<std::size_t>(column)];
  if (weights.group == weights.k) {
    int64_t sum = 0;
    for (int64_t i = 0; i < weights.k; ++i) {
      sum += int64_t{row.q[static_cast<std::size_t>(i)] - row.zero_point} * w[i];
    }
    return static_cast<float>(sum) * (row.recip * weights.scales[static_cast<std::size_t>(column)]) + bias;
  }
  const int64_t groups = weights.k / weights.group;
  float f = dot_minimums(row, weights, column);
  for (int64_t g = 0; g < groups; ++g) {
    int64_t sum = 0;
    for (int64_t i = g * weights.group; i < (g + 1) * weights.group; ++i) {
      sum += int64_t{row.q[static_cast<std::size_t>(i)]} * w[i];
    }
    f = std::fma(static_cast<float>(sum), weights.scales[static_cast<std::size_t>(column * groups + g)], f);
  }
  f = std::fma(-static_cast<float>(row.zero_point), weighted_sum(weights, column), f);
  const float scale =
      weights.channel_scales.empty() ? row.recip : row.recip * weights.channel_scales[static_cast<std::size_t>(column)];
  return f * scale + bias;
}

std::vector<float> dot_all(const Row& row, const Weights& weights) {
  std::vector<float> out;
  for (int64_t column = 0; column < weights.n; ++column) out.push_back(dot(row, weights, column));
  return out;
}

Numbers numbers_of(int kind) {
  if (kind == 3) return {7, 1.702, 1};
  if (kind == 8) return {std::numeric_limits<double>::infinity(), 0.8, 0.8};
  return {kind == 4 ? 7 : std::numeric_limits<double>::infinity(), 1, 0};
}

Bounded activate(int kind, const Numbers& numbers, bool gated, float g, float u) {
  const Approximate result = activation(kind, numbers, gated, g, u);
  // An intermediate that underflows is off by half of the smallest denormal, and multiplied by g, u or both after that.
  const double factor =
      std::max(1.0, std::fabs(static_cast<double>(g))) * std::max(1.0, std::fabs(static_cast<double>(u)));
  // 1.01: second-order terms, far below 1 %.
  return {result.value, std::fabs(result.value) * result.relative * 1.01 + result.absolute + 4 * kTiny * factor};
}

std::vector<Bounded> moe_token(const MoeLayer& layer, const std::vector<float>& x, const std::vector<int>& ids,
                               const std::vector<float>& router) {
  const Row row = quantize(x);
  const auto hidden = static_cast<int64_t>(x.size());
  std::vector<Bounded> out(x.size(), {0, 0});
  double magnitude = 0;  // of the largest term, for the roundings of the sum
  for (std::size_t j = 0; j < ids.size(); ++j) {
    if (ids[j] < 0) continue;
    const auto e = static_cast<std::size_t>(ids[j]);
    Row input = row;
    if (layer.weight_on_input) input.recip = row.recip * router[j];
    const double weight = layer.weight_on_input ? 1.0 : static_cast<double>(router[j]);
    const std::vector<float> gu = dot_all(input, layer.w13[e]);
    const int64_t inner = layer.w2[e].k;
    std::vector<float> h;
    std::vector<double> error;
    for (int64_t i = 0; i < inner; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const Bounded b = activate(layer.kind, layer.numbers, layer.gated, gu[at],
                                 layer.gated ? gu[at + static_cast<std::size_t>(inner)] : 0);
      h.push_back(static_cast<float>(b.value));
      error.push_back(b.error + std::fabs(b.value) * kRound);
    }
    const Row middle = quantize(h);
    // How far each dequantized value may be off: a step if the error reaches a tie, else what the range adds.
    const double step = middle.recip;
    const double largest_error = *std::max_element(error.begin(), error.end());
    const double scale_error = 2 * largest_error / (255 * step) + 4 * kRound;  // the range is 255 steps
    const auto to_half = [](double position) { return std::fabs(position - std::floor(position) - 0.5); };
    // zp = rint(127 - max / step), and a moved one moves the values at the ends of the range by a step.
    const double largest = std::max(0.0, static_cast<double>(*std::max_element(h.begin(), h.end()))) / step;
    const bool zero_point_moves = to_half(127 - largest) <= largest_error / step + 256 * scale_error;
    std::vector<double> moved;
    for (int64_t i = 0; i < inner; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double position = static_cast<double>(h[at]) / step;
      const double reach = error[at] / step + std::fabs(position) * scale_error;
      const double to_tie = to_half(position);
      const bool clamp_moves = zero_point_moves && (middle.q[at] == -128 || middle.q[at] == 127);
      moved.push_back(step * ((to_tie <= reach || clamp_moves ? 1.0 : 0.0) + (std::fabs(position) + 1) * scale_error));
    }
    for (int64_t c = 0; c < hidden; ++c) {
      const Weights& w2 = layer.w2[e];
      double tolerance = 0;
      double scaled = 0;
      for (int64_t i = 0; i < inner; ++i) {
        const double w =
            std::fabs(static_cast<double>(w2.scales[static_cast<std::size_t>(c * (inner / w2.group) + i / w2.group)]) *
                      w2.w[static_cast<std::size_t>(c * inner + i)]);
        tolerance += w * moved[static_cast<std::size_t>(i)];
        scaled += w * step * 256;
      }
      const double y = dot(middle, w2, c);
      // The two evaluations round alike except where their inputs differ: one unit per group and two for the end.
      tolerance += scaled * kRound * static_cast<double>(inner / w2.group + 3) + std::fabs(y) * 2 * kRound;
      out[static_cast<std::size_t>(c)].value += weight * y;
      out[static_cast<std::size_t>(c)].error += std::fabs(weight) * tolerance;
      magnitude = std::max(magnitude, std::fabs(weight * y));
    }
  }
  for (Bounded& b : out) b.error += magnitude * kRound * static_cast<double>(ids.size() * (ids.size() + 1));
  return out;
}

}  // namespace w4a8::ref
