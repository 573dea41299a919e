// AVX2 kernel: int4 weights (unsigned nibbles) x int8 activations, in 16-bit sums.
//
//   instruction                      Haswell .. Alder Lake   Zen 2 .. 4        (uops.info, read 2026-11)
//   VPMADDUBSW ymm  u8 x s8 -> i16   2 a cycle, 5            2 a cycle, 3..4
//   VPADDW ymm                       3 a cycle, 1            4 a cycle, 1
//   VPMADDWD ymm    i16 x 1 -> i32   2 a cycle, 5            2 a cycle, 3
//
//   A step of a panel (8 k x 16 columns) is two registers, columns 0..7 and 8..15:
//      w    ymm   [ b0 b1 b2 b3 | b0 b1 b2 b3 | .. ]     byte i of column c: low nibble k0 + i, high nibble k0 + 4 + i
//      a    ymm   [ a0 a1 a2 a3 | a0 a1 a2 a3 | .. ]     4 activations, broadcast; used for both halves
//
//   |nibble * q| <= 15 * 128 = 1920, VPMADDUBSW adds two: 3840 cannot saturate. A 16-bit lane takes 2 products of each
//   VPMADDUBSW, so a block of 4 steps (32 k) is 8 of them: 8 * 3840 = 30720 < 32768. Then they are widened to 32 bits.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "kernels/cpu_features.h"
#include "kernels/kernel.h"
#include "kernels/row_params.h"
#include "kernels/target.h"

W4A8_TARGET("avx2,fma,f16c")
namespace w4a8::isa {
namespace {

#include "kernels/activation-inl.h"
#include "kernels/rows-inl.h"
#include "kernels/tile-inl.h"

struct Ops {
  using F = __m256;
  using I = __m256i;
  static constexpr int64_t kLanes = 8;
  static constexpr int kVecs = 2;
  // 4 rows x 2 halves of 16-bit sums, two weights, broadcast, product: 12 of 16 registers; 32-bit sums live in memory.
  static constexpr int kRows[] = {4};
  static constexpr int64_t kUnpackRows = 8;
  static constexpr int64_t kUnpackSteps = 96;  // 12 KiB of unpacked weights

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
  static W4A8_INLINE I imin(I a, I b) { return _mm256_min_epi32(a, b); }
  static W4A8_INLINE I imax(I a, I b) { return _mm256_max_epi32(a, b); }
  template <int kBits>
  static W4A8_INLINE I shift_right(I a) {
    return _mm256_srai_epi32(a, kBits);
  }
  static W4A8_INLINE int32_t reduce(I a) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
    return _mm_cvtsi128_si32(sum);
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
  static W4A8_INLINE F load_scales(const uint8_t* scales, int64_t i, DType dtype) {
    if (dtype == DType::kFloat32) return load_bytes(scales + 4 * i);
    return widen_bfloat16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + 2 * i)));
  }

  static W4A8_INLINE I broadcast4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    return _mm256_set1_epi32(four);
  }
  // The nibbles of k0..k0+3 (kHigh: k0+4..k0+7) of both halves of the columns.
  template <bool kUnpacked, bool kHigh>
  static W4A8_INLINE void load_nibbles(const uint8_t* w, int64_t s, I (&out)[2]) {
    const I nibble = _mm256_set1_epi8(0x0f);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      if constexpr (kUnpacked) {
        out[v] = iload(w + s * 2 * kStepBytes + (kHigh ? kStepBytes : 0) + 32 * v);
      } else {
        const I both = iload(w + s * kStepBytes + 32 * v);
        out[v] = _mm256_and_si256(kHigh ? _mm256_srli_epi16(both, 4) : both, nibble);
      }
    }
  }
  // kFirst: the sums are set instead of added to.
  template <int R, bool kUnpacked, bool kHigh, bool kFirst>
  static W4A8_INLINE void add_products(I (&sums)[R][2], const int8_t* const (&rows)[R], const uint8_t* w, int64_t s) {
    I nibbles[2];
    load_nibbles<kUnpacked, kHigh>(w, s, nibbles);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const I a = broadcast4(rows[r] + s * kStepK + (kHigh ? 4 : 0));
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const I products = _mm256_maddubs_epi16(nibbles[v], a);
        sums[r][v] = kFirst ? products : _mm256_add_epi16(sums[r][v], products);
        // Keeps the compiler from regrouping the additions of several steps, which would spill every sum.
        __asm__("" : "+x"(sums[r][v]));
      }
    }
  }

  // Steps [s, s + count), 1 <= count <= kBlockSteps.
  template <int R, bool kUnpacked>
  static W4A8_INLINE void add_block(I (&acc)[R][1][2], const int8_t* const (&rows)[R], const uint8_t* w, int64_t s,
                                    int64_t count, const uint8_t* fetch) {
    I sums[R][2];
    constexpr bool kPrefetch = !kUnpacked;
    if constexpr (kPrefetch) __builtin_prefetch(fetch, 0, 2);
    add_products<R, kUnpacked, false, true>(sums, rows, w, s);
    add_products<R, kUnpacked, true, false>(sums, rows, w, s);
#pragma GCC unroll 4
    for (int64_t i = 1; i < count; ++i) {
      if constexpr (kPrefetch) __builtin_prefetch(fetch + i * kStepBytes, 0, 2);
      add_products<R, kUnpacked, false, false>(sums, rows, w, s + i);
      add_products<R, kUnpacked, true, false>(sums, rows, w, s + i);
    }
    const I ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      acc[r][0][0] = _mm256_add_epi32(acc[r][0][0], _mm256_madd_epi16(sums[r][0], ones));
      acc[r][0][1] = _mm256_add_epi32(acc[r][0][1], _mm256_madd_epi16(sums[r][1], ones));
    }
  }

  template <int R, int C, bool kUnpacked, bool kBlocks>
  static W4A8_INLINE void accumulate(I (&acc)[R][C][2], const int8_t* const (&rows)[R],
                                     const uint8_t* const (&weights)[C], int64_t begin, int64_t end, const uint8_t* fetch) {
    int64_t s = begin;
    for (; s + kBlockSteps <= end; s += kBlockSteps, fetch += kBlockSteps * kStepBytes) {
      add_block<R, kUnpacked>(acc, rows, weights[0], s, kBlockSteps, fetch);
    }
    if constexpr (kBlocks) return;
    if (s < end) add_block<R, kUnpacked>(acc, rows, weights[0], s, end - s, fetch);
  }
};

}  // namespace

extern const Kernel x86_avx2;
const Kernel x86_avx2 = {"x86_avx2",        kAvx2 | kFma | kF16c, Ops::kRows[0], gemm<Ops>,
                         quantize_row<Ops>, activate<Ops>,        combine<Ops>,  store_row<Ops>};

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
