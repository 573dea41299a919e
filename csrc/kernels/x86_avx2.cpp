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
//   e2m1 counts from 12: 24 * 128 * 2 = 6144, so 2 steps are 4 * 6144 = 24576, and 3 would not fit.
//   Six bits are 63 at most: 63 * 128 * 2 = 16128, and 1 step is 2 * 16128 = 32256 < 32768. The least sum is -32256,
//   too: activations are in -128..127. Bytes of int8 are too large: their low and their high four bits are multiplied
//   apart, and VPMADDWD, which widens the sums, multiplies those of the high ones by 16. Those of iq4 are looked up in
//   two tables.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "kernels/cpu_features.h"
#include "kernels/kernel.h"
#include "kernels/ops.h"
#include "kernels/row_params.h"
#include "kernels/target.h"

W4A8_TARGET("avx2,fma,f16c")
namespace w4a8::isa {
namespace {

#include "kernels/avx2_ops-inl.h"
#include "kernels/ops_tiles-inl.h"
#include "kernels/row_functions-inl.h"

struct Ops : Avx2Ops {
  // 4 rows x 2 halves of 16-bit sums, two weights, broadcast, product: 12 of 16 registers; 32-bit sums live in memory.
  static constexpr int kRows[] = {4};
  static constexpr int64_t kUnpackRows = 8;
  static constexpr int64_t kStreamedRows = 2;
  static constexpr int64_t kUnpackSteps = 96;  // 12 KiB of unpacked weights

  static constexpr bool kE2M1IsWide = true;
  static constexpr bool kInt6IsWide = true;

  // Which four bits of a byte of int8, or of iq4's table, are multiplied.
  enum class Part { kAll, kLow, kHigh };

  // The table of iq4, four bits of w + 128.
  template <Part kPart>
  static W4A8_INLINE __m128i iq4_part() {
    const __m128i table = iq4_table();
    return _mm_and_si128(kPart == Part::kHigh ? _mm_srli_epi16(table, 4) : table, _mm_set1_epi8(0x0f));
  }

  // kFirst: the sums are set instead of added to.
  template <int R, Code kCode, bool kUpperK, bool kFirst, Part kPart>
  static W4A8_INLINE void add_products(I (&sums)[R][2], const int8_t* const (&rows)[R], const uint8_t* w, int64_t s,
                                       int64_t k) {
    I u[2];
    load_half<kCode == Code::kIQ4 ? Code::kNibbles : kCode, kUpperK>(w, s, u);
    if constexpr (kCode == Code::kIQ4) {
      const I table = _mm256_broadcastsi128_si256(iq4_part<kPart>());
      for_each<2>([&](int v) W4A8_LAMBDA { u[v] = _mm256_shuffle_epi8(table, u[v]); });
    } else if constexpr (kPart != Part::kAll) {
      for_each<2>([&](int v) W4A8_LAMBDA {
        u[v] = _mm256_and_si256(kPart == Part::kHigh ? _mm256_srli_epi16(u[v], 4) : u[v], _mm256_set1_epi8(0x0f));
      });
    }
    multiply<R, kFirst>(sums, rows, k + (kUpperK ? 4 : 0), u);
  }
  // Four k from `k` on.
  template <int R, bool kFirst>
  static W4A8_INLINE void multiply(I (&sums)[R][2], const int8_t* const (&rows)[R], int64_t k, const I (&u)[2]) {
    for_each<R>([&](int r) W4A8_LAMBDA {
      const I a = broadcast4(rows[r] + k);
      for_each<2>([&](int v) W4A8_LAMBDA {
        const I products = _mm256_maddubs_epi16(u[v], a);
        sums[r][v] = kFirst ? products : _mm256_add_epi16(sums[r][v], products);
        // Keeps the compiler from regrouping the additions of several steps, which would spill every sum.
        __asm__("" : "+x"(sums[r][v]));
      });
    });
  }

  // Steps [s, s + kCount), which fit 16 bits.
  template <int R, Code kCode, int64_t kCount, Part kPart>
  static W4A8_INLINE void add_part(I (&acc)[R][1][2], const int8_t* const (&rows)[R], const uint8_t* w, int64_t s) {
    int64_t k = s * kStepK;
    // Otherwise GCC would keep the broadcasts of all rows for the other part, in memory.
    if constexpr (kPart == Part::kHigh) __asm__("" : "+r"(k), "+r"(w));
    I sums[R][2];
    add_products<R, kCode, false, true, kPart>(sums, rows, w, s, k);
    add_products<R, kCode, true, false, kPart>(sums, rows, w, s, k);
#pragma GCC unroll 4
    for (int64_t i = 1; i < kCount; ++i) {
      add_products<R, kCode, false, false, kPart>(sums, rows, w, s + i, k + i * kStepK);
      add_products<R, kCode, true, false, kPart>(sums, rows, w, s + i, k + i * kStepK);
    }
    widen<R, kPart>(acc, sums);
  }
  template <int R, Part kPart>
  static W4A8_INLINE void widen(I (&acc)[R][1][2], const I (&sums)[R][2]) {
    const I weight = _mm256_set1_epi16(kPart == Part::kHigh ? 16 : 1);
    for_each<R, 2>([&](int r, int v) W4A8_LAMBDA {
      acc[r][0][v] = _mm256_add_epi32(acc[r][0][v], _mm256_madd_epi16(sums[r][v], weight));
    });
  }

  // A block of six bits, whose first step is s.
  template <int R, int kStep = 0>
  static W4A8_INLINE void add_six(I (&acc)[R][1][2], const int8_t* const (&rows)[R], const uint8_t* w, int64_t s) {
    const uint8_t* block = w + s * step_bytes(Code::kSix);
    I sums[R][2];
    I u[2];
    load_six<2 * kStep>(block, u);
    multiply<R, true>(sums, rows, (s + kStep) * kStepK, u);
    load_six<2 * kStep + 1>(block, u);
    multiply<R, false>(sums, rows, (s + kStep) * kStepK + 4, u);
    widen<R, Part::kAll>(acc, sums);
    if constexpr (kStep == 0) add_six<R, 1>(acc, rows, w, s);
  }

  template <int R, Code kCode, bool kFetch, int64_t kCount>
  static W4A8_INLINE void add_sums(I (&acc)[R][1][2], const int8_t* const (&rows)[R], const uint8_t* w, int64_t s,
                                   const uint8_t* fetch) {
    if constexpr (kFetch) fetch_lines<kCount * step_bytes(kCode)>(fetch);
    if constexpr (kCode == Code::kSix) {
      add_six(acc, rows, w, s);
    } else if constexpr (is_int8(kCode)) {
      add_part<R, kCode, kCount, Part::kLow>(acc, rows, w, s);
      add_part<R, kCode, kCount, Part::kHigh>(acc, rows, w, s);
    } else {
      add_part<R, kCode, kCount, Part::kAll>(acc, rows, w, s);
    }
  }

  template <int R, int C, Code kCode, int64_t kUnit>
  static W4A8_INLINE void accumulate(I (&acc)[R][C][2], const int8_t* const (&rows)[R],
                                     const uint8_t* const (&weights)[C], int64_t begin, int64_t end,
                                     const uint8_t* fetch) {
    if constexpr (may_stream<Ops, R, C>()) {
      if (fetch == nullptr) return sum_steps<R, kCode, kUnit, false>(acc, rows, weights[0], begin, end, weights[0]);
    }
    sum_steps<R, kCode, kUnit, is_packed(kCode)>(acc, rows, weights[0], begin, end, fetch);
  }

  template <int R, Code kCode, int64_t kUnit, bool kFetch>
  static W4A8_INLINE void sum_steps(I (&acc)[R][1][2], const int8_t* const (&rows)[R], const uint8_t* weights,
                                    int64_t begin, int64_t end, const uint8_t* fetch) {
    constexpr int64_t kSteps = unrolled(kUnit);
    // That fit 16 bits; of packed six bits a block.
    constexpr int64_t kNarrow = kCode == Code::kSixBytes ? 1 : (is_e2m1(kCode) || is_six(kCode) ? 2 : kSteps);
    int64_t s = begin;
    for (; s + kSteps <= end; s += kSteps) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < kSteps; i += kNarrow, fetch += kNarrow * step_bytes(kCode)) {
        add_sums<R, kCode, kFetch, kNarrow>(acc, rows, weights, s + i, fetch);
      }
    }
    if constexpr (kUnit != 1) return;
    constexpr int64_t kRest = kCode == Code::kSix ? kSixSteps : 1;
    for (; s < end; s += kRest, fetch += kRest * step_bytes(kCode)) {
      add_sums<R, kCode, kFetch, kRest>(acc, rows, weights, s, fetch);
    }
  }

  static constexpr bool kOwnGroups = true;
  template <int R, int C, Code kCode, Grouping kGrouping>
  static W4A8_INLINE void add_groups(const TileArgs& t, const int8_t* const (&rows)[R],
                                     const uint8_t* const (&weights)[C], F (&f)[R][C][2]) {
    if constexpr (kCode == Code::kSixBytes && is_least(kGrouping)) {
      add_unpacked_sixes<R, is_scaled(kGrouping)>(t, rows, weights[0], f);
    } else {
      add_all_groups<Ops, R, C, kCode, kGrouping>(t, rows, weights, f);
    }
  }

  // Unpacked six bits in groups of two steps, which stay in 8 registers while each row is multiplied by them and
  // scaled: of all sums only f is kept in memory.
  template <int R, bool kScaled>
  static W4A8_INLINE void add_unpacked_sixes(const TileArgs& t, const int8_t* const (&rows)[R], const uint8_t* w,
                                             F (&f)[R][1][2]) {
    const uint8_t* scales = t.scales;
    int64_t k = 0;
    for (int64_t group = 0; k < t.steps * kStepK; ++group, k += kLeastGroupSteps * kStepK) {
      I u[4][2];
      for_each<4, 2>([&](int i, int v) W4A8_LAMBDA {
        u[i][v] = iload(w + (2 * i + v) * 32);
        __asm__("" : "+x"(u[i][v]));  // GCC would load it again for each row
      });
      for_each<R>([&](int r) W4A8_LAMBDA {
        const int8_t* const row[] = {rows[r]};
        I acc[1][1][2];
        I sums[1][2];
        fill(acc, isplat(t.starts[r * t.starts_stride + group]));
        multiply<1, true>(sums, row, k, u[0]);
        multiply<1, false>(sums, row, k + 4, u[1]);
        widen<1, Part::kAll>(acc, sums);
        multiply<1, true>(sums, row, k + 8, u[2]);
        multiply<1, false>(sums, row, k + 12, u[3]);
        widen<1, Part::kAll>(acc, sums);
        for_each<2>([&](int v) W4A8_LAMBDA {
          const F value = part_value<Ops, kScaled>(t, acc[0][0][v], r, group);
          f[r][0][v] = fma(value, load_bytes(scales + 4 * v * kLanes), f[r][0][v]);
        });
      });
      w += kLeastGroupSteps * kByteStepBytes;
      scales += kScaleBytes;
    }
  }
};

}  // namespace

extern const Kernel x86_avx2;
extern const AttentionFunctions x86_avx2_attention;
extern const LinearAttentionFunctions x86_avx2_linear_attention;
constinit const Kernel x86_avx2 = {rows_of<Ops>(), gemm_of<Ops>(),      &x86_avx2_attention, &x86_avx2_linear_attention,
                                   "x86_avx2",     kAvx2 | kFma | kF16c};

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
