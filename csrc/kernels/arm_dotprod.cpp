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

#include "kernels/activation-inl.h"
#include "kernels/arm_ops-inl.h"
#include "kernels/rows-inl.h"
#include "kernels/tile-inl.h"
#include "kernels/tile_driver-inl.h"
#include "kernels/tile_sdot-inl.h"

using Ops = DotOps;

// The constants of tiles on packed weights, and the type of the scales: known at compile time, it costs no branches.
template <ScaleType kScales>
struct FewOps : DotOps {
  // 2 rows x 2 panels or 5 x 1, with the weights of a step.
  static constexpr int kRows[] = {5, 2};
  static constexpr int64_t kUnpackRows = 0;  // Tiles of the ISA do it
  static constexpr bool kOwnGroups = true;

  // What u of 16 columns counts from; four registers of four.
  template <Code kCode>
  static W4A8_INLINE void expand_zeros(const uint8_t* p, I (&out)[4]) {
    const uint8x16_t all = vld1q_u8(p);
    const uint8x16_t bytes = kCode == Code::kInt8 ? all : vandq_u8(all, vdupq_n_u8(15));
    const uint16x8_t halves[] = {vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)};
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      out[2 * h] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(halves[h])));
      out[2 * h + 1] = vreinterpretq_s32_u32(vmovl_high_u16(halves[h]));
    }
    if constexpr (kCode == Code::kInt8) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) out[v] = isub(out[v], isplat(128));
    }
  }

  // start_accumulators and start_at_zeros of tile-inl.h; starts move to the next group.
  template <int R, int C, Code kCode>
  static W4A8_INLINE void start_group(I (&acc)[R][C][4], const int32_t* (&starts)[R],
                                      const Records<C, kCode>& records, bool zero_points) {
    if (kCode != Code::kE2M1 && zero_points) {
      I eighths[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) eighths[r] = vshrq_n_s32(take_splat(starts[r]), 3);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        I zero[4];
        expand_zeros<kCode>(records.weights[c] + records.zeros_at, zero);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) acc[r][c][v] = imul(zero[v], eighths[r]);
        }
      }
      return;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const I start = kCode == Code::kNibbles ? take_splat(starts[r]) : isplat(0);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) acc[r][c][v] = start;
      }
    }
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
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      q[r] = rows[r];
      starts[r] = t.starts + r * t.starts_stride;
    }
    Records<C, kCode> records(layout, weights);
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) w[c] = weights[c];
    const int64_t ahead = t.fetch - t.panel;
    int64_t left = layout.groups;
    do {
      I acc[R][C][4];
      start_group<R, C, kCode>(acc, starts, records, t.zeros != nullptr);
      if constexpr (kGrouping == Grouping::kLeast) {
        add_least_group<R, C, kCode>(acc, q, w, ahead);
      } else {
        int64_t blocks = layout.group_steps / kBlockSteps;
        do {
          add_block<R, C, kCode>(acc, q, w, ahead);
        } while (--blocks != 0);
      }
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        const uint8_t* scales = records.scales(c);
        __builtin_prefetch(scales + ahead, 0, 2);
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) {
          const F scale = load_any_scales<FewOps>(scales, 4 * v, kScales);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) f[r][c][v] = fma(to_float(acc[r][c][v]), scale, f[r][c][v]);
        }
      }
      if (records.next()) {
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) w[c] += layout.head_bytes;
      }
    } while (--left != 0);
  }
};

// Only groups of 16 have scales of e5m3, and only larger ones those of e8m0.
struct FewE5M3Ops : FewOps<ScaleType::kE5M3> {
  static constexpr bool kOnlyLeastGroups = true;
};

void few_rows(const Rows& rows, int64_t m, const Panels& panels, int64_t panel_count, float* out, int64_t ldc,
              uint8_t*) {
  const auto run = [&]<class FewRows>(FewRows) {
    gemm<FewRows>(rows, m, panels, panel_count, out, ldc, nullptr);
  };
  switch (panels.scale_type) {
    case ScaleType::kFloat32: return run(FewOps<ScaleType::kFloat32>());
    case ScaleType::kBFloat16: return run(FewOps<ScaleType::kBFloat16>());
    case ScaleType::kFloat16: return run(FewOps<ScaleType::kFloat16>());
    case ScaleType::kE5M3: return run(FewE5M3Ops());
    case ScaleType::kE8M0: return run(FewOps<ScaleType::kE8M0>());
  }
}

// Tiles on an unpacked panel: a step is the 64 low nibbles, then the 64 high ones.
struct Unpacked {
  using Vectors = Ops;
  using F = Ops::F;
  using I = Ops::I;
  using Bytes = Ops::Bytes;
  static constexpr int64_t kRowBytes = 0;
  static constexpr int64_t kBatchRows = 0;
  static constexpr int64_t kChunkSteps = 256;  // 32 KiB of unpacked weights
  static constexpr bool kUnpacks = true;
  static constexpr int64_t kMostColumns = 1;
  static constexpr GemmFn kFew = few_rows;
  static constexpr int64_t kManyRows = 8;
  static constexpr int64_t kMostRows = 5;

  static constexpr uint8_t kE2M1Zero = Ops::kE2M1Zero;
  static constexpr bool kTakesZeros = true;

  static W4A8_INLINE void store_step(const Bytes (&low)[4], const Bytes (&high)[4], uint8_t* bytes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      vst1q_u8(bytes + 16 * j, vreinterpretq_u8_s8(low[j]));
      vst1q_u8(bytes + kStepBytes + 16 * j, vreinterpretq_u8_s8(high[j]));
    }
  }
  static void unpack(const TileArgs&, const Chunk& chunk, uint8_t* bytes) {
    Ops::barrier();  // not before the tiles have read what this overwrites
    if (chunk.layout.kind == kInt4) {
      unpack_nibbles(chunk, bytes);
    } else {
      unpack_others<Unpacked>(chunk, bytes);
    }
  }

  // Adds V registers of columns of one step; kStep: offset of the step behind w, in steps.
  template <int R, int V, int kStep, int kLane>
  static W4A8_INLINE void add_step(I (&acc)[R][V], const Bytes (&a)[R], const uint8_t* w) {
    constexpr int kOffset = kStep * static_cast<int>(kByteStepBytes);
    add_pair<R, V, kOffset, kLane, 0>(acc, a, w);
    if constexpr (V == 4) add_pair<R, V, kOffset + 32, kLane, 2>(acc, a, w);
    add_pair<R, V, kOffset + static_cast<int>(kStepBytes), kLane + 1, 0>(acc, a, w);
    if constexpr (V == 4) add_pair<R, V, kOffset + static_cast<int>(kStepBytes) + 32, kLane + 1, 2>(acc, a, w);
  }
  template <int R, int V, int kOffset, int kLane, int kFirst>
  static W4A8_INLINE void add_pair(I (&acc)[R][V], const Bytes (&a)[R], const uint8_t* w) {
    Bytes first;
    Bytes second;
    Ops::load_pair<kOffset>(w, first, second);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) Ops::dot<kLane>(acc[r][kFirst], first, a[r]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) Ops::dot<kLane>(acc[r][kFirst + 1], second, a[r]);
  }

  // Four steps. q and w move behind them.
  template <int R, int V>
  static W4A8_INLINE void add_block(I (&acc)[R][V], const int8_t* (&q)[R], const uint8_t*& w) {
    Bytes a[R];
    Bytes b[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) Ops::take_pair(q[r], a[r], b[r]);
    add_step<R, V, 0, 0>(acc, a, w);
    add_step<R, V, 1, 2>(acc, a, w);
    add_step<R, V, 2, 0>(acc, b, w);
    add_step<R, V, 3, 2>(acc, b, w);
    w += kBlockSteps * kByteStepBytes;
  }

  template <int R>
  static void channelwise(const TileArgs& t) {
    I acc[R][1][4];
    if (t.first) {
      start_accumulators<Ops, R, 1, Code::kBytes>(t, 0, acc);
    } else {
      load_sums<Ops>(t, acc);
    }
    I sums[R][4];
    const int8_t* q[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      q[r] = t.q + r * t.q_stride;
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sums[r][v] = acc[r][0][v];
    }
    const uint8_t* w = t.weights;
    Ops::barrier();
    for (int64_t blocks = t.steps / kBlockSteps; blocks != 0; --blocks) add_block<R, 4>(sums, q, w);
    for (int64_t left = t.steps % kBlockSteps; left != 0; --left, w += kByteStepBytes) {
      Bytes a[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) Ops::take_half(q[r], a[r]);
      add_step<R, 4, 0, 0>(sums, a, w);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) acc[r][0][v] = sums[r][v];
    }
    if (t.last) {
      finish_channelwise<Ops, R, 1>(t, acc);
    } else {
      store_sums<Ops>(t, acc);
    }
  }

  // Two steps. q and w move behind them.
  template <int R, int V>
  static W4A8_INLINE void add_least_group(I (&acc)[R][V], const int8_t* (&q)[R], const uint8_t*& w) {
    Bytes a[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) Ops::take_one(q[r], a[r]);
    add_step<R, V, 0, 0>(acc, a, w);
    add_step<R, V, 1, 2>(acc, a, w);
    w += kLeastGroupSteps * kByteStepBytes;
  }

  // All groups of the chunk for 8 columns, the first or second half of the panel. Not inlined: the sums of the other
  // half would take registers. kSteps: of a group, 0 if known at run time only.
  template <int R, int kHalf, int64_t kSteps>
  static __attribute__((noinline)) void add_groups(const TileArgs& t, F (&all)[R][1][4]) {
    F f[R][2];
    const int8_t* q[R];
    const int32_t* starts[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      q[r] = t.q + r * t.q_stride;
      starts[r] = t.starts + r * t.starts_stride;
      f[r][0] = all[r][0][2 * kHalf];
      f[r][1] = all[r][0][2 * kHalf + 1];
    }
    const uint8_t* w = t.weights + 32 * kHalf;
    const uint8_t* scales = t.scales + 32 * kHalf;
    const int64_t blocks = t.panels->group_steps / kBlockSteps;
    int64_t groups = t.steps / t.panels->group_steps;
    Ops::barrier();
    do {
      I acc[R][2];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        acc[r][0] = Ops::take_splat(starts[r]);
        acc[r][1] = acc[r][0];
      }
      if constexpr (kSteps == kLeastGroupSteps) {
        add_least_group<R, 2>(acc, q, w);
      } else if constexpr (kSteps == kBlockSteps) {
        add_block<R, 2>(acc, q, w);
      } else {
        int64_t block = blocks;
        do {
          add_block<R, 2>(acc, q, w);
        } while (--block != 0);
      }
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const F scale = Ops::load_bytes(scales + 16 * v);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) f[r][v] = Ops::fma(Ops::to_float(acc[r][v]), scale, f[r][v]);
      }
      scales += kScaleBytes;
    } while (--groups != 0);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      all[r][0][2 * kHalf] = f[r][0];
      all[r][0][2 * kHalf + 1] = f[r][1];
    }
  }

  template <int R, int64_t kSteps>
  static W4A8_INLINE void both_halves(const TileArgs& t, F (&all)[R][1][4]) {
    add_groups<R, 0, kSteps>(t, all);
    add_groups<R, 1, kSteps>(t, all);
  }
  template <int R>
  static void groups(const TileArgs& t) {
    F f[R][1][4];
    if (t.first) {
      fill(f, Ops::splat(0.0f));
    } else {
      load_sums<Ops>(t, f);
    }
    switch (t.panels->group_steps) {
      case kLeastGroupSteps: both_halves<R, kLeastGroupSteps>(t, f); break;
      case kBlockSteps: both_halves<R, kBlockSteps>(t, f); break;
      default: both_halves<R, 0>(t, f);
    }
    if (!t.last) {
      store_sums<Ops>(t, f);
    } else if (t.panels->scale_type == ScaleType::kE5M3) {
      finish_groups<Ops, R, 1, true>(t, f);
    } else {
      finish_groups<Ops, R, 1, false>(t, f);
    }
  }

  static int64_t tile_rows(int64_t, bool channelwise) { return channelwise ? kMostRows : 4; }
  static void tile(int64_t count, const TileArgs& t) {
    constexpr int64_t kLeast = 3;
    static_assert(kLeast == least_share(kManyRows, 4) && kLeast == least_share(kManyRows, kMostRows));
    static constexpr TileFn kChannelwise[] = {channelwise<3>, channelwise<4>, channelwise<5>};
    static constexpr TileFn kGroups[] = {groups<3>, groups<4>};
    const TileFn* tiles = t.panels->channelwise ? kChannelwise : kGroups;
    tiles[count - kLeast](t);
  }
};

}  // namespace

extern const Kernel arm_dotprod;
constinit const Kernel arm_dotprod = {shared_rows<arm_neon>(), gemm_arm_of<Unpacked>(), "arm_dotprod",
                                      kNeon | kDotprod};

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
