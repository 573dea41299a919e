// The element-wise operations of the Arm kernels: NEON registers of 4 lanes. Plain armv8-a.
// Included inside a target region and an anonymous namespace.
#pragma once

struct NeonOps : TileDefaults {
  using F = float32x4_t;
  using I = int32x4_t;
  static constexpr int64_t kLanes = 4;
  static constexpr int kVecs = 4;

  static W4A8_INLINE F splat(float x) { return vdupq_n_f32(x); }
  static W4A8_INLINE F load(const float* p) { return vld1q_f32(p); }
  static W4A8_INLINE F load_bytes(const uint8_t* p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
  static W4A8_INLINE void store(float* p, F x) { vst1q_f32(p, x); }
  static W4A8_INLINE F add(F a, F b) { return vaddq_f32(a, b); }
  static W4A8_INLINE F sub(F a, F b) { return vsubq_f32(a, b); }
  static W4A8_INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
  static W4A8_INLINE F div(F a, F b) { return vdivq_f32(a, b); }
  static W4A8_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  // FMIN and FMAX return a NaN of either operand, the definition wants the second operand then.
  static W4A8_INLINE F min(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static W4A8_INLINE F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static W4A8_INLINE F neg(F a) { return vnegq_f32(a); }
  static W4A8_INLINE F abs(F a) { return vabsq_f32(a); }
  static W4A8_INLINE F select_less(F a, F b, F yes, F no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
  static W4A8_INLINE F float_bits(I a) { return vreinterpretq_f32_s32(a); }
  static W4A8_INLINE I int_bits(F a) { return vreinterpretq_s32_f32(a); }
  static W4A8_INLINE F to_float(I a) { return vcvtq_f32_s32(a); }
  static W4A8_INLINE I to_int(F a) { return vcvtnq_s32_f32(a); }  // half to even, whatever the rounding mode
  static W4A8_INLINE F pow2(I n) { return float_bits(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }

  static W4A8_INLINE I isplat(int32_t x) { return vdupq_n_s32(x); }
  static W4A8_INLINE I iload(const uint8_t* p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
  static W4A8_INLINE void istore(int32_t* p, I x) { vst1q_s32(p, x); }
  static W4A8_INLINE I iadd(I a, I b) { return vaddq_s32(a, b); }
  static W4A8_INLINE I isub(I a, I b) { return vsubq_s32(a, b); }
  static W4A8_INLINE I imul(I a, I b) { return vmulq_s32(a, b); }
  static W4A8_INLINE I iand(I a, I b) { return vandq_s32(a, b); }
  static W4A8_INLINE I imin(I a, I b) { return vminq_s32(a, b); }
  static W4A8_INLINE I imax(I a, I b) { return vmaxq_s32(a, b); }
  template <int kBits>
  static W4A8_INLINE I shift_right(I a) {
    return vshrq_n_s32(a, kBits);
  }
  template <int kBits>
  static W4A8_INLINE I shift_left(I a) {
    return vshlq_n_s32(a, kBits);
  }
  static W4A8_INLINE int32_t reduce(I a) { return vaddvq_s32(a); }
  static W4A8_INLINE int32_t reduce_max(I a) { return vmaxvq_s32(a); }
  // Lanes are in [-128, 127]: nothing is lost.
  static W4A8_INLINE void store_int8(int8_t* p, I a) {
    const int16x4_t words = vmovn_s32(a);
    const int32x2_t bytes = vreinterpret_s32_s8(vmovn_s16(vcombine_s16(words, words)));
    const int32_t four = vget_lane_s32(bytes, 0);
    __builtin_memcpy(p, &four, sizeof(four));
  }

  static W4A8_INLINE F widen_bfloat16(const uint8_t* p) {
    uint16x4_t half;
    __builtin_memcpy(&half, p, sizeof(half));
    return vreinterpretq_f32_u32(vshll_n_u16(half, 16));
  }
  template <DType kType>
  static W4A8_INLINE F load_as(const void* p, int64_t i) {
    const auto* bytes = static_cast<const uint8_t*>(p) + i * dtype_bytes(kType);
    if constexpr (kType == DType::kFloat32) {
      return load_bytes(bytes);
    } else if constexpr (kType == DType::kBFloat16) {
      return widen_bfloat16(bytes);
    } else {
      uint16x4_t half;
      __builtin_memcpy(&half, bytes, sizeof(half));
      return vcvt_f32_f16(vreinterpret_f16_u16(half));
    }
  }
  template <DType kType>
  static W4A8_INLINE void store_as(void* p, int64_t i, F x) {
    auto* bytes = static_cast<uint8_t*>(p) + i * dtype_bytes(kType);
    x = vbslq_f32(vceqq_f32(x, x), x, float_bits(vdupq_n_s32(0x7fc00000)));
    if constexpr (kType == DType::kFloat32) {
      vst1q_u8(bytes, vreinterpretq_u8_f32(x));
    } else if constexpr (kType == DType::kBFloat16) {
      // Nearest even: add 0x7fff plus the lowest bit kept. 0x7fc00000 stays 0x7fc0.
      const uint32x4_t bits = vreinterpretq_u32_f32(x);
      const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
      const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
      const uint16x4_t half = vshrn_n_u32(rounded, 16);
      __builtin_memcpy(bytes, &half, sizeof(half));
    } else {
      const uint16x4_t half = vreinterpret_u16_f16(vcvt_f16_f32(x));
      __builtin_memcpy(bytes, &half, sizeof(half));
    }
  }
  static W4A8_INLINE I load_widened(const uint8_t* p) {
    uint32_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
  }
  static W4A8_INLINE I load_int8(const uint8_t* p) {
    uint32_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four)))));
  }
  // u of four k of a block of six bits: the nibble of one and two of the high bits, of four columns.
  template <int kQuarter>
  static W4A8_INLINE int8x16_t join_six(uint8x16_t both, uint8x16_t bits) {
    if constexpr (kQuarter == 0) bits = vshlq_n_u8(bits, 4);
    if constexpr (kQuarter == 1) bits = vshlq_n_u8(bits, 2);
    if constexpr (kQuarter == 3) bits = vshrq_n_u8(bits, 2);
    const uint8x16_t low = kQuarter % 2 == 0 ? vandq_u8(both, vdupq_n_u8(0x0f)) : vshrq_n_u8(both, 4);
    return vreinterpretq_s8_u8(vorrq_u8(vandq_u8(bits, vdupq_n_u8(0x30)), low));
  }
  static constexpr uint8_t kE2M1Zero = 0;
  static constexpr int32_t kInt8Zero = 0;
  static constexpr bool kFusesShifts = false;  // FMLA overwrites the shift, which is needed again
  // w of 16 nibbles.
  template <Code kCode>
  static W4A8_INLINE int8x16_t look_up(uint8x16_t nibbles) {
    return vqtbl1q_s8(vld1q_s8(kCode == Code::kIQ4 ? kIQ4Weights : kE2M1Weights), nibbles);
  }
  template <Code kCode>
  static constexpr bool is_looked_up = kCode == Code::kE2M1 || kCode == Code::kIQ4;
};
