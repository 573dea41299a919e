// The operations of the 512-bit x86 kernels: AVX-512 F, BW, DQ, VL and VNNI.
// Included inside a target region and an anonymous namespace.
#pragma once

#if !defined(__clang__)
// GCC before 13 warns about its own undefined-value idiom in avx512fintrin.h (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

struct Avx512Ops : TileDefaults {
  using F = __m512;
  using I = __m512i;
  static constexpr int64_t kLanes = 16;
  static constexpr int kVecs = 1;
  // 12 x 1 or 6 x 2 accumulators, as many float ones, and the weights: 29 of 32 registers.
  static constexpr int kRows[] = {12, 6};
  static constexpr int kDoubled = 4;
  static constexpr int64_t kStreamedRows = 2;
  static constexpr int64_t kUnpackRows = 24;
  static constexpr int64_t kUnpackSteps = 96;  // 24 KiB of unpacked weights

  static W4A8_INLINE F splat(float x) { return _mm512_set1_ps(x); }
  static W4A8_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  static W4A8_INLINE F load_bytes(const uint8_t* p) { return _mm512_loadu_ps(p); }
  static W4A8_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static W4A8_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static W4A8_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static W4A8_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static W4A8_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
  static W4A8_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static W4A8_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
  static W4A8_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
  static W4A8_INLINE F neg(F a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static W4A8_INLINE F abs(F a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
  static W4A8_INLINE F select_less(F a, F b, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
  }
  static W4A8_INLINE F float_bits(I a) { return _mm512_castsi512_ps(a); }
  static W4A8_INLINE I int_bits(F a) { return _mm512_castps_si512(a); }
  static W4A8_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static W4A8_INLINE I to_int(F a) { return _mm512_cvtps_epi32(a); }
  static W4A8_INLINE F pow2(I n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
  }

  static W4A8_INLINE I isplat(int32_t x) { return _mm512_set1_epi32(x); }
  static W4A8_INLINE I iload(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static W4A8_INLINE void istore(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
  static W4A8_INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static W4A8_INLINE I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static W4A8_INLINE I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
  // VPDPWSSD: VPMULLD is two or three micro-operations on Intel.
  static W4A8_INLINE I iadd_product16(I sum, I a, I b) { return _mm512_dpwssd_epi32(sum, a, b); }
  static W4A8_INLINE I iand(I a, I b) { return _mm512_and_si512(a, b); }
  static W4A8_INLINE I imin(I a, I b) { return _mm512_min_epi32(a, b); }
  static W4A8_INLINE I imax(I a, I b) { return _mm512_max_epi32(a, b); }
  template <int kBits>
  static W4A8_INLINE I shift_right(I a) {
    return _mm512_srai_epi32(a, kBits);
  }
  template <int kBits>
  static W4A8_INLINE I shift_left(I a) {
    return _mm512_slli_epi32(a, kBits);
  }
  static W4A8_INLINE int32_t reduce(I a) { return _mm512_reduce_add_epi32(a); }
  static W4A8_INLINE int32_t reduce_max(I a) { return _mm512_reduce_max_epi32(a); }
  static W4A8_INLINE void store_int8(int8_t* p, I a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
  }

  static W4A8_INLINE F widen_bfloat16(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  template <DType kType>
  static W4A8_INLINE F load_as(const void* p, int64_t i) {
    if constexpr (kType == DType::kFloat32) return _mm512_loadu_ps(static_cast<const float*>(p) + i);
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(p) + i));
    return kType == DType::kBFloat16 ? widen_bfloat16(half) : _mm512_cvtph_ps(half);
  }
  template <DType kType>
  static W4A8_INLINE void store_as(void* p, int64_t i, F x) {
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    x = _mm512_mask_mov_ps(x, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
    if constexpr (kType == DType::kFloat32) {
      _mm512_storeu_ps(static_cast<float*>(p) + i, x);
      return;
    }
    auto* dst = reinterpret_cast<__m256i*>(static_cast<uint16_t*>(p) + i);
    if constexpr (kType == DType::kBFloat16) {
      // Nearest even: add 0x7fff plus the lowest bit kept. 0x7fc00000 stays 0x7fc0.
      const I bits = _mm512_castps_si512(x);
      const I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const I rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
      _mm256_storeu_si256(dst, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
    } else {
      _mm256_storeu_si256(dst, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }
  static W4A8_INLINE I load_widened(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static W4A8_INLINE I load_int8(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  // The two instructions of the inner loop are asm statements: with the intrinsics GCC 12 copies accumulators from
  // register to register and loads broadcasts long before they are used, which spills. `volatile` keeps their order.
  static W4A8_INLINE I broadcast4(const int8_t* p) {
    struct Four {
      int8_t bytes[4];
    };
    I four;
    __asm__ volatile("vpbroadcastd %1, %0" : "=v"(four) : "m"(*reinterpret_cast<const Four*>(p)));
    return four;
  }
  // A load for each register that is to have it: GCC makes copies of one, which may take a port of `dot`.
  static W4A8_INLINE I isplat_of(const int32_t* p) { return broadcast4(reinterpret_cast<const int8_t*>(p)); }
  static W4A8_INLINE void dot(I& acc, I u8, I s8) {
    __asm__ volatile("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u8), "v"(s8));
  }
  static W4A8_INLINE void take_half(const uint8_t* w, I (&u)[1]) {
    __asm__ volatile("vmovdqu64 %1, %0" : "=v"(u[0]) : "m"(*reinterpret_cast<const __m512i_u*>(w)));
  }
  static constexpr uint8_t kE2M1Zero = 12;
  static constexpr int32_t kInt8Zero = 128;
  static constexpr bool kSpareRegisters = true;
  static constexpr bool kNarrowProducts = true;
  static constexpr bool kReloadsStarts = true;
  static W4A8_INLINE I look_up(I nibbles) {
    const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
  }
  // The table of iq4: nibbles to w + 128.
  static W4A8_INLINE I look_up_iq4(I nibbles) {
    const __m128i weights = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIQ4Weights));
    const __m128i table = _mm_xor_si128(weights, _mm_set1_epi8(-128));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
  }
  // A step: lo and hi in the order of the columns.
  template <Code kCode>
  static W4A8_INLINE void load_step(const uint8_t* w, int64_t s, I (&lo)[1], I (&hi)[1]) {
    if constexpr (step_bytes(kCode) == kByteStepBytes) {
      lo[0] = _mm512_loadu_si512(w + s * kByteStepBytes);
      hi[0] = _mm512_loadu_si512(w + s * kByteStepBytes + kStepBytes);
    } else {
      const I nibble = _mm512_set1_epi8(0x0f);
      const I both = _mm512_loadu_si512(w + s * kStepBytes);
      lo[0] = _mm512_and_si512(both, nibble);
      hi[0] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    }
    if constexpr (kCode == Code::kE2M1) {
      lo[0] = look_up(lo[0]);
      hi[0] = look_up(hi[0]);
    }
    if constexpr (kCode == Code::kIQ4) {
      lo[0] = look_up_iq4(lo[0]);
      hi[0] = look_up_iq4(hi[0]);
    }
  }
  // u of four k of a block of six bits: the nibble of one and two of the high bits.
  template <int kQuarter>
  static W4A8_INLINE void load_six(const uint8_t* block, I (&u)[1]) {
    const I nibble = _mm512_set1_epi8(0x0f);
    const I two = _mm512_set1_epi8(0x30);
    const I both = _mm512_loadu_si512(block + kQuarter / 2 * kStepBytes);
    I high = _mm512_loadu_si512(block + kSixSteps * kStepBytes);
    if constexpr (kQuarter == 0) high = _mm512_slli_epi16(high, 4);
    if constexpr (kQuarter == 1) high = _mm512_slli_epi16(high, 2);
    if constexpr (kQuarter == 3) high = _mm512_srli_epi16(high, 2);
    const I low = _mm512_and_si512(kQuarter % 2 == 0 ? both : _mm512_srli_epi16(both, 4), nibble);
    u[0] = _mm512_ternarylogic_epi64(high, two, low, 0xea);  // (high & two) | low
  }
  static W4A8_INLINE void unpack_e2m1(const uint8_t* packed, uint8_t* bytes) {
    I lo[1];
    I hi[1];
    load_step<Code::kE2M1>(packed, 0, lo, hi);
    _mm512_storeu_si512(bytes, lo[0]);
    _mm512_storeu_si512(bytes + kStepBytes, hi[0]);
  }
};
