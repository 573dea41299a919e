// Attention by AVX2: int8 widened to 16 bits and multiplied by VPMADDWD, bfloat16 widened to floats and FMA.
//
//   instruction                      Haswell .. Alder Lake   Zen 2 .. 4        (uops.info, read 2026-11)
//   VPMADDWD ymm                     2 a cycle, 5            2 a cycle, 3
//   VPMOVZXBW, VPMOVSXBW ymm, m128   1 a cycle               1 to 2 a cycle
//
//   VPMADDUBSW would take bytes, but two products of 255 * 127 do not fit its 16 bits. A register of 8 keys is two of
//   16-bit numbers, four keys each, shared by the 6 rows of a tile:
//      line   ymm   [ k0: i0 i1 i2 i3 | k1: .. ]      item of four keys, 16 bits each
//      item   ymm   [ i0 i1 i2 i3 | i0 .. ]           item of the row, broadcast, kept with 16 bits in scratch
//      sum    ymm   [ k0: i0 + i1, i2 + i3 | .. ]     added up at the end
//   12 sums, 2 of keys and the item: 15 of 16 registers. No sum overflows (x86_avx512vnni.cpp).
//
//   bfloat16: 4 rows x 16 keys. 8 sums keep two FMAs of 4 cycles busy; the 6 sums of 6 x 8 would wait for each other.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "kernels/attention/attention.h"
#include "kernels/half.h"
#include "kernels/ops.h"
#include "kernels/target.h"

W4A8_TARGET("avx2,fma,f16c")
namespace w4a8::isa {
namespace {

#include "kernels/attention/attention-inl.h"
#include "kernels/attention/avx2-inl.h"

struct Int8Dot {
  static constexpr bool kInt8 = true;
  static constexpr int kTileRows = 6;
  static constexpr int kTileVecs = 1;
  static constexpr int64_t kPerItem = 4;
  static constexpr int64_t kRowItemBytes = 8;
  struct Sum {
    __m256i low;
    __m256i high;
  };
  struct Line {
    __m256i low;
    __m256i high;
  };
  using Item = __m256i;
  static W4A8_INLINE Sum zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  template <bool kKeys>
  static W4A8_INLINE Line load(const uint8_t* p) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16));
    if constexpr (kKeys) return {_mm256_cvtepu8_epi16(low), _mm256_cvtepu8_epi16(high)};
    return {_mm256_cvtepi8_epi16(low), _mm256_cvtepi8_epi16(high)};
  }
  template <bool kKeys>
  static W4A8_INLINE Item item(const uint8_t* p) {
    int64_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    return _mm256_set1_epi64x(four);
  }
  template <bool kKeys>
  static W4A8_INLINE void add(Sum& sum, Line line, Item item) {
    sum.low = _mm256_add_epi32(sum.low, _mm256_madd_epi16(line.low, item));
    sum.high = _mm256_add_epi32(sum.high, _mm256_madd_epi16(line.high, item));
    // Otherwise GCC would compute the products of all rows first, which spills the sums.
    __asm__("" : "+x"(sum.low), "+x"(sum.high));
  }
  static W4A8_INLINE Ops::I total(Sum sum) {
    // The halves of both registers alternate.
    return _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum.low, sum.high), 0xd8);
  }
  static W4A8_INLINE void store_weights(uint8_t* p, Ops::F weights) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), Ops::narrow(Ops::to_int(weights), false));
  }
};

}  // namespace

extern const AttentionFunctions x86_avx2_attention;
constinit const AttentionFunctions x86_avx2_attention = attention_of<Ops, Int8Dot, FmaDot<Ops, 4, 2>>();

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
