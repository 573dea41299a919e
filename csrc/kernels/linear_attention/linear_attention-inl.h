// Linear attention, once for all instruction sets: linear_attention_of makes a kernel's functions of its Ops, which are
// VectorOps with sum16 (attention/base-inl.h). Included inside a target region and an anonymous namespace.
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

template <class Ops, bool kBias, bool kActivate>
void convolve_as(const ConvolutionTile& x) {
  using F = typename Ops::F;
  const ConvolutionTile tile = x;  // in registers: a store of lanes may be to anything
  for (int64_t t = 0; t < tile.tokens; ++t) {
    const float* const* rows = tile.rows + t;
    for (int64_t i = 0; i < tile.n; i += Ops::kLanes) {
      const F weight = Ops::load(tile.weight + i);
      const F row = Ops::load(rows[0] + i);
      F sum = kBias ? Ops::fma(weight, row, Ops::load(tile.bias + i)) : Ops::mul(weight, row);
      for (int64_t w = 1; w < tile.width; ++w) {
        sum = Ops::fma(Ops::load(tile.weight + w * tile.weight_stride + i), Ops::load(rows[w] + i), sum);
      }
      Ops::store(tile.out + t * tile.n + i, kActivate ? vec_gate<Ops>(sum, sum) : sum);
    }
  }
}
template <class Ops>
void convolve(const ConvolutionTile& tile) {
  if (tile.activate) {
    return tile.bias != nullptr ? convolve_as<Ops, true, true>(tile) : convolve_as<Ops, false, true>(tile);
  }
  return tile.bias != nullptr ? convolve_as<Ops, true, false>(tile) : convolve_as<Ops, false, false>(tile);
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
void softplus(const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += Ops::kLanes) Ops::store(out + i, vec_softplus<Ops>(Ops::load(x + i)));
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
  const int64_t size = x.key_size;  // in a register: a store of lanes may be to anything
  const int64_t stride = x.state_stride;
  const float* key = x.keys + t * size;
  const float* query = x.queries + t * size;
  const float* decay = x.decays + t * (kOfChannels ? size : 1);
  const float* next = key + size;
  const float* next_decay = decay + size;
  const F whole = Ops::splat(decay[0]);
  for (int64_t i = 0; i < size; ++i, state += stride) {
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

// kRows rows of a state, for all tokens. Sums over the state have 16 parts, added in a fixed order.
template <class Ops, int kRows>
void scan_rows(const ScanTile& x, int64_t channel) {
  using F = typename Ops::F;
  const int64_t size = x.state_size;
  const int64_t stride = x.state_stride;
  float* const state = x.state + channel * stride;
  for (int64_t t = 0; t < x.tokens; ++t) {
    const float* b = x.b + t * size;
    const float* c = x.c + t * size;
    const F decay = Ops::splat(x.decays[t]);
    F in[kRows];
    F sums[kRows][Ops::kVecs];
    for_each<kRows>([&](int r) W4A8_LAMBDA {
      in[r] = Ops::splat(x.steps[t] * x.x[t * x.channels + channel + r]);
      for_each<Ops::kVecs>([&](int v) W4A8_LAMBDA { sums[r][v] = Ops::splat(0.0f); });
    });
    for (int64_t n = 0; n < size; n += kStateStep) {
      for_each<Ops::kVecs>([&](int v) W4A8_LAMBDA {
        const F bn = Ops::load(b + n + v * Ops::kLanes);
        const F cn = Ops::load(c + n + v * Ops::kLanes);
        float* const at = state + n + v * Ops::kLanes;
        for_each<kRows>([&](int r) W4A8_LAMBDA {
          const F next = Ops::fma(in[r], bn, Ops::mul(decay, Ops::load(at + r * stride)));
          Ops::store(at + r * stride, next);
          sums[r][v] = Ops::fma(cn, next, sums[r][v]);
        });
      });
    }
    float* const out = x.out + t * x.out_stride + channel;
    for_each<kRows>([&](int r) W4A8_LAMBDA { out[r] = Ops::sum16(sums[r]); });
  }
}
template <class Ops>
void scan(const ScanTile& x) {
  constexpr int kRows = 4;
  for (int64_t channel = 0; channel < x.channels; channel += kRows) scan_rows<Ops, kRows>(x, channel);
  const typename Ops::F skip = Ops::splat(x.skip);
  for (int64_t t = 0; t < x.tokens; ++t) {
    for (int64_t i = 0; i < x.channels; i += Ops::kLanes) {
      float* const out = x.out + t * x.out_stride + i;
      Ops::store(out, Ops::fma(skip, Ops::load(x.x + t * x.channels + i), Ops::load(out)));
    }
  }
}

template <VectorOps Ops, int64_t kColumns>
constexpr LinearAttentionFunctions linear_attention_of() {
  return {convolve<Ops>, decays<Ops>, softplus<Ops>, sigmoids<Ops>, delta<Ops, kColumns>, scan<Ops>};
}
