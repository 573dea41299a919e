// Float weights to codes and scales (docs/numerics.md section 8): 16 groups at once, the same group of 16 rows,
// one to a lane. Every lane adds in the order of k and no sum goes across lanes, so the width of the registers changes
// no bit. Included inside a target region and an anonymous namespace.
//
//   u     a group's weights over a power of two, [group, 16]: the largest magnitude is in [1, 2)
//   i     what an error counts, [group, 16]
//   q     values of the codes, u ~ f q
//
// For fixed q the best factor is f = sum(i u q) / sum(i q q), which leaves sum(i u u) - sum(i u q)^2 / sum(i q q).
#pragma once

#include "kernels/rows-inl.h"

constexpr int64_t kGroupLanes = kPanelColumns;
// A float between 2^23 and 2^24 has no fraction bits: x + kShift - kShift is rint(x) for |x| < 2^22.
constexpr float kShift = 0x1.8p23f;

struct alignas(64) LaneFloats {
  float v[kGroupLanes];
};

// Multiples begin + j * step, j < count, of the rule's 1 / scale to be tried; all of them are exact. A negative one
// turns the sign of the scale.
struct Ladder {
  float begin;
  float step;
  int count;
};

// What a search tries. Long groups have outliers, which it may pay to cut off.
struct Ladders {
  Ladder ladder[2];
  bool neighbours;  // of the best zero point as well
  int refits;       // times that the best factor for the best codes is tried in turn

  W4A8_INLINE int count() const { return ladder[0].count + ladder[1].count; }
  W4A8_INLINE float at(int j) const {
    const Ladder& part = ladder[j < ladder[0].count ? 0 : 1];
    return part.begin + part.step * static_cast<float>(j < ladder[0].count ? j : j - ladder[0].count);
  }
};

constexpr int64_t kLongGroup = 129;

constexpr Ladders ladders_of(WeightKind kind, int effort, bool is_long) {
  const bool quick = effort == 1;
  if (kind == kInt4) {
    if (is_long) {
      return quick ? Ladders{{{1, 0.25f, 6}, {-0.875f, -0.25f, 6}}, false, 2}
                   : Ladders{{{0.9375f, 0.125f, 18}, {-0.875f, -0.125f, 18}}, false, 2};
    }
    return quick ? Ladders{{{1, 0.125f, 3}, {-0.875f, -0.125f, 3}}, false, 1}
                 : Ladders{{{0.875f, 0.0625f, 13}, {-0.8125f, -0.0625f, 13}}, false, 2};
  }
  if (kind == kInt4ZeroPoints) {
    if (is_long) {
      return quick ? Ladders{{{0.875f, 0.0625f, 6}, {1.4375f, 0.25f, 4}}, true, 1}
                   : Ladders{{{0.8125f, 0.0625f, 8}, {1.375f, 0.125f, 14}}, true, 2};
    }
    return quick ? Ladders{{{0.875f, 0.0625f, 8}, {}}, false, 1}
                 : Ladders{{{0.8125f, 0.03125f, 13}, {1.25f, 0.125f, 5}}, true, 2};
  }
  if (kind == kE2M1) {
    if (is_long) {
      return quick ? Ladders{{{0.625f, 0.25f, 8}, {}}, false, 2} : Ladders{{{0.625f, 0.125f, 20}, {}}, false, 2};
    }
    return quick ? Ladders{{{0.6875f, 0.0625f, 8}, {}}, false, 1} : Ladders{{{0.625f, 0.0625f, 18}, {}}, false, 2};
  }
  // The multiple that makes the peak the largest code instead of the least one.
  const float turned = kind == kInt6 ? -0.96875f : -0.9921875f;
  return quick ? Ladders{{{1, 0.125f, 1}, {turned, -0.125f, 1}}, false, 1}
               : Ladders{{{1, 0.0625f, 5}, {turned, -0.0625f, 5}}, false, 2};
}

// The zero point of symmetric integers, and the largest code: 8 and 15, 32 and 63, 128 and 255.
constexpr float middle_code(WeightKind kind) { return static_cast<float>(counts_from({kind.values})); }
constexpr float largest_code(WeightKind kind) { return 2.0f * middle_code(kind) - 1.0f; }

// What weights are rounded to, once they are multiplied: integers from -zero to largest - zero, with both ends plus
// kShift; or the numbers of e2m1. Integers of all sizes share the code.
template <class Ops, bool kE2M1Values>
struct Grid {
  using F = typename Ops::F;
  F low;
  F high;

  static W4A8_INLINE Grid of(WeightKind kind, F zero) {
    return {Ops::sub(Ops::splat(kShift), zero), Ops::sub(Ops::splat(kShift + largest_code(kind)), zero)};
  }
  // The nearest to v, |v| < 2^22: ties to the even integer, or the even code of e2m1.
  W4A8_INLINE F nearest(F v) const {
    if constexpr (kE2M1Values) {
      // Steps of 0.5 below 2, 1 below 4, 2 above.
      const F size = Ops::abs(v);
      const F upper = Ops::select_less(size, Ops::splat(4.0f), Ops::splat(kShift), Ops::splat(2.0f * kShift));
      const F shift = Ops::select_less(size, Ops::splat(2.0f), Ops::splat(0.5f * kShift), upper);
      const F q = Ops::sub(Ops::add(v, shift), shift);
      return Ops::min(Ops::splat(6.0f), Ops::max(Ops::splat(-6.0f), q));
    } else {
      return clamped(Ops::add(v, Ops::splat(kShift)));
    }
  }
  // nearest(u * inverse); the product of integers is not rounded before.
  W4A8_INLINE F nearest_product(F u, F inverse) const {
    if constexpr (kE2M1Values) {
      return nearest(Ops::mul(u, inverse));
    } else {
      return clamped(Ops::fma(u, inverse, Ops::splat(kShift)));
    }
  }

 private:
  W4A8_INLINE F clamped(F shifted) const {
    return Ops::sub(Ops::min(high, Ops::max(low, shifted)), Ops::splat(kShift));
  }
};

// The codes of values: q + zero, or of e2m1 the four bits.
template <class Ops, bool kE2M1Values>
W4A8_INLINE typename Ops::F code_of(typename Ops::F q, typename Ops::F zero) {
  using F = typename Ops::F;
  if constexpr (kE2M1Values) {
    // Twice the size, 0 to 4, 6, 8, 12, is the code up to 4; half of it and 2 above (8, for 12, is one too many).
    const F twice = Ops::abs(Ops::add(q, q));
    const F above = Ops::min(Ops::splat(7.0f), Ops::fma(twice, Ops::splat(0.5f), Ops::splat(2.0f)));
    const F size = Ops::min(twice, above);
    return Ops::select_less(q, Ops::splat(0.0f), Ops::add(size, Ops::splat(8.0f)), size);
  } else {
    return Ops::add(q, zero);
  }
}

// The best of what was tried, for each lane.
struct BestTry {
  LaneFloats gain;    // sum(i u q)^2 / sum(i q q)
  LaneFloats factor;  // f
  LaneFloats zero;
};

struct Try {
  LaneFloats inverse;
  LaneFloats zero;
};

// Rounds u to the grid at each of some inverse factors and keeps the best.
template <class Ops, bool kE2M1Values, int kTries>
void attempt(const GroupsToRound& task, const float* u, const float* counts, const Try (&tries)[2], BestTry* best) {
  using F = typename Ops::F;
  constexpr int kVecs = kGroupLanes / Ops::kLanes;
  for (int v = 0; v < kVecs; ++v) {
    const int64_t lane = v * Ops::kLanes;
    F inverse[kTries];
    F a[kTries];
    F b[kTries];
    Grid<Ops, kE2M1Values> grid[kTries];
    for (int t = 0; t < kTries; ++t) {
      inverse[t] = Ops::load(tries[t].inverse.v + lane);
      grid[t] = Grid<Ops, kE2M1Values>::of(task.kind, Ops::load(tries[t].zero.v + lane));
      a[t] = b[t] = Ops::splat(0.0f);
    }
    for (int64_t k = 0; k < task.group; ++k) {
      const F x = Ops::load(u + k * kGroupLanes + lane);
      const F i = Ops::load(counts + k * kGroupLanes + lane);
#pragma GCC unroll 2
      for (int t = 0; t < kTries; ++t) {
        const F q = grid[t].nearest_product(x, inverse[t]);
        const F iq = Ops::mul(q, i);
        a[t] = Ops::fma(x, iq, a[t]);
        b[t] = Ops::fma(q, iq, b[t]);
      }
    }
    for (int t = 0; t < kTries; ++t) {
      const F gain = Ops::div(Ops::mul(a[t], a[t]), b[t]);  // NaN where all of q is 0, and then not larger
      const F before = Ops::load(best->gain.v + lane);
      const F factor = Ops::load(best->factor.v + lane);
      const F zero = Ops::load(best->zero.v + lane);
      Ops::store(best->gain.v + lane, Ops::select_less(before, gain, gain, before));
      Ops::store(best->factor.v + lane, Ops::select_less(before, gain, Ops::div(a[t], b[t]), factor));
      Ops::store(best->zero.v + lane, Ops::select_less(before, gain, Ops::load(tries[t].zero.v + lane), zero));
    }
  }
}

// sum(i (u - f q)^2) of rounding with a factor and a zero point, for each lane.
template <class Ops, bool kE2M1Values>
void lost_by(const GroupsToRound& task, const float* u, const float* counts, const LaneFloats& factor,
             const LaneFloats& zero, LaneFloats* lost) {
  using F = typename Ops::F;
  for (int64_t lane = 0; lane < kGroupLanes; lane += Ops::kLanes) {
    const F f = Ops::load(factor.v + lane);
    const auto grid = Grid<Ops, kE2M1Values>::of(task.kind, Ops::load(zero.v + lane));
    F sum = Ops::splat(0.0f);
    for (int64_t k = 0; k < task.group; ++k) {
      const F x = Ops::load(u + k * kGroupLanes + lane);
      const F error = Ops::fma(Ops::neg(grid.nearest(Ops::div(x, f))), f, x);
      sum = Ops::fma(error, Ops::mul(error, Ops::load(counts + k * kGroupLanes + lane)), sum);
    }
    Ops::store(lost->v + lane, sum);
  }
}

// 2^exponent, exponent in [-1022, 1023]: a double, since a float lacks the inverses of the least denormals.
static inline double power_of_two(int exponent) {
  return __builtin_bit_cast(double, static_cast<uint64_t>(exponent + 1023) << 52);
}
static inline int exponent_of(float x) {  // not 0; denormals too
  return static_cast<int>(__builtin_bit_cast(uint64_t, static_cast<double>(x)) >> 52 & 0x7ff) - 1023;
}
static inline float in_scale_type(float x, ScaleType type) {
  return type == ScaleType::kFloat32 ? x : w4a8::bits_float(static_cast<uint32_t>(bfloat16_from_float(x)) << 16);
}
// f * 2^exponent as it is kept. The operators need halves of e2m1's scales to be exact: of denormals, the even ones.
static inline float stored_scale(float f, int exponent, ScaleType type, WeightKind kind) {
  const auto scale = static_cast<float>(f * power_of_two(exponent));
  if (kind == kE2M1) return 2.0f * in_scale_type(0.5f * in_scale_type(scale, type), type);
  return in_scale_type(scale, type);
}

// One group of 16 rows on its way.
struct GroupState {
  LaneFloats low;   // least weight or 0, of the group; later of u
  LaneFloats high;  // largest weight or 0
  LaneFloats peak;  // the first weight of largest magnitude; later of u
  int exponent[kGroupLanes];
  LaneFloats scale;   // of the rule, as it is kept
  LaneFloats factor;  // the same, for u
  LaneFloats zero;    // of the rule
};

// Weights [rows, group] to [group, 16] of float32, zeros for missing rows. False: one is not finite.
template <class Ops, DType kType>
bool load_groups(const GroupsToRound& task, float* u) {
  using F = typename Ops::F;
  constexpr int64_t kLanes = Ops::kLanes;
  const F zero = Ops::splat(0.0f);
  F finite = zero;  // becomes NaN with the first NaN or infinity, since 0 * inf is NaN
  for (int64_t r = 0; r < kGroupLanes; ++r) {
    if (r >= task.rows) {
      for (int64_t k = 0; k < task.group; ++k) u[k * kGroupLanes + r] = 0.0f;
      continue;
    }
    const auto* first = static_cast<const uint8_t*>(task.weights) + r * task.stride * dtype_bytes(kType);
    const RowLoader<Ops, kType> row{first};
    for (int64_t k = 0; k < task.group; k += kLanes) {
      const int64_t count = task.group - k < kLanes ? task.group - k : kLanes;
      const F x = count == kLanes ? row.full(k) : row.part(k, count);
      finite = Ops::fma(x, zero, finite);
      float lanes[kLanes];
      Ops::store(lanes, x);
      for (int64_t j = 0; j < count; ++j) u[(k + j) * kGroupLanes + r] = lanes[j];
    }
  }
  return is_zero<Ops>(finite);
}

template <class Ops>
void find_extremes(const float* u, int64_t group, GroupState* state) {
  using F = typename Ops::F;
  for (int64_t lane = 0; lane < kGroupLanes; lane += Ops::kLanes) {
    F low = Ops::splat(0.0f);
    F high = low;
    F peak = low;
    for (int64_t k = 0; k < group; ++k) {
      const F x = Ops::load(u + k * kGroupLanes + lane);
      low = Ops::min(low, x);
      high = Ops::max(high, x);
      peak = Ops::select_less(Ops::abs(peak), Ops::abs(x), x, peak);
    }
    Ops::store(state->low.v + lane, low);
    Ops::store(state->high.v + lane, high);
    Ops::store(state->peak.v + lane, peak);
  }
}

// Scale and zero point by the rule, and u. A group whose scale is too small to be kept becomes zeros with a scale of 1.
template <class Ops>
void apply_rule(const GroupsToRound& task, float* u, GroupState* state) {
  find_extremes<Ops>(u, task.group, state);
  LaneFloats first;
  LaneFloats second;
  for (int64_t i = 0; i < kGroupLanes; ++i) {
    float scale = 0.0f;
    float& low = state->low.v[i];
    float& high = state->high.v[i];
    float& peak = state->peak.v[i];
    int& e = state->exponent[i];
    e = peak == 0.0f ? 0 : exponent_of(peak);
    const double inverse = power_of_two(-e);
    low = static_cast<float>(low * inverse);
    high = static_cast<float>(high * inverse);
    peak = static_cast<float>(peak * inverse);
    float factor = -peak / middle_code(task.kind);  // the peak becomes the least value
    if (task.kind == kE2M1) factor = (peak < 0.0f ? -peak : peak) / 6.0f;
    if (task.kind.zero_points) factor = high / 15.0f - low / 15.0f;
    scale = stored_scale(factor, e, task.scale_type, task.kind);
    first.v[i] = static_cast<float>(power_of_two(-(e / 2)));
    second.v[i] = static_cast<float>(power_of_two(-(e - e / 2)));
    if (scale == 0.0f) {
      e = 0;
      scale = 1.0f;
      low = high = first.v[i] = 0.0f;
    }
    state->scale.v[i] = scale;
    state->factor.v[i] = static_cast<float>(scale * power_of_two(-e));
    const float zero = (-low / state->factor.v[i] + kShift) - kShift;
    state->zero.v[i] = !task.kind.zero_points ? middle_code(task.kind) : zero > 15.0f ? 15.0f : zero;
  }
  using F = typename Ops::F;
  for (int64_t lane = 0; lane < kGroupLanes; lane += Ops::kLanes) {
    const F a = Ops::load(first.v + lane);
    const F b = Ops::load(second.v + lane);
    for (int64_t k = 0; k < task.group; ++k) {
      float* x = u + k * kGroupLanes + lane;
      Ops::store(x, Ops::mul(Ops::mul(Ops::load(x), a), b));
    }
  }
}

// 0..15, of a zero point that need not be an integer.
template <class Ops>
W4A8_INLINE typename Ops::F zero_point_of(typename Ops::F x) {
  const typename Ops::F zero = Ops::sub(Ops::add(x, Ops::splat(kShift)), Ops::splat(kShift));
  return Ops::min(Ops::splat(15.0f), Ops::max(Ops::splat(0.0f), zero));
}

// The multiple t of the rule's 1 / scale. Of zero points the one that cuts off as much at both ends.
template <class Ops>
W4A8_INLINE void set_try(WeightKind kind, const GroupState& state, float t, Try* out) {
  using F = typename Ops::F;
  for (int64_t lane = 0; lane < kGroupLanes; lane += Ops::kLanes) {
    const F inverse = Ops::div(Ops::splat(1.0f), Ops::load(state.factor.v + lane));
    F zero = Ops::load(state.zero.v + lane);
    if (kind.zero_points) {
      const F ends = Ops::add(Ops::load(state.low.v + lane), Ops::load(state.high.v + lane));
      const F middle = Ops::mul(ends, Ops::mul(Ops::splat(0.5f), inverse));
      zero = zero_point_of<Ops>(Ops::sub(Ops::splat(7.5f), Ops::mul(middle, Ops::splat(t))));
    }
    Ops::store(out->inverse.v + lane, Ops::mul(Ops::splat(t), inverse));
    Ops::store(out->zero.v + lane, zero);
  }
}

// The best factor for the best codes, with another zero point if it is `step` off.
template <class Ops>
W4A8_INLINE void set_refit(WeightKind kind, const BestTry& best, float step, Try* out) {
  using F = typename Ops::F;
  for (int64_t lane = 0; lane < kGroupLanes; lane += Ops::kLanes) {
    const F zero = Ops::add(Ops::load(best.zero.v + lane), Ops::splat(step));
    Ops::store(out->inverse.v + lane, Ops::div(Ops::splat(1.0f), Ops::load(best.factor.v + lane)));
    Ops::store(out->zero.v + lane, kind.zero_points ? zero_point_of<Ops>(zero) : zero);
  }
}

// Puts a better scale and zero point into `state`, where there is one.
template <class Ops, bool kE2M1Values>
void search(const GroupsToRound& task, const float* u, const float* counts, GroupState* state) {
  const Ladders ladders = ladders_of(task.kind, task.effort, task.group >= kLongGroup);
  BestTry best = {{}, state->factor, state->zero};
  Try tries[2];
  const int count = ladders.count();
  for (int j = 0; j < count; j += 2) {
    set_try<Ops>(task.kind, *state, ladders.at(j), &tries[0]);
    set_try<Ops>(task.kind, *state, ladders.at(j + 1 < count ? j + 1 : j), &tries[1]);
    attempt<Ops, kE2M1Values, 2>(task, u, counts, tries, &best);
  }
  if (ladders.neighbours) {
    set_refit<Ops>(task.kind, best, -1.0f, &tries[0]);
    set_refit<Ops>(task.kind, best, 1.0f, &tries[1]);
    attempt<Ops, kE2M1Values, 2>(task, u, counts, tries, &best);
  }
  for (int j = 0; j < ladders.refits; ++j) {
    set_refit<Ops>(task.kind, best, 0.0f, &tries[0]);
    attempt<Ops, kE2M1Values, 1>(task, u, counts, tries, &best);
  }
  LaneFloats scale;
  for (int64_t i = 0; i < kGroupLanes; ++i) {
    const int e = state->exponent[i];
    scale.v[i] = stored_scale(best.factor.v[i], e, task.scale_type, task.kind);
    best.factor.v[i] = scale.v[i] == 0.0f ? state->factor.v[i] : static_cast<float>(scale.v[i] * power_of_two(-e));
  }
  LaneFloats before;
  LaneFloats after;
  lost_by<Ops, kE2M1Values>(task, u, counts, state->factor, state->zero, &before);
  lost_by<Ops, kE2M1Values>(task, u, counts, best.factor, best.zero, &after);
  // Either sum is within group + 8 roundings of what is lost, so what seems less by this much is less.
  const float share = 1.0f - static_cast<float>(task.group + 64) * 0x1p-23f;
  for (int64_t i = 0; i < kGroupLanes; ++i) {
    if (!(after.v[i] < before.v[i] * share - 0x1p-100f) || scale.v[i] == 0.0f) continue;
    state->scale.v[i] = scale.v[i];
    state->factor.v[i] = best.factor.v[i];
    state->zero.v[i] = best.zero.v[i];
  }
}

// Codes as they are kept, [rows, bytes of a group]; `bytes` holds [bytes of a group, 16] meanwhile.
template <class Ops, bool kE2M1Values>
void store_codes(const GroupsToRound& task, const float* u, const GroupState& state, int8_t* bytes) {
  using F = typename Ops::F;
  const int64_t in_byte = are_nibbles(task.kind.values) ? 2 : 1;
  const int64_t count = task.group / in_byte;
  for (int64_t lane = 0; lane < kGroupLanes; lane += Ops::kLanes) {
    const F factor = Ops::load(state.factor.v + lane);
    const F zero = Ops::load(state.zero.v + lane);
    const auto grid = Grid<Ops, kE2M1Values>::of(task.kind, zero);
    for (int64_t j = 0; j < count; ++j) {
      const float* x = u + j * in_byte * kGroupLanes + lane;
      F code = code_of<Ops, kE2M1Values>(grid.nearest(Ops::div(Ops::load(x), factor)), zero);
      if (in_byte == 2) {
        const F odd = grid.nearest(Ops::div(Ops::load(x + kGroupLanes), factor));
        code = Ops::fma(code_of<Ops, kE2M1Values>(odd, zero), Ops::splat(16.0f), code);
      }
      // 128..255 become -128..-1, the same byte: store_int8 may saturate.
      code = Ops::select_less(Ops::splat(127.0f), code, Ops::sub(code, Ops::splat(256.0f)), code);
      Ops::store_int8(bytes + j * kGroupLanes + lane, Ops::to_int(code));
    }
  }
  for (int64_t r = 0; r < task.rows; ++r) {
    uint8_t* row = task.codes + r * task.codes_stride;
    for (int64_t j = 0; j < count; ++j) row[j] = static_cast<uint8_t>(bytes[j * kGroupLanes + r]);
  }
}

// An error counts the importance of its k, over a power of two so that the largest is in [1, 2). False: there is none,
// or all of it is 0.
inline bool take_importance(const GroupsToRound& task, float* counts) {
  if (task.importance == nullptr) return false;
  float most = 0.0f;
  for (int64_t k = 0; k < task.group; ++k) most = task.importance[k] > most ? task.importance[k] : most;
  if (most == 0.0f) return false;
  const double factor = power_of_two(-exponent_of(most));
  for (int64_t k = 0; k < task.group; ++k) {
    const auto count = static_cast<float>(task.importance[k] * factor);
    for (int64_t lane = 0; lane < kGroupLanes; ++lane) counts[k * kGroupLanes + lane] = count;
  }
  return true;
}

// Or |u| + the root of the mean of u u: large weights matter more than the square of an error says.
template <class Ops>
void take_magnitudes(const float* u, int64_t group, float* counts) {
  using F = typename Ops::F;
  for (int64_t lane = 0; lane < kGroupLanes; lane += Ops::kLanes) {
    F squares = Ops::splat(0.0f);
    for (int64_t k = 0; k < group; ++k) {
      const F x = Ops::load(u + k * kGroupLanes + lane);
      squares = Ops::fma(x, x, squares);
    }
    float roots[Ops::kLanes];
    Ops::store(roots, Ops::div(squares, Ops::splat(static_cast<float>(group))));
    for (float& each : roots) each = std::sqrt(each);
    const F root = Ops::load(roots);
    for (int64_t k = 0; k < group; ++k) {
      const int64_t at = k * kGroupLanes + lane;
      Ops::store(counts + at, Ops::add(Ops::abs(Ops::load(u + at)), root));
    }
  }
}

template <class Ops, bool kE2M1Values>
void round_groups_as(GroupsToRound& task) {
  float* u = task.scratch;
  float* counts = u + kGroupLanes * task.group;
  auto* bytes = reinterpret_cast<int8_t*>(counts + kGroupLanes * task.group);
  with_dtype(task.dtype, [&]<DType kType>() { task.finite = load_groups<Ops, kType>(task, u); });
  if (!task.finite) return;
  GroupState state;
  apply_rule<Ops>(task, u, &state);
  if (task.effort > 0) {
    if (!take_importance(task, counts)) take_magnitudes<Ops>(u, task.group, counts);
    search<Ops, kE2M1Values>(task, u, counts, &state);
  }
  store_codes<Ops, kE2M1Values>(task, u, state, bytes);
  for (int64_t r = 0; r < task.rows; ++r) {
    if (task.scale_type == ScaleType::kFloat32) {
      static_cast<float*>(task.scales)[r * task.scales_stride] = state.scale.v[r];
    } else {
      static_cast<uint16_t*>(task.scales)[r * task.scales_stride] = bfloat16_from_float(state.scale.v[r]);
    }
    if (task.kind.zero_points) {
      task.zero_points[r * task.scales_stride] = static_cast<uint8_t>(state.zero.v[r]);
    }
  }
}

template <class Ops>
void round_groups(GroupsToRound& task) {
  if (task.kind == kE2M1) return round_groups_as<Ops, true>(task);
  round_groups_as<Ops, false>(task);
}
