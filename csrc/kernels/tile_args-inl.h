// What every tile works with: its arguments, what accumulators start at, how sums are kept and finished, fetching.
// Included inside a target region and an anonymous namespace.
#pragma once

#include "kernels/rows-inl.h"
#include "kernels/unroll-inl.h"

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
  const float* row_shifts;  // Rows::shifts, likewise
  int64_t row_scales_stride;
  const RowQuant* quant;
  const Panels* panels;
  const uint8_t* panel;    // the first of the C panels
  const uint8_t* weights;  // its first step: of all, packed; of the chunk, unpacked
  int64_t weights_stride;  // bytes to the steps of the next panel
  const uint8_t* scales;   // unpacked weights: of its groups in the chunk, [groups, 16] float32
  int64_t scales_stride;   // bytes to those of the next panel
  const uint8_t* zeros;    // [16], offsets of u in its first group; null: that of the weights (adding_an_isa.md)
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

// docs/numerics.md section 3, after the sum over the groups. kMayScale: there may be channel scales. W is the sum
// of weights in the panel. With activation groups W and the zero point are 0, and recip is 1 or 2^24 (RowQuant), times
// a router weight if given.
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

// What accumulators start at without zero points. part: of the chunk. kScaled: Rows::starts include kSumBits.
template <class Ops, int R, int C, Code kCode, bool kScaled>
W4A8_INLINE void start_accumulators(const TileArgs& t, int64_t part, typename Ops::I (&acc)[R][C][Ops::kVecs]) {
  for_each<R, C, Ops::kVecs>([&](int r, int c, int v) W4A8_LAMBDA {
    typename Ops::I& start = acc[r][c][v];
    if constexpr ((is_e2m1(kCode) && Ops::kE2M1Zero == 0) || (is_int8(kCode) && Ops::kInt8Zero == 0) ||
                  (!is_packed(kCode) && Ops::kUnpacksToW)) {
      start = Ops::isplat(kScaled ? kSumBits : 0);
    } else if constexpr (!is_packed(kCode) && Ops::kReloadsStarts) {
      start = Ops::isplat_of(t.starts + r * t.starts_stride + part);
    } else {
      start = Ops::isplat(t.starts[r * t.starts_stride + part]);
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

// acc = -z * sum of q, plus kSumBits if kScaled. kAdded: added to acc after the sum over the steps, since all that acc
// holds before the steps is live all through them. kSmall: |sum of q| < 2^15. zeros: of the group, a pointer per panel.
template <class Ops, int R, int C, Code kCode, bool kScaled, bool kAdded, bool kSmall>
W4A8_INLINE void start_at_zeros(const TileArgs& t, const uint8_t* const (&zeros)[C], int64_t part,
                                typename Ops::I (&acc)[R][C][Ops::kVecs]) {
  using I = typename Ops::I;
  I zero[C][Ops::kVecs];
  for_each<C, Ops::kVecs>([&](int c, int v)
                              W4A8_LAMBDA { zero[c][v] = load_zeros<Ops, kCode>(zeros[c] + v * Ops::kLanes); });
  for_each<R>([&](int r) W4A8_LAMBDA {
    const int32_t* const from = t.starts + r * t.starts_stride + part;
    I sum;
    if constexpr (Ops::kReloadsStarts) {
      sum = Ops::isplat_of(from);
    } else {
      sum = Ops::isplat(*from);
    }
    if constexpr (kScaled) sum = Ops::isub(sum, Ops::isplat(kSumBits));
    for_each<C, Ops::kVecs>([&](int c, int v) W4A8_LAMBDA {
      const I before = kAdded ? acc[r][c][v] : Ops::isplat(kScaled ? kSumBits : 0);
      if constexpr (kSmall && Ops::kNarrowProducts) {
        acc[r][c][v] = Ops::iadd_product16(before, zero[c][v], sum);
      } else {
        acc[r][c][v] = Ops::iadd(before, Ops::imul(zero[c][v], sum));
      }
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
