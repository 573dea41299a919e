#include "attention_reference.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

namespace w4a8::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float exp2_of(float x) {
  if (x < -125.0f) return 0.0f;
  const float n = std::nearbyint(x);
  const float f = x - n;
  float p = 0x1.3a02d0p-7f;
  for (const float c : {0x1.c9fc48p-5f, 0x1.ec0378p-3f, 0x1.62e12cp-1f, 1.0f}) p = std::fma(p, f, c);
  return std::isnan(x) ? kNan : std::ldexp(p, static_cast<int>(n));
}

float to_bfloat16(float x) {
  if (std::isnan(x)) return kNan;  // a weight
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}
float flushed(float x) { return std::fabs(x) < 0x1p-55f ? 0.0f : to_bfloat16(x); }

// What bfloat16 would round to infinity is not.
bool finite(const std::vector<float>& x) {
  return std::all_of(x.begin(), x.end(), [](float v) { return std::fabs(v) < 0x1.ffp127f; });
}
float largest(const std::vector<float>& x) {
  float most = 0;
  for (const float v : x) most = std::max(most, std::fabs(v));
  return finite(x) ? most : kNan;
}

void rotate(std::vector<float>& x) {
  const std::size_t n = x.size() & -x.size();
  for (std::size_t distance = 1; distance < n; distance *= 2) {
    for (std::size_t i = 0; i < x.size(); ++i) {
      if ((i & distance) != 0) continue;
      const float a = x[i];
      const float b = x[i + distance];
      x[i] = a + b;
      x[i + distance] = a - b;
    }
  }
}

std::vector<float> codes_of(const std::vector<float>& x, float inverse) {
  std::vector<float> codes(x.size(), 0.0f);
  for (std::size_t i = 0; i < x.size() && inverse != 0.0f; ++i) {
    codes[i] = std::clamp(std::nearbyint(x[i] * inverse), -127.0f, 127.0f);
  }
  return codes;
}

float log_of(float x) {
  int exponent;
  const float m = 2.0f * std::frexp(x, &exponent) - 1.0f;
  return static_cast<float>(exponent - 1) + m * (1.4249f + m * (-0.5814f + m * 0.1565f));
}

// Lanes 0..15 are added in a tree.
float tree(std::array<float, 16> x) {
  for (std::size_t half = 8; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) x[i] += x[i + half];
  }
  return x[0];
}

}  // namespace

void CachedHead::append(std::vector<float> key, std::vector<float> value) {
  Token token;
  const int64_t position = tokens();
  if (shape_.kind == CacheKind::kLatent) value.assign(key.begin(), key.begin() + shape_.value_size);
  const bool usable = finite(key) && finite(value);
  if (shape_.kind != CacheKind::kInt8) {
    token.key.assign(key.size(), 0.0f);
    token.value.assign(value.size(), 0.0f);
    if (usable) {
      std::transform(key.begin(), key.end(), token.key.begin(), flushed);
      std::transform(value.begin(), value.end(), token.value.begin(), flushed);
    } else {
      token.key.back() = kNan;
    }
    keys_.push_back(token);
    return;
  }
  rotate(key);
  rotate(value);
  if (position % kBlockKeys == 0) {
    std::vector<float> reference(key.size());
    if (position > 0 && (window_ == 0 || window_ > kBlockKeys)) {
      const std::vector<float>& old = references_.back();
      for (std::size_t i = 0; i < key.size(); ++i) {
        float sum[4] = {};
        for (int64_t j = 0; j < kBlockKeys; ++j) {
          const Token& other = keys_[static_cast<std::size_t>(position - kBlockKeys + j)];
          sum[j % 4] = std::fma(other.key[i], other.key_scale, sum[j % 4]);
        }
        reference[i] = old[i] + ((sum[0] + sum[1]) + (sum[2] + sum[3])) * (1.0f / kBlockKeys);
      }
    } else {
      reference = key;
    }
    if (!(largest(reference) < 0x1p127f)) reference.assign(key.size(), 0.0f);
    for (float& x : reference) x = to_bfloat16(x);
    references_.push_back(reference);
  }
  for (std::size_t i = 0; i < key.size(); ++i) key[i] -= references_.back()[i];
  const float most = largest(key);
  const bool good = usable && !std::isnan(most) && finite(value);
  const float inverse = good && most > 0x1p-100f ? 127.0f / most : 0.0f;
  token.key = codes_of(key, inverse);
  token.key_scale = !good ? kNan : (inverse == 0.0f ? 0.0f : most / 127.0f);
  const float scale = largest(value) / 127.0f;
  token.value_log = good && scale > 0x1p-32f ? log_of(scale) : -32.0f;
  token.value = codes_of(value, good ? exp2_of(-token.value_log) : 0.0f);
  keys_.push_back(token);
}

std::vector<float> CachedHead::attend(const Row& row) const {
  const bool int8 = shape_.kind == CacheKind::kInt8;
  const auto n = static_cast<int64_t>(row.query.size());
  std::vector<float> query = row.query;
  float factor = row.scale * 0x1.715476p+0f;
  const float cap = row.soft_cap * 0x1.715476p+0f;
  float query_scale = 0;
  std::vector<float> rotated;
  if (int8) {
    rotate(query);
    factor /= static_cast<float>(n & -n);
    const float most = largest(query);
    const float inverse = most > 0x1p-100f ? 127.0f / most : 0.0f;
    query_scale = std::isnan(most) ? kNan : (inverse == 0.0f ? 0.0f : most / 127.0f * factor);
    rotated = query;
    for (float& x : rotated) x *= factor;
    query = codes_of(query, inverse);
  } else if (finite(query)) {
    std::transform(query.begin(), query.end(), query.begin(), flushed);
  } else {
    query.assign(query.size(), kNan);
  }

  float all_max = row.sink == nullptr ? kLowestScore : *row.sink * 0x1.715476p+0f;
  float all_sum = row.sink == nullptr ? 0.0f : 1.0f;
  std::vector<float> all(static_cast<std::size_t>(shape_.value_size), 0.0f);
  for (int64_t segment = row.begin / kSegmentKeys * kSegmentKeys; segment < row.end; segment += kSegmentKeys) {
    float max = kLowestScore;
    std::array<float, 16> lanes = {};
    std::vector<float> out(all.size(), 0.0f);
    for (int64_t step = segment; step < std::min(segment + kSegmentKeys, row.end); step += kStepKeys) {
      std::vector<float> scores(kStepKeys, 10 * kLowestScore);
      float here = kLowestScore;
      const int64_t end = std::min(step + kStepKeys, row.end);
      for (int64_t key = std::max(step, row.begin); key < end; ++key) {
        const Token& token = keys_[static_cast<std::size_t>(key)];
        float t = 0;
        if (int8) {
          int32_t sum = 0;
          for (std::size_t i = 0; i < query.size(); ++i) sum += static_cast<int32_t>(query[i] * token.key[i]);
          std::array<float, 16> base = {};
          const std::vector<float>& reference = references_[static_cast<std::size_t>(key / kBlockKeys)];
          for (std::size_t i = 0; i < query.size(); ++i) {
            base[i % 16] = std::fma(rotated[i], reference[i], base[i % 16]);
          }
          t = std::fma(static_cast<float>(sum) * token.key_scale, query_scale, tree(base));
        } else {
          for (std::size_t i = 0; i < query.size(); i += 2) {
            t = std::fma(token.key[i + 1], query[i + 1], t);
            t = std::fma(token.key[i], query[i], t);
          }
          t = t * factor;
        }
        if (cap != 0.0f) {
          const float e = exp2_of(-(std::fabs(t) * (0x1.715476p+1f / cap)));
          t = std::copysign(cap * ((1.0f - e) / (1.0f + e)), t);
        }
        if (int8) t += token.value_log;
        scores[static_cast<std::size_t>(key - step)] = t;
        if (t > here) here = t;
      }
      const float now = std::max(max, here);
      if (!int8) here = now;
      const float alpha = exp2_of(max - now);
      const float beta = exp2_of(here - now);
      max = now;
      std::array<float, 16> sums = {};
      std::array<float, 16> rest = {};
      std::vector<float> weights(kStepKeys, 0.0f);
      for (int64_t j = 0; j < kStepKeys; ++j) {
        const auto at = static_cast<std::size_t>(j);
        const float p = exp2_of(scores[at] - here);
        if (int8) {
          const float log = step + j < tokens() ? keys_[static_cast<std::size_t>(step + j)].value_log : 0.0f;
          sums[at % 16] = std::fma(p, exp2_of(std::fabs(log) < 124.5f ? -log : 0.0f), sums[at % 16]);
          const float exact = std::fma(p, 254.0f, rest[at % 16]);
          weights[at] = std::nearbyint(exact);
          rest[at % 16] = exact - weights[at];
        } else {
          sums[at % 16] += p;
          weights[at] = flushed(p);
        }
      }
      for (std::size_t i = 0; i < 16; ++i) lanes[i] = std::fma(alpha, lanes[i], int8 ? sums[i] * beta : sums[i]);
      for (std::size_t c = 0; c < out.size(); ++c) {
        float sum = 0;
        const auto value = [&](int64_t key) {
          return key < tokens() ? keys_[static_cast<std::size_t>(key)].value[c] : 0.0f;
        };
        if (int8) {
          int32_t whole = 0;
          for (int64_t j = 0; j < kStepKeys; ++j) {
            const float w = weights[static_cast<std::size_t>(j)];
            if (w > 0) whole += static_cast<int32_t>(w * value(step + j));
          }
          sum = beta * (1.0f / 254.0f) * static_cast<float>(whole);
        } else {
          for (int64_t j = 0; j < kStepKeys; j += 2) {
            sum = std::fma(value(step + j + 1), weights[static_cast<std::size_t>(j + 1)], sum);
            sum = std::fma(value(step + j), weights[static_cast<std::size_t>(j)], sum);
          }
        }
        out[c] = std::fma(alpha, out[c], sum);
      }
    }
    const float now = std::max(all_max, max);
    const float alpha = exp2_of(all_max - now);
    const float beta = exp2_of(max - now);
    all_max = now;
    all_sum = all_sum * alpha + tree(lanes) * beta;
    for (std::size_t c = 0; c < out.size(); ++c) all[c] = std::fma(alpha, all[c], beta * out[c]);
  }
  float inverse = all_sum == 0.0f ? 0.0f : 1.0f / all_sum;
  if (int8) {
    rotate(all);
    inverse /= static_cast<float>(shape_.value_size & -shape_.value_size);
  }
  for (float& x : all) x = x * inverse + 0.0f;
  return all;
}

}  // namespace w4a8::test
