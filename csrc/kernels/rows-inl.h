// Work on whole rows: quantize, combine, round to the output type. Once for all ISAs.
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/activation-inl.h"

// call.operator()<kType>() for the type that is known at run time only.
template <class Call>
W4A8_INLINE void with_dtype(DType dtype, Call call) {
  switch (dtype) {
    case DType::kFloat32: return call.template operator()<DType::kFloat32>();
    case DType::kBFloat16: return call.template operator()<DType::kBFloat16>();
    case DType::kFloat16: return call.template operator()<DType::kFloat16>();
  }
}

template <class Ops, DType kType>
struct RowLoader {
  const void* x;

  W4A8_INLINE typename Ops::F full(int64_t i) const { return Ops::template load_as<kType>(x, i); }
  // Elements [i, i + count), zeros behind; count < kLanes.
  W4A8_INLINE typename Ops::F part(int64_t i, int64_t count) const {
    constexpr int64_t kSize = dtype_bytes(kType);
    alignas(64) uint8_t buffer[Ops::kLanes * kSize] = {};
    __builtin_memcpy(buffer, static_cast<const uint8_t*>(x) + i * kSize, static_cast<size_t>(count * kSize));
    return Ops::template load_as<kType>(buffer, 0);
  }
};

template <class Ops>
struct Quantizer {
  typename Ops::F scale;
  typename Ops::I zero_point;

  W4A8_INLINE typename Ops::I operator()(typename Ops::F x) const {
    const typename Ops::I q = Ops::iadd(Ops::to_int(Ops::mul(x, scale)), zero_point);
    return Ops::imax(Ops::isplat(-128), Ops::imin(Ops::isplat(127), q));
  }
};

struct Extremes {
  float low;    // of the row and 0
  float high;   // of the row and 0
  bool finite;  // all of it
};

// Whether x, of which each lane is 0 or NaN, has no NaN.
template <class Ops>
W4A8_INLINE bool is_zero(typename Ops::F x) {
  float lanes[Ops::kLanes];
  Ops::store(lanes, x);
  float sum = 0.0f;
  for (const float lane : lanes) sum += lane;
  return sum == 0.0f;
}

template <class Ops, DType kType>
W4A8_INLINE Extremes row_extremes(const void* x, int64_t k) {
  using F = typename Ops::F;
  constexpr int64_t kLanes = Ops::kLanes;
  const RowLoader<Ops, kType> row{x};
  const int64_t rest = k % kLanes;
  const F zero = Ops::splat(0.0f);
  F low = zero;
  F high = zero;
  F finite = zero;  // becomes NaN with the first NaN or infinity, since 0 * inf is NaN
  for (int64_t v = 0; v < k / kLanes; ++v) {
    const F value = row.full(v * kLanes);
    low = Ops::min(low, value);
    high = Ops::max(high, value);
    finite = Ops::fma(value, zero, finite);
  }
  if (rest != 0) {
    const F value = row.part(k - rest, rest);
    low = Ops::min(low, value);
    high = Ops::max(high, value);
    finite = Ops::fma(value, zero, finite);
  }
  float lows[kLanes];
  float highs[kLanes];
  Ops::store(lows, low);
  Ops::store(highs, high);
  float mn = 0.0f;
  float mx = 0.0f;
  for (int64_t i = 0; i < kLanes; ++i) {
    mn = lows[i] < mn ? lows[i] : mn;
    mx = highs[i] > mx ? highs[i] : mx;
  }
  return {mn, mx, is_zero<Ops>(finite)};
}

// A row with a NaN or an infinity, whose outputs are all NaN.
inline void quantize_to_nan(const RowShape& shape, const QuantizedRow& to) {
  const int64_t padded = (shape.k + kLineBytes - 1) / kLineBytes * kLineBytes;
  for (int64_t i = 0; i < padded; ++i) to.q[i] = 0;
  for (int64_t p = 0; p < shape.parts(); ++p) {
    to.starts[p] = 0;
    if (shape.scaled()) to.scales[p * to.scales_stride] = 0.0f;
  }
  *to.quant = {__builtin_nanf(""), 0};
}

template <class Ops, DType kType>
void quantize_row_as(const void* x, const RowShape& shape, const QuantizedRow& to) {
  using I = typename Ops::I;
  constexpr int64_t kLanes = Ops::kLanes;
  const RowLoader<Ops, kType> row{x};
  const int64_t k = shape.k;
  const int64_t rest = k % kLanes;
  const Extremes range = row_extremes<Ops, kType>(x, k);
  if (!range.finite) return quantize_to_nan(shape, to);
  const RowParams params = row_params(range.low, range.high);
  *to.quant = params.quant;
  const Quantizer<Ops> quantizer{Ops::splat(params.scale), Ops::isplat(params.quant.zero_point)};
  const int64_t part_vectors = shape.part / kLanes;  // a part is all of k, or a multiple of 16 and so of kLanes
  for (int64_t p = 0; p < shape.parts(); ++p) {
    I sum = Ops::isplat(0);
    for (int64_t v = p * part_vectors; v < (p + 1) * part_vectors; ++v) {
      const I value = quantizer(row.full(v * kLanes));
      Ops::store_int8(to.q + v * kLanes, value);
      sum = Ops::iadd(sum, value);
    }
    to.starts[p] = -Ops::reduce(sum);
  }
  for (int64_t i = k; i % kLineBytes != 0; ++i) to.q[i] = 0;
  if (rest == 0) return;
  int32_t tail[kLanes];
  Ops::istore(tail, quantizer(row.part(k - rest, rest)));
  int32_t sum = 0;
  for (int64_t i = 0; i < rest; ++i) {
    to.q[k - rest + i] = static_cast<int8_t>(tail[i]);
    sum += tail[i];
  }
  to.starts[0] -= sum;
}

// Symmetric, a scale for each activation group. K is a multiple of 32 then, and a part one of 16.
template <class Ops, DType kType>
void quantize_groups_as(const void* x, const RowShape& shape, const QuantizedRow& to) {
  using F = typename Ops::F;
  using I = typename Ops::I;
  const RowLoader<Ops, kType> row{x};
  int64_t part = 0;
  for (int64_t begin = 0; begin < shape.k; begin += shape.activation_group) {
    const int64_t end = begin + shape.activation_group;
    // Floats that are not negative are in the order of their bits, infinity and NaN behind all others.
    I most = Ops::isplat(0);
    for (int64_t i = begin; i < end; i += Ops::kLanes) most = Ops::imax(most, Ops::int_bits(Ops::abs(row.full(i))));
    const int32_t bits = Ops::reduce_max(most);
    if (bits >= kInfinityBits) return quantize_to_nan(shape, to);
    const GroupParams params = group_params(bits);
    const F scale = Ops::splat(params.scale);
    for (int64_t i = begin; i < end; ++part) {
      I sum = Ops::isplat(0);
      for (const int64_t last = i + shape.part; i < last; i += Ops::kLanes) {
        const I value = Ops::to_int(Ops::mul(row.full(i), scale));
        Ops::store_int8(to.q + i, value);
        sum = Ops::iadd(sum, value);
      }
      to.starts[part] = -Ops::reduce(sum);
      to.scales[part * to.scales_stride] = params.recip;
    }
  }
  for (int64_t i = shape.k; i % kLineBytes != 0; ++i) to.q[i] = 0;
  *to.quant = {1.0f, 0};
}

template <class Ops>
void quantize_row(const void* x, DType dtype, const RowShape& shape, const QuantizedRow& to) {
  with_dtype(dtype, [&]<DType kType>() W4A8_LAMBDA {
    if (shape.scaled()) return quantize_groups_as<Ops, kType>(x, shape, to);
    quantize_row_as<Ops, kType>(x, shape, to);
  });
  finish_row(shape, to);
}

// Stores vectors of float32 as kType, the last one partly.
template <class Ops, DType kType>
struct RowStorer {
  void* out;

  W4A8_INLINE void full(int64_t i, typename Ops::F x) const { Ops::template store_as<kType>(out, i, x); }
  W4A8_INLINE void part(int64_t i, int64_t count, typename Ops::F x) const {
    constexpr int64_t kSize = dtype_bytes(kType);
    alignas(64) uint8_t buffer[Ops::kLanes * kSize];
    Ops::template store_as<kType>(buffer, 0, x);
    __builtin_memcpy(static_cast<uint8_t*>(out) + i * kSize, buffer, static_cast<size_t>(count * kSize));
  }
};

// x / scale + zero, clamped and rounded, as the low byte of an int8.
template <class Ops>
struct TokenQuantizer {
  using F = typename Ops::F;
  using I = typename Ops::I;
  F scale;
  F zero;
  F low;
  F high;

  W4A8_INLINE I operator()(F x) const {
    const F value = Ops::add(Ops::div(x, scale), zero);
    const I q = Ops::to_int(Ops::min(high, Ops::max(low, value)));
    // 128..255 become -128..-1, the same byte: store_int8 may saturate. Others are in [-128, 127] and stay.
    const I over = Ops::imax(Ops::isplat(0), Ops::template shift_right<7>(q));
    return Ops::isub(q, Ops::imul(over, Ops::isplat(256)));
  }
};

// A number rounded to kType and back.
template <class Ops, DType kType>
W4A8_INLINE float rounded_to(float x) {
  if constexpr (kType == DType::kFloat32) return x;
  alignas(64) uint8_t buffer[Ops::kLanes * dtype_bytes(kType)];
  float lanes[Ops::kLanes];
  Ops::template store_as<kType>(buffer, 0, Ops::splat(x));
  Ops::store(lanes, Ops::template load_as<kType>(buffer, 0));
  return lanes[0];
}

template <class Ops, DType kType>
void quantize_token_as(const void* x, int64_t k, bool symmetric, int bits, uint8_t* q, TokenQuant* quant) {
  constexpr int64_t kLanes = Ops::kLanes;
  const Extremes range = row_extremes<Ops, kType>(x, k);
  if (!range.finite) {
    for (int64_t i = 0; i < k; ++i) q[i] = 0;
    *quant = {__builtin_nanf(""), 0};
    return;
  }
  const TokenParams params = token_params(range.low, range.high, symmetric, bits);
  const float scale = rounded_to<Ops, kType>(params.scale);
  const float zero = token_zero_point(range.low, scale, params);
  *quant = {scale, static_cast<int32_t>(zero)};
  const TokenQuantizer<Ops> quantizer{Ops::splat(scale), Ops::splat(zero), Ops::splat(params.low),
                                      Ops::splat(params.high)};
  const RowLoader<Ops, kType> row{x};
  auto* out = reinterpret_cast<int8_t*>(q);
  const int64_t rest = k % kLanes;
  for (int64_t i = 0; i < k - rest; i += kLanes) Ops::store_int8(out + i, quantizer(row.full(i)));
  if (rest == 0) return;
  int32_t tail[kLanes];
  Ops::istore(tail, quantizer(row.part(k - rest, rest)));
  for (int64_t j = 0; j < rest; ++j) out[k - rest + j] = static_cast<int8_t>(tail[j]);
}

template <class Ops>
void quantize_token(const void* x, DType dtype, int64_t k, bool symmetric, int bits, uint8_t* q, TokenQuant* quant) {
  with_dtype(dtype, [&]<DType kType>() W4A8_LAMBDA { quantize_token_as<Ops, kType>(x, k, symmetric, bits, q, quant); });
}

template <class Ops, DType kType>
void store_row_as(const float* x, int64_t n, void* out) {
  const RowStorer<Ops, kType> row{out};
  int64_t i = 0;
  for (; i + Ops::kLanes <= n; i += Ops::kLanes) row.full(i, Ops::load(x + i));
  if (i < n) row.part(i, n - i, RowLoader<Ops, DType::kFloat32>{x}.part(i, n - i));
}

template <class Ops>
void store_row(const float* x, int64_t n, DType dtype, void* out) {
  with_dtype(dtype, [&]<DType kType>() W4A8_LAMBDA { store_row_as<Ops, kType>(x, n, out); });
}

template <class Ops, DType kType>
void combine_as(const float* y, int64_t ldy, const int32_t* slots, const float* weights, int64_t count, int64_t n,
                void* out) {
  using F = typename Ops::F;
  constexpr int64_t kLanes = Ops::kLanes;
  const RowStorer<Ops, kType> row{out};
  for (int64_t i = 0; i < n; i += kLanes) {
    const bool whole = i + kLanes <= n;
    F sum = Ops::splat(0.0f);
    for (int64_t j = 0; j < count; ++j) {
      if (slots[j] < 0) continue;
      const float* src = y + slots[j] * ldy;
      const F value = whole ? Ops::load(src + i) : RowLoader<Ops, DType::kFloat32>{src}.part(i, n - i);
      sum = Ops::fma(Ops::splat(weights != nullptr ? weights[j] : 1.0f), value, sum);
    }
    if (whole) {
      row.full(i, sum);
    } else {
      row.part(i, n - i, sum);
    }
  }
}

template <class Ops>
void combine(const float* y, int64_t ldy, const int32_t* slots, const float* weights, int64_t count, int64_t n,
             DType dtype, void* out) {
  with_dtype(dtype, [&]<DType kType>() W4A8_LAMBDA { combine_as<Ops, kType>(y, ldy, slots, weights, count, n, out); });
}

// Scales [i, i + kLanes) of a type that is a float.
template <class Ops>
W4A8_INLINE typename Ops::F load_float_scales(const uint8_t* scales, int64_t i, ScaleType type) {
  if (type == ScaleType::kBFloat16) return Ops::template load_as<DType::kBFloat16>(scales, i);
  if (type == ScaleType::kFloat32) return Ops::load_bytes(scales + 4 * i);
  return Ops::template load_as<DType::kFloat16>(scales, i);
}
template <class Ops>
W4A8_INLINE typename Ops::F load_e5m3(const uint8_t* scales, int64_t i) {
  const typename Ops::I bits = Ops::template shift_left<20>(Ops::load_widened(scales + i));
  return Ops::mul(Ops::float_bits(bits), Ops::splat(kE5M3Factor));
}
// Half of the scale: e2m1 values count twice.
template <class Ops>
W4A8_INLINE typename Ops::F load_half_e8m0(const uint8_t* scales, int64_t i) {
  const typename Ops::I bits = Ops::template shift_left<23>(Ops::load_widened(scales + i));
  return Ops::mul(Ops::float_bits(Ops::imax(bits, Ops::isplat(kLeastE8M0))), Ops::splat(0.5f));
}
// The super-scales of the panel's columns, and scales by them.
template <class Ops>
W4A8_INLINE typename Ops::F load_supers(const uint8_t* supers, int64_t i) {
  return Ops::template load_as<DType::kFloat16>(supers, i);
}
template <class Ops>
W4A8_INLINE typename Ops::F load_super_scales(const uint8_t* scales, typename Ops::F super, int64_t i) {
  return Ops::mul(Ops::to_float(Ops::load_int8(scales + i)), super);
}
// Of any type but kSuper.
template <class Ops>
W4A8_INLINE typename Ops::F load_any_scales(const uint8_t* scales, int64_t i, ScaleType type) {
  if (type == ScaleType::kE5M3) return load_e5m3<Ops>(scales, i);
  if (type == ScaleType::kE8M0) return load_half_e8m0<Ops>(scales, i);
  return load_float_scales<Ops>(scales, i, type);
}

template <class Ops>
void add_weight_sums(const uint8_t* scales, ScaleType type, const int32_t* group_sums, int64_t groups, float* sums) {
  constexpr int kVecs = kPanelColumns / Ops::kLanes;
  const int64_t line = kPanelColumns * scale_bytes(type);
  typename Ops::F w[kVecs];
  for (int v = 0; v < kVecs; ++v) w[v] = Ops::load(sums + v * Ops::kLanes);
  for (int64_t g = 0; g < groups; ++g, scales += line, group_sums += kPanelColumns) {
    for (int v = 0; v < kVecs; ++v) {
      const int64_t at = v * Ops::kLanes;
      const auto sum = Ops::iload(reinterpret_cast<const uint8_t*>(group_sums + at));
      w[v] = Ops::fma(load_any_scales<Ops>(scales, at, type), Ops::to_float(sum), w[v]);
    }
  }
  for (int v = 0; v < kVecs; ++v) Ops::store(sums + v * Ops::kLanes, w[v]);
}
