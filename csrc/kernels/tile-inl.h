// The matrix tile: R quantized rows times C panels, integer part by the ISA, the rest here once for all.
// Included inside a target region and an anonymous namespace.
//
//                        panel 0         panel 1
//                      [ records of K | records of K ]      packed, or steps unpacked once into scratch for many rows
//     row 0  [ K int8 ] acc[0][0]       acc[0][1]
//     row 1  [ K int8 ] acc[1][0]       acc[1][1]         each acc: 16 int32 columns, kVecs registers
//       ..
// An ISA brings Ops (ops.h), of which
//     accumulate<R, C, kCode, kUnit>(acc, rows, weights, begin, end, fetch)
// which adds the sum over the steps [begin, end) of u * q to acc[r][c][v], and for packed weights fetches as many bytes
// at `fetch` unless that is null. Step s is at weights[c] + s * step_bytes(kCode). end - begin is a multiple of kUnit:
// kBlockSteps or kLeastGroupSteps of groups, 1 channelwise. What u counts from is in the accumulator from the start.
// With kOwnGroups it also brings add_groups<R, C, kCode, kGrouping>(t, rows, weights, f), the loop over groups.
//
// A tile of packed weights adds all steps of K, one of unpacked weights those of a chunk (tile_driver-inl.h); between
// chunks it keeps its sums, int32 channelwise, else float, in `out`.
//
// What u counts from is told in docs/adding_an_isa.md. start_accumulators and start_at_zeros are where it is in code.

// body(i, j, ..) for each i < N, j < the next number, .., unrolled: arrays indexed by them stay in registers.
template <int N, int... kMore, class Body>
W4A8_INLINE void for_each(Body body) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof...(kMore) == 0) {
      body(i);
    } else {
      for_each<kMore...>([&](auto... more) W4A8_LAMBDA { body(i, more...); });
    }
  }
}

// Steps of the smallest group, 16 values of k; all others are multiples of a block, 32 values.
constexpr int64_t kLeastGroupSteps = 2;
constexpr int64_t kBlockSteps = 4;

// What shares a scale: all of K, 16 values of it, or a multiple of 32. Groups of the least size have tiles of their
// own: they alone may have channel scales and scales of e5m3, which the others then need not look for.
// kScaled..: activations have scales, too, one for each of these groups; kParts: one for each of the parts of a group,
// or of K.
enum class Grouping { kChannelwise, kLeast, kBlocks, kScaledLeast, kScaledBlocks, kParts };
inline Grouping grouping_of(const PanelLayout& layout) {
  if (layout.scaled && (layout.channelwise || layout.part_steps < layout.group_steps)) return Grouping::kParts;
  if (layout.channelwise) return Grouping::kChannelwise;
  if (layout.group_steps == kLeastGroupSteps) return layout.scaled ? Grouping::kScaledLeast : Grouping::kLeast;
  return layout.scaled ? Grouping::kScaledBlocks : Grouping::kBlocks;
}
constexpr bool is_least(Grouping grouping) {
  return grouping == Grouping::kLeast || grouping == Grouping::kScaledLeast;
}
constexpr bool is_scaled(Grouping grouping) { return grouping >= Grouping::kScaledLeast; }

// The same for loops that are not over all of these: the scales of activations along k.
enum class RowScales { kNone, kOfGroups, kOfParts };
constexpr RowScales row_scales_of(Grouping grouping) {
  if (grouping == Grouping::kParts) return RowScales::kOfParts;
  return is_scaled(grouping) ? RowScales::kOfGroups : RowScales::kNone;
}

// Steps that loops over [begin, end) take at once.
constexpr int64_t unrolled(int64_t unit) { return unit == kLeastGroupSteps ? kLeastGroupSteps : kBlockSteps; }

// What one tile reads and writes.
struct TileArgs {
  const int8_t* q;  // at the first step of the chunk; prepared, where the ISA prepares rows
  int64_t q_stride;
  const int32_t* starts;  // at the first part of the chunk
  int64_t starts_stride;
  const float* row_scales;  // Rows::scales, at the same part
  int64_t row_scales_stride;
  const RowQuant* quant;
  const Panels* panels;
  const uint8_t* panel;    // the first of the C panels
  const uint8_t* weights;  // its first step: of all, packed; of the chunk, unpacked
  int64_t weights_stride;  // bytes to the steps of the next panel
  const uint8_t* scales;   // unpacked weights: of its groups in the chunk, [groups, 16] float32
  int64_t scales_stride;   // bytes to those of the next panel
  const uint8_t* zeros;    // [16], what u counts from, of its first group; null: what the table above says without
  int64_t zeros_stride;    // bytes to those of the next panel
  int64_t zeros_step;      // unpacked weights: bytes to those of the next group
  const uint8_t* fetch;    // packed weights: the panels that are multiplied after the C panels, fetched as they are;
                           // null: the hardware does it (may_stream)
  int64_t columns;         // C
  int64_t steps;
  bool first;  // no chunk before this one
  bool last;
  bool begins_group;  // the chunk does; it has several, or a part of one
  bool ends_group;
  float* out;
  int64_t ldc;
};
using TileFn = void (*)(const TileArgs&);

// docs/numerics.md section 2. Members of t that are read after a store are copied first: the store might change them,
// as far as the compiler knows.
template <class Ops, int R, int C>
W4A8_INLINE void finish_channelwise(const TileArgs& t, typename Ops::I (&acc)[R][C][Ops::kVecs]) {
  const Panels& p = *t.panels;
  const RowQuant* const quants = t.quant;
  float* const out = t.out;
  const int64_t ldc = t.ldc;
  for_each<C, Ops::kVecs>([&](int c, int v) W4A8_LAMBDA {
    const uint8_t* panel = t.panel + c * p.panel_bytes;
    const int64_t column = v * Ops::kLanes;
    const typename Ops::I sums = Ops::iload(panel + p.sums_offset + 4 * column);
    const typename Ops::F scales = load_float_scales<Ops>(panel, column, p.scale_type);
    const typename Ops::F bias = Ops::load_bytes(panel + p.bias_offset + 4 * column);
    for_each<R>([&](int r) W4A8_LAMBDA {
      const RowQuant quant = quants[r];
      const typename Ops::I sum = Ops::isub(acc[r][c][v], Ops::imul(Ops::isplat(quant.zero_point), sums));
      const typename Ops::F scale = Ops::mul(Ops::splat(quant.recip), scales);
      Ops::store(out + r * ldc + c * kPanelColumns + column, Ops::add(Ops::mul(Ops::to_float(sum), scale), bias));
    });
  });
}

// docs/numerics.md section 3, behind the sum over the groups. kMayScale: there may be channel scales. Where activations
// have scales along k, W is zero, the zero point 0 and recip 1 (or a router weight).
template <class Ops, int R, int C, bool kMayScale>
W4A8_INLINE void finish_groups(const TileArgs& t, typename Ops::F (&f)[R][C][Ops::kVecs]) {
  const Panels& p = *t.panels;
  const RowQuant* const quants = t.quant;
  float* const out = t.out;
  const int64_t ldc = t.ldc;
  for_each<C, Ops::kVecs>([&](int c, int v) W4A8_LAMBDA {
    const uint8_t* panel = t.panel + c * p.panel_bytes;
    const int64_t column = v * Ops::kLanes;
    const typename Ops::F sums = Ops::load_bytes(panel + p.sums_offset + 4 * column);
    const typename Ops::F bias = Ops::load_bytes(panel + p.bias_offset + 4 * column);
    typename Ops::F channel = Ops::splat(1.0f);  // a product with which is exact
    if (kMayScale && p.scale_type == ScaleType::kE5M3) {
      channel = Ops::load_bytes(panel + p.channel_offset + 4 * column);
    }
    for_each<R>([&](int r) W4A8_LAMBDA {
      const RowQuant quant = quants[r];
      const typename Ops::F shifted = Ops::fma(Ops::splat(-static_cast<float>(quant.zero_point)), sums, f[r][c][v]);
      typename Ops::F scale = Ops::splat(quant.recip);
      if constexpr (kMayScale) scale = Ops::mul(scale, channel);
      Ops::store(out + r * ldc + c * kPanelColumns + column, Ops::add(Ops::mul(shifted, scale), bias));
    });
  });
}

// What accumulators start at without zero points. part: of the chunk.
template <class Ops, int R, int C, Code kCode>
W4A8_INLINE void start_accumulators(const TileArgs& t, int64_t part, typename Ops::I (&acc)[R][C][Ops::kVecs]) {
  for_each<R, C, Ops::kVecs>([&](int r, int c, int v) W4A8_LAMBDA {
    typename Ops::I& start = acc[r][c][v];
    if constexpr ((is_e2m1(kCode) && Ops::kE2M1Zero == 0) || (kCode == Code::kInt8 && Ops::kInt8Zero == 0) ||
                  (!is_packed(kCode) && Ops::kUnpacksToW)) {
      start = Ops::isplat(0);
    } else if constexpr (!is_packed(kCode) && Ops::kReloadsStarts) {
      start = Ops::isplat_of(t.starts + r * t.starts_stride + part);
    } else {
      start = Ops::isplat(t.starts[r * t.starts_stride + part]);
      if constexpr (is_e2m1(kCode)) start = Ops::iadd(start, Ops::template shift_right<1>(start));
      if constexpr (kCode == Code::kInt8) start = Ops::template shift_left<4>(start);
    }
  });
}

template <int R, int C, int kVecs, class V>
W4A8_INLINE void fill(V (&registers)[R][C][kVecs], V value) {
  for_each<R, C, kVecs>([&](int r, int c, int v) W4A8_LAMBDA { registers[r][c][v] = value; });
}

// Zero points as what u counts from. The low four bits of nibbles' ones, so that any bytes are harmless.
template <class Ops, Code kCode>
W4A8_INLINE typename Ops::I load_zeros(const uint8_t* p) {
  const typename Ops::I zeros = Ops::load_widened(p);
  if constexpr (kCode != Code::kInt8) return Ops::iand(zeros, Ops::isplat(15));
  return Ops::kInt8Zero == 128 ? zeros : Ops::isub(zeros, Ops::isplat(128));
}

// acc = -z * sum of q. kAdded: added to acc, behind the sum over the steps, since what is there before is live all
// through it. kSmall: |sum| < 2^15. zeros: of the group, of panel 0.
template <class Ops, int R, int C, Code kCode, bool kAdded, bool kSmall>
W4A8_INLINE void start_at_zeros(const TileArgs& t, const uint8_t* const (&zeros)[C], int64_t part,
                                typename Ops::I (&acc)[R][C][Ops::kVecs]) {
  for_each<C, Ops::kVecs>([&](int c, int v) W4A8_LAMBDA {
    const typename Ops::I zero = load_zeros<Ops, kCode>(zeros[c] + v * Ops::kLanes);
    for_each<R>([&](int r) W4A8_LAMBDA {
      const typename Ops::I sum = Ops::isplat(t.starts[r * t.starts_stride + part] >> 3);
      typename Ops::I start;
      if constexpr (kSmall && Ops::kNarrowProducts) {
        start = Ops::imul16(zero, sum);
      } else {
        start = Ops::imul(zero, sum);
      }
      acc[r][c][v] = kAdded ? Ops::iadd(acc[r][c][v], start) : start;
    });
  });
}

// Sums kept in `out` between chunks, as they are: floats, or int32 as the bits of floats.
template <class Ops>
W4A8_INLINE void load_sum(const float* p, typename Ops::F& sum) {
  sum = Ops::load(p);
}
template <class Ops>
W4A8_INLINE void load_sum(const float* p, typename Ops::I& sum) {
  sum = Ops::int_bits(Ops::load(p));
}
template <class Ops>
W4A8_INLINE void store_sum(float* p, typename Ops::F sum) {
  Ops::store(p, sum);
}
template <class Ops>
W4A8_INLINE void store_sum(float* p, typename Ops::I sum) {
  Ops::store(p, Ops::float_bits(sum));
}

template <class Ops, int R, int C, class V>
W4A8_INLINE void load_sums(const TileArgs& t, V (&sums)[R][C][Ops::kVecs]) {
  const float* const out = t.out;
  const int64_t ldc = t.ldc;
  for_each<R, C, Ops::kVecs>([&](int r, int c, int v) W4A8_LAMBDA {
    load_sum<Ops>(out + r * ldc + c * kPanelColumns + v * Ops::kLanes, sums[r][c][v]);
  });
}

template <class Ops, int R, int C, class V>
W4A8_INLINE void store_sums(const TileArgs& t, const V (&sums)[R][C][Ops::kVecs]) {
  float* const out = t.out;
  const int64_t ldc = t.ldc;
  for_each<R, C, Ops::kVecs>([&](int r, int c, int v) W4A8_LAMBDA {
    store_sum<Ops>(out + r * ldc + c * kPanelColumns + v * Ops::kLanes, sums[r][c][v]);
  });
}

// Few rows read one panel after the other, one stream, which the hardware of some CPUs fetches better by itself:
// TileArgs::fetch is null then.
template <class Ops, int R, int C>
constexpr bool may_stream() {
  return R <= Ops::kStreamedRows && C == 1;
}

// Fetches [fetch, end) and returns end; nothing if fetch is null, which it is only where a tile may stream. Into the
// second-level cache: the first would be full before they are used.
template <bool kMayStream>
W4A8_INLINE const uint8_t* fetch_until(const uint8_t* fetch, const uint8_t* end) {
  if (kMayStream && fetch == nullptr) return nullptr;
  for (; fetch < end; fetch += kLineBytes) __builtin_prefetch(fetch, 0, 2);
  return fetch;
}

// The same of a number of bytes known at compile time, and never null.
template <int64_t kBytes>
W4A8_INLINE void fetch_lines(const uint8_t* fetch) {
  for (int64_t i = 0; i < kBytes; i += kLineBytes) __builtin_prefetch(fetch + i, 0, 2);
}

// The zero points of the first group of each panel.
template <int C>
W4A8_INLINE void point_to_zeros(const TileArgs& t, const uint8_t* (&zeros)[C]) {
  for_each<C>([&](int c) W4A8_LAMBDA { zeros[c] = t.zeros + c * t.zeros_stride; });
}

template <class Ops, int R, int C, Code kCode>
W4A8_INLINE void channelwise_tile(const TileArgs& t, const int8_t* const (&rows)[R],
                                  const uint8_t* const (&weights)[C]) {
  typename Ops::I acc[R][C][Ops::kVecs];
  if (t.first) {
    if (!is_e2m1(kCode) && t.zeros != nullptr) {
      const uint8_t* zeros[C];
      point_to_zeros(t, zeros);
      start_at_zeros<Ops, R, C, kCode, false, false>(t, zeros, 0, acc);
    } else {
      start_accumulators<Ops, R, C, kCode>(t, 0, acc);
    }
  } else {
    load_sums<Ops>(t, acc);
  }
  Ops::template accumulate<R, C, kCode, 1>(acc, rows, weights, 0, t.steps, t.fetch);
  if constexpr (is_packed(kCode)) {
    const uint8_t* rest = t.fetch + C * t.steps * step_bytes(kCode);
    fetch_until<may_stream<Ops, R, C>()>(t.fetch == nullptr ? nullptr : rest, t.fetch + C * t.panels->panel_bytes);
  }
  if (t.last) {
    finish_channelwise<Ops, R, C>(t, acc);
  } else {
    store_sums<Ops>(t, acc);
  }
}

// Whether a loop over groups starts at t.zeros: where registers are scarce it has a loop of its own, since a branch in
// it makes GCC spill more for the others.
enum class Zeros { kNone, kAll, kAsk };

// Only groups of the least size have scales of e5m3, and only e2m1 values in others those of e8m0: constants of their
// conversion would take registers from all others in the loop.
template <class Ops, Code kCode, int64_t kGroupSteps>
W4A8_INLINE typename Ops::F load_group_scales(const uint8_t* scales, int64_t i, ScaleType type) {
  if constexpr (!is_packed(kCode)) {
    return Ops::load_bytes(scales + 4 * i);
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
  int64_t scales_at;          // from there to the scales of the group. Not a pointer of their own, which costs decode
  int64_t zeros_at;           // more than the addition; and to its zero points
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

// acc = the sum over the steps [begin, end), which are of one part. kSteps: unrolled ones. kSmall: start_at_zeros.
template <class Ops, int R, int C, Code kCode, Zeros kZeros, int64_t kSteps, bool kSmall, class Walk>
W4A8_INLINE void sum_part(const TileArgs& t, const int8_t* const (&rows)[R], const Walk& walk, int64_t part,
                          int64_t begin, int64_t end, const uint8_t* fetch, typename Ops::I (&acc)[R][C][Ops::kVecs]) {
  const auto start_zeros = [&]<bool kAdded>() W4A8_LAMBDA {
    const uint8_t* zeros[C];
    for_each<C>([&](int c) W4A8_LAMBDA {
      zeros[c] = (is_packed(kCode) ? walk.weights[c] : t.zeros + c * t.zeros_stride) + walk.zeros_at;
    });
    start_at_zeros<Ops, R, C, kCode, kAdded, kSmall>(t, zeros, part, acc);
  };
  if constexpr (kZeros == Zeros::kAll) {
    fill(acc, Ops::isplat(0));
  } else if (kZeros == Zeros::kAsk && t.zeros != nullptr) {
    start_zeros.template operator()<false>();
  } else {
    start_accumulators<Ops, R, C, kCode>(t, part, acc);
  }
  Ops::template accumulate<R, C, kCode, kSteps>(acc, rows, walk.weights, begin, end, fetch);
  if constexpr (kZeros == Zeros::kAll) start_zeros.template operator()<true>();
}

// What the sum of a part counts in the sum over a group: with the scale of its activations, if it has one.
template <class Ops, bool kScaled>
W4A8_INLINE typename Ops::F part_value(const TileArgs& t, typename Ops::I acc, int r, int64_t part) {
  const typename Ops::F sum = Ops::to_float(acc);
  if constexpr (!kScaled) return sum;
  return Ops::mul(sum, Ops::splat(t.row_scales[part * t.row_scales_stride + r]));
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
    sum_part<Ops, R, C, kCode, kZeros, unrolled(kGroupSteps), kSmall>(t, rows, walk, group, step, step + group_steps,
                                                                      fetch, acc);
    if (is_packed(kCode) && (!kMayStream || fetch != nullptr)) fetch += group_bytes;
    for_each<C>([&](int c) W4A8_LAMBDA {
      const uint8_t* scales = walk.scales(c);
      for_each<Ops::kVecs>([&](int v) W4A8_LAMBDA {
        const F scale = load_group_scales<Ops, kCode, kGroupSteps>(scales, v * Ops::kLanes, p.scale_type);
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
      sum_part<Ops, R, C, kCode, kZeros, kBlockSteps, true>(t, rows, walk, part, step, step + part_steps, fetch, acc);
      if (is_packed(kCode) && (!kMayStream || fetch != nullptr)) fetch += part_bytes;
      for_each<R, C, Ops::kVecs>([&](int r, int c, int v) W4A8_LAMBDA {
        const F scale = Ops::splat(t.row_scales[part * t.row_scales_stride + r]);
        p[r][c][v] = Ops::fma(Ops::to_float(acc[r][c][v]), scale, p[r][c][v]);
      });
    }
    if (layout.channelwise && !t.last) {
      for_each<R, C, Ops::kVecs>([&](int r, int c, int v)
                                     W4A8_LAMBDA { sums[(r * C + c) * Ops::kVecs + v] = p[r][c][v]; });
      break;
    }
    for_each<C, Ops::kVecs>([&](int c, int v) W4A8_LAMBDA {
      const F scale = load_group_scales<Ops, kCode, 0>(walk.scales(c), v * Ops::kLanes, layout.scale_type);
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
  if constexpr (!Ops::kSpareRegisters && !is_e2m1(kCode)) {
    if (t.zeros != nullptr) return add_sized_groups<Ops, R, C, kCode, Zeros::kAll, kGrouping>(t, rows, weights, f);
  }
  constexpr Zeros kZeros = Ops::kSpareRegisters && !is_e2m1(kCode) ? Zeros::kAsk : Zeros::kNone;
  add_sized_groups<Ops, R, C, kCode, kZeros, kGrouping>(t, rows, weights, f);
}

template <class Ops, int R, int C, Code kCode, Grouping kGrouping>
W4A8_INLINE void groups_tile(const TileArgs& t, const int8_t* const (&rows)[R], const uint8_t* const (&weights)[C]) {
  typename Ops::F f[R][C][Ops::kVecs];
  if (t.first) {
    fill(f, Ops::splat(0.0f));
  } else {
    load_sums<Ops>(t, f);
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

template <class Ops, int R, int C, Grouping kGrouping, Code kCode>
void tile(const TileArgs& t) {
  const int8_t* rows[R];
  const uint8_t* weights[C];
  for_each<R>([&](int r) W4A8_LAMBDA { rows[r] = t.q + r * t.q_stride; });
  for_each<C>([&](int c) W4A8_LAMBDA { weights[c] = t.weights + c * t.weights_stride; });
  if constexpr (kGrouping == Grouping::kChannelwise) {
    channelwise_tile<Ops, R, C, kCode>(t, rows, weights);
  } else {
    groups_tile<Ops, R, C, kCode, kGrouping>(t, rows, weights);
  }
}
