// Attention by NEON, plain armv8-a: int8 widened to 16 bits and multiplied by SMLAL, bfloat16 widened to floats and
// FMLA.
//
//   A register of 4 keys is two of 16-bit numbers, two keys each. A sum keeps i0 .. i3 of a key in four lanes of 32
//   bits each, added up at the end: 4 keys are 4 registers.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstdint>
#include <utility>

#include "kernels/attention/attention.h"
#include "kernels/half.h"
#include "kernels/ops.h"
#include "kernels/target.h"

namespace w4a8::isa {
namespace {

#include "kernels/attention/attention-inl.h"
#include "kernels/attention/neon-inl.h"

struct Int8Dot {
  static constexpr bool kInt8 = true;
  static constexpr int kTileRows = 4;
  static constexpr int kTileVecs = 1;
  static constexpr int64_t kPerItem = 4;
  static constexpr int64_t kRowItemBytes = 8;
  struct Sum {
    int32x4_t key[4];
  };
  struct Line {
    int16x8_t low;
    int16x8_t high;
  };
  using Item = int16x4_t;
  static W4A8_INLINE Sum zero() { return {{vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)}}; }
  template <bool kKeys>
  static W4A8_INLINE Line load(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    if constexpr (kKeys) {
      return {vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))), vreinterpretq_s16_u16(vmovl_high_u8(bytes))};
    }
    const int8x16_t codes = vreinterpretq_s8_u8(bytes);
    return {vmovl_s8(vget_low_s8(codes)), vmovl_high_s8(codes)};
  }
  template <bool kKeys>
  static W4A8_INLINE Item item(const uint8_t* p) {
    return vld1_s16(reinterpret_cast<const int16_t*>(p));
  }
  template <bool kKeys>
  static W4A8_INLINE void add(Sum& sum, Line line, Item item) {
    sum.key[0] = vmlal_s16(sum.key[0], vget_low_s16(line.low), item);
    sum.key[1] = vmlal_s16(sum.key[1], vget_high_s16(line.low), item);
    sum.key[2] = vmlal_s16(sum.key[2], vget_low_s16(line.high), item);
    sum.key[3] = vmlal_s16(sum.key[3], vget_high_s16(line.high), item);
  }
  static W4A8_INLINE Ops::I total(Sum sum) {
    return vpaddq_s32(vpaddq_s32(sum.key[0], sum.key[1]), vpaddq_s32(sum.key[2], sum.key[3]));
  }
  static W4A8_INLINE void store_weights(uint8_t* p, Ops::F weights) {
    vst1_s16(reinterpret_cast<int16_t*>(p), vmovn_s32(Ops::to_int(weights)));
  }
};

}  // namespace

extern const AttentionFunctions arm_neon_attention;
constinit const AttentionFunctions arm_neon_attention = attention_of<Ops, Int8Dot, FmaDot<Ops, 4, 4>>();

}  // namespace w4a8::isa
#endif
