#include "core/token_quant.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/split.h"
#include "kernels/half.h"

namespace w4a8 {
namespace {

constexpr int64_t kRowsPerTask = 8;
constexpr float kLeastScale = 1e-5f;

// Half to even for |x| < 2^22, without a call: the sum has no bits behind the point.
float round_even(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

template <DType kType>
float load(const void* x, int64_t i) {
  if constexpr (kType == DType::kFloat32) {
    return static_cast<const float*>(x)[i];
  } else {
    const uint16_t bits = static_cast<const uint16_t*>(x)[i];
    return kType == DType::kBFloat16 ? bits_float(uint32_t{bits} << 16) : float_from_float16(bits);
  }
}

// Stores x rounded to the type and returns what was stored.
template <DType kType>
float store(float x, void* out, int64_t i) {
  if constexpr (kType == DType::kFloat32) {
    static_cast<float*>(out)[i] = x;
  } else {
    static_cast<uint16_t*>(out)[i] = kType == DType::kBFloat16 ? bfloat16_from_float(x) : float16_from_float(x);
  }
  return load<kType>(out, i);
}

struct Extremes {
  float low = 0.0f;  // of the row and 0
  float high = 0.0f;
  bool finite = true;
};

template <DType kType>
Extremes extremes(const void* x, int64_t begin, int64_t k) {
  Extremes result;
  float flag = 0.0f;  // becomes NaN with the first NaN or infinity
  for (int64_t i = begin; i < begin + k; ++i) {
    const float value = load<kType>(x, i);
    result.low = value < result.low ? value : result.low;
    result.high = value > result.high ? value : result.high;
    flag += value * 0.0f;
  }
  result.finite = flag == 0.0f;
  return result;
}

float span_over(float low, float high, float levels) {
  const float span = high - low;
  return span <= std::numeric_limits<float>::max() ? span / levels : high / levels - low / levels;
}

template <DType kType>
void quantize_row(const void* x, int64_t row, int64_t k, bool symmetric, int bits, uint8_t* q, void* scales,
                  int32_t* zero_point) {
  const int64_t begin = row * k;
  const Extremes range = extremes<kType>(x, begin, k);
  zero_point[row] = 0;
  if (!range.finite) {
    store<kType>(std::numeric_limits<float>::quiet_NaN(), scales, row);
    std::fill(q + begin, q + begin + k, uint8_t{0});
    return;
  }
  const auto levels = static_cast<float>((1 << bits) - 1);
  const auto half = static_cast<float>(1 << (bits - 1));
  const float raw =
      symmetric ? std::max(-range.low, range.high) / (half - 1) : span_over(range.low, range.high, levels);
  const float scale = store<kType>(std::max(raw, kLeastScale), scales, row);
  const float low = symmetric ? -half : 0.0f;
  const float high = symmetric ? half - 1 : levels;
  // The scale was rounded to x's type, so the quotient may be a little more than `levels`.
  const float zero = symmetric ? 0.0f : std::min(levels, round_even(-range.low / scale));
  zero_point[row] = static_cast<int32_t>(zero);
  for (int64_t i = begin; i < begin + k; ++i) {
    const float value = load<kType>(x, i) / scale + zero;
    const float clamped = value < low ? low : (value > high ? high : value);
    q[i] = static_cast<uint8_t>(static_cast<int32_t>(round_even(clamped)));
  }
}

}  // namespace

void quantize_per_token(Parallel& parallel, const void* x, DType dtype, int64_t m, int64_t k, bool symmetric, int bits,
                        uint8_t* q, void* scale, int32_t* zero_point) {
  if (m == 0) return;
  SerialParallel serial;
  Parallel& runner = k < kSerialMacs / 16 / m ? serial : parallel;
  const auto quantize = dtype == DType::kFloat32    ? quantize_row<DType::kFloat32>
                        : dtype == DType::kBFloat16 ? quantize_row<DType::kBFloat16>
                                                    : quantize_row<DType::kFloat16>;
  const int64_t counts[] = {ceil_div(m, kRowsPerTask)};
  run_phases(runner, counts, [&](int, int64_t task, int) {
    const int64_t end = std::min(m, (task + 1) * kRowsPerTask);
    for (int64_t r = task * kRowsPerTask; r < end; ++r) quantize(x, r, k, symmetric, bits, q, scale, zero_point);
  });
}

}  // namespace w4a8
