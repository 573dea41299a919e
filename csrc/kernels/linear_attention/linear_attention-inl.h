// Linear attention, once for all instruction sets: linear_attention_of makes a kernel's functions of its Ops,
// VectorOps. Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/activation-inl.h"
#include "kernels/unroll-inl.h"

// log(1 + exp(x)), relative error < 4e-7; x itself from 20 on. It is max(x, 0) + log(1 + y), y = exp(-|x|), and
// log(1 + y) = 2 artanh(s), s = y / (2 + y) <= 1/3. Polynomial: minimax fit of (artanh(s) / s - 1) / s^2.
template <class Ops>
W4A8_INLINE typename Ops::F vec_softplus(typename Ops::F x) {
  using F = typename Ops::F;
  const F y = vec_exp<Ops>(Ops::neg(Ops::abs(x)));
  const F s = Ops::div(y, Ops::add(Ops::splat(2.0f), y));
  const F square = Ops::mul(s, s);
  F p = Ops::splat(0x1.dba26p-4f);
  p = Ops::fma(p, square, Ops::splat(0x1.bc8cf8p-4f));
  p = Ops::fma(p, square, Ops::splat(0x1.24c926p-3f));
  p = Ops::fma(p, square, Ops::splat(0x1.9998d4p-3f));
  p = Ops::fma(p, square, Ops::splat(0x1.555556p-2f));
  const F twice = Ops::add(s, s);
  return Ops::add(Ops::max(Ops::splat(0.0f), x), Ops::fma(Ops::mul(twice, square), p, twice));
}

template <class Ops>
void convolve(const float* const* rows, const float* weight, int64_t weight_stride, int64_t width, int64_t tokens,
              int64_t n, float* out) {
  using F = typename Ops::F;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < n; i += Ops::kLanes) {
      F sum = Ops::mul(Ops::load(weight + i), Ops::load(rows[t] + i));
      for (int64_t w = 1; w < width; ++w) {
        sum = Ops::fma(Ops::load(weight + w * weight_stride + i), Ops::load(rows[t + w] + i), sum);
      }
      Ops::store(out + t * n + i, vec_gate<Ops>(sum, sum));
    }
  }
}

// Numbers below 2^-64 become 0: no product with the state is denormal, which CPUs are slow at, and none is missed.
template <class Ops>
void decays(const float* x, float rate, int64_t n, float* out) {
  using F = typename Ops::F;
  for (int64_t i = 0; i < n; i += Ops::kLanes) {
    const F decay = vec_exp<Ops>(Ops::mul(Ops::splat(-rate), vec_softplus<Ops>(Ops::load(x + i))));
    Ops::store(out + i, Ops::select_less(decay, Ops::splat(0x1p-64f), Ops::splat(0.0f), decay));
  }
}

template <class Ops>
void sigmoids(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += Ops::kLanes) {
    Ops::store(out + i, vec_gate<Ops>(Ops::splat(1.0f), Ops::load(x + i)));
  }
}

// Token t of kVecs registers of columns: the state gets the token, and its columns times the query are summed. Of what
// the next token sees, the sums over the keys, each is added up on the way (kLast: there is none).
template <class Ops, bool kOfChannels, int kVecs, bool kLast>
W4A8_INLINE void add_token(const DeltaTile& x, int64_t t, float* state, const typename Ops::F (&d)[kVecs],
                           typename Ops::F (&out)[kVecs], typename Ops::F (&seen)[kVecs]) {
  using F = typename Ops::F;
  const float* key = x.keys + t * x.key_size;
  const float* query = x.queries + t * x.key_size;
  const float* decay = x.decays + t * (kOfChannels ? x.key_size : 1);
  const float* next = key + x.key_size;
  const float* next_decay = decay + x.key_size;
  const F whole = Ops::splat(decay[0]);
  for (int64_t i = 0; i < x.key_size; ++i, state += x.state_stride) {
    const F k = Ops::splat(key[i]);
    const F q = Ops::splat(query[i]);
    const F g = kOfChannels ? Ops::splat(decay[i]) : whole;
    F row[kVecs];
    for_each<kVecs>([&](int c) W4A8_LAMBDA { row[c] = Ops::mul(g, Ops::load(state + c * Ops::kLanes)); });
    for_each<kVecs>([&](int c) W4A8_LAMBDA { row[c] = Ops::fma(k, d[c], row[c]); });
    for_each<kVecs>([&](int c) W4A8_LAMBDA { out[c] = Ops::fma(q, row[c], out[c]); });
    for_each<kVecs>([&](int c) W4A8_LAMBDA { Ops::store(state + c * Ops::kLanes, row[c]); });
    if constexpr (!kLast) {
      const F n = Ops::splat(kOfChannels ? next[i] * next_decay[i] : next[i]);
      for_each<kVecs>([&](int c) W4A8_LAMBDA { seen[c] = Ops::fma(n, row[c], seen[c]); });
    }
  }
}

// One token or many, cut anywhere: the same operations in the same order. A decay of all keys multiplies the sum.
template <class Ops, bool kOfChannels, int kVecs>
void delta_columns(const DeltaTile& x, int64_t column) {
  using F = typename Ops::F;
  float* const state = x.state + column;
  F seen[kVecs];
  for_each<kVecs>([&](int c) W4A8_LAMBDA { seen[c] = Ops::splat(0.0f); });
  for (int64_t i = 0; i < x.key_size; ++i) {
    const F k = Ops::splat(kOfChannels ? x.keys[i] * x.decays[i] : x.keys[i]);
    const float* row = state + i * x.state_stride;
    for_each<kVecs>([&](int c) W4A8_LAMBDA { seen[c] = Ops::fma(k, Ops::load(row + c * Ops::kLanes), seen[c]); });
  }
  for (int64_t t = 0; t < x.tokens; ++t) {
    const F beta = Ops::splat(x.betas[t]);
    const F decay = Ops::splat(kOfChannels ? 0.0f : x.decays[t]);
    const float* value = x.values + t * x.values_stride + column;
    F d[kVecs];
    F out[kVecs];
    for_each<kVecs>([&](int c) W4A8_LAMBDA {
      const F past = kOfChannels ? seen[c] : Ops::mul(decay, seen[c]);
      d[c] = Ops::mul(beta, Ops::sub(Ops::load(value + c * Ops::kLanes), past));
      out[c] = seen[c] = Ops::splat(0.0f);
    });
    if (t + 1 < x.tokens) {
      add_token<Ops, kOfChannels, kVecs, false>(x, t, state, d, out, seen);
    } else {
      add_token<Ops, kOfChannels, kVecs, true>(x, t, state, d, out, seen);
    }
    float* to = x.out + t * x.out_stride + column;
    for_each<kVecs>([&](int c) W4A8_LAMBDA { Ops::store(to + c * Ops::kLanes, out[c]); });
  }
}

// kColumns: 16 or 32, what registers hold the sums of.
template <class Ops, bool kOfChannels, int64_t kColumns>
void delta_as(const DeltaTile& tile) {
  int64_t column = 0;
  for (; column + kColumns <= tile.columns; column += kColumns) {
    delta_columns<Ops, kOfChannels, static_cast<int>(kColumns / Ops::kLanes)>(tile, column);
  }
  if constexpr (kColumns > kStateStep) {
    if (column < tile.columns) {
      delta_columns<Ops, kOfChannels, static_cast<int>(kStateStep / Ops::kLanes)>(tile, column);
    }
  }
}
template <class Ops, int64_t kColumns>
void delta(const DeltaTile& tile) {
  return tile.of_channels ? delta_as<Ops, true, kColumns>(tile) : delta_as<Ops, false, kColumns>(tile);
}

template <VectorOps Ops, int64_t kColumns>
constexpr LinearAttentionFunctions linear_attention_of() {
  return {convolve<Ops>, decays<Ops>, sigmoids<Ops>, delta<Ops, kColumns>};
}
