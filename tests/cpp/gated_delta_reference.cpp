#include "gated_delta_reference.h"

#include <algorithm>
#include <cmath>

namespace w4a8::test {

float exp_of(float x) {
  if (std::isnan(x)) return x;
  x = std::clamp(x, -104.0f, 104.0f);
  const float n = std::nearbyint(x * 0x1.715476p+0f);
  const float r = std::fma(n, -0x1.7f7d1cp-20f, std::fma(n, -0x1.62e4p-1f, x));
  float q = 0x1.6c6b88p-10f;
  for (const float c : {0x1.121022p-7f, 0x1.5555bep-5f, 0x1.5554d8p-3f, 0.5f}) q = std::fma(q, r, c);
  return std::ldexp(1.0f + std::fma(r * r, q, r), static_cast<int>(n));
}

float softplus_of(float x) {
  const float y = exp_of(-std::fabs(x));
  const float s = y / (2.0f + y);
  const float square = s * s;
  float p = 0x1.dba26p-4f;
  for (const float c : {0x1.bc8cf8p-4f, 0x1.24c926p-3f, 0x1.9998d4p-3f, 0x1.555556p-2f}) p = std::fma(p, square, c);
  return (0.0f > x ? 0.0f : x) + std::fma((s + s) * square, p, s + s);
}

float sum_of(float (&lanes)[16]) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

float norm_of(const float* x, int64_t n, float eps) {
  float lanes[16] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i % 16] += x[i] * x[i];
  return 1.0f / std::sqrt(sum_of(lanes) / static_cast<float>(n) + eps);
}

float convolved(const float* rows, const float* weight, int64_t stride, int64_t width, const float* bias) {
  float sum = bias == nullptr ? weight[0] * rows[0] : std::fma(weight[0], rows[0], *bias);
  for (int64_t w = 1; w < width; ++w) sum = std::fma(weight[w * stride], rows[w * stride], sum);
  return sum;
}

std::vector<float> DeltaSequence::append(const DeltaLayer& layer, const DeltaToken& token) {
  const int64_t channels = layer.channels();
  past.insert(past.end(), token.row.begin(), token.row.end());
  std::vector<float> x(static_cast<std::size_t>(channels));
  for (int64_t c = 0; c < channels; ++c) {
    x[static_cast<std::size_t>(c)] =
        silu_of(convolved(past.data() + c, layer.weight.data() + c, channels, layer.width, nullptr));
  }
  past.erase(past.begin(), past.begin() + channels);

  const int64_t keys = layer.key_size;
  const int64_t size = layer.value_size;
  const auto root = static_cast<float>(keys);
  for (int64_t h = 0; h < 2 * layer.key_heads; ++h) {
    const float unit = h < layer.key_heads ? 1.0f / root : 1.0f / std::sqrt(root);
    float* const row = x.data() + h * keys;
    const float r = norm_of(row, keys, 1e-6f / root);
    for (int64_t i = 0; i < keys; ++i) row[i] = row[i] * r * unit;
  }
  std::vector<float> out(static_cast<std::size_t>(layer.values()));
  for (int64_t h = 0; h < layer.value_heads(); ++h) {
    const float* q = x.data() + h / layer.group * keys;
    const float* k = q + layer.key_heads * keys;
    const float* v = x.data() + 2 * layer.key_heads * keys + h * size;
    const float beta = layer.beta_scale * sigmoid_of(token.betas[static_cast<std::size_t>(h)]);
    const auto decay = [&](int64_t i) {
      const auto at = static_cast<std::size_t>(layer.of_channels ? h * keys + i : h);
      return decay_of(token.decays[at] + layer.bias[at], layer.rates[static_cast<std::size_t>(h)]);
    };
    std::vector<float> decays;
    for (int64_t i = 0; i < keys; ++i) decays.push_back(i == 0 || layer.of_channels ? decay(i) : decays[0]);
    float* const row = out.data() + h * size;
    for (int64_t c = 0; c < size; ++c) {
      float* const column = state.data() + h * keys * size + c;
      float seen = 0.0f;
      for (int64_t i = 0; i < keys; ++i) {
        const float key = layer.of_channels ? k[i] * decays[static_cast<std::size_t>(i)] : k[i];
        seen = std::fma(key, column[i * size], seen);
      }
      const float d = beta * (v[c] - (layer.of_channels ? seen : decays[0] * seen));
      float sum = 0.0f;
      for (int64_t i = 0; i < keys; ++i) {
        column[i * size] = std::fma(k[i], d, decays[static_cast<std::size_t>(i)] * column[i * size]);
        sum = std::fma(q[i], column[i * size], sum);
      }
      row[c] = sum;
    }
    const float r = norm_of(row, size, layer.norm_eps);
    for (int64_t c = 0; c < size; ++c) {
      const float z = token.gates[static_cast<std::size_t>(h * size + c)];
      row[c] = row[c] * r * layer.norm[static_cast<std::size_t>(c)] * (layer.sigmoid_gate ? sigmoid_of(z) : silu_of(z));
    }
  }
  return out;
}

}  // namespace w4a8::test
