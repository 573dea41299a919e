// Attention over a cache of blocks, once for all instruction sets. Included inside a target region and an anonymous
// namespace. `Ops` are VectorOps with, besides,
//
//   kTileRows                           rows of a tile of dot products
//   swap_lanes<kDistance>(f)            lane i is lane i ^ kDistance, kDistance < kLanes
//   round(f), times_pow2(f, n)          to a whole number; f * 2^n, n whole in [-125, 125] (anything if f is not used)
//   reduce_max(f)                       the largest lane; of NaN, any
//   sum16(const F (&)[kVecs])           of 16 lanes: i + (i ^ 8), then ^ 4, ^ 2, ^ 1
//
// and Dot is how it multiplies the items of a cache kind:
//
//   Sum, Line, Item                     sums of kLanes keys or channels; their items; an item of one row, broadcast
//   kTileVecs                           registers of keys or channels of a tile
//   kRowItemBytes                       bytes of an item of a row in scratch
//   zero(), load<kKeys>(p), item(p)     kKeys: keys, which are unsigned, and queries; else values and weights
//   add<kKeys>(sum, line, item)
//   total(sum)                          the sums, as I (int8) or F (bfloat16)
//   store_weights(p, f)                 kLanes whole weights 0..254 (int8), or of bfloat16, to row items

#include "kernels/unroll-inl.h"

// A cache of bfloat16 where there is no instruction for it: widened to floats. The odd number is added first, as
// VDPBF16PS does. `kVecs`: kTileVecs.
template <class Ops, int kVecs>
struct FmaDot {
  static constexpr bool kInt8 = false;
  static constexpr int kTileVecs = kVecs;
  static constexpr int64_t kPerItem = 2;
  static constexpr int64_t kRowItemBytes = 8;
  using Sum = typename Ops::F;
  struct Line {
    typename Ops::F odd;
    typename Ops::F even;
  };
  using Item = Line;
  static W4A8_INLINE Sum zero() { return Ops::splat(0.0f); }
  template <bool kKeys>
  static W4A8_INLINE Line load(const uint8_t* p) {
    const typename Ops::I both = Ops::iload(p);
    return {Ops::float_bits(Ops::iand(both, Ops::isplat(static_cast<int32_t>(0xffff0000u)))),
            Ops::float_bits(Ops::template shift_left<16>(both))};
  }
  template <bool kKeys>
  static W4A8_INLINE Item item(const uint8_t* p) {
    const auto* floats = reinterpret_cast<const float*>(p);
    return {Ops::splat(floats[1]), Ops::splat(floats[0])};
  }
  template <bool kKeys>
  static W4A8_INLINE void add(Sum& sum, Line line, Item item) {
    sum = Ops::fma(line.odd, item.odd, sum);
    sum = Ops::fma(line.even, item.even, sum);
  }
  static W4A8_INLINE typename Ops::F total(Sum sum) { return sum; }
  static W4A8_INLINE void store_weights(uint8_t* p, typename Ops::F weights) {
    Ops::store(reinterpret_cast<float*>(p), weights);
  }
};

// 2^x for x <= 125, relative error < 3e-6; 0 below -125, 1 of 0.
template <class Ops>
W4A8_INLINE typename Ops::F vec_exp2(typename Ops::F x) {
  using F = typename Ops::F;
  const F n = Ops::round(x);
  const F f = Ops::sub(x, n);
  F p = Ops::splat(0x1.3a02d0p-7f);
  p = Ops::fma(p, f, Ops::splat(0x1.c9fc48p-5f));
  p = Ops::fma(p, f, Ops::splat(0x1.ec0378p-3f));
  p = Ops::fma(p, f, Ops::splat(0x1.62e12cp-1f));
  p = Ops::fma(p, f, Ops::splat(1.0f));
  return Ops::select_less(x, Ops::splat(-125.0f), Ops::splat(0.0f), Ops::times_pow2(p, n));
}

// x rounded to bfloat16, as a float; 0 where it is below 2^-55, so that no sum of products is denormal. A NaN becomes
// anything: of a weight the sum L is NaN then.
template <class Ops>
W4A8_INLINE typename Ops::F round_to_bfloat16(typename Ops::F x) {
  const typename Ops::I bits = Ops::int_bits(x);
  const typename Ops::I odd = Ops::iand(Ops::template shift_right<16>(bits), Ops::isplat(1));
  const typename Ops::I rounded = Ops::iadd(bits, Ops::iadd(odd, Ops::isplat(0x7fff)));
  const typename Ops::F y = Ops::float_bits(Ops::iand(rounded, Ops::isplat(static_cast<int32_t>(0xffff0000u))));
  return Ops::select_less(Ops::abs(x), Ops::splat(0x1p-55f), Ops::splat(0.0f), y);
}

// The Walsh-Hadamard transform, without a factor, of the largest power of two that divides n; a sum, a difference.
template <class Ops, int kDistance>
W4A8_INLINE void butterflies_in_register(float* x, int64_t n) {
  if constexpr (kDistance < Ops::kLanes) {
    float sign[Ops::kLanes];
    for (int i = 0; i < Ops::kLanes; ++i) sign[i] = (i & kDistance) != 0 ? -1.0f : 1.0f;
    const typename Ops::F signs = Ops::load(sign);
    for (int64_t i = 0; i < n; i += Ops::kLanes) {
      const typename Ops::F a = Ops::load(x + i);
      Ops::store(x + i, Ops::fma(signs, a, Ops::template swap_lanes<kDistance>(a)));
    }
  }
}
template <class Ops>
void rotate(float* x, int64_t n) {
  butterflies_in_register<Ops, 1>(x, n);
  butterflies_in_register<Ops, 2>(x, n);
  butterflies_in_register<Ops, 4>(x, n);
  butterflies_in_register<Ops, 8>(x, n);
  for (int64_t distance = Ops::kLanes; distance < (n & -n); distance *= 2) {
    for (int64_t begin = 0; begin < n; begin += 2 * distance) {
      for (int64_t i = begin; i < begin + distance; i += Ops::kLanes) {
        const typename Ops::F a = Ops::load(x + i);
        const typename Ops::F b = Ops::load(x + i + distance);
        Ops::store(x + i, Ops::add(a, b));
        Ops::store(x + i + distance, Ops::sub(a, b));
      }
    }
  }
}

template <class Ops, DType kType>
W4A8_INLINE void widen_row(const void* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += Ops::kLanes) Ops::store(to + i, Ops::template load_as<kType>(from, i));
}
template <class Ops>
void widen_row(const void* from, DType dtype, float* to, int64_t n) {
  switch (dtype) {
    case DType::kFloat32: return widen_row<Ops, DType::kFloat32>(from, to, n);
    case DType::kBFloat16: return widen_row<Ops, DType::kBFloat16>(from, to, n);
    case DType::kFloat16: return widen_row<Ops, DType::kFloat16>(from, to, n);
  }
}

// The largest |x|; NaN if one is not finite. From 0x1.ffp127 on, what bfloat16 would round to infinity, a number counts
// as not finite.
template <class Ops>
float largest(const float* x, int64_t n) {
  typename Ops::I most = Ops::isplat(0);
  for (int64_t i = 0; i < n; i += Ops::kLanes) most = Ops::imax(most, Ops::int_bits(Ops::abs(Ops::load(x + i))));
  const auto bits = static_cast<uint32_t>(Ops::reduce_max(most));
  return bits < 0x7f7f8000u ? bits_float(bits) : bits_float(0x7fc00000u);
}

// What x is multiplied by so that its largest number becomes 127; 0 for rows of almost nothing, and of NaN.
inline float to_codes(float most) { return most > 0x1p-100f ? 127.0f / most : 0.0f; }

// codes = rint(x * inverse), and their sum. 0 for NaN, whose inverse is 0: x is not looked at then.
template <class Ops>
int32_t round_codes(const float* x, float inverse, int8_t* codes, int64_t n) {
  typename Ops::I sum = Ops::isplat(0);
  for (int64_t i = 0; i < n; i += Ops::kLanes) {
    const typename Ops::F y = Ops::mul(inverse == 0.0f ? Ops::splat(0.0f) : Ops::load(x + i), Ops::splat(inverse));
    const typename Ops::I q = Ops::imin(Ops::isplat(127), Ops::imax(Ops::isplat(-127), Ops::to_int(y)));
    Ops::store_int8(codes + i, q);
    sum = Ops::iadd(sum, q);
  }
  return Ops::reduce(sum);
}

// About log2(x) for a normal x > 0; what error there is changes a scale, not the number that it stands for.
inline float rough_log2(float x) {
  const uint32_t bits = float_bits(x);
  const float m = bits_float((bits & 0x007fffffu) | 0x3f800000u);
  const float exponent = static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
  return exponent + (m - 1.0f) * (1.4249f + (m - 1.0f) * (-0.5814f + (m - 1.0f) * 0.1565f));
}

// ---- The cache ----

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
  float rounded[kMostHeadSize];
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
  if (!finite) rounded[0] = bits_float(0x7fc00000u);
  uint8_t* to = block + token * kItemBytes;
  for (int64_t i = 0; i < shape.key_size; ++i) put(rounded[i], to + i / 2 * kItemLine + i % 2 * 2);
  round(value, shape.value_size);
  to = block + shape.values_at() + token / 2 * shape.value_size * kItemBytes + token % 2 * 2;
  for (int64_t c = 0; c < shape.value_size; ++c) put(rounded[c], to + c * kItemBytes);
}

template <class Ops>
void write_tokens(const CacheShape& shape, const TokensToWrite& tokens, uint8_t* block) {
  float key[kMostHeadSize];
  float value[kMostHeadSize];
  const bool int8 = shape.kind == CacheKind::kInt8;
  if (tokens.first == 0) {
    // What is not written yet is multiplied by weights that are 0: it must be a number.
    __builtin_memset(block + shape.values_at(), 0, static_cast<std::size_t>(shape.key_scales_at() - shape.values_at()));
  }
  for (int64_t t = 0; t < tokens.count; ++t) {
    const int64_t bytes = dtype_bytes(tokens.dtype);
    widen_row<Ops>(static_cast<const uint8_t*>(tokens.keys) + t * tokens.key_stride * bytes, tokens.dtype, key,
                   shape.key_size);
    widen_row<Ops>(static_cast<const uint8_t*>(tokens.values) + t * tokens.value_stride * bytes, tokens.dtype, value,
                   shape.value_size);
    const float most = largest<Ops>(key, shape.key_size) + largest<Ops>(value, shape.value_size);
    if (int8 && tokens.first + t == 0) set_reference<Ops>(shape, tokens.before, key, block);
    (int8 ? write_int8<Ops> : write_bfloat16<Ops>)(shape, tokens.first + t, key, value, most == most, block);
  }
}

// ---- Queries ----

template <class Ops>
void prepare_int8(const QueryTile& tile, int64_t r, float* query, int8_t* codes) {
  const int64_t n = tile.shape.key_size;
  rotate<Ops>(query, n);
  const float most = largest<Ops>(query, n);
  const float inverse = most == most ? to_codes(most) : 0.0f;
  tile.starts[r] = -128 * round_codes<Ops>(query, inverse, codes, n);
  // Both rotations together multiply by the size of the transform, a power of two.
  const float factor = tile.factor / static_cast<float>(n & -n);
  tile.scales[r] = most != most ? most : (inverse == 0.0f ? 0.0f : most / 127.0f * factor);
  for (int64_t i = 0; i < n; i += Ops::kLanes) {
    Ops::store(tile.rotated + r * n + i, Ops::mul(Ops::load(query + i), Ops::splat(factor)));
  }
}

// Row items of 8 bytes are int16 or float, for instruction sets that multiply those.
template <class Ops, class Int8Dot, class BFloat16Dot>
void prepare_queries(const QueryTile& tile, const void* const* rows, DType dtype) {
  const int64_t n = tile.shape.key_size;
  float query[kMostHeadSize];
  for (int64_t r = 0; r < tile.rows; ++r) {
    uint8_t* to = tile.queries + r * query_bytes(n);
    widen_row<Ops>(rows[r], dtype, query, n);
    if (tile.shape.kind == CacheKind::kInt8) {
      int8_t codes[kMostHeadSize];
      prepare_int8<Ops>(tile, r, query, codes);
      if constexpr (Int8Dot::kRowItemBytes == kItemBytes) {
        __builtin_memcpy(to, codes, static_cast<std::size_t>(n));
      } else {
        for (int64_t i = 0; i < n; ++i) {
          const int16_t code = codes[i];
          __builtin_memcpy(to + 2 * i, &code, sizeof(code));
        }
      }
    } else {
      const float most = largest<Ops>(query, n);
      const bool finite = most == most;
      const typename Ops::F nan = Ops::splat(bits_float(0x7fc00000u));
      for (int64_t i = 0; i < n; i += Ops::kLanes) {
        const typename Ops::F x = finite ? round_to_bfloat16<Ops>(Ops::load(query + i)) : nan;
        if constexpr (BFloat16Dot::kRowItemBytes == kItemBytes) {
          Ops::template store_as<DType::kBFloat16>(to, i, x);
        } else {
          Ops::store(reinterpret_cast<float*>(to) + i, x);
        }
      }
    }
  }
}

// ---- A segment ----

template <class Ops>
struct Step {
  const QueryTile& tile;
  const uint8_t* blocks[2];
  const uint8_t* next[2];  // to be fetched; null: nothing
  int64_t key;             // the first one
  int64_t count;           // of blocks
  int64_t in_segment;      // the number of the first block in the segment
  bool masked[2];          // some row does not see all of the block
};

// The keys of a block as scores: behind the soft cap and the mask, with the scales of values, and the largest one.
// `first`: of the step. Once for all instruction sets, over what score_rows left.
template <class Ops>
W4A8_INLINE void finish_scores(const Step<Ops>& step, int64_t r, int64_t b, int64_t column, typename Ops::F t,
                               typename Ops::F& most) {
  using F = typename Ops::F;
  const QueryTile& tile = step.tile;
  if (step.masked[b]) {
    float index[Ops::kLanes];
    for (int i = 0; i < Ops::kLanes; ++i) index[i] = static_cast<float>(i);
    const F key = Ops::load(index);
    const int64_t at = step.key + b * kBlockKeys + column;
    const F end = Ops::splat(static_cast<float>(tile.end[r] - at));
    const F begin = Ops::splat(static_cast<float>(tile.begin[r] - at));
    t = Ops::select_less(key, end, t, Ops::splat(10 * kLowestScore));
    t = Ops::select_less(key, begin, Ops::splat(10 * kLowestScore), t);
  }
  most = Ops::max(t, most);
  Ops::store(tile.scores + r * kStepKeys + b * kBlockKeys + column, t);
}

// cap * tanh(t / cap), tanh(x) = (1 - e) / (1 + e) with e = exp(-2 |x|).
template <class Ops>
W4A8_INLINE typename Ops::F cap_score(typename Ops::F t, float cap) {
  using F = typename Ops::F;
  const F x = Ops::mul(Ops::abs(t), Ops::splat(0x1.715476p+1f / cap));  // 2 log2(e)
  const F e = vec_exp2<Ops>(Ops::neg(x));
  const F y = Ops::mul(Ops::splat(cap), Ops::div(Ops::sub(Ops::splat(1.0f), e), Ops::add(Ops::splat(1.0f), e)));
  return Ops::select_less(t, Ops::splat(0.0f), Ops::neg(y), y);
}

template <class Ops, class Dot, int R, int C, bool kKeys>
W4A8_INLINE void multiply_items(typename Dot::Sum (&sums)[R][C], const uint8_t* rows, int64_t row_bytes,
                                const uint8_t* lines, int64_t line_bytes, int64_t items, const uint8_t* fetch) {
  constexpr int64_t kVecBytes = Ops::kLanes * kItemBytes;
  for (int64_t i = 0; i < items; ++i) {
    typename Dot::Line line[C];
    for_each<C>([&](int c)
                    W4A8_LAMBDA { line[c] = Dot::template load<kKeys>(lines + i * line_bytes + c * kVecBytes); });
    if (fetch != nullptr) {
      for (int64_t at = 0; at < C * kVecBytes; at += kLineBytes) __builtin_prefetch(fetch + i * line_bytes + at, 0, 2);
    }
    for_each<R>([&](int r) W4A8_LAMBDA {
      const typename Dot::Item item = Dot::template item<kKeys>(rows + r * row_bytes + i * Dot::kRowItemBytes);
      for_each<C>([&](int c) W4A8_LAMBDA { Dot::template add<kKeys>(sums[r][c], line[c], item); });
    });
  }
}

// Scores of R rows and C registers of keys.
template <class Ops, class Dot, int R>
__attribute__((noinline)) void score_rows(const Step<Ops>& step, int64_t row, int64_t b, int64_t column) {
  constexpr int C = Dot::kTileVecs;
  using F = typename Ops::F;
  const QueryTile& tile = step.tile;
  const CacheShape& shape = tile.shape;
  const uint8_t* block = step.blocks[b];
  const uint8_t* fetch = row == 0 && step.next[b] != nullptr ? step.next[b] + column * kItemBytes : nullptr;
  typename Dot::Sum sums[R][C];
  for_each<R, C>([&](int r, int c) W4A8_LAMBDA { sums[r][c] = Dot::zero(); });
  multiply_items<Ops, Dot, R, C, true>(sums, tile.queries + row * query_bytes(shape.key_size),
                                       query_bytes(shape.key_size), block + column * kItemBytes, kItemLine,
                                       shape.key_items(), fetch);
  for_each<R>([&](int r) W4A8_LAMBDA {
    const int64_t at = row + r;
    F most = b == 0 && column == 0 ? Ops::splat(kLowestScore) : Ops::load(tile.most + at * kHeadStep);
    for_each<C>([&](int c) W4A8_LAMBDA {
      const int64_t key = column + c * Ops::kLanes;
      F t;
      if constexpr (Dot::kInt8) {
        const F sum = Ops::to_float(Ops::iadd(Dot::total(sums[r][c]), Ops::isplat(tile.starts[at])));
        const F scaled = Ops::mul(sum, Ops::load_bytes(block + shape.key_scales_at() + 4 * key));
        t = Ops::fma(scaled, Ops::splat(tile.scales[at]),
                     Ops::splat(tile.bases[at * kSegmentBlocks + step.in_segment + b]));
      } else {
        t = Ops::mul(Dot::total(sums[r][c]), Ops::splat(tile.factor));
      }
      if (tile.soft_cap != 0.0f) t = cap_score<Ops>(t, tile.soft_cap);
      if constexpr (Dot::kInt8) t = Ops::add(t, Ops::load_bytes(block + shape.value_scales_at() + 4 * key));
      finish_scores(step, at, b, key, t, most);
    });
    Ops::store(tile.most + at * kHeadStep, most);
  });
}

// out = alpha * out + beta * (weights times values), R rows and C registers of channels.
template <class Ops, class Dot, int R, int C>
__attribute__((noinline)) void add_values(const Step<Ops>& step, int64_t row, int64_t channel) {
  using F = typename Ops::F;
  const QueryTile& tile = step.tile;
  const CacheShape& shape = tile.shape;
  typename Dot::Sum sums[R][C];
  for_each<R, C>([&](int r, int c) W4A8_LAMBDA { sums[r][c] = Dot::zero(); });
  const int64_t at = shape.values_at() + channel * kItemBytes;
  for (int64_t b = 0; b < step.count; ++b) {
    multiply_items<Ops, Dot, R, C, false>(
        sums, tile.weights + row * kWeightBytes + b * shape.value_items() * Dot::kRowItemBytes, kWeightBytes,
        step.blocks[b] + at, shape.value_size * kItemBytes, shape.value_items(),
        row == 0 && step.next[b] != nullptr ? step.next[b] + at : nullptr);
  }
  for_each<R>([&](int r) W4A8_LAMBDA {
    const F alpha = Ops::splat(tile.alpha[row + r]);
    const F beta = Ops::splat(tile.beta[row + r]);
    for_each<C>([&](int c) W4A8_LAMBDA {
      float* out = tile.out + (row + r) * shape.value_size + channel + c * Ops::kLanes;
      F sum;
      if constexpr (Dot::kInt8) {
        sum = Ops::mul(beta, Ops::to_float(Dot::total(sums[r][c])));
      } else {
        sum = Dot::total(sums[r][c]);
      }
      Ops::store(out, Ops::fma(alpha, Ops::load(out), sum));
    });
  });
}

// Calls f.run<R>(row) for tiles of rows.
template <class Ops, class F>
W4A8_INLINE void for_row_tiles(int64_t rows, F f) {
  int64_t row = 0;
  for (; row + Ops::kTileRows <= rows; row += Ops::kTileRows) f.template operator()<Ops::kTileRows>(row);
  if constexpr (Ops::kTileRows > 4) {
    for (; row + 4 <= rows; row += 4) f.template operator()<4>(row);
  }
  if constexpr (Ops::kTileRows > 2) {
    for (; row + 2 <= rows; row += 2) f.template operator()<2>(row);
  }
  for (; row < rows; ++row) f.template operator()<1>(row);
}

// The weights of a step, and the factors of what was summed before.
template <class Ops, class Dot>
void weigh_step(const Step<Ops>& step) {
  using F = typename Ops::F;
  constexpr int kVecs = Ops::kVecs;
  const QueryTile& tile = step.tile;
  const int64_t keys = step.count * kBlockKeys;
  // By what a weight must be multiplied to be without the scale of its value; 1 where that is no number, so that a
  // weight of 0 stays 0.
  float unscale[kStepKeys];
  if constexpr (Dot::kInt8) {
    for (int64_t key = 0; key < keys; key += Ops::kLanes) {
      const uint8_t* logs = step.blocks[key / kBlockKeys] + tile.shape.value_scales_at();
      const F log = Ops::load_bytes(logs + 4 * (key % kBlockKeys));
      const F usual = Ops::select_less(Ops::abs(log), Ops::splat(124.5f), log, Ops::splat(0.0f));
      Ops::store(unscale + key, vec_exp2<Ops>(Ops::neg(usual)));
    }
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    F most = Ops::load(tile.most + r * kHeadStep);
    const float step_max = Ops::reduce_max_float(most);
    tile.step_max[r] = step_max > kLowestScore ? step_max : kLowestScore;
  }
  for (int64_t r = 0; r < tile.rows; r += Ops::kLanes) {
    const F old = Ops::load(tile.max + r);
    F here = Ops::load(tile.step_max + r);
    const F now = Ops::max(old, here);
    if (!Dot::kInt8) here = now;
    Ops::store(tile.step_max + r, here);
    Ops::store(tile.max + r, now);
    Ops::store(tile.alpha + r, vec_exp2<Ops>(Ops::sub(old, now)));
    Ops::store(tile.beta + r, vec_exp2<Ops>(Ops::sub(here, now)));
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    const F most = Ops::splat(tile.step_max[r]);
    F sum[kVecs];
    // What rounding took from a weight goes to the next one of its lane, so that many small ones are not all 0. A key
    // that the row does not see gets nothing: half of a code rounds to 0.
    F rest[kVecs];
    for_each<kVecs>([&](int v) W4A8_LAMBDA { sum[v] = rest[v] = Ops::splat(0.0f); });
    for (int64_t key = 0; key < keys; key += kHeadStep) {
      for_each<kVecs>([&](int v) W4A8_LAMBDA {
        const int64_t at = key + v * Ops::kLanes;
        const F p = vec_exp2<Ops>(Ops::sub(Ops::load(tile.scores + r * kStepKeys + at), most));
        uint8_t* to = tile.weights + r * kWeightBytes + at * Dot::kRowItemBytes / Dot::kPerItem;
        if constexpr (Dot::kInt8) {
          sum[v] = Ops::fma(p, Ops::load(unscale + at), sum[v]);
          const F exact = Ops::fma(p, Ops::splat(kMostWeight), rest[v]);
          const F whole = Ops::round(exact);
          rest[v] = Ops::sub(exact, whole);
          Dot::store_weights(to, whole);
        } else {
          sum[v] = Ops::add(sum[v], p);
          Dot::store_weights(to, round_to_bfloat16<Ops>(p));
        }
      });
    }
    float* lanes = tile.lanes + r * kHeadStep;
    for_each<kVecs>([&](int v) W4A8_LAMBDA {
      if constexpr (Dot::kInt8) sum[v] = Ops::mul(sum[v], Ops::splat(tile.beta[r]));
      Ops::store(lanes + v * Ops::kLanes,
                 Ops::fma(Ops::splat(tile.alpha[r]), Ops::load(lanes + v * Ops::kLanes), sum[v]));
    });
    if constexpr (Dot::kInt8) tile.beta[r] *= 1.0f / kMostWeight;
  }
}

// Each row times the references of the blocks.
template <class Ops>
void multiply_references(const QueryTile& tile, const KeySegment& segment) {
  constexpr int kVecs = Ops::kVecs;
  const int64_t n = tile.shape.key_size;
  const int64_t blocks = (segment.count + kBlockKeys - 1) / kBlockKeys;
  float references[kSegmentBlocks * kMostHeadSize];
  for (int64_t b = 0; b < blocks; ++b) {
    widen_row<Ops, DType::kBFloat16>(segment.blocks[b] + tile.shape.reference_at(), references + b * n, n);
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float* row = tile.rotated + r * n;
    for (int64_t b = 0; b < blocks; ++b) {
      typename Ops::F sum[kVecs];
      for_each<kVecs>([&](int v) W4A8_LAMBDA { sum[v] = Ops::splat(0.0f); });
      for (int64_t i = 0; i < n; i += kHeadStep) {
        for_each<kVecs>([&](int v) W4A8_LAMBDA {
          const int64_t at = i + v * Ops::kLanes;
          sum[v] = Ops::fma(Ops::load(row + at), Ops::load(references + b * n + at), sum[v]);
        });
      }
      tile.bases[r * kSegmentBlocks + b] = Ops::sum16(sum);
    }
  }
}

template <class Ops, class Dot>
void attend(const QueryTile& tile, const KeySegment& segment) {
  const CacheShape& shape = tile.shape;
  const int64_t padded = (tile.rows + kHeadStep - 1) / kHeadStep * kHeadStep;
  for (int64_t r = 0; r < padded; ++r) {
    tile.max[r] = kLowestScore;
    tile.step_max[r] = kLowestScore;
  }
  for (int64_t i = 0; i < tile.rows * shape.value_size; ++i) tile.out[i] = 0.0f;
  for (int64_t i = 0; i < tile.rows * kHeadStep; ++i) tile.lanes[i] = 0.0f;
  if constexpr (Dot::kInt8) multiply_references<Ops>(tile, segment);

  int32_t all_end = tile.end[0];
  int32_t all_begin = tile.begin[0];
  int32_t first_begin = tile.begin[0];
  for (int64_t r = 1; r < tile.rows; ++r) {
    all_end = tile.end[r] < all_end ? tile.end[r] : all_end;
    all_begin = tile.begin[r] > all_begin ? tile.begin[r] : all_begin;
    first_begin = tile.begin[r] < first_begin ? tile.begin[r] : first_begin;
  }
  for (int64_t at = 0; at < segment.count; at += kStepKeys) {
    if (segment.first_key + at + kStepKeys <= first_begin) continue;  // in front of all windows
    const int64_t b = at / kBlockKeys;
    const int64_t count = segment.count - at > kBlockKeys ? 2 : 1;
    Step<Ops> step = {tile, {}, {}, segment.first_key + at, count, b, {}};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t key = step.key + i * kBlockKeys;
      step.blocks[i] = segment.blocks[b + i];
      // The next step's blocks, or those of the next segment.
      step.next[i] =
          at + kStepKeys < segment.count
              ? (b + 2 + i < (segment.count + kBlockKeys - 1) / kBlockKeys ? segment.blocks[b + 2 + i] : nullptr)
              : segment.next[i];
      step.masked[i] = key < all_begin || key + kBlockKeys > all_end;
    }
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t column = 0; column < kBlockKeys; column += Dot::kTileVecs * Ops::kLanes) {
        for_row_tiles<Ops>(tile.rows, [&]<int R>(int64_t row) { score_rows<Ops, Dot, R>(step, row, i, column); });
      }
    }
    weigh_step<Ops, Dot>(step);
    int64_t channel = 0;
    constexpr int64_t kWide = Dot::kTileVecs * Ops::kLanes;
    for (; channel + kWide <= shape.value_size; channel += kWide) {
      for_row_tiles<Ops>(tile.rows,
                         [&]<int R>(int64_t row) { add_values<Ops, Dot, R, Dot::kTileVecs>(step, row, channel); });
    }
    if constexpr (kWide > kHeadStep) {
      for (; channel < shape.value_size; channel += Ops::kLanes) {
        for_row_tiles<Ops>(tile.rows, [&]<int R>(int64_t row) { add_values<Ops, Dot, R, 1>(step, row, channel); });
      }
    }
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    typename Ops::F lanes[Ops::kVecs];
    for_each<Ops::kVecs>([&](int v)
                             W4A8_LAMBDA { lanes[v] = Ops::load(tile.lanes + r * kHeadStep + v * Ops::kLanes); });
    tile.sum[r] = Ops::sum16(lanes);
  }
}

template <class Ops>
void merge_segment(int64_t rows, int64_t value_size, const float* segment_out, const float* segment_max,
                   const float* segment_sum, float* out, float* max, float* sum) {
  using F = typename Ops::F;
  for (int64_t r = 0; r < rows; ++r) {
    const float now = segment_max[r] > max[r] ? segment_max[r] : max[r];
    const F alpha = vec_exp2<Ops>(Ops::splat(max[r] - now));
    const F beta = vec_exp2<Ops>(Ops::splat(segment_max[r] - now));
    float factors[2 * Ops::kLanes];
    Ops::store(factors, alpha);
    Ops::store(factors + Ops::kLanes, beta);
    max[r] = now;
    sum[r] = sum[r] * factors[0] + segment_sum[r] * factors[Ops::kLanes];
    for (int64_t i = 0; i < value_size; i += Ops::kLanes) {
      float* to = out + r * value_size + i;
      Ops::store(to, Ops::fma(alpha, Ops::load(to), Ops::mul(beta, Ops::load(segment_out + r * value_size + i))));
    }
  }
}

// Rotated values are rotated back. The sign of a zero depends on how many segments were merged: adding 0 makes it
// positive.
template <class Ops>
void finish_row(const CacheShape& shape, float* out, float sum) {
  const int64_t n = shape.value_size;
  float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (shape.kind == CacheKind::kInt8) {
    rotate<Ops>(out, n);
    factor /= static_cast<float>(n & -n);
  }
  const typename Ops::F inverse = Ops::splat(factor);
  for (int64_t i = 0; i < n; i += Ops::kLanes) {
    Ops::store(out + i, Ops::add(Ops::mul(Ops::load(out + i), inverse), Ops::splat(0.0f)));
  }
}

template <class Ops, class Int8Dot, class BFloat16Dot>
void attend_segment(const QueryTile& tile, const KeySegment& segment) {
  if (tile.shape.kind == CacheKind::kInt8) {
    attend<Ops, Int8Dot>(tile, segment);
  } else {
    attend<Ops, BFloat16Dot>(tile, segment);
  }
}

template <class Ops, class Int8Dot, class BFloat16Dot>
constexpr AttentionFunctions attention_of() {
  return {write_tokens<Ops>, prepare_queries<Ops, Int8Dot, BFloat16Dot>, attend_segment<Ops, Int8Dot, BFloat16Dot>,
          merge_segment<Ops>, finish_row<Ops>};
}
