// exp, the normal distribution function and the activations (docs/numerics.md section 5), once for all ISAs.
// Included inside a target region and an anonymous namespace; Ops is the ISA's vector type set.
#pragma once

// n = rint(x / ln 2) and r with exp(x) = 2^n * exp(r), |r| <= ln(2) / 2. Returns q with exp(r) = 1 + r + r^2 q. ln 2 is
// in two parts (Cody and Waite), the first with trailing zeros so that n times this part is exact. q: minimax fit.
template <class Ops>
W4A8_INLINE typename Ops::F exp_parts(typename Ops::F x, typename Ops::I& n, typename Ops::F& r) {
  using F = typename Ops::F;
  n = Ops::to_int(Ops::mul(x, Ops::splat(0x1.715476p+0f)));
  const F nf = Ops::to_float(n);
  r = Ops::fma(nf, Ops::splat(-0x1.62e4p-1f), x);
  r = Ops::fma(nf, Ops::splat(-0x1.7f7d1cp-20f), r);
  F q = Ops::splat(0x1.6c6b88p-10f);
  q = Ops::fma(q, r, Ops::splat(0x1.121022p-7f));
  q = Ops::fma(q, r, Ops::splat(0x1.5555bep-5f));
  q = Ops::fma(q, r, Ops::splat(0x1.5554d8p-3f));
  return Ops::fma(q, r, Ops::splat(0.5f));
}

// exp(x), relative error < 1.2e-7. Overflows to infinity, underflows through the denormals to 0.
template <class Ops>
W4A8_INLINE typename Ops::F vec_exp(typename Ops::F x) {
  using F = typename Ops::F;
  // At +-104 the result is infinity or 0 already. A NaN stays one: min and max return their second operand then.
  x = Ops::max(Ops::splat(-104.0f), Ops::min(Ops::splat(104.0f), x));
  typename Ops::I n;
  F r;
  const F q = exp_parts<Ops>(x, n, r);
  const F p = Ops::add(Ops::splat(1.0f), Ops::fma(Ops::mul(r, r), q, r));
  // 2^n in two factors, since n in [-150, 150] does not fit one exponent.
  const typename Ops::I half = Ops::template shift_right<1>(n);
  return Ops::mul(Ops::mul(p, Ops::pow2(half)), Ops::pow2(Ops::isub(n, half)));
}

// exp(x) - 1 for x <= 0, relative error < 2e-7: 2^n (exp(r) - 1) + (2^n - 1), the latter exact down to 2^-24.
template <class Ops>
W4A8_INLINE typename Ops::F vec_expm1(typename Ops::F x) {
  using F = typename Ops::F;
  typename Ops::I n;
  F r;
  const F q = exp_parts<Ops>(Ops::max(Ops::splat(-32.0f), x), n, r);  // -1 from -18 on
  const F power = Ops::pow2(n);
  return Ops::fma(Ops::fma(Ops::mul(r, r), q, r), power, Ops::sub(power, Ops::splat(1.0f)));
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

// alpha x^2 + x / 2 above 0, else beta (exp(x) - 1 - x) + x / 2, but for exp(x) next to 0.
template <class Ops>
W4A8_INLINE typename Ops::F vec_xielu(const Activation& activation, typename Ops::F x) {
  using F = typename Ops::F;
  const F half = Ops::mul(Ops::splat(0.5f), x);
  const F positive = Ops::fma(Ops::mul(Ops::splat(activation.alpha), x), x, half);
  const F exponential = vec_expm1<Ops>(Ops::min(Ops::splat(-1e-6f), x));
  const F negative = Ops::fma(Ops::splat(activation.beta), Ops::sub(exponential, x), half);
  return Ops::select_less(Ops::splat(0.0f), x, positive, negative);
}

// The factor of g alone. kKind: kGelu, kGeluTanh, kRelu2, kXielu, or kSilu for all others, which are one form with two
// limits, one of them infinite.
template <class Ops, ActivationKind kKind>
W4A8_INLINE typename Ops::F gate_factor(const Activation& activation, typename Ops::F g) {
  using F = typename Ops::F;
  if constexpr (kKind == ActivationKind::kGelu) {
    return vec_gelu<Ops>(g);
  } else if constexpr (kKind == ActivationKind::kGeluTanh) {
    return vec_gelu_tanh<Ops>(g);
  } else if constexpr (kKind == ActivationKind::kRelu2) {
    const F positive = Ops::max(Ops::splat(0.0f), g);
    return Ops::mul(positive, positive);
  } else if constexpr (kKind == ActivationKind::kXielu) {
    return vec_xielu<Ops>(activation, g);
  } else {
    constexpr float kNone = std::numeric_limits<float>::infinity();
    const bool behind = activation.kind == ActivationKind::kSwigluStep;
    const F c = Ops::min(Ops::splat(behind ? kNone : activation.limit), g);
    const F gate = vec_gate<Ops>(c, Ops::mul(Ops::splat(activation.alpha), c));
    return Ops::min(Ops::splat(behind ? activation.limit : kNone), gate);
  }
}

// n: whole vectors.
template <class Ops, ActivationKind kKind>
void activate_vectors(Activation activation, const float* g, const float* u, float* h, int64_t n) {
  using F = typename Ops::F;
  const F limit = Ops::splat(activation.limit);
  const F least = Ops::splat(-activation.limit);
  const F beta = Ops::splat(activation.beta);
  for (int64_t i = 0; i < n; i += Ops::kLanes) {
    F value = gate_factor<Ops, kKind>(activation, Ops::load(g + i));
    if (u != nullptr) {
      F up = Ops::load(u + i);
      if constexpr (kKind == ActivationKind::kSilu) up = Ops::add(Ops::max(least, Ops::min(limit, up)), beta);
      value = Ops::mul(value, up);
    }
    Ops::store(h + i, value);
  }
}

template <class Ops, ActivationKind kKind>
void activate_as(Activation activation, const float* g, const float* u, float* h, int64_t n) {
  constexpr int64_t kLanes = Ops::kLanes;
  const int64_t whole = n - n % kLanes;
  activate_vectors<Ops, kKind>(activation, g, u, h, whole);
  if (whole == n) return;
  // The rest in one padded vector: what is behind the arrays is never touched.
  float gb[kLanes] = {};
  float ub[kLanes] = {};
  for (int64_t i = whole; i < n; ++i) {
    gb[i - whole] = g[i];
    if (u != nullptr) ub[i - whole] = u[i];
  }
  activate_vectors<Ops, kKind>(activation, gb, u != nullptr ? ub : nullptr, gb, kLanes);
  for (int64_t i = whole; i < n; ++i) h[i] = gb[i - whole];
}

template <class Ops>
void activate(Activation activation, const float* g, const float* u, float* h, int64_t n) {
  switch (activation.kind) {
    case ActivationKind::kGelu: return activate_as<Ops, ActivationKind::kGelu>(activation, g, u, h, n);
    case ActivationKind::kGeluTanh: return activate_as<Ops, ActivationKind::kGeluTanh>(activation, g, u, h, n);
    case ActivationKind::kRelu2: return activate_as<Ops, ActivationKind::kRelu2>(activation, g, u, h, n);
    case ActivationKind::kXielu: return activate_as<Ops, ActivationKind::kXielu>(activation, g, u, h, n);
    case ActivationKind::kSiluUpGate:
      if (u != nullptr) return activate_as<Ops, ActivationKind::kSilu>(activation, u, g, h, n);
      [[fallthrough]];
    case ActivationKind::kSiluGateUp:
    case ActivationKind::kSilu:
    case ActivationKind::kSwigluOai:
    case ActivationKind::kSwigluStep: return activate_as<Ops, ActivationKind::kSilu>(activation, g, u, h, n);
  }
}
