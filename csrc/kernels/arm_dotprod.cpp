// SDOT kernel (Armv8.2 with FEAT_DotProd): int4 weights (unsigned nibbles) x int8 activations.
//
//   SDOT by element   s8 x s8 -> i32, 16 products an instruction: 4 k of 4 columns, one row
//   AND, USHR         low and high nibbles of packed weights
//
//   How a step is multiplied, and the ranges, are in tile_sdot-inl.h. Whole rows are arm_neon's. Many rows, unpacked
//   panel:
//
//      channelwise          5 rows x 4 sums, 2 x 5 rows of q, 2 of weights: 32 registers
//      groups               4 rows x 2 sums, as many floats, 2 x 4, 2: 26 registers; the panel in two halves, 8 columns
//                           each, because the float sums of all 16 would not fit beside the int32 ones
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstdint>
#include <utility>

#include "kernels/cpu_features.h"
#include "kernels/kernel.h"
#include "kernels/ops.h"
#include "kernels/row_params.h"
#include "kernels/target.h"

W4A8_TARGET(W4A8_TARGET_DOTPROD)
namespace w4a8::isa {

extern const Kernel arm_neon;

namespace {

#include "kernels/row_functions-inl.h"
#include "kernels/tile_sdot-inl.h"

using Ops = DotOps;

// The constants of tiles on packed weights, and the type of the scales: known at compile time, it costs no branches.
template <ScaleType kScales>
struct FewOps : DotOps {
  // 2 rows x 2 panels or 5 x 1, with the weights of a step.
  static constexpr int kRows[] = {5, 2};
  static constexpr int64_t kUnpackRows = 0;  // Tiles of the ISA do it
  static constexpr bool kOwnGroups = true;
  static constexpr bool takes(bool, bool scaled) { return !scaled; }

  // What u of 16 columns counts from; four registers of four.
  template <Code kCode>
  static W4A8_INLINE void expand_zeros(const uint8_t* p, I (&out)[4]) {
    const uint8x16_t all = vld1q_u8(p);
    const uint8x16_t bytes = kCode == Code::kInt8 ? all : vandq_u8(all, vdupq_n_u8(15));
    const uint16x8_t halves[] = {vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)};
    for_each<2>([&](int h) W4A8_LAMBDA {
      out[2 * h] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(halves[h])));
      out[2 * h + 1] = vreinterpretq_s32_u32(vmovl_high_u16(halves[h]));
    });
    if constexpr (kCode == Code::kInt8) for_each<4>([&](int v) W4A8_LAMBDA { out[v] = isub(out[v], isplat(128)); });
  }

  // start_accumulators and start_at_zeros of tile_args-inl.h; starts move to the next group.
  template <int R, int C, Code kCode>
  static W4A8_INLINE void start_group(I (&acc)[R][C][4], const int32_t* (&starts)[R], const uint8_t* const (&zeros)[C],
                                      bool has_zeros) {
    if (may_have_zeros(kCode) && has_zeros) {
      I sums[R];
      for_each<R>([&](int r) W4A8_LAMBDA { sums[r] = take_splat(starts[r]); });
      for_each<C>([&](int c) W4A8_LAMBDA {
        I zero[4];
        expand_zeros<kCode>(zeros[c], zero);
        for_each<4, R>([&](int v, int r) W4A8_LAMBDA { acc[r][c][v] = imul(zero[v], sums[r]); });
      });
      return;
    }
    for_each<R>([&](int r) W4A8_LAMBDA {
      const I start = kCode == Code::kNibbles || kCode == Code::kSix ? take_splat(starts[r]) : isplat(0);
      for_each<C, 4>([&](int c, int v) W4A8_LAMBDA { acc[r][c][v] = start; });
    });
  }

  // The sums of the general add_groups with pointers that move instead of indices. In decode a group of 32 takes a
  // tenth less.
  template <int R, int C, Code kCode, Grouping kGrouping>
  static W4A8_INLINE void add_groups(const TileArgs& t, const int8_t* const (&rows)[R],
                                     const uint8_t* const (&weights)[C], F (&f)[R][C][4]) {
    const PanelLayout& layout = *t.panels;
    const int8_t* q[R];
    const int32_t* starts[R];
    const uint8_t* w[C];
    const uint8_t* scales[C];
    const uint8_t* zeros[C];
    for_each<R>([&](int r) W4A8_LAMBDA {
      q[r] = rows[r];
      starts[r] = t.starts + r * t.starts_stride;
    });
    // A record begins at w[c]: its head.
    const auto begin_record = [&](int c) W4A8_LAMBDA {
      scales[c] = w[c];
      zeros[c] = w[c] + layout.zeros_offset;
      w[c] += layout.head_bytes;
    };
    for_each<C>([&](int c) W4A8_LAMBDA {
      w[c] = weights[c] - layout.head_bytes;
      begin_record(c);
    });
    int64_t in_record = layout.record_groups;
    const int64_t ahead = t.fetch - t.panel;
    int64_t left = layout.groups;
    do {
      I acc[R][C][4];
      start_group<R, C, kCode>(acc, starts, zeros, t.zeros != nullptr);
      if constexpr (kGrouping == Grouping::kLeast) {
        add_least_group<kCode>(acc, q, w, ahead);
      } else {
        int64_t blocks = layout.group_steps / kBlockSteps;
        do {
          add_block<kCode>(acc, q, w, ahead);
        } while (--blocks != 0);
      }
      for_each<C>([&](int c) W4A8_LAMBDA {
        __builtin_prefetch(scales[c] + ahead, 0, 2);
        for_each<4>([&](int v) W4A8_LAMBDA {
          const F scale = load_any_scales<FewOps>(scales[c], 4 * v, kScales);
          for_each<R>([&](int r) W4A8_LAMBDA { f[r][c][v] = fma(to_float(acc[r][c][v]), scale, f[r][c][v]); });
        });
        scales[c] += kPanelColumns * scale_bytes(kScales);
        zeros[c] += kPanelColumns;
      });
      if (--in_record == 0) {
        in_record = layout.record_groups;
        for_each<C>(begin_record);
      }
    } while (--left != 0);
  }
};

// Only groups of 16 have scales of e5m3, and only larger ones those of e8m0.
struct FewE5M3Ops : FewOps<ScaleType::kE5M3> {
  static constexpr bool takes(bool least, bool scaled) { return least && !scaled; }
};
// The general loops. Scales of activations, and super-scales, cost more than asking for the type of the weights'
// scales.
struct FewAnyOps : DotOps {
  static constexpr int kRows[] = {5, 2};
  static constexpr int64_t kUnpackRows = 0;
};

void few_rows(const Rows& rows, int64_t m, const Panels& panels, int64_t panel_count, float* out, int64_t ldc,
              uint8_t*) {
  const auto run = [&]<class FewRows>(FewRows) { gemm<FewRows>(rows, m, panels, panel_count, out, ldc, nullptr); };
  if (panels.scaled || panels.scale_type == ScaleType::kSuper) return run(FewAnyOps());
  switch (panels.scale_type) {
    case ScaleType::kFloat32: return run(FewOps<ScaleType::kFloat32>());
    case ScaleType::kBFloat16: return run(FewOps<ScaleType::kBFloat16>());
    case ScaleType::kFloat16: return run(FewOps<ScaleType::kFloat16>());
    case ScaleType::kE5M3: return run(FewE5M3Ops());
    case ScaleType::kE8M0: return run(FewOps<ScaleType::kE8M0>());
    case ScaleType::kSuper: break;
  }
}

// The tiles of unpacked panels.
struct ManyOps : DotOps {
  static constexpr bool kUnpacksToW = true;
  static constexpr bool kOwnGroups = true;

  // All groups of the chunk for 8 columns, the first or second half of the panel. Not inlined: the sums of the other
  // half would take registers. kSteps: of a part, 0 if known at run time only. kSmall: is_small. kOfParts: f is the sum
  // over the parts of a group, and the one over groups is in `all`.
  template <int R, int kHalf, int64_t kSteps, bool kSmall, RowScales kRowScales>
  static __attribute__((noinline)) void add_half(const TileArgs& t, F (&all)[R][1][4]) {
    constexpr bool kOfParts = kRowScales == RowScales::kOfParts;
    F f[R][2];
    const int8_t* q[R];
    for_each<R>([&](int r) W4A8_LAMBDA { q[r] = t.q + r * t.q_stride; });
    for_each<R, 2>([&](int r, int v) W4A8_LAMBDA { f[r][v] = kOfParts ? splat(0.0f) : all[r][0][2 * kHalf + v]; });
    const uint8_t* w[1] = {t.weights + 32 * kHalf};
    const uint8_t* scales = t.scales + 32 * kHalf;
    const float* row_scales = t.row_scales;
    const int64_t blocks = t.panels->part_steps / kBlockSteps;
    const int64_t parts_of_group = t.panels->group_steps / t.panels->part_steps;
    int64_t left_of_group = parts_of_group;
    int64_t parts = t.steps / t.panels->part_steps;
    barrier();
    do {
      I acc[R][1][2];
      for_each<R>([&](int r) W4A8_LAMBDA {
        if constexpr (kSmall) {
          start_small(acc[r][0][0], acc[r][0][1]);
        } else {
          acc[r][0][0] = acc[r][0][1] = isplat(0);
        }
      });
      if constexpr (kSteps == kLeastGroupSteps) {
        add_least_group<Code::kBytes>(acc, q, w, 0);
      } else if constexpr (kSteps == kBlockSteps) {
        add_block<Code::kBytes>(acc, q, w, 0);
      } else {
        int64_t block = blocks;
        do {
          add_block<Code::kBytes>(acc, q, w, 0);
        } while (--block != 0);
      }
      const F offset = middle();
      for_each<2>([&](int v) W4A8_LAMBDA {
        const F scale = load_bytes(scales + 16 * v);
        for_each<R>([&](int r) W4A8_LAMBDA {
          const F sum = group_sum<kSmall>(acc[r][0][v], offset);
          if constexpr (kRowScales == RowScales::kNone) f[r][v] = fma(sum, scale, f[r][v]);
          if constexpr (kRowScales == RowScales::kOfGroups)
            f[r][v] = fma(mul(sum, splat(row_scales[r])), scale, f[r][v]);
          if constexpr (kOfParts) f[r][v] = fma(sum, splat(row_scales[r]), f[r][v]);
        });
      });
      row_scales += t.row_scales_stride;
      if (kOfParts && --left_of_group != 0) continue;
      if constexpr (kOfParts) {
        left_of_group = parts_of_group;
        for_each<R, 2>([&](int r, int v) W4A8_LAMBDA {
          F& sum = all[r][0][2 * kHalf + v];
          sum = fma(f[r][v], load_bytes(scales + 16 * v), sum);
          f[r][v] = splat(0.0f);
        });
      }
      scales += kScaleBytes;
    } while (--parts != 0);
    if constexpr (!kOfParts) for_each<R, 2>([&](int r, int v) W4A8_LAMBDA { all[r][0][2 * kHalf + v] = f[r][v]; });
  }

  template <int R, int64_t kSteps, bool kSmall, RowScales kRowScales>
  static W4A8_INLINE void both_halves(const TileArgs& t, F (&all)[R][1][4]) {
    add_half<R, 0, kSteps, kSmall, kRowScales>(t, all);
    add_half<R, 1, kSteps, kSmall, kRowScales>(t, all);
  }
  template <int R, int C, Code kCode, Grouping kGrouping>
  static W4A8_INLINE void add_groups(const TileArgs& t, const int8_t* const (&)[R], const uint8_t* const (&)[C],
                                     F (&f)[R][C][4]) {
    constexpr RowScales kRowScales = row_scales_of(kGrouping);
    if constexpr (is_least(kGrouping)) {
      both_halves<R, kLeastGroupSteps, true, kRowScales>(t, f);
    } else if (t.panels->part_steps == kBlockSteps) {
      both_halves<R, kBlockSteps, true, kRowScales>(t, f);
    } else if (is_scaled(kGrouping) || is_small(*t.panels)) {
      both_halves<R, 0, true, kRowScales>(t, f);
    } else {
      both_halves<R, 0, false, kRowScales>(t, f);
    }
  }
};

// A step is the 64 low nibbles, then the 64 high ones.
struct Unpacked : SignedTiles<Unpacked> {
  using Bytes = Ops::Bytes;
  static constexpr int64_t kRowBytes = 0;
  static constexpr int64_t kBatchRows = 0;
  static constexpr int64_t kChunkSteps = 256;  // 32 KiB of unpacked weights
  static constexpr GemmFn kFew = few_rows;
  static constexpr int64_t kManyRows = 8;
  static constexpr int64_t kMostRows = 5;

  static W4A8_INLINE void store_step(const Bytes (&low)[4], const Bytes (&high)[4], uint8_t* bytes) {
    for_each<4>([&](int j) W4A8_LAMBDA {
      vst1q_u8(bytes + 16 * j, vreinterpretq_u8_s8(low[j]));
      vst1q_u8(bytes + kStepBytes + 16 * j, vreinterpretq_u8_s8(high[j]));
    });
  }
  static int64_t tile_rows(int64_t, bool channelwise) { return channelwise ? kMostRows : 4; }
  static constexpr int kLeast = 3;
  static constexpr Code kCode = Code::kBytes;
  template <Grouping kGrouping>
  static void groups(int64_t count, const TileArgs& t) {
    pick_rows<ManyOps, 1, kGrouping, kCode, kLeast>(count, std::make_integer_sequence<int, 2>())(t);
  }
  static void tile(int64_t count, const TileArgs& t) {
    static_assert(kLeast == least_share(kManyRows, 4) && kLeast == least_share(kManyRows, kMostRows));
    switch (grouping_of(*t.panels)) {
      case Grouping::kChannelwise:
        return pick_rows<ManyOps, 1, Grouping::kChannelwise, kCode, kLeast>(count,
                                                                            std::make_integer_sequence<int, 3>())(t);
      case Grouping::kLeast: return groups<Grouping::kLeast>(count, t);
      case Grouping::kBlocks: return groups<Grouping::kBlocks>(count, t);
      case Grouping::kScaledLeast: return groups<Grouping::kScaledLeast>(count, t);
      case Grouping::kScaledBlocks: return groups<Grouping::kScaledBlocks>(count, t);
      case Grouping::kParts: return groups<Grouping::kParts>(count, t);
    }
  }
};

}  // namespace

extern const Kernel arm_dotprod;
extern const AttentionFunctions arm_neon_attention;
extern const LinearAttentionFunctions arm_neon_linear_attention;
constinit const Kernel arm_dotprod = {shared_rows<arm_neon>(),    gemm_arm_of<Unpacked>(), &arm_neon_attention,
                                      &arm_neon_linear_attention, "arm_dotprod",           kNeon | kDotprod};

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
