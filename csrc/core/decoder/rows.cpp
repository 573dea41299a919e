#include "core/decoder/rows.h"

#include <cmath>
#include <cstring>

#include "core/real_functions.h"
#include "kernels/half.h"

namespace w4a8 {
namespace {

constexpr int64_t kLanes = 16;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
using Bits = uint32_t __attribute__((vector_size(kLanes * sizeof(float))));

inline void load(const float* x, Lanes& lanes) { std::memcpy(&lanes, x, sizeof lanes); }

// The halves are added until one is left.
float total(const Lanes& lanes) {
  float sums[kLanes];
  std::memcpy(sums, &lanes, sizeof sums);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return sums[0];
}

// `add` adds what 16 values are in the sum to the sums of the lanes.
template <class Add>
float sum_of(const float* x, int64_t n, Add add) {
  Lanes sums = {};
  Lanes values;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    load(x + i, values);
    add(values, sums);
  }
  if (i < n) {
    values = Lanes{};  // zeros change no sum
    std::memcpy(&values, x + i, static_cast<std::size_t>(n - i) * sizeof(float));
    add(values, sums);
  }
  return total(sums);
}

template <DType kType>
inline void load_as(const void* data, int64_t i, Lanes& lanes) {
  if constexpr (kType == DType::kFloat32) {
    load(static_cast<const float*>(data) + i, lanes);
  } else {
    const auto* halves = static_cast<const uint16_t*>(data) + i;
    if constexpr (kType == DType::kBFloat16) {
      using Halves = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));
      Halves narrow;
      std::memcpy(&narrow, halves, sizeof narrow);
      const Bits bits = __builtin_convertvector(narrow, Bits) << 16;
      std::memcpy(&lanes, &bits, sizeof lanes);
    } else {
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = float_from_float16(halves[lane]);
    }
  }
}

}  // namespace

float mean_square(const float* x, int64_t n) {
  return sum_of(x, n, [](const Lanes& values, Lanes& sums) { sums += values * values; }) / static_cast<float>(n);
}

void rms_norm_of(const float* x, float square, const float* weight, float eps, int64_t n, float* out) {
  const float r = 1.0f / std::sqrt(square + eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * r * weight[i];
}

void center(const float* x, int64_t n, float* out) {
  const float sum = sum_of(x, n, [](const Lanes& values, Lanes& sums) { sums += values; });
  const float mean = sum / static_cast<float>(n);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] - mean;
}

void rotate(const float* angles, int64_t half, bool interleaved, float* x) {
  const float* cosines = angles;
  const float* sines = angles + half;
  const int64_t step = interleaved ? 2 : 1;
  const int64_t other = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[step * i];
    const float b = x[step * i + other];
    x[step * i] = a * cosines[i] - b * sines[i];
    x[step * i + other] = b * cosines[i] + a * sines[i];
  }
}

void add_scaled(const float* y, float factor, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] += factor * y[i];
}

void scale_row(const float* factors, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factors[i];
}

void load_floats(const void* x, DType dtype, int64_t n, float* out) {
  Lanes values;
  for (int64_t i = 0; i < n; i += kLanes) {
    switch (dtype) {
      case DType::kBFloat16: load_as<DType::kBFloat16>(x, i, values); break;
      case DType::kFloat16: load_as<DType::kFloat16>(x, i, values); break;
      default: load_as<DType::kFloat32>(x, i, values);
    }
    std::memcpy(out + i, &values, sizeof values);
  }
}

float sigmoid(float x) { return static_cast<float>(1.0 / (1.0 + exp_of(-static_cast<double>(x)))); }

}  // namespace w4a8
