// The element-wise operations of the 256-bit x86 kernels: AVX2, FMA and F16C.
// Included inside a target region and an anonymous namespace.
#pragma once

struct Avx2Ops : TileDefaults {
  static constexpr bool kNarrowProducts = true;
  using F = __m256;
  using I = __m256i;
  static constexpr int64_t kLanes = 8;
  static constexpr int kVecs = 2;

  static W4A8_INLINE F splat(float x) { return _mm256_set1_ps(x); }
  static W4A8_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
  static W4A8_INLINE F load_bytes(const uint8_t* p) { return _mm256_castsi256_ps(iload(p)); }
  static W4A8_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static W4A8_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  static W4A8_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static W4A8_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static W4A8_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
  static W4A8_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static W4A8_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
  static W4A8_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
  static W4A8_INLINE F neg(F a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static W4A8_INLINE F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static W4A8_INLINE F select_less(F a, F b, F yes, F no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static W4A8_INLINE F float_bits(I a) { return _mm256_castsi256_ps(a); }
  static W4A8_INLINE I int_bits(F a) { return _mm256_castps_si256(a); }
  static W4A8_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static W4A8_INLINE I to_int(F a) { return _mm256_cvtps_epi32(a); }
  static W4A8_INLINE F pow2(I n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }

  static W4A8_INLINE I isplat(int32_t x) { return _mm256_set1_epi32(x); }
  static W4A8_INLINE I iload(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static W4A8_INLINE void istore(int32_t* p, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
  static W4A8_INLINE I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
  static W4A8_INLINE I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
  static W4A8_INLINE I imul(I a, I b) { return _mm256_mullo_epi32(a, b); }
  // VPMADDWD: VPMULLD is two or three micro-operations on Intel.
  static W4A8_INLINE I iadd_product16(I sum, I a, I b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
  static W4A8_INLINE I iand(I a, I b) { return _mm256_and_si256(a, b); }
  static W4A8_INLINE I imin(I a, I b) { return _mm256_min_epi32(a, b); }
  static W4A8_INLINE I imax(I a, I b) { return _mm256_max_epi32(a, b); }
  template <int kBits>
  static W4A8_INLINE I shift_right(I a) {
    return _mm256_srai_epi32(a, kBits);
  }
  template <int kBits>
  static W4A8_INLINE I shift_left(I a) {
    return _mm256_slli_epi32(a, kBits);
  }
  static W4A8_INLINE int32_t reduce(I a) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
    return _mm_cvtsi128_si32(sum);
  }
  static W4A8_INLINE int32_t reduce_max(I a) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
    return _mm_cvtsi128_si32(most);
  }
  // Low 16 bits of each lane, in order; lanes are in the range of the type, so the saturation does nothing.
  static W4A8_INLINE __m128i narrow(I a, bool is_unsigned) {
    const __m128i low = _mm256_castsi256_si128(a);
    const __m128i high = _mm256_extracti128_si256(a, 1);
    return is_unsigned ? _mm_packus_epi32(low, high) : _mm_packs_epi32(low, high);
  }
  static W4A8_INLINE void store_int8(int8_t* p, I a) {
    const __m128i words = narrow(a, false);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  }

  static W4A8_INLINE F widen_bfloat16(__m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  template <DType kType>
  static W4A8_INLINE F load_as(const void* p, int64_t i) {
    if constexpr (kType == DType::kFloat32) return _mm256_loadu_ps(static_cast<const float*>(p) + i);
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(p) + i));
    return kType == DType::kBFloat16 ? widen_bfloat16(half) : _mm256_cvtph_ps(half);
  }
  template <DType kType>
  static W4A8_INLINE void store_as(void* p, int64_t i, F x) {
    const F nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    x = _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan);
    if constexpr (kType == DType::kFloat32) {
      _mm256_storeu_ps(static_cast<float*>(p) + i, x);
      return;
    }
    auto* dst = reinterpret_cast<__m128i*>(static_cast<uint16_t*>(p) + i);
    if constexpr (kType == DType::kBFloat16) {
      // Nearest even: add 0x7fff plus the lowest bit kept. 0x7fc00000 stays 0x7fc0.
      const I bits = _mm256_castps_si256(x);
      const I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const I rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      _mm_storeu_si128(dst, narrow(_mm256_srli_epi32(rounded, 16), true));
    } else {
      _mm_storeu_si128(dst, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }
  static W4A8_INLINE I load_widened(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static W4A8_INLINE I load_int8(const uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }

  static W4A8_INLINE I broadcast4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    return _mm256_set1_epi32(four);
  }
  static constexpr uint8_t kE2M1Zero = 12;
  static constexpr int32_t kInt8Zero = 128;
  static W4A8_INLINE I look_up(I nibbles) {
    const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
  }
  // The table of iq4: a nibble to w + 128.
  static W4A8_INLINE __m128i iq4_table() {
    const __m128i weights = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIQ4Weights));
    return _mm_xor_si128(weights, _mm_set1_epi8(-128));
  }
  // u of k0..k0+3 (kHigh: k0+4..k0+7) of both halves of the columns.
  template <Code kCode, bool kHigh>
  static W4A8_INLINE void load_half(const uint8_t* w, int64_t s, I (&out)[2]) {
    const I nibble = _mm256_set1_epi8(0x0f);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      if constexpr (step_bytes(kCode) == kByteStepBytes) {
        out[v] = iload(w + s * kByteStepBytes + (kHigh ? kStepBytes : 0) + 32 * v);
      } else {
        const I both = iload(w + s * kStepBytes + 32 * v);
        out[v] = _mm256_and_si256(kHigh ? _mm256_srli_epi16(both, 4) : both, nibble);
      }
      if constexpr (kCode == Code::kE2M1) out[v] = look_up(out[v]);
      if constexpr (kCode == Code::kIQ4) {
        out[v] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(iq4_table()), out[v]);
      }
    }
  }
  // u of four k of a block of six bits: the nibble of one and two of the high bits.
  template <int kQuarter>
  static W4A8_INLINE void load_six(const uint8_t* block, I (&u)[2]) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const I both = iload(block + kQuarter / 2 * kStepBytes + 32 * v);
      I high = iload(block + kSixSteps * kStepBytes + 32 * v);
      if constexpr (kQuarter == 0) high = _mm256_slli_epi16(high, 4);
      if constexpr (kQuarter == 1) high = _mm256_slli_epi16(high, 2);
      if constexpr (kQuarter == 3) high = _mm256_srli_epi16(high, 2);
      const I low = _mm256_and_si256(kQuarter % 2 == 0 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(0x0f));
      u[v] = _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi8(0x30)), low);
    }
  }
  static W4A8_INLINE void unpack_e2m1(const uint8_t* packed, uint8_t* bytes) {
    I halves[2][2];
    load_half<Code::kE2M1, false>(packed, 0, halves[0]);
    load_half<Code::kE2M1, true>(packed, 0, halves[1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + 32 * i), halves[i / 2][i % 2]);
    }
  }
};
