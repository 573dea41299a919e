// Attention: writing keys and values to the blocks of a cache.
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/attention/base-inl.h"

// About log2(x) for a normal x > 0; what error there is changes a scale, not the number that it stands for.
inline float rough_log2(float x) {
  const uint32_t bits = float_bits(x);
  const float m = bits_float((bits & 0x007fffffu) | 0x3f800000u);
  const float exponent = static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
  return exponent + (m - 1.0f) * (1.4249f + (m - 1.0f) * (-0.5814f + (m - 1.0f) * 0.1565f));
}

// The mean of the keys of a full block.
template <class Ops>
void mean_of_keys(const CacheShape& shape, const uint8_t* before, float* mean) {
  constexpr int kVecs = Ops::kVecs;
  // Each scale four times, beside the four bytes of its item.
  float scales[kItemLine];
  for (int64_t i = 0; i < kItemLine; ++i) {
    __builtin_memcpy(scales + i, before + shape.key_scales_at() + i / kItemBytes * 4, sizeof(float));
  }
  for (int64_t item = 0; item < shape.key_items(); ++item) {
    const uint8_t* line = before + item * kItemLine;
    typename Ops::F sum[kVecs];
    for (int v = 0; v < kVecs; ++v) sum[v] = Ops::splat(0.0f);
    for (int64_t i = 0; i < kItemLine; i += kHeadStep) {
      for (int v = 0; v < kVecs; ++v) {
        const int64_t at = i + v * Ops::kLanes;
        const typename Ops::I code = Ops::isub(Ops::load_widened(line + at), Ops::isplat(128));
        sum[v] = Ops::fma(Ops::to_float(code), Ops::load(scales + at), sum[v]);
      }
    }
    float lanes[kHeadStep];
    for (int v = 0; v < kVecs; ++v) Ops::store(lanes + v * Ops::kLanes, sum[v]);
    for (int64_t i = 0; i < kItemBytes; ++i) {
      const float all = (lanes[i] + lanes[i + 4]) + (lanes[i + 8] + lanes[i + 12]);
      uint16_t old;
      __builtin_memcpy(&old, before + shape.reference_at() + 2 * (item * kItemBytes + i), sizeof(old));
      mean[item * kItemBytes + i] = bits_float(static_cast<uint32_t>(old) << 16) + all * (1.0f / kBlockKeys);
    }
  }
}

// The reference of a block: the mean of the keys of the block before; without one, its own first key. 0 where that is
// not finite. Rotated keys of a block have much in common, which is then exact instead of rounded to int8. It depends
// on no later token: a block is the same however its tokens were written.
template <class Ops>
void set_reference(const CacheShape& shape, const uint8_t* before, const float* first_key, uint8_t* block) {
  const int64_t n = shape.key_size;
  float reference[kMostHeadSize];
  if (before != nullptr) {
    mean_of_keys<Ops>(shape, before, reference);
  } else {
    __builtin_memcpy(reference, first_key, static_cast<std::size_t>(n) * sizeof(float));
    rotate<Ops>(reference, n);
  }
  uint8_t* to = block + shape.reference_at();
  __builtin_memset(to, 0, static_cast<std::size_t>(shape.block_bytes() - shape.reference_at()));
  // Half of the largest number: rounding to bfloat16 must not make it infinite.
  if (!(largest<Ops>(reference, n) < 0x1p127f)) return;
  for (int64_t i = 0; i < n; i += Ops::kLanes) {
    Ops::template store_as<DType::kBFloat16>(to, i, Ops::load(reference + i));
  }
}

template <class Ops>
void write_int8(const CacheShape& shape, int64_t token, float* key, float* value, bool finite, uint8_t* block) {
  int8_t codes[kMostHeadSize];
  const uint8_t* reference = block + shape.reference_at();
  rotate<Ops>(key, shape.key_size);
  rotate<Ops>(value, shape.value_size);
  for (int64_t i = 0; i < shape.key_size; i += Ops::kLanes) {
    Ops::store(key + i, Ops::sub(Ops::load(key + i), Ops::template load_as<DType::kBFloat16>(reference, i)));
  }
  const float most = largest<Ops>(key, shape.key_size);
  const float most_value = largest<Ops>(value, shape.value_size);
  finite = finite && most == most && most_value == most_value;
  const float inverse = finite ? to_codes(most) : 0.0f;
  round_codes<Ops>(key, inverse, codes, shape.key_size);
  uint8_t* to = block + token * kItemBytes;
  for (int64_t i = 0; i < shape.key_size; ++i) {
    to[i / kItemBytes * kItemLine + i % kItemBytes] = static_cast<uint8_t>(codes[i] + 128);
  }
  const float key_scale = finite ? (inverse == 0.0f ? 0.0f : most / 127.0f) : bits_float(0x7fc00000u);
  __builtin_memcpy(block + shape.key_scales_at() + 4 * token, &key_scale, sizeof(float));

  // A scale of 2^-32 or more: what is left of smaller values is less than half of that.
  const float scale = most_value / 127.0f;
  const float log = finite && scale > 0x1p-32f ? rough_log2(scale) : -32.0f;
  float to_value[Ops::kLanes];
  Ops::store(to_value, vec_exp2<Ops>(Ops::splat(-log)));
  round_codes<Ops>(value, finite ? to_value[0] : 0.0f, codes, shape.value_size);
  to = block + shape.values_at() + token / 4 * shape.value_size * kItemBytes + token % 4;
  for (int64_t c = 0; c < shape.value_size; ++c) to[c * kItemBytes] = static_cast<uint8_t>(codes[c]);
  __builtin_memcpy(block + shape.value_scales_at() + 4 * token, &log, sizeof(float));
}

template <class Ops>
void write_bfloat16(const CacheShape& shape, int64_t token, float* key, float* value, bool finite, uint8_t* block) {
  float rounded[kMostLatentSize];
  const auto round = [&](const float* from, int64_t n) {
    for (int64_t i = 0; i < n; i += Ops::kLanes) {
      Ops::store(rounded + i, finite ? round_to_bfloat16<Ops>(Ops::load(from + i)) : Ops::splat(0.0f));
    }
  };
  const auto put = [](float x, uint8_t* to) {
    const auto half = static_cast<uint16_t>(float_bits(x) >> 16);
    __builtin_memcpy(to, &half, sizeof(half));
  };
  round(key, shape.key_size);
  // The last channel is no value in a cache of kLatent.
  if (!finite) rounded[shape.key_size - 1] = bits_float(0x7fc00000u);
  uint8_t* to = block + token * kItemBytes;
  for (int64_t i = 0; i < shape.key_size; ++i) put(rounded[i], to + i / 2 * kItemLine + i % 2 * 2);
  if (shape.kind == CacheKind::kLatent) return;
  round(value, shape.value_size);
  to = block + shape.values_at() + token / 2 * shape.value_size * kItemBytes + token % 2 * 2;
  for (int64_t c = 0; c < shape.value_size; ++c) put(rounded[c], to + c * kItemBytes);
}

template <class Ops>
void write_tokens(const CacheShape& shape, const TokensToWrite& tokens, uint8_t* block) {
  float key[kMostLatentSize];
  float value[kMostHeadSize];
  const bool int8 = shape.kind == CacheKind::kInt8;
  const bool latent = shape.kind == CacheKind::kLatent;
  if (tokens.first == 0) {
    // Values that are not written yet are multiplied by weights of 0: they must be numbers.
    const int64_t values = latent ? 0 : shape.values_at();
    __builtin_memset(block + values, 0, static_cast<std::size_t>(shape.key_scales_at() - values));
  }
  for (int64_t t = 0; t < tokens.count; ++t) {
    const int64_t bytes = dtype_bytes(tokens.dtype);
    widen_row<Ops>(static_cast<const uint8_t*>(tokens.keys) + t * tokens.key_stride * bytes, tokens.dtype, key,
                   shape.key_size);
    float most = largest<Ops>(key, shape.key_size);
    if (!latent) {
      widen_row<Ops>(static_cast<const uint8_t*>(tokens.values) + t * tokens.value_stride * bytes, tokens.dtype, value,
                     shape.value_size);
      most += largest<Ops>(value, shape.value_size);
    }
    if (int8 && tokens.first + t == 0) set_reference<Ops>(shape, tokens.before, key, block);
    (int8 ? write_int8<Ops> : write_bfloat16<Ops>)(shape, tokens.first + t, key, value, most == most, block);
  }
}
