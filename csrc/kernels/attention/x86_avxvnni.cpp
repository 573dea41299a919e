// Attention by VPDPBUSD on 256-bit registers; bfloat16 as x86_avx2.cpp.
//
//   12 sums of 6 rows x 16 keys, 2 registers of keys and the item of a row: 15 of 16 registers. How an item is
//   multiplied and the ranges are told in x86_avx512vnni.cpp.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "kernels/attention/attention.h"
#include "kernels/half.h"
#include "kernels/ops.h"
#include "kernels/target.h"

// {vex}, {evex}: the assembler must not choose the form (x86_avxvnni.cpp of the kernels).
#ifndef W4A8_EVEX_TWIN
#define W4A8_ATTENTION x86_avxvnni_attention
#define W4A8_VPDPBUSD "%{vex%} vpdpbusd"
W4A8_TARGET("avx2,fma,f16c,avxvnni")
#else
#define W4A8_ATTENTION x86_avxvnni_evex_attention
#define W4A8_VPDPBUSD "%{evex%} vpdpbusd"
W4A8_TARGET("avx2,fma,f16c,avx512vl,avx512vnni")
#endif
namespace w4a8::isa {
namespace {

#include "kernels/attention/attention-inl.h"
#include "kernels/attention/avx2-inl.h"

struct Int8Dot {
  static constexpr bool kInt8 = true;
  static constexpr int kTileRows = 6;
  static constexpr int kTileVecs = 2;
  static constexpr int64_t kPerItem = 4;
  static constexpr int64_t kRowItemBytes = 4;
  using Sum = __m256i;
  using Line = __m256i;
  using Item = __m256i;
  static W4A8_INLINE Sum zero() { return _mm256_setzero_si256(); }
  template <bool kKeys>
  static W4A8_INLINE Line load(const uint8_t* p) {
    return Ops::iload(p);
  }
  template <bool kKeys>
  static W4A8_INLINE Item item(const uint8_t* p) {
    return Ops::broadcast4(reinterpret_cast<const int8_t*>(p));
  }
  template <bool kKeys>
  static W4A8_INLINE void add(Sum& sum, Line line, Item item) {
    __asm__ volatile(W4A8_VPDPBUSD " %2, %1, %0" : "+x"(sum) : "x"(kKeys ? line : item), "x"(kKeys ? item : line));
  }
  static W4A8_INLINE Ops::I total(Sum sum) { return sum; }
  static W4A8_INLINE void store_weights(uint8_t* p, Ops::F weights) {
    const __m128i words = Ops::narrow(Ops::to_int(weights), false);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }
};

}  // namespace

extern const AttentionFunctions W4A8_ATTENTION;
constinit const AttentionFunctions W4A8_ATTENTION = attention_of<Ops, Int8Dot, FmaDot<Ops, 4, 2>>();

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
