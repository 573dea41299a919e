// The matrix tile's loops over groups: where a sum of int32 becomes float and meets its scales.
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/tile_args-inl.h"

// Whether a loop over groups starts at t.zeros: where registers are scarce it has a loop of its own, since a branch in
// it makes GCC spill more for the others.
enum class Zeros { kNone, kAll, kAsk };

// Only groups of the least size have scales of e5m3, and only e2m1 values in others those of e8m0: constants of their
// conversion would take registers from all others in the loop.
template <class Ops, Code kCode, int64_t kGroupSteps, class Walk>
W4A8_INLINE typename Ops::F load_group_scales(const Walk& walk, int c, int64_t i, ScaleType type) {
  const uint8_t* scales = walk.scales(c);
  if constexpr (!is_packed(kCode)) {
    return Ops::load_bytes(scales + 4 * i);
  } else if (!is_e2m1(kCode) && type == ScaleType::kSuper) {
    return load_super_scales<Ops>(scales, load_supers<Ops>(walk.supers(c), i), i);
  } else if constexpr (kGroupSteps == kLeastGroupSteps) {
    return type == ScaleType::kE5M3 ? load_e5m3<Ops>(scales, i) : load_float_scales<Ops>(scales, i, type);
  } else if constexpr (kCode == Code::kE2M1) {
    return type == ScaleType::kE8M0 ? load_half_e8m0<Ops>(scales, i) : load_float_scales<Ops>(scales, i, type);
  } else {
    return load_float_scales<Ops>(scales, i, type);
  }
}

// Walks through the records of C packed panels, group by group.
template <int C, Code kCode>
struct Records {
  const uint8_t* weights[C];  // step s of K, if it is of this record, is at weights[c] + s * step_bytes(kCode)
  int64_t scales_at;          // bytes from weights[c] to the scales of the group: pointers would cost decode more
  int64_t zeros_at;           // bytes from weights[c] to the zero points of the group
  int64_t left;               // groups of the record from this one on
  int64_t scale_line;
  int64_t scales_gap;  // what scales_at and zeros_at grow by from record to record, besides
  int64_t zeros_gap;
  int64_t head_bytes;
  int64_t record_groups;

  W4A8_INLINE Records(const PanelLayout& p, const uint8_t* const (&first)[C])
      : scales_at(-p.head_bytes),
        zeros_at(p.zeros_offset - p.head_bytes),
        left(p.record_groups),
        scale_line(p.scale_line),
        scales_gap(p.record_groups * (p.group_steps * step_bytes(kCode) - p.scale_line)),
        zeros_gap(p.record_groups * (p.group_steps * step_bytes(kCode) - kPanelColumns)),
        head_bytes(p.head_bytes),
        record_groups(p.record_groups) {
    for_each<C>([&](int c) W4A8_LAMBDA { weights[c] = first[c]; });
  }
  W4A8_INLINE const uint8_t* scales(int c) const { return weights[c] + scales_at; }
  // The super-scales, behind the scales of all groups of the record.
  W4A8_INLINE const uint8_t* supers(int c) const { return scales(c) + left * scale_line; }
  // Returns whether the next group begins a record.
  W4A8_INLINE bool next() {
    scales_at += scale_line;
    zeros_at += kPanelColumns;
    if (--left != 0) return false;
    left = record_groups;
    scales_at += scales_gap;
    zeros_at += zeros_gap;
    for_each<C>([&](int c) W4A8_LAMBDA { weights[c] += head_bytes; });
    return true;
  }
};

// Walks through the groups of C unpacked panels.
template <int C>
struct UnpackedGroups {
  const uint8_t* weights[C];
  int64_t scales_at = 0;
  int64_t zeros_at = 0;
  const TileArgs& t;

  W4A8_INLINE UnpackedGroups(const TileArgs& t, const uint8_t* const (&first)[C]) : t(t) {
    for_each<C>([&](int c) W4A8_LAMBDA { weights[c] = first[c]; });
  }
  W4A8_INLINE const uint8_t* scales(int c) const { return t.scales + c * t.scales_stride + scales_at; }
  W4A8_INLINE bool next() {
    scales_at += 4 * kPanelColumns;
    zeros_at += t.zeros_step;
    return false;
  }
};

template <int C, Code kCode>
W4A8_INLINE auto walk_groups(const TileArgs& t, const uint8_t* const (&weights)[C]) {
  if constexpr (is_packed(kCode)) {
    return Records<C, kCode>(*t.panels, weights);
  } else {
    return UnpackedGroups<C>(t, weights);
  }
}

// acc = the sum over the steps [begin, end), which are of one part, and kSumBits if kScaled. kSteps: unrolled ones.
// kSmall: start_at_zeros.
template <class Ops, int R, int C, Code kCode, Zeros kZeros, bool kScaled, int64_t kSteps, bool kSmall, class Walk>
W4A8_INLINE void sum_part(const TileArgs& t, const int8_t* const (&rows)[R], const Walk& walk, int64_t part,
                          int64_t begin, int64_t end, const uint8_t* fetch, typename Ops::I (&acc)[R][C][Ops::kVecs]) {
  const auto start_zeros = [&]<bool kAdded>() W4A8_LAMBDA {
    const uint8_t* zeros[C];
    for_each<C>([&](int c) W4A8_LAMBDA {
      zeros[c] = (is_packed(kCode) ? walk.weights[c] : t.zeros + c * t.zeros_stride) + walk.zeros_at;
    });
    start_at_zeros<Ops, R, C, kCode, kScaled, kAdded, kSmall>(t, zeros, part, acc);
  };
  if constexpr (kZeros == Zeros::kAll) {
    fill(acc, Ops::isplat(kScaled ? kSumBits : 0));
  } else if (kZeros == Zeros::kAsk && t.zeros != nullptr) {
    start_zeros.template operator()<false>();
  } else {
    start_accumulators<Ops, R, C, kCode, kScaled>(t, part, acc);
  }
  Ops::template accumulate<R, C, kCode, kSteps>(acc, rows, walk.weights, begin, end, fetch);
  if constexpr (kZeros == Zeros::kAll) start_zeros.template operator()<true>();
}

// The sum of a part that started at kSumBits.
template <class Ops>
W4A8_INLINE typename Ops::F counted_sum(typename Ops::I acc) {
  return Ops::sub(Ops::float_bits(acc), Ops::splat(kSumFloat));
}

// A sum that started at kSumBits as a float, times the scale of its activations. The fma takes kSumFloat off and rounds
// once: the result is float(sum) times the scale.
template <class Ops>
W4A8_INLINE typename Ops::F scaled_sum(typename Ops::I acc, const float* scale, const float* shift) {
  if constexpr (!Ops::kFusesShifts) return Ops::mul(counted_sum<Ops>(acc), Ops::splat(*scale));
  return Ops::fma(Ops::float_bits(acc), Ops::splat(*scale), Ops::splat(*shift));
}

// The sum of a part as a float, times the scale of its activations if kScaled.
template <class Ops, bool kScaled>
W4A8_INLINE typename Ops::F part_value(const TileArgs& t, typename Ops::I acc, int r, int64_t part) {
  if constexpr (!kScaled) return Ops::to_float(acc);
  const int64_t at = part * t.row_scales_stride + r;
  return scaled_sum<Ops>(acc, t.row_scales + at, t.row_shifts + at);
}

// f = fma(part_value, scale, f), group by group. kGroupSteps: steps of a group, 0 if known at run time only.
template <class Ops, int R, int C, Code kCode, Zeros kZeros, bool kScaled, int64_t kGroupSteps>
W4A8_INLINE void add_groups(const TileArgs& all, const int8_t* const (&rows)[R], const uint8_t* const (&first)[C],
                            typename Ops::F (&f)[R][C][Ops::kVecs]) {
  using F = typename Ops::F;
  constexpr bool kMayStream = may_stream<Ops, R, C>();
  constexpr bool kSmall = kScaled || kGroupSteps != 0;
  const Panels& p = *all.panels;
  const int64_t group_steps = kGroupSteps != 0 ? kGroupSteps : p.group_steps;
  const int64_t group_bytes = C * group_steps * step_bytes(kCode);
  const uint8_t* fetch = all.fetch;
  auto walk = walk_groups<C, kCode>(all, first);
  for (int64_t group = 0, step = 0; step < all.steps; ++group, step += group_steps) {
    // Unpacked since ports for arithmetic are scarce: members are read again. GCC would keep what the other registers
    // cannot hold in spare vector registers, and taking it from there costs such a port.
    const TileArgs* again = &all;
    if constexpr (!is_packed(kCode) && Ops::kReloadsStarts) __asm__("" : "+r"(again));
    const TileArgs& t = *again;
    typename Ops::I acc[R][C][Ops::kVecs];
    sum_part<Ops, R, C, kCode, kZeros, kScaled, unrolled(kGroupSteps), kSmall>(t, rows, walk, group, step,
                                                                               step + group_steps, fetch, acc);
    if (is_packed(kCode) && (!kMayStream || fetch != nullptr)) fetch += group_bytes;
    for_each<C>([&](int c) W4A8_LAMBDA {
      for_each<Ops::kVecs>([&](int v) W4A8_LAMBDA {
        const F scale = load_group_scales<Ops, kCode, kGroupSteps>(walk, c, v * Ops::kLanes, p.scale_type);
        for_each<R>([&](int r) W4A8_LAMBDA {
          f[r][c][v] = Ops::fma(part_value<Ops, kScaled>(t, acc[r][c][v], r, group), scale, f[r][c][v]);
        });
      });
    });
    if (walk.next()) fetch = fetch_until<kMayStream>(fetch, fetch + C * p.head_bytes);
  }
  if constexpr (is_packed(kCode)) fetch_until<kMayStream>(fetch, all.fetch + C * p.panel_bytes);
}

// Where the sums over groups are while the parts of one are added up. Accumulators and the sums over parts come first:
// if registers are full of them, GCC is not told that `sums` is `f`, so that it leaves f in memory, at one address.
template <class Ops, int R, int C>
W4A8_INLINE typename Ops::F* sums_beside_parts(typename Ops::F (&f)[R][C][Ops::kVecs]) {
  constexpr int kFree = (Ops::kSpareRegisters ? 32 : 16) - 7;
  typename Ops::F* sums = &f[0][0][0];
  if constexpr (3 * R * C * Ops::kVecs > kFree) __asm__("" : "+r"(sums) : : "memory");
  return sums;
}

// p = fma(float(acc), row scale, p), part by part; f = fma(p, scale, f), group by group. All of K channelwise is one
// group, whose p is in f between chunks.
template <class Ops, int R, int C, Code kCode, Zeros kZeros, int64_t kPartSteps>
W4A8_INLINE void add_parts(const TileArgs& t, const int8_t* const (&rows)[R], const uint8_t* const (&first)[C],
                           typename Ops::F (&f)[R][C][Ops::kVecs]) {
  using F = typename Ops::F;
  constexpr bool kMayStream = may_stream<Ops, R, C>();
  const Panels& layout = *t.panels;
  const int64_t part_steps = kPartSteps != 0 ? kPartSteps : layout.part_steps;
  const int64_t part_bytes = C * part_steps * step_bytes(kCode);
  const uint8_t* fetch = t.fetch;
  auto walk = walk_groups<C, kCode>(t, first);
  F p[R][C][Ops::kVecs];
  fill(p, Ops::splat(0.0f));
  if (layout.channelwise) {
    for_each<R, C, Ops::kVecs>([&](int r, int c, int v) W4A8_LAMBDA { p[r][c][v] = f[r][c][v]; });
    fill(f, Ops::splat(0.0f));
  }
  F* const sums = sums_beside_parts<Ops, R, C>(f);
  for (int64_t part = 0, step = 0; step < t.steps;) {
    for (const int64_t end = layout.channelwise ? t.steps : step + layout.group_steps; step < end;
         step += part_steps, ++part) {
      typename Ops::I acc[R][C][Ops::kVecs];
      sum_part<Ops, R, C, kCode, kZeros, true, kBlockSteps, true>(t, rows, walk, part, step, step + part_steps, fetch,
                                                                  acc);
      if (is_packed(kCode) && (!kMayStream || fetch != nullptr)) fetch += part_bytes;
      for_each<R, C, Ops::kVecs>([&](int r, int c, int v) W4A8_LAMBDA {
        const F scale = Ops::splat(t.row_scales[part * t.row_scales_stride + r]);
        p[r][c][v] = Ops::fma(counted_sum<Ops>(acc[r][c][v]), scale, p[r][c][v]);
      });
    }
    if (layout.channelwise && !t.last) {
      for_each<R, C, Ops::kVecs>([&](int r, int c, int v)
                                     W4A8_LAMBDA { sums[(r * C + c) * Ops::kVecs + v] = p[r][c][v]; });
      break;
    }
    for_each<C, Ops::kVecs>([&](int c, int v) W4A8_LAMBDA {
      const F scale = load_group_scales<Ops, kCode, 0>(walk, c, v * Ops::kLanes, layout.scale_type);
      for_each<R>([&](int r) W4A8_LAMBDA {
        F& sum = sums[(r * C + c) * Ops::kVecs + v];
        sum = Ops::fma(p[r][c][v], scale, sum);
      });
    });
    fill(p, Ops::splat(0.0f));
    if (walk.next()) fetch = fetch_until<kMayStream>(fetch, fetch + C * layout.head_bytes);
  }
  if constexpr (is_packed(kCode)) fetch_until<kMayStream>(fetch, t.fetch + C * layout.panel_bytes);
}

// add_groups of one row and one packed panel whose groups have super-scales, which are of all of K and never beside
// zero points: those of a record stay in registers, nothing asks for a type, and pointers move in the place of indices.
template <class Ops, Code kCode, int64_t kGroupSteps>
W4A8_INLINE void add_super_groups(const TileArgs& t, const int8_t* q, const uint8_t* first,
                                  typename Ops::F (&f)[1][1][Ops::kVecs]) {
  using F = typename Ops::F;
  constexpr int64_t kGroups = kSuperK / kStepK / kGroupSteps;  // of a record
  const int8_t* row[] = {q};
  const uint8_t* weights[] = {first};
  const int32_t* start = t.starts;
  const float* row_scale = t.row_scales;
  const float* row_shift = t.row_shifts;
  const int64_t stride = t.row_scales_stride;
  const int64_t head_bytes = t.panels->head_bytes;
  for (int64_t left = t.panels->groups; left > 0; left -= kGroups, weights[0] += head_bytes) {
    const uint8_t* scales = weights[0] - head_bytes;
    const uint8_t* const supers = scales + kGroups * kPanelColumns;
    F super[Ops::kVecs];
    for_each<Ops::kVecs>([&](int v) W4A8_LAMBDA { super[v] = load_supers<Ops>(supers, v * Ops::kLanes); });
    for (; scales < supers; scales += kPanelColumns, ++start, row_scale += stride, row_shift += stride) {
      typename Ops::I acc[1][1][Ops::kVecs];
      fill(acc, Ops::isplat(*start));
      Ops::template accumulate<1, 1, kCode, kGroupSteps>(acc, row, weights, 0, kGroupSteps, nullptr);
      for_each<Ops::kVecs>([&](int v) W4A8_LAMBDA {
        const F scale = load_super_scales<Ops>(scales, super[v], v * Ops::kLanes);
        f[0][0][v] = Ops::fma(scaled_sum<Ops>(acc[0][0][v], row_scale, row_shift), scale, f[0][0][v]);
      });
      row[0] += kGroupSteps * kStepK;
      weights[0] += kGroupSteps * step_bytes(kCode);
    }
  }
}

template <class Ops, int R, int C, Code kCode, Zeros kZeros, Grouping kGrouping>
W4A8_INLINE void add_sized_groups(const TileArgs& t, const int8_t* const (&rows)[R], const uint8_t* const (&weights)[C],
                                  typename Ops::F (&f)[R][C][Ops::kVecs]) {
  constexpr bool kScaled = is_scaled(kGrouping);
  if constexpr (kGrouping == Grouping::kParts) {
    if (t.panels->part_steps == kBlockSteps) {
      add_parts<Ops, R, C, kCode, kZeros, kBlockSteps>(t, rows, weights, f);
    } else {
      add_parts<Ops, R, C, kCode, kZeros, 0>(t, rows, weights, f);
    }
  } else if constexpr (is_least(kGrouping)) {
    add_groups<Ops, R, C, kCode, kZeros, kScaled, kLeastGroupSteps>(t, rows, weights, f);
  } else if (t.panels->group_steps == kBlockSteps) {
    add_groups<Ops, R, C, kCode, kZeros, kScaled, kBlockSteps>(t, rows, weights, f);
  } else {
    add_groups<Ops, R, C, kCode, kZeros, kScaled, 0>(t, rows, weights, f);
  }
}

template <class Ops, int R, int C, Code kCode, Grouping kGrouping>
W4A8_INLINE void add_all_groups(const TileArgs& t, const int8_t* const (&rows)[R], const uint8_t* const (&weights)[C],
                                typename Ops::F (&f)[R][C][Ops::kVecs]) {
  constexpr bool kMayBeSuper = kGrouping == Grouping::kScaledLeast || kGrouping == Grouping::kScaledBlocks;
  if constexpr (R == 1 && may_stream<Ops, R, C>() && kMayBeSuper && (kCode == Code::kNibbles || kCode == Code::kSix)) {
    constexpr int64_t kSteps = is_least(kGrouping) ? kLeastGroupSteps : kBlockSteps;
    if (t.fetch == nullptr && t.panels->scale_type == ScaleType::kSuper && t.panels->group_steps == kSteps) {
      return add_super_groups<Ops, kCode, kSteps>(t, rows[0], weights[0], f);
    }
  }
  if constexpr (!Ops::kSpareRegisters && may_have_zeros(kCode)) {
    if (t.zeros != nullptr) return add_sized_groups<Ops, R, C, kCode, Zeros::kAll, kGrouping>(t, rows, weights, f);
  }
  constexpr Zeros kZeros = Ops::kSpareRegisters && may_have_zeros(kCode) ? Zeros::kAsk : Zeros::kNone;
  add_sized_groups<Ops, R, C, kCode, kZeros, kGrouping>(t, rows, weights, f);
}

// The minimums of 16 columns, group by group.
template <class Ops>
struct Minimums {
  const uint8_t* line;
  ScaleType type;
  int64_t left;  // groups of the block of super-scales, if there are any
  int64_t scale_line;
  int64_t super_groups;

  W4A8_INLINE Minimums(const PanelLayout& p, const uint8_t* panel)
      : line(panel),
        type(p.scale_type),
        left(p.super_groups()),
        scale_line(p.scale_line),
        super_groups(p.super_groups()) {}
  W4A8_INLINE typename Ops::F load(int64_t i) const {
    if (type == ScaleType::kSuper) {
      return load_super_scales<Ops>(line, load_supers<Ops>(line + left * scale_line, i), i);
    }
    return load_float_scales<Ops>(line, i, type);
  }
  W4A8_INLINE void next() {
    line += scale_line;
    if (--left != 0) return;
    left = super_groups;
    line += kSuperLine;
  }
};

// Groups whose minimums are widened at once, for all rows.
constexpr int64_t kMinimumRun = 64;

// Rows whose sums begin at minimums: offsets of a run of groups, `left` rows to do, their sums [left, ldc] at `out`.
// add_minimums takes R of them at a time, then fewer: f = fma(minimum, offset, f), f from 0 in the first run.
struct MinimumRows {
  const float* offsets;
  int64_t offsets_stride;
  int64_t left;
  float* out;
  int64_t ldc;
};
template <class Ops, int R>
W4A8_INLINE void add_minimums(const float* minimums, int64_t groups, bool first, MinimumRows rows) {
  for (; rows.left >= R; rows.left -= R, rows.offsets += R * rows.offsets_stride, rows.out += R * rows.ldc) {
    typename Ops::F f[R][Ops::kVecs];
    const float* offsets[R];
    for_each<R>([&](int r) W4A8_LAMBDA { offsets[r] = rows.offsets + r * rows.offsets_stride; });
    for_each<R, Ops::kVecs>([&](int r, int v) W4A8_LAMBDA {
      f[r][v] = first ? Ops::splat(0.0f) : Ops::load(rows.out + r * rows.ldc + v * Ops::kLanes);
    });
#pragma GCC unroll 1
    for (int64_t g = 0; g < groups; ++g) {
      for_each<Ops::kVecs>([&](int v) W4A8_LAMBDA {
        const typename Ops::F minimum = Ops::load(minimums + g * kPanelColumns + v * Ops::kLanes);
        for_each<R>([&](int r) W4A8_LAMBDA { f[r][v] = Ops::fma(minimum, Ops::splat(offsets[r][g]), f[r][v]); });
      });
    }
    for_each<R, Ops::kVecs>([&](int r, int v)
                                W4A8_LAMBDA { Ops::store(rows.out + r * rows.ldc + v * Ops::kLanes, f[r][v]); });
  }
  if constexpr (R > 1) add_minimums<Ops, R / 2>(minimums, groups, first, rows);
}

// Sets rows.out[r, 0..15] to the sum over g of minimum_g * offset[r, g], g ascending (docs/numerics.md section 3).
template <class Ops>
__attribute__((noinline)) void start_at_minimums(const PanelLayout& p, const uint8_t* panel, MinimumRows rows) {
  constexpr int kBlock = Ops::kVecs == 1 ? 8 : 4;
  Minimums<Ops> walk(p, panel);
  if (rows.left == 1) {  // each minimum is used once
    typename Ops::F f[Ops::kVecs];
    for_each<Ops::kVecs>([&](int v) W4A8_LAMBDA { f[v] = Ops::splat(0.0f); });
    for (int64_t g = 0; g < p.groups; ++g, walk.next()) {
      for_each<Ops::kVecs>(
          [&](int v) W4A8_LAMBDA { f[v] = Ops::fma(walk.load(v * Ops::kLanes), Ops::splat(rows.offsets[g]), f[v]); });
    }
    for_each<Ops::kVecs>([&](int v) W4A8_LAMBDA { Ops::store(rows.out + v * Ops::kLanes, f[v]); });
    return;
  }
  for (int64_t begin = 0; begin < p.groups; begin += kMinimumRun, rows.offsets += kMinimumRun) {
    const int64_t groups = p.groups - begin < kMinimumRun ? p.groups - begin : kMinimumRun;
    float minimums[kMinimumRun * kPanelColumns];
    for (int64_t g = 0; g < groups; ++g, walk.next()) {
      for_each<Ops::kVecs>([&](int v) W4A8_LAMBDA {
        Ops::store(minimums + g * kPanelColumns + v * Ops::kLanes, walk.load(v * Ops::kLanes));
      });
    }
    add_minimums<Ops, kBlock>(minimums, groups, begin == 0, rows);
  }
}

template <class Ops, int R, int C, Code kCode, Grouping kGrouping>
W4A8_INLINE void groups_tile(const TileArgs& t, const int8_t* const (&rows)[R], const uint8_t* const (&weights)[C]) {
  typename Ops::F f[R][C][Ops::kVecs];
  if (!t.first || (are_integers(kCode) && t.panels->kind.minimums)) {
    load_sums<Ops>(t, f);
  } else {
    fill(f, Ops::splat(0.0f));
  }
  if constexpr (Ops::kOwnGroups) {
    Ops::template add_groups<R, C, kCode, kGrouping>(t, rows, weights, f);
  } else {
    add_all_groups<Ops, R, C, kCode, kGrouping>(t, rows, weights, f);
  }
  if (t.last) {
    finish_groups<Ops, R, C, is_least(kGrouping)>(t, f);
  } else {
    store_sums<Ops>(t, f);
  }
}
