// SMMLA kernel (Armv8.6, FEAT_I8MM): int4 weights x int8 activations, 2 rows x 2 columns x 8 k an instruction.
//
//   SMMLA        s8 x s8 -> i32, 32 products an instruction
//   ZIP1, ZIP2   pair columns (weights) and rows, once per batch
//
//   Many rows: rows are prepared in pairs, the panel is unpacked and zipped, both once for a batch (tile_driver-inl.h):
//
//      a[p]        [ row 2 p: k0..k7     | row 2 p + 1: k0..k7 ]      one step of a pair of rows
//      b[v]        [ column 2 v: k0..k7  | column 2 v + 1: k0..k7 ]   one step of a pair of columns
//      acc[p][v]   [ row 2 p: columns 2 v, 2 v + 1 | row 2 p + 1: the same ]   += SMMLA(a[p], b[v])
//
//      channelwise   3 pairs of rows x 8 sums, 2 x 3 of a, 2 of b: 32 registers
//      groups        3 x 4 sums, as many floats, 2 x 3, 2: 32 registers; the panel in two halves, 8 columns each
//
//   Weights are unpacked to w, so that sums start at 0. |acc| <= K * 15 * 128 < 2^31 for K <= 2^20. Few rows take SDOT,
//   which every CPU with SMMLA has, and packed weights, as in arm_dotprod: reading those is what they wait for. Whole
//   rows are arm_neon's.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstdint>
#include <utility>

#include "kernels/cpu_features.h"
#include "kernels/kernel.h"
#include "kernels/ops.h"
#include "kernels/row_params.h"
#include "kernels/target.h"

W4A8_TARGET(W4A8_TARGET_I8MM)
namespace w4a8::isa {

extern const Kernel arm_dotprod;
extern const Kernel arm_neon;

namespace {

#include "kernels/row_functions-inl.h"
#include "kernels/tile_sdot-inl.h"

using Ops = DotOps;

struct Pairs : SignedTiles<Pairs> {
  using F = Ops::F;
  using I = Ops::I;
  using Bytes = Ops::Bytes;
  static constexpr GemmFn kFew = pass_on<arm_dotprod, &Kernel::gemm>;
  static constexpr int64_t kManyRows = 6;
  static constexpr int64_t kRowBytes = kStepK;
  static constexpr int64_t kBatchRows = 64;
  static constexpr int64_t kChunkSteps = 100;  // 12 KiB of unpacked weights and 50 KiB of prepared rows
  static constexpr int64_t kMostRows = 6;
  static int64_t tile_rows(int64_t, bool) { return kMostRows; }

  static W4A8_INLINE I low_halves(I a, I b) { return vcombine_s32(vget_low_s32(a), vget_low_s32(b)); }
  static W4A8_INLINE I high_halves(I a, I b) { return vcombine_s32(vget_high_s32(a), vget_high_s32(b)); }

  // Steps of a tile one after the other, in each the pairs of rows. The last of an odd number of rows is its own
  // partner.
  static void prepare(const int8_t* q, int64_t count, int64_t stride, int64_t steps, uint8_t* bytes) {
    const int64_t step_bytes = (count + 1) / 2 * 16;
    for (int64_t r = 0; r < count; r += 2, bytes += 16) {
      const int8_t* even = q + r * stride;
      const int8_t* odd = r + 1 < count ? even + stride : even;
      uint8_t* to = bytes;
      int64_t s = 0;
      for (; s + 4 <= steps; s += 4, to += 4 * step_bytes) {
        const I a = Ops::iload(reinterpret_cast<const uint8_t*>(even + s * kStepK));
        const I b = Ops::iload(reinterpret_cast<const uint8_t*>(odd + s * kStepK));
        const I c = Ops::iload(reinterpret_cast<const uint8_t*>(even + s * kStepK + 16));
        const I d = Ops::iload(reinterpret_cast<const uint8_t*>(odd + s * kStepK + 16));
        vst1q_u8(to, vreinterpretq_u8_s32(low_halves(a, b)));
        vst1q_u8(to + step_bytes, vreinterpretq_u8_s32(high_halves(a, b)));
        vst1q_u8(to + 2 * step_bytes, vreinterpretq_u8_s32(low_halves(c, d)));
        vst1q_u8(to + 3 * step_bytes, vreinterpretq_u8_s32(high_halves(c, d)));
      }
      for (; s < steps; ++s, to += step_bytes) {
        __builtin_memcpy(to, even + s * kStepK, kStepK);
        __builtin_memcpy(to + kStepK, odd + s * kStepK, kStepK);
      }
    }
  }

  static W4A8_INLINE void store_step(const Bytes (&low)[4], const Bytes (&high)[4], uint8_t* bytes) {
    for_each<4>([&](int j) W4A8_LAMBDA {
      const I pairs[] = {vzip1q_s32(vreinterpretq_s32_s8(low[j]), vreinterpretq_s32_s8(high[j])),
                         vzip2q_s32(vreinterpretq_s32_s8(low[j]), vreinterpretq_s32_s8(high[j]))};
      vst1q_u8(bytes + 32 * j, vreinterpretq_u8_s32(pairs[0]));
      vst1q_u8(bytes + 32 * j + 16, vreinterpretq_u8_s32(pairs[1]));
    });
  }

  static W4A8_INLINE void multiply(I& acc, Bytes a, Bytes b) {
    __asm__ volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(acc) : "w"(a), "w"(b));
  }
  // A zero that takes no register to copy it from.
  static W4A8_INLINE I zero() {
    I zero;
    __asm__ volatile("movi %0.4s, 0" : "=w"(zero));
    return zero;
  }

  // Adds V pairs of columns of one step; kStep: its offset behind w, in steps.
  template <int P, int V, int kStep, int kPair = 0>
  static W4A8_INLINE void add_step(I (&acc)[P][V], const Bytes (&a)[P], const uint8_t* w) {
    Bytes first;
    Bytes second;
    Ops::load_pair<kStep* static_cast<int>(kByteStepBytes) + 16 * kPair>(w, first, second);
    for_each<P>([&](int p) W4A8_LAMBDA { multiply(acc[p][kPair], a[p], first); });
    for_each<P>([&](int p) W4A8_LAMBDA { multiply(acc[p][kPair + 1], a[p], second); });
    if constexpr (kPair + 2 < V) add_step<P, V, kStep, kPair + 2>(acc, a, w);
  }

  // Two steps, at kStep behind w. q moves behind them.
  template <int P, int V, int kStep>
  static W4A8_INLINE void add_two_steps(I (&acc)[P][V], const int8_t*& q, const uint8_t* w) {
    Bytes both[2 * P];
    Bytes a[P];
    Bytes b[P];
    for_each<P>([&](int p) W4A8_LAMBDA { Ops::take_pair(q, both[2 * p], both[2 * p + 1]); });
    for_each<P>([&](int p) W4A8_LAMBDA {
      a[p] = both[p];
      b[p] = both[P + p];
    });
    add_step<P, V, kStep>(acc, a, w);
    add_step<P, V, kStep + 1>(acc, b, w);
  }

  // V sums of a pair of rows, from register kFirst of 8 on, as `out` keeps them between chunks: registers 0..3 in the
  // even row, 4..7 in the odd one. A single row has room for its half of them, in the order of the columns.
  template <int V, int kFirst>
  static W4A8_INLINE void load_pair(const float* row, int64_t ldc, bool both, F (&f)[V]) {
    for_each<V / 2>([&](int i) W4A8_LAMBDA {
      const int v = 2 * i;
      const int at = kFirst + v;
      if (both) {
        const float* from = row + (at < 4 ? 0 : ldc) + at % 4 * 4;
        f[v] = Ops::load(from);
        f[v + 1] = Ops::load(from + 4);
      } else {
        const I one = Ops::int_bits(Ops::load(row + 2 * at));
        f[v] = Ops::float_bits(low_halves(one, one));
        f[v + 1] = Ops::float_bits(high_halves(one, one));
      }
    });
  }
  template <int V, int kFirst>
  static W4A8_INLINE void store_pair(float* row, int64_t ldc, bool both, const F (&f)[V]) {
    for_each<V / 2>([&](int i) W4A8_LAMBDA {
      const int v = 2 * i;
      const int at = kFirst + v;
      if (both) {
        float* to = row + (at < 4 ? 0 : ldc) + at % 4 * 4;
        Ops::store(to, f[v]);
        Ops::store(to + 4, f[v + 1]);
      } else {
        Ops::store(row + 2 * at, Ops::float_bits(low_halves(Ops::int_bits(f[v]), Ops::int_bits(f[v + 1]))));
      }
    });
  }
  template <int P, int V, int kFirst>
  static W4A8_INLINE void load_pairs(const TileArgs& t, int64_t count, F (&f)[P][V]) {
    for_each<P>([&](int p) W4A8_LAMBDA {
      load_pair<V, kFirst>(t.out + 2 * p * t.ldc, t.ldc, p + 1 < P || count == 2 * P, f[p]);
    });
  }
  template <int P, int V, int kFirst>
  static W4A8_INLINE void store_pairs(const TileArgs& t, int64_t count, const F (&f)[P][V]) {
    for_each<P>([&](int p) W4A8_LAMBDA {
      store_pair<V, kFirst>(t.out + 2 * p * t.ldc, t.ldc, p + 1 < P || count == 2 * P, f[p]);
    });
  }

  // Two numbers, twice.
  static W4A8_INLINE F twice(const uint8_t* p) {
    double two;
    __builtin_memcpy(&two, p, sizeof(two));
    return vreinterpretq_f32_f64(vdupq_n_f64(two));
  }
  // finish_channelwise and finish_groups of tile_args-inl.h for pairs of rows, in `out`.
  template <bool kChannelwise>
  static __attribute__((noinline)) void finish(const TileArgs& t, int64_t count) {
    const Panels& panels = *t.panels;
    F sums[8];
    F bias[8];
    F scales[8];
    for_each<8>([&](int v) W4A8_LAMBDA {
      sums[v] = twice(t.panel + panels.sums_offset + 8 * v);
      bias[v] = twice(t.panel + panels.bias_offset + 8 * v);
      scales[v] = Ops::splat(1.0f);
      if (panels.scale_type == ScaleType::kE5M3) scales[v] = twice(t.panel + panels.channel_offset + 8 * v);
    });
    if constexpr (kChannelwise) {
      for_each<4>([&](int j) W4A8_LAMBDA {
        const I four = Ops::int_bits(load_float_scales<Ops>(t.panel, 4 * j, panels.scale_type));
        scales[2 * j] = Ops::float_bits(low_halves(four, four));
        scales[2 * j + 1] = Ops::float_bits(high_halves(four, four));
      });
    }
    for (int64_t r = 0; r < count; r += 2) {
      const bool both = r + 1 < count;
      const RowQuant even = t.quant[r];
      const RowQuant odd = t.quant[both ? r + 1 : r];
      const F recip = vcombine_f32(vdup_n_f32(even.recip), vdup_n_f32(odd.recip));
      const I zero = vcombine_s32(vdup_n_s32(even.zero_point), vdup_n_s32(odd.zero_point));
      float* row = t.out + r * t.ldc;
      F f[8];
      load_pair<8, 0>(row, t.ldc, both, f);
      for_each<8>([&](int v) W4A8_LAMBDA {
        if constexpr (kChannelwise) {
          const I sum = Ops::isub(Ops::int_bits(f[v]), Ops::imul(zero, Ops::int_bits(sums[v])));
          f[v] = Ops::add(Ops::mul(Ops::to_float(sum), Ops::mul(recip, scales[v])), bias[v]);
        } else {
          const F shifted = Ops::fma(Ops::neg(Ops::to_float(zero)), sums[v], f[v]);
          f[v] = Ops::add(Ops::mul(shifted, Ops::mul(recip, scales[v])), bias[v]);
        }
      });
      for_each<4>([&](int j) W4A8_LAMBDA {
        const I first = Ops::int_bits(f[2 * j]);
        const I second = Ops::int_bits(f[2 * j + 1]);
        Ops::store(row + 4 * j, Ops::float_bits(low_halves(first, second)));
        if (both) Ops::store(row + t.ldc + 4 * j, Ops::float_bits(high_halves(first, second)));
      });
    }
  }

  template <int P>
  static __attribute__((noinline)) void channelwise(const TileArgs& t, int64_t count) {
    I acc[P][8];
    F bits[P][8];
    if (!t.first) load_pairs<P, 8, 0>(t, count, bits);
    for_each<P, 8>([&](int p, int v) W4A8_LAMBDA { acc[p][v] = t.first ? Ops::isplat(0) : Ops::int_bits(bits[p][v]); });
    const int8_t* q = t.q;
    const uint8_t* w = t.weights;
    Ops::barrier();
    for (int64_t left = t.steps / 2; left != 0; --left, w += 2 * kByteStepBytes) add_two_steps<P, 8, 0>(acc, q, w);
    if (t.steps % 2 != 0) {
      Bytes a[P];
      for_each<P>([&](int p) W4A8_LAMBDA { Ops::take_one(q, a[p]); });
      add_step<P, 8, 0>(acc, a, w);
    }
    for_each<P, 8>([&](int p, int v) W4A8_LAMBDA { bits[p][v] = Ops::float_bits(acc[p][v]); });
    store_pairs<P, 8, 0>(t, count, bits);
    if (t.last) finish<true>(t, count);
  }

  // float32 scales of 8 columns, each pair twice, as the sums are. `scales` moves to the next group.
  static W4A8_INLINE void take_scales(const uint8_t*& scales, F (&out)[4]) {
    for_each<4>([&](int v) W4A8_LAMBDA { __asm__ volatile("ld1r {%0.2d}, [%1], 8" : "=w"(out[v]), "+r"(scales)); });
    scales += kScaleBytes - 32;
  }

  // Four steps, 8 columns. q and w move behind them.
  template <int P>
  static W4A8_INLINE void add_block(I (&acc)[P][4], const int8_t*& q, const uint8_t*& w) {
    add_two_steps<P, 4, 0>(acc, q, w);
    add_two_steps<P, 4, 2>(acc, q, w);
    w += kBlockSteps * kByteStepBytes;
  }
  template <int P>
  static W4A8_INLINE void add_least_group(I (&acc)[P][4], const int8_t*& q, const uint8_t*& w) {
    add_two_steps<P, 4, 0>(acc, q, w);
    w += kLeastGroupSteps * kByteStepBytes;
  }
  // The scales of a pair of rows, as the sums are.
  static W4A8_INLINE F pair_scales(const float* p) {
    const float32x2_t both = vld1_f32(p);
    return vcombine_f32(vdup_lane_f32(both, 0), vdup_lane_f32(both, 1));
  }

  // All groups of the chunk for 8 columns, the first or second half of the panel. kSteps: of a part, 0 if known at
  // run time only. kSmall: is_small. kOfParts: f is the sum over the parts of a group, and the one over groups is in
  // `out`.
  template <int P, int kHalf, int64_t kSteps, bool kSmall, RowScales kRowScales>
  static __attribute__((noinline)) void add_groups(const TileArgs& t, int64_t count) {
    constexpr bool kOfParts = kRowScales == RowScales::kOfParts;
    F f[P][4];
    if (t.first || kOfParts) {
      for_each<P, 4>([&](int p, int v) W4A8_LAMBDA { f[p][v] = Ops::splat(0.0f); });
    } else {
      load_pairs<P, 4, 4 * kHalf>(t, count, f);
    }
    const int8_t* q = t.q;
    const uint8_t* w = t.weights + 64 * kHalf;
    const uint8_t* scales = t.scales + 32 * kHalf;
    const float* row_scales = t.row_scales;
    const int64_t blocks = t.panels->part_steps / kBlockSteps;
    const int64_t parts_of_group = t.panels->group_steps / t.panels->part_steps;
    int64_t left_of_group = parts_of_group;
    int64_t parts = t.steps / t.panels->part_steps;
    bool fresh = t.first;
    Ops::barrier();
    do {
      I acc[P][4];
      for_each<P, 2>([&](int p, int v) W4A8_LAMBDA {
        if constexpr (kSmall) {
          Ops::start_small(acc[p][2 * v], acc[p][2 * v + 1]);
        } else {
          acc[p][2 * v] = zero();
          acc[p][2 * v + 1] = zero();
        }
      });
      if constexpr (kSteps == kLeastGroupSteps) {
        add_least_group<P>(acc, q, w);
      } else if constexpr (kSteps != 0) {
        for_each<kSteps / kBlockSteps>([&](int) W4A8_LAMBDA { add_block<P>(acc, q, w); });
      } else {
        int64_t block = blocks;
        do {
          add_block<P>(acc, q, w);
        } while (--block != 0);
      }
      F a[P];
      if constexpr (kRowScales != RowScales::kNone) {
        for_each<P>([&](int p) W4A8_LAMBDA { a[p] = pair_scales(row_scales + 2 * p); });
        row_scales += t.row_scales_stride;
      }
      const F offset = Ops::middle();
      if constexpr (kOfParts) {
        for_each<4, P>([&](int v, int p) W4A8_LAMBDA {
          f[p][v] = Ops::fma(Ops::group_sum<kSmall>(acc[p][v], offset), a[p], f[p][v]);
        });
        if (--left_of_group != 0) continue;
        left_of_group = parts_of_group;
        move_to_out<P, kHalf>(t, count, scales, fresh, f);
        fresh = false;
      } else {
        F scale[4];
        take_scales(scales, scale);
        for_each<4, P>([&](int v, int p) W4A8_LAMBDA {
          F sum = Ops::group_sum<kSmall>(acc[p][v], offset);
          if constexpr (kRowScales == RowScales::kOfGroups) sum = Ops::mul(sum, a[p]);
          f[p][v] = Ops::fma(sum, scale[v], f[p][v]);
        });
      }
    } while (--parts != 0);
    if constexpr (!kOfParts) store_pairs<P, 4, 4 * kHalf>(t, count, f);
  }
  // The sums over groups in `out` += scale * f, or are that if they are `fresh`; f = 0.
  template <int P, int kHalf>
  static W4A8_INLINE void move_to_out(const TileArgs& t, int64_t count, const uint8_t*& scales, bool fresh,
                                      F (&f)[P][4]) {
    F scale[4];
    take_scales(scales, scale);
    F sums[P][4];
    for_each<P, 4>([&](int p, int v) W4A8_LAMBDA { sums[p][v] = Ops::splat(0.0f); });
    if (!fresh) load_pairs<P, 4, 4 * kHalf>(t, count, sums);
    for_each<P, 4>([&](int p, int v) W4A8_LAMBDA {
      sums[p][v] = Ops::fma(f[p][v], scale[v], sums[p][v]);
      f[p][v] = Ops::splat(0.0f);
    });
    store_pairs<P, 4, 4 * kHalf>(t, count, sums);
  }

  template <int P, int64_t kSteps, bool kSmall = true, RowScales kRowScales = RowScales::kNone>
  static W4A8_INLINE void both_halves(const TileArgs& t, int64_t count) {
    add_groups<P, 0, kSteps, kSmall, kRowScales>(t, count);
    add_groups<P, 1, kSteps, kSmall, kRowScales>(t, count);
  }
  template <int P, RowScales kRowScales>
  static void scaled_groups(const TileArgs& t, int64_t count) {
    switch (t.panels->part_steps) {
      case kLeastGroupSteps: return both_halves<P, kLeastGroupSteps, true, kRowScales>(t, count);
      case kBlockSteps: return both_halves<P, kBlockSteps, true, kRowScales>(t, count);
      default: return both_halves<P, 0, true, kRowScales>(t, count);
    }
  }
  // The sums in `out`, row by row, become those of pairs of rows.
  static __attribute__((noinline)) void start_sums(const TileArgs& t, int64_t count) {
    for (int64_t r = 0; r < count; r += 2) {
      const bool both = r + 1 < count;
      const float* const sums = t.out + r * t.ldc;
      F f[8];
      for_each<4>([&](int j) W4A8_LAMBDA {
        const I even = Ops::int_bits(Ops::load(sums + 4 * j));
        const I odd = Ops::int_bits(Ops::load(sums + (both ? t.ldc : 0) + 4 * j));
        f[2 * j] = Ops::float_bits(low_halves(even, odd));
        f[2 * j + 1] = Ops::float_bits(high_halves(even, odd));
      });
      store_pair<8, 0>(t.out + r * t.ldc, t.ldc, both, f);
    }
  }
  template <int P>
  static void groups(const TileArgs& t, int64_t count) {
    const PanelLayout& layout = *t.panels;
    if (t.first && layout.kind.minimums) {
      start_sums(t, count);
      TileArgs rest = t;
      rest.first = false;
      return groups<P>(rest, count);
    }
    if (layout.scaled) {
      (layout.part_steps < layout.group_steps ? scaled_groups<P, RowScales::kOfParts>
                                              : scaled_groups<P, RowScales::kOfGroups>)(t, count);
      if (t.last) finish<false>(t, count);
      return;
    }
    switch (layout.group_steps) {
      case kLeastGroupSteps: both_halves<P, kLeastGroupSteps>(t, count); break;
      case kBlockSteps: both_halves<P, kBlockSteps>(t, count); break;
      case 4 * kBlockSteps: both_halves<P, 4 * kBlockSteps>(t, count); break;
      default: is_small(*t.panels) ? both_halves<P, 0>(t, count) : both_halves<P, 0, false>(t, count);
    }
    if (t.last) finish<false>(t, count);
  }

  template <int P>
  static void tile_of(const TileArgs& t, int64_t count) {
    if (t.panels->channelwise) {
      channelwise<P>(t, count);
    } else {
      groups<P>(t, count);
    }
  }
  static void tile(int64_t count, const TileArgs& t) {
    static_assert(least_share(kManyRows / 2, kMostRows / 2) == 2);  // pairs
    if (count > 4) {
      tile_of<3>(t, count);
    } else {
      tile_of<2>(t, count);
    }
  }
};

}  // namespace

extern const Kernel arm_i8mm;
extern const AttentionFunctions arm_neon_attention;
extern const LinearAttentionFunctions arm_neon_linear_attention;
constinit const Kernel arm_i8mm = {shared_rows<arm_neon>(),    gemm_arm_of<Pairs>(), &arm_neon_attention,
                                   &arm_neon_linear_attention, "arm_i8mm",           kNeon | kDotprod | kI8mm};

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
