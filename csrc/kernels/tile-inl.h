// The matrix tile: R quantized rows times C panels, integer part by the ISA, the rest here once for all.
// Included inside a target region and an anonymous namespace.
//
//                        panel 0       panel 1
//                      [ steps of K | steps of K ]      packed, or unpacked once into scratch for many rows
//     row 0  [ K int8 ] acc[0][0]     acc[0][1]
//     row 1  [ K int8 ] acc[1][0]     acc[1][1]         each acc: 16 int32 columns, kVecs registers
//       ..
// An ISA brings Ops (ops.h), of which
//     accumulate<R, C, kCode, kUnit>(acc, rows, weights, begin, end, fetch)
// which adds sum over the steps [begin, end) of u * q to acc[r][c][v], and for packed weights fetches as many bytes at
// `fetch`. end - begin is a multiple of kUnit: kBlockSteps or kLeastGroupSteps of groups, 1 channelwise. u is the
// nibble, or for e2m1 twice the value + kE2M1Zero; what it counts from is in the accumulator from the start. With
// kOwnGroups it also brings add_groups<R, C, kCode, kGrouping>(t, rows, weights, f), the loop over groups.
//
// A tile adds the steps of one chunk (tile_driver-inl.h); between chunks it keeps its sums, int32 channelwise, else
// float, in `out`.

// Steps of the smallest group, 16 values of k; all others are multiples of a block, 32 values.
constexpr int64_t kLeastGroupSteps = 2;
constexpr int64_t kBlockSteps = 4;

// What shares a scale: all of K, 16 values of it, or a multiple of 32. Groups of the least size have tiles of their
// own: they alone may have channel scales and scales of e5m3, which the others then need not look for.
enum class Grouping { kChannelwise, kLeast, kBlocks };
inline Grouping grouping_of(const Panels& panels) {
  if (panels.channelwise) return Grouping::kChannelwise;
  return panels.group_steps == kLeastGroupSteps ? Grouping::kLeast : Grouping::kBlocks;
}

// Steps that loops over [begin, end) take at once.
constexpr int64_t unrolled(int64_t unit) { return unit == kLeastGroupSteps ? kLeastGroupSteps : kBlockSteps; }

// What one tile reads and writes, for the steps of one chunk.
struct TileArgs {
  const int8_t* q;  // at the first step of the chunk; prepared, where the ISA prepares rows
  int64_t q_stride;
  const int32_t* starts;  // at the first group of the chunk
  int64_t starts_stride;
  const uint8_t* zeros;  // [16], what u counts from, at the first group of the chunk; null: 8 in all columns
  int64_t zeros_stride;  // bytes to those of the next panel
  int64_t zeros_step;    // bytes to those of the next group
  const RowQuant* quant;
  const Panels* panels;
  const uint8_t* panel;    // the first of the C panels: sums and bias
  const uint8_t* scales;   // its scales, at the first group of the chunk; of unpacked weights float32
  int64_t scales_stride;   // bytes to those of the next panel
  const uint8_t* weights;  // its steps, packed or unpacked, at the first step of the chunk
  int64_t weights_stride;  // bytes to the steps of the next panel
  const uint8_t* fetch;    // packed weights only: what is multiplied after the C panels, fetched as they are; null:
                           // the hardware does it (may_stream)
  const uint8_t* behind;   // the panels that come when all steps of these are done; null: unknown
  int64_t columns;         // C
  int64_t steps;
  bool first;  // no chunk before this one
  bool last;
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
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) {
    const uint8_t* panel = t.panel + c * p.stride;
#pragma GCC unroll 16
    for (int v = 0; v < Ops::kVecs; ++v) {
      const int64_t column = v * Ops::kLanes;
      const typename Ops::I sums = Ops::iload(panel + p.sums_offset + 4 * column);
      const typename Ops::F scales = Ops::load_scales(panel + p.scales_offset, column, p.scale_dtype);
      const typename Ops::F bias = Ops::load_bytes(panel + p.bias_offset + 4 * column);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const RowQuant quant = quants[r];
        const typename Ops::I sum = Ops::isub(acc[r][c][v], Ops::imul(Ops::isplat(quant.zero_point), sums));
        const typename Ops::F scale = Ops::mul(Ops::splat(quant.recip), scales);
        Ops::store(out + r * ldc + c * kPanelColumns + column, Ops::add(Ops::mul(Ops::to_float(sum), scale), bias));
      }
    }
  }
}

// docs/numerics.md section 3, behind the sum over the groups. kMayScale: there may be channel scales.
template <class Ops, int R, int C, bool kMayScale>
W4A8_INLINE void finish_groups(const TileArgs& t, typename Ops::F (&f)[R][C][Ops::kVecs]) {
  const Panels& p = *t.panels;
  const RowQuant* const quants = t.quant;
  float* const out = t.out;
  const int64_t ldc = t.ldc;
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) {
    const uint8_t* panel = t.panel + c * p.stride;
#pragma GCC unroll 16
    for (int v = 0; v < Ops::kVecs; ++v) {
      const int64_t column = v * Ops::kLanes;
      const typename Ops::F sums = Ops::load_bytes(panel + p.sums_offset + 4 * column);
      const typename Ops::F bias = Ops::load_bytes(panel + p.bias_offset + 4 * column);
      typename Ops::F channel = Ops::splat(1.0f);  // a product with which is exact
      if (kMayScale && p.scale_dtype == DType::kE5M3) {
        channel = Ops::load_bytes(panel + p.channel_scales_offset + 4 * column);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const RowQuant quant = quants[r];
        const typename Ops::F shifted = Ops::fma(Ops::splat(-static_cast<float>(quant.zero_point)), sums, f[r][c][v]);
        typename Ops::F scale = Ops::splat(quant.recip);
        if constexpr (kMayScale) scale = Ops::mul(scale, channel);
        Ops::store(out + r * ldc + c * kPanelColumns + column, Ops::add(Ops::mul(shifted, scale), bias));
      }
    }
  }
}

// acc = -8 * sum of q, and of e2m1 -kE2M1Zero * sum of q.
template <class Ops, int R, int C, Code kCode>
W4A8_INLINE void start_accumulators(const TileArgs& t, int64_t group, typename Ops::I (&acc)[R][C][Ops::kVecs]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 16
      for (int v = 0; v < Ops::kVecs; ++v) {
        if constexpr (is_e2m1(kCode) && Ops::kE2M1Zero == 0) {
          acc[r][c][v] = Ops::isplat(0);
        } else if constexpr (!is_packed(kCode) && requires { Ops::isplat_of(t.starts); }) {
          acc[r][c][v] = Ops::isplat_of(t.starts + r * t.starts_stride + group);
        } else {
          acc[r][c][v] = Ops::isplat(t.starts[r * t.starts_stride + group]);
          if constexpr (is_e2m1(kCode)) {
            acc[r][c][v] = Ops::iadd(acc[r][c][v], Ops::template shift_right<1>(acc[r][c][v]));
          }
        }
      }
    }
  }
}

template <int R, int C, int kVecs, class V>
W4A8_INLINE void fill(V (&registers)[R][C][kVecs], V value) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) registers[r][c][v] = value;
    }
  }
}

// Where u counts from z instead of 8: acc = -z * sum of q, for kAdded added to acc: behind the sum over the
// steps, since what is there before is live all through it. kSmall: |sum| < 2^15.
template <class Ops, int R, int C, bool kAdded, bool kSmall>
W4A8_INLINE void start_at_zeros(const TileArgs& t, int64_t group, typename Ops::I (&acc)[R][C][Ops::kVecs]) {
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) {
    const uint8_t* zeros = t.zeros + c * t.zeros_stride + group * t.zeros_step;
#pragma GCC unroll 16
    for (int v = 0; v < Ops::kVecs; ++v) {
      const typename Ops::I zero = Ops::load_zeros(zeros + v * Ops::kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const typename Ops::I sum = Ops::isplat(t.starts[r * t.starts_stride + group] >> 3);
        typename Ops::I start;
        if constexpr (kSmall && requires { Ops::imul16(zero, sum); }) {
          start = Ops::imul16(zero, sum);
        } else {
          start = Ops::imul(zero, sum);
        }
        acc[r][c][v] = kAdded ? Ops::iadd(acc[r][c][v], start) : start;
      }
    }
  }
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
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 16
      for (int v = 0; v < Ops::kVecs; ++v)
        load_sum<Ops>(out + r * ldc + c * kPanelColumns + v * Ops::kLanes, sums[r][c][v]);
    }
  }
}

template <class Ops, int R, int C, class V>
W4A8_INLINE void store_sums(const TileArgs& t, const V (&sums)[R][C][Ops::kVecs]) {
  float* const out = t.out;
  const int64_t ldc = t.ldc;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 16
      for (int v = 0; v < Ops::kVecs; ++v)
        store_sum<Ops>(out + r * ldc + c * kPanelColumns + v * Ops::kLanes, sums[r][c][v]);
    }
  }
}

// Few rows read one panel after the other in one stream, which suits the hardware of some CPUs. Channelwise there is
// little else, and some fetch better by themselves: TileArgs::fetch is null then. kStreamedRows of Ops: up to how many.
template <class Ops>
constexpr int64_t streamed_rows() {
  if constexpr (requires { Ops::kStreamedRows; }) {
    return Ops::kStreamedRows;
  } else {
    return 0;
  }
}
template <class Ops, int R, int C, bool kChannelwise>
constexpr bool may_stream() {
  return kChannelwise && R <= streamed_rows<Ops>() && C == 1;
}

// Fetches `bytes` bytes and returns what lies behind them. Into the second-level cache: the first would be full before
// they are used.
W4A8_INLINE const uint8_t* fetch_bytes(const uint8_t* fetch, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kStepBytes) __builtin_prefetch(fetch + i, 0, 2);
  return fetch + bytes;
}

template <class Ops, int R, int C, Code kCode>
W4A8_INLINE void channelwise_tile(const TileArgs& t, const int8_t* const (&rows)[R],
                                  const uint8_t* const (&weights)[C]) {
  typename Ops::I acc[R][C][Ops::kVecs];
  if (t.first) {
    if (!is_e2m1(kCode) && t.zeros != nullptr) {
      start_at_zeros<Ops, R, C, false, false>(t, 0, acc);
    } else {
      start_accumulators<Ops, R, C, kCode>(t, 0, acc);
    }
  } else {
    load_sums<Ops>(t, acc);
  }
  Ops::template accumulate<R, C, kCode, 1>(acc, rows, weights, 0, t.steps, t.fetch);
  if constexpr (is_packed(kCode)) {
    const int64_t step_bytes = t.steps * kStepBytes;
    if (t.fetch != nullptr) fetch_bytes(t.fetch + C * step_bytes, C * (t.panels->stride - step_bytes));
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

// Only groups of the least size have scales of e5m3, which take a register for a factor from all others in the loop.
template <class Ops, Code kCode, int64_t kGroupSteps>
W4A8_INLINE typename Ops::F load_group_scales(const uint8_t* scales, int64_t i, DType dtype) {
  if constexpr (!is_packed(kCode)) {
    return Ops::load_bytes(scales + 4 * i);
  } else if constexpr (kGroupSteps == kLeastGroupSteps) {
    return load_any_scales<Ops>(scales, i, dtype);
  } else {
    return Ops::load_scales(scales, i, dtype);
  }
}

// f = fma(float(acc), scale, f), group by group. kGroupSteps: steps of a group, 0 if known at run time only.
template <class Ops, int R, int C, Code kCode, Zeros kZeros, int64_t kGroupSteps>
W4A8_INLINE void add_groups(const TileArgs& all, const int8_t* const (&rows)[R], const uint8_t* const (&weights)[C],
                            typename Ops::F (&f)[R][C][Ops::kVecs]) {
  using F = typename Ops::F;
  const Panels& p = *all.panels;
  const int64_t group_steps = kGroupSteps != 0 ? kGroupSteps : p.group_steps;
  const int64_t scale_bytes = kPanelColumns * dtype_bytes(p.scale_dtype) + all.zeros_step;
  const uint8_t* fetch = all.fetch;
  for (int64_t group = 0, step = 0; step < all.steps; ++group, step += group_steps) {
    // Unpacked since ports for arithmetic are scarce: members are read again. GCC would keep what the other registers
    // cannot hold in spare vector registers, and taking it from there costs such a port.
    const TileArgs* again = &all;
    if constexpr (!is_packed(kCode) && requires { Ops::isplat_of(all.starts); }) __asm__("" : "+r"(again));
    const TileArgs& t = *again;
    typename Ops::I acc[R][C][Ops::kVecs];
    constexpr bool kSmall = kGroupSteps != 0;
    if constexpr (kZeros == Zeros::kAll) {
      fill(acc, Ops::isplat(0));
    } else if (kZeros == Zeros::kAsk && t.zeros != nullptr) {
      start_at_zeros<Ops, R, C, false, kSmall>(t, group, acc);
    } else {
      start_accumulators<Ops, R, C, kCode>(t, group, acc);
    }
    Ops::template accumulate<R, C, kCode, unrolled(kGroupSteps)>(acc, rows, weights, step, step + group_steps, fetch);
    if constexpr (kZeros == Zeros::kAll) start_at_zeros<Ops, R, C, true, kSmall>(t, group, acc);
    if constexpr (is_packed(kCode)) fetch = fetch_bytes(fetch + C * group_steps * kStepBytes, C * scale_bytes);
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      const uint8_t* scales = t.scales + c * t.scales_stride;
#pragma GCC unroll 16
      for (int v = 0; v < Ops::kVecs; ++v) {
        const int64_t at = group * kPanelColumns + v * Ops::kLanes;
        const F scale = load_group_scales<Ops, kCode, kGroupSteps>(scales, at, p.scale_dtype);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) f[r][c][v] = Ops::fma(Ops::to_float(acc[r][c][v]), scale, f[r][c][v]);
      }
    }
  }
}

template <class Ops, int R, int C, Code kCode, Zeros kZeros, Grouping kGrouping>
W4A8_INLINE void add_sized_groups(const TileArgs& t, const int8_t* const (&rows)[R], const uint8_t* const (&weights)[C],
                                  typename Ops::F (&f)[R][C][Ops::kVecs]) {
  if constexpr (kGrouping == Grouping::kLeast) {
    add_groups<Ops, R, C, kCode, kZeros, kLeastGroupSteps>(t, rows, weights, f);
  } else if (t.panels->group_steps == kBlockSteps) {
    add_groups<Ops, R, C, kCode, kZeros, kBlockSteps>(t, rows, weights, f);
  } else {
    add_groups<Ops, R, C, kCode, kZeros, 0>(t, rows, weights, f);
  }
}

template <class Ops, int R, int C, Code kCode, Grouping kGrouping>
W4A8_INLINE void add_all_groups(const TileArgs& t, const int8_t* const (&rows)[R], const uint8_t* const (&weights)[C],
                                typename Ops::F (&f)[R][C][Ops::kVecs]) {
  constexpr bool kSpare = requires { Ops::kSpareRegisters; };
  if constexpr (!kSpare && !is_e2m1(kCode)) {
    if (t.zeros != nullptr) return add_sized_groups<Ops, R, C, kCode, Zeros::kAll, kGrouping>(t, rows, weights, f);
  }
  constexpr Zeros kZeros = kSpare && !is_e2m1(kCode) ? Zeros::kAsk : Zeros::kNone;
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
  if constexpr (requires { Ops::kOwnGroups; }) {
    Ops::template add_groups<R, C, kCode, kGrouping>(t, rows, weights, f);
  } else {
    add_all_groups<Ops, R, C, kCode, kGrouping>(t, rows, weights, f);
  }
  if (t.last) {
    finish_groups<Ops, R, C, kGrouping == Grouping::kLeast>(t, f);
  } else {
    store_sums<Ops>(t, f);
  }
}

template <class Ops, int R, int C, Grouping kGrouping, Code kCode>
void tile(const TileArgs& t) {
  const int8_t* rows[R];
  const uint8_t* weights[C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) rows[r] = t.q + r * t.q_stride;
#pragma GCC unroll 2
  for (int c = 0; c < C; ++c) weights[c] = t.weights + c * t.weights_stride;
  if constexpr (kGrouping == Grouping::kChannelwise) {
    channelwise_tile<Ops, R, C, kCode>(t, rows, weights);
  } else {
    groups_tile<Ops, R, C, kCode, kGrouping>(t, rows, weights);
  }
}
