// NEON kernel, plain armv8-a: int4 weights (unsigned nibbles) x int8 activations, in 16-bit sums.
//
//   SMULL, SMLAL, SMLAL2   s8 x s8 -> i16, 8 products an instruction, set or added to the sums
//   SADDLP                 i16 + i16 -> i32, neighbours
//
//   A step of a panel (8 k x 16 columns) is four registers, j = 0..3:
//      w[j]   [ b0 b1 b2 b3 | b0 b1 .. ]   byte i of column 4 j + c: low nibble k0 + i, high nibble k0 + 4 + i
//      a      [ a0 a1 a2 a3 | a0 a1 .. ]   4 activations, broadcast
//      sums[2 j]     += low half of w[j] * a      8 lanes of 16 bits: 2 columns x 4 k
//      sums[2 j + 1] += high half
//
//   2 rows x 8 sums, 4 broadcasts and the weights: 28 of 32 registers, the 32-bit sums live in memory.
//
//   |nibble * q| <= 15 * 128 = 1920. A lane takes 2 products of each step, so a block of 8 steps (64 k) is 16 of them:
//   16 * 1920 = 30720 < 32768. Then they are widened to 32 bits.
//
//   Six bits are positive as signed bytes, too: 63 * 128 * 4 = 32256, the products of 2 steps.
//
//   Bytes of int8 are taken less 128. Their products, and those of iq4, fill 16 bits: each is widened at once (SADALP).
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstdint>
#include <utility>

#include "kernels/cpu_features.h"
#include "kernels/kernel.h"
#include "kernels/ops.h"
#include "kernels/row_params.h"
#include "kernels/target.h"

namespace w4a8::isa {
namespace {

#include "kernels/ops_tiles-inl.h"
#include "kernels/row_functions-inl.h"
#include "kernels/rows_arm-inl.h"

struct Ops : NeonOps {
  static constexpr int kRows[] = {2};
  static constexpr int64_t kUnpackRows = 4;
  static constexpr int64_t kUnpackSteps = 128;  // 16 KiB of unpacked weights
  static constexpr int64_t kSumSteps = 8;       // steps that fit 16-bit sums
  static constexpr int64_t kSumSixSteps = 2;    // the same of six bits
  static constexpr bool kE2M1IsWide = false;    // |w| <= 12
  static constexpr bool kInt6IsWide = true;

  static W4A8_INLINE int8x16_t broadcast4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
  }
  // kStep: of a block of six bits, which begins with the step s - kStep.
  template <Code kCode, int kStep = 0>
  static W4A8_INLINE void load_nibbles(const uint8_t* w, int64_t s, int j, int8x16_t& low, int8x16_t& high) {
    if constexpr (kCode == Code::kSix) {
      const uint8_t* block = w + (s - kStep) * step_bytes(kCode) + 16 * j;
      const uint8x16_t both = vld1q_u8(block + kStep * kStepBytes);
      const uint8x16_t bits = vld1q_u8(block + kSixSteps * kStepBytes);
      low = join_six<2 * kStep>(both, bits);
      high = join_six<2 * kStep + 1>(both, bits);
      return;
    }
    if constexpr (step_bytes(kCode) == kByteStepBytes) {
      low = vreinterpretq_s8_u8(vld1q_u8(w + s * kByteStepBytes + 16 * j));
      high = vreinterpretq_s8_u8(vld1q_u8(w + s * kByteStepBytes + kLineBytes + 16 * j));
    } else {
      const uint8x16_t both = vld1q_u8(w + s * kStepBytes + 16 * j);
      low = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(0x0f)));
      high = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
    }
    if constexpr (is_looked_up<kCode>) {
      low = look_up<kCode>(vreinterpretq_u8_s8(low));
      high = look_up<kCode>(vreinterpretq_u8_s8(high));
    }
    if constexpr (kCode == Code::kInt8) {
      low = veorq_s8(low, vdupq_n_s8(-128));
      high = veorq_s8(high, vdupq_n_s8(-128));
    }
  }
  static W4A8_INLINE void unpack_e2m1(const uint8_t* packed, uint8_t* bytes) {
    for_each<4>([&](int j) W4A8_LAMBDA {
      int8x16_t low;
      int8x16_t high;
      load_nibbles<Code::kE2M1>(packed, 0, j, low, high);
      vst1q_u8(bytes + 16 * j, vreinterpretq_u8_s8(low));
      vst1q_u8(bytes + kStepBytes + 16 * j, vreinterpretq_u8_s8(high));
    });
  }
  // kFirst: the sums are set instead of added to.
  template <int R, Code kCode, bool kFirst, int kStep = 0>
  static W4A8_INLINE void add_step(int16x8_t (&sums)[R][8], const int8_t* const (&rows)[R], const uint8_t* w,
                                   int64_t s) {
    int8x16_t a_low[R];
    int8x16_t a_high[R];
    for_each<R>([&](int r) W4A8_LAMBDA {
      a_low[r] = broadcast4(rows[r] + s * kStepK);
      a_high[r] = broadcast4(rows[r] + s * kStepK + 4);
    });
    for_each<4>([&](int j) W4A8_LAMBDA {
      int8x16_t low;
      int8x16_t high;
      load_nibbles<kCode, kStep>(w, s, j, low, high);
      for_each<R>([&](int r) W4A8_LAMBDA {
        int16x8_t& even = sums[r][2 * j];
        int16x8_t& odd = sums[r][2 * j + 1];
        if constexpr (kFirst) {
          even = vmull_s8(vget_low_s8(low), vget_low_s8(a_low[r]));
          odd = vmull_high_s8(low, a_low[r]);
        } else {
          even = vmlal_s8(even, vget_low_s8(low), vget_low_s8(a_low[r]));
          odd = vmlal_high_s8(odd, low, a_low[r]);
        }
        even = vmlal_s8(even, vget_low_s8(high), vget_low_s8(a_high[r]));
        odd = vmlal_high_s8(odd, high, a_high[r]);
      });
    });
  }

  // Steps [s, s + count), 1 <= count <= kSumSteps.
  template <int R, Code kCode>
  static W4A8_INLINE void add_block(I (&acc)[R][1][4], const int8_t* const (&rows)[R], const uint8_t* w, int64_t s,
                                    int64_t count, const uint8_t* fetch) {
    int16x8_t sums[R][8];
    if constexpr (is_packed(kCode)) __builtin_prefetch(fetch, 0, 2);
    add_step<R, kCode, true>(sums, rows, w, s);
    for (int64_t i = 1; i < count; ++i) {
      if constexpr (is_packed(kCode)) __builtin_prefetch(fetch + i * kStepBytes, 0, 2);
      add_step<R, kCode, false>(sums, rows, w, s + i);
    }
    widen<R>(acc, sums);
  }
  template <int R>
  static W4A8_INLINE void widen(I (&acc)[R][1][4], const int16x8_t (&sums)[R][8]) {
    for_each<R, 4>([&](int r, int j) W4A8_LAMBDA {
      const I pairs = vpaddq_s32(vpaddlq_s16(sums[r][2 * j]), vpaddlq_s16(sums[r][2 * j + 1]));
      acc[r][0][j] = vaddq_s32(acc[r][0][j], pairs);
    });
  }

  // Two steps of six bits, which begin with s.
  template <int R, Code kCode>
  static W4A8_INLINE void add_sixes(I (&acc)[R][1][4], const int8_t* const (&rows)[R], const uint8_t* w, int64_t s,
                                    const uint8_t* fetch) {
    int16x8_t sums[R][8];
    if constexpr (is_packed(kCode)) fetch_lines<kSixBlockBytes>(fetch);
    add_step<R, kCode, true>(sums, rows, w, s);
    add_step<R, kCode, false, 1>(sums, rows, w, s + 1);
    widen<R>(acc, sums);
  }

  // Adds the step s of int8 or iq4 to 32-bit sums: as those of add_step, two lanes of half the k instead of four.
  template <int R, Code kCode>
  static W4A8_INLINE void add_byte_step(I (&sums)[R][8], const int8_t* const (&rows)[R], const uint8_t* w, int64_t s) {
    for_each<4>([&](int j) W4A8_LAMBDA {
      int8x16_t low;
      int8x16_t high;
      load_nibbles<kCode>(w, s, j, low, high);
      for_each<R>([&](int r) W4A8_LAMBDA {
        const int8x16_t a_low = broadcast4(rows[r] + s * kStepK);
        const int8x16_t a_high = broadcast4(rows[r] + s * kStepK + 4);
        sums[r][2 * j] = vpadalq_s16(sums[r][2 * j], vmull_s8(vget_low_s8(low), vget_low_s8(a_low)));
        sums[r][2 * j] = vpadalq_s16(sums[r][2 * j], vmull_s8(vget_low_s8(high), vget_low_s8(a_high)));
        sums[r][2 * j + 1] = vpadalq_s16(sums[r][2 * j + 1], vmull_high_s8(low, a_low));
        sums[r][2 * j + 1] = vpadalq_s16(sums[r][2 * j + 1], vmull_high_s8(high, a_high));
      });
    });
  }
  template <int R, Code kCode>
  static W4A8_INLINE void add_byte_steps(I (&acc)[R][1][4], const int8_t* const (&rows)[R], const uint8_t* w,
                                         int64_t begin, int64_t end, const uint8_t* fetch) {
    I sums[R][8];
    for_each<R, 8>([&](int r, int i) W4A8_LAMBDA { sums[r][i] = isplat(0); });
    for (int64_t s = begin; s < end; ++s, fetch += step_bytes(kCode)) {
      fetch_lines<step_bytes(kCode)>(fetch);
      add_byte_step<R, kCode>(sums, rows, w, s);
    }
    for_each<R, 4>([&](int r, int j) W4A8_LAMBDA {
      acc[r][0][j] = vaddq_s32(acc[r][0][j], vpaddq_s32(sums[r][2 * j], sums[r][2 * j + 1]));
    });
  }

  template <int R, int C, Code kCode, int64_t kUnit>
  static W4A8_INLINE void accumulate(I (&acc)[R][C][4], const int8_t* const (&rows)[R],
                                     const uint8_t* const (&weights)[C], int64_t begin, int64_t end,
                                     const uint8_t* fetch) {
    if constexpr (is_int8(kCode)) {
      add_byte_steps<R, kCode>(acc, rows, weights[0], begin, end, fetch);
    } else if constexpr (is_six(kCode)) {
      for (int64_t s = begin; s < end; s += kSumSixSteps, fetch += kSixBlockBytes) {
        add_sixes<R, kCode>(acc, rows, weights[0], s, fetch);
      }
    } else {
      for (int64_t s = begin; s < end; s += kSumSteps, fetch += kSumSteps * kStepBytes) {
        add_block<R, kCode>(acc, rows, weights[0], s, end - s < kSumSteps ? end - s : kSumSteps, fetch);
      }
    }
  }
};

}  // namespace

extern const Kernel arm_neon;
extern const AttentionFunctions arm_neon_attention;
extern const LinearAttentionFunctions arm_neon_linear_attention;
constinit const Kernel arm_neon = {rows_of<Ops>(quantize_row_neon<Ops>), gemm_of<Ops>(), &arm_neon_attention,
                                   &arm_neon_linear_attention,           "arm_neon",     kNeon};

}  // namespace w4a8::isa
#endif
