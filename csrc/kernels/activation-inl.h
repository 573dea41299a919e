// exp, the normal distribution function and the activations (docs/numerics.md section 5), once for all ISAs.
// Included inside a target region and an anonymous namespace; Ops is the ISA's vector type set.
#pragma once

// exp(x), relative error < 1.2e-7. Overflows to infinity, underflows through the denormals to 0.
// exp(x) = 2^n * exp(r), n = rint(x / ln 2), |r| <= ln(2) / 2; ln 2 in two parts (Cody and Waite), the first with
// trailing zeros so that n * kLn2High is exact. Polynomial: minimax fit of (exp(r) - 1 - r) / r^2.
template <class Ops>
W4A8_INLINE typename Ops::F vec_exp(typename Ops::F x) {
  using F = typename Ops::F;
  // At +-104 the result is infinity or 0 already. A NaN stays one: min and max return their second operand then.
  x = Ops::max(Ops::splat(-104.0f), Ops::min(Ops::splat(104.0f), x));
  const typename Ops::I n = Ops::to_int(Ops::mul(x, Ops::splat(0x1.715476p+0f)));
  const F nf = Ops::to_float(n);
  F r = Ops::fma(nf, Ops::splat(-0x1.62e4p-1f), x);
  r = Ops::fma(nf, Ops::splat(-0x1.7f7d1cp-20f), r);
  F q = Ops::splat(0x1.6c6b88p-10f);
  q = Ops::fma(q, r, Ops::splat(0x1.121022p-7f));
  q = Ops::fma(q, r, Ops::splat(0x1.5555bep-5f));
  q = Ops::fma(q, r, Ops::splat(0x1.5554d8p-3f));
  q = Ops::fma(q, r, Ops::splat(0.5f));
  const F p = Ops::add(Ops::splat(1.0f), Ops::fma(Ops::mul(r, r), q, r));
  // 2^n in two factors, since n in [-150, 150] does not fit one exponent.
  const typename Ops::I half = Ops::template shift_right<1>(n);
  return Ops::mul(Ops::mul(p, Ops::pow2(half)), Ops::pow2(Ops::isub(n, half)));
}

// x / (1 + exp(-a x)) = x * sigmoid(a x), `ax` being a x.
template <class Ops>
W4A8_INLINE typename Ops::F vec_gate(typename Ops::F x, typename Ops::F ax) {
  return Ops::div(x, Ops::add(Ops::splat(1.0f), vec_exp<Ops>(Ops::neg(ax))));
}

// x * Phi(x). Phi(-s) = exp(-s^2 / 2) * t * P(t) with t = 1 / (1 + 0.35 s), s = |x|; P: minimax fit of degree 8 on
// s in [0, 14.2] (mpmath's erfc), relative error 3e-7. The rounding of s^2 is taken back by one fma.
template <class Ops>
W4A8_INLINE typename Ops::F vec_gelu(typename Ops::F x) {
  using F = typename Ops::F;
  const F one = Ops::splat(1.0f);
  const F s = Ops::min(Ops::splat(14.2f), Ops::abs(x));
  const F t = Ops::div(one, Ops::fma(Ops::splat(0.35f), s, one));
  F p = Ops::splat(-0.02915784902870655f);
  p = Ops::fma(p, t, Ops::splat(0.14403074979782104f));
  p = Ops::fma(p, t, Ops::splat(-0.25583863258361816f));
  p = Ops::fma(p, t, Ops::splat(0.15931929647922516f));
  p = Ops::fma(p, t, Ops::splat(-0.023212091997265816f));
  p = Ops::fma(p, t, Ops::splat(0.10555239766836166f));
  p = Ops::fma(p, t, Ops::splat(0.11982131004333496f));
  p = Ops::fma(p, t, Ops::splat(0.1398635059595108f));
  p = Ops::fma(p, t, Ops::splat(0.139621302485466f));
  const F square = Ops::mul(s, s);
  const F lost = Ops::fma(s, s, Ops::neg(square));
  const F e = vec_exp<Ops>(Ops::mul(Ops::splat(-0.5f), square));
  const F corrected = Ops::fma(Ops::mul(Ops::splat(-0.5f), lost), e, e);
  const F tail = Ops::mul(Ops::mul(corrected, t), p);  // Phi(-s)
  // x >= 0: x - x * Phi(-x); else x * Phi(x).
  const F product = Ops::mul(x, tail);
  return Ops::select_less(x, Ops::splat(0.0f), product, Ops::sub(x, product));
}

template <class Ops>
W4A8_INLINE typename Ops::F vec_gelu_tanh(typename Ops::F x) {
  using F = typename Ops::F;
  const F cube = Ops::mul(Ops::mul(x, x), x);
  const F inner = Ops::fma(Ops::splat(0.044715f), cube, x);
  return vec_gate<Ops>(x, Ops::mul(Ops::splat(0x1.988454p+0f), inner));  // 2 * sqrt(2 / pi)
}

template <class Ops>
W4A8_INLINE typename Ops::F vec_clamp7(typename Ops::F u) {
  return Ops::max(Ops::splat(-7.0f), Ops::min(Ops::splat(7.0f), u));
}

template <class Ops, Activation kKind, bool kGated>
W4A8_INLINE typename Ops::F activation(typename Ops::F g, typename Ops::F u) {
  using F = typename Ops::F;
  const F seven = Ops::splat(7.0f);
  if constexpr (kKind == Activation::kSiluUpGate && kGated) {
    return Ops::mul(vec_gate<Ops>(u, u), g);
  } else if constexpr (kKind == Activation::kSwigluOai) {
    const F c = Ops::min(seven, g);
    const F gate = vec_gate<Ops>(c, Ops::mul(Ops::splat(1.702f), c));
    if constexpr (!kGated) return gate;
    return Ops::mul(gate, Ops::add(vec_clamp7<Ops>(u), Ops::splat(1.0f)));
  } else {
    F a;
    if constexpr (kKind == Activation::kSwigluStep) {
      a = Ops::min(seven, vec_gate<Ops>(g, g));
      u = vec_clamp7<Ops>(u);
    } else if constexpr (kKind == Activation::kGelu) {
      a = vec_gelu<Ops>(g);
    } else if constexpr (kKind == Activation::kGeluTanh) {
      a = vec_gelu_tanh<Ops>(g);
    } else if constexpr (kKind == Activation::kRelu2) {
      const F positive = Ops::max(Ops::splat(0.0f), g);
      a = Ops::mul(positive, positive);
    } else {
      a = vec_gate<Ops>(g, g);
    }
    if constexpr (!kGated) return a;
    return Ops::mul(a, u);
  }
}

template <class Ops, Activation kKind, bool kGated>
void activate_as(const float* g, const float* u, float* h, int64_t n) {
  constexpr int64_t kLanes = Ops::kLanes;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const typename Ops::F gv = Ops::load(g + i);
    Ops::store(h + i, activation<Ops, kKind, kGated>(gv, kGated ? Ops::load(u + i) : gv));
  }
  if (i == n) return;
  // The rest in one padded vector: what is behind the arrays is never touched.
  float gb[kLanes] = {};
  float ub[kLanes] = {};
  for (int64_t j = i; j < n; ++j) {
    gb[j - i] = g[j];
    if (kGated) ub[j - i] = u[j];
  }
  Ops::store(gb, activation<Ops, kKind, kGated>(Ops::load(gb), Ops::load(ub)));
  for (int64_t j = i; j < n; ++j) h[j] = gb[j - i];
}

template <class Ops, Activation kKind>
void activate_kind(const float* g, const float* u, float* h, int64_t n) {
  if (u != nullptr) {
    activate_as<Ops, kKind, true>(g, u, h, n);
  } else {
    activate_as<Ops, kKind, false>(g, u, h, n);
  }
}

template <class Ops>
void activate(Activation kind, const float* g, const float* u, float* h, int64_t n) {
  switch (kind) {
    case Activation::kSiluGateUp:
    case Activation::kSilu: return activate_kind<Ops, Activation::kSilu>(g, u, h, n);
    case Activation::kSiluUpGate: return activate_kind<Ops, Activation::kSiluUpGate>(g, u, h, n);
    case Activation::kSwigluOai: return activate_kind<Ops, Activation::kSwigluOai>(g, u, h, n);
    case Activation::kSwigluStep: return activate_kind<Ops, Activation::kSwigluStep>(g, u, h, n);
    case Activation::kGelu: return activate_kind<Ops, Activation::kGelu>(g, u, h, n);
    case Activation::kGeluTanh: return activate_kind<Ops, Activation::kGeluTanh>(g, u, h, n);
    case Activation::kRelu2: return activate_kind<Ops, Activation::kRelu2>(g, u, h, n);
  }
}
