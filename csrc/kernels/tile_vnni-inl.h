// The integer part of tiles with VPDPBUSD, whatever the width of the registers.
// Included inside a target region and an anonymous namespace.
//
// Base brings, besides the element-wise operations:
//     broadcast4(p)                       4 activations in every lane
//     dot(acc, u8, s8)                    acc += 4 products in each 32-bit lane
//     load_step<kCode>(w, s, lo, hi)      u of k0..k0+3 and of k0+4..k0+7, kVecs registers each
//     load_six<kQuarter>(block, u)        u of four of the 16 k of a block of six bits, kVecs registers
//     kDoubled                            up to so many accumulators, a second set hides the latency of dot
//     take_half(w, u)                     one half of a step of bytes: to hold both takes registers that others need
#pragma once

#include "kernels/tile_args-inl.h"

template <class Base>
struct VnniOps : Base {
  using I = typename Base::I;
  static constexpr int kVecs = Base::kVecs;

  // 24 * 128 in size at most, K * 24 * 128 < 2^31 for K <= 2^19; nothing is narrow.
  static constexpr bool kE2M1IsWide = false;
  static constexpr bool kInt6IsWide = false;

  // Makes GCC add to one index alone. It would have a pointer for every row, and all the additions take ports of `dot`.
  static W4A8_INLINE void keep_index(int64_t& k) {
    if constexpr (Base::kSpareRegisters) __asm__("" : "+r"(k));
  }

  // Adds four k from `k` on. Loops, not for_each, up to add_bytes: with it GCC 12 spills in tiles of 5 x 2 and 6 x 2.
  template <int R, int C>
  static W4A8_INLINE void add_half(I (&acc)[R][C][kVecs], const int8_t* const (&rows)[R], int64_t k,
                                   const I (&u)[C][kVecs]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const I a = Base::broadcast4(rows[r] + k);
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) Base::dot(acc[r][c][v], u[c][v], a);
      }
    }
  }

  // Adds one step of nibbles. second: where the high halves go, the same as acc or a second set.
  template <int R, int C, Code kCode>
  static W4A8_INLINE void add_nibbles(I (&acc)[R][C][kVecs], I (&second)[R][C][kVecs], const int8_t* const (&rows)[R],
                                      const uint8_t* const (&weights)[C], int64_t s) {
    I lo[C][kVecs];
    I hi[C][kVecs];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) Base::template load_step<kCode>(weights[c], s, lo[c], hi[c]);
    // All low halves, then all high ones: as far apart as can be, since both may add to the same accumulator.
    add_half(acc, rows, s * kStepK, lo);
    add_half(second, rows, s * kStepK + 4, hi);
  }

  // Adds the step of bytes that begins at k.
  template <int R, int C>
  static W4A8_INLINE void add_bytes(I (&acc)[R][C][kVecs], I (&second)[R][C][kVecs], const int8_t* const (&rows)[R],
                                    const uint8_t* const (&weights)[C], int64_t k) {
    I u[C][kVecs];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int64_t at = k * (kByteStepBytes / kStepK) + half * kLineBytes;
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) Base::take_half(weights[c] + at, u[c]);
      add_half(half == 0 ? acc : second, rows, k + 4 * half, u);
    }
  }

  // Adds four k of a block of six bits, then those behind.
  template <int R, int C, int kQuarter = 0>
  static W4A8_INLINE void add_six(I (&acc)[R][C][kVecs], I (&second)[R][C][kVecs], const int8_t* const (&rows)[R],
                                  const uint8_t* const (&blocks)[C], int64_t k) {
    I u[C][kVecs];
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) Base::template load_six<kQuarter>(blocks[c], u[c]);
    add_half(kQuarter % 2 == 0 ? acc : second, rows, k + 4 * kQuarter, u);
    if constexpr (kQuarter < 3) add_six<R, C, kQuarter + 1>(acc, second, rows, blocks, k);
  }

  // add_steps for packed six bits: adds the blocks of the steps [begin, end), and fetches as many bytes at `fetch`.
  template <int R, int C, bool kFetch>
  static W4A8_INLINE void add_sixes(I (&acc)[R][C][kVecs], I (&second)[R][C][kVecs], const int8_t* const (&rows)[R],
                                    const uint8_t* const (&weights)[C], int64_t begin, int64_t end,
                                    const uint8_t* fetch) {
    for (int64_t s = begin; s < end; s += kSixSteps, fetch += C * kSixBlockBytes) {
      if constexpr (kFetch) fetch_lines<C * kSixBlockBytes>(fetch);
      const uint8_t* blocks[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) blocks[c] = weights[c] + s * step_bytes(Code::kSix);
      add_six(acc, second, rows, blocks, s * kStepK);
    }
  }

  // Adds the step `s`, k = s * kStepK, and fetches as many bytes.
  template <int R, int C, Code kCode, bool kFetch>
  static W4A8_INLINE void add_step(I (&acc)[R][C][kVecs], I (&second)[R][C][kVecs], const int8_t* const (&rows)[R],
                                   const uint8_t* const (&weights)[C], int64_t s, int64_t k, const uint8_t* fetch) {
    if constexpr (kFetch) fetch_lines<C * step_bytes(kCode)>(fetch);
    if constexpr (step_bytes(kCode) == kByteStepBytes) {
      add_bytes(acc, second, rows, weights, k);
    } else {
      add_nibbles<R, C, kCode>(acc, second, rows, weights, s);
    }
  }

  template <int R, int C, Code kCode, int64_t kUnit, bool kFetch>
  static W4A8_INLINE void add_steps(I (&acc)[R][C][kVecs], I (&second)[R][C][kVecs], const int8_t* const (&rows)[R],
                                    const uint8_t* const (&weights)[C], int64_t begin, int64_t end,
                                    const uint8_t* fetch) {
    if constexpr (kCode == Code::kSix) return add_sixes<R, C, kFetch>(acc, second, rows, weights, begin, end, fetch);
    constexpr int64_t kBytes = C * step_bytes(kCode);
    constexpr int64_t kSteps = unrolled(kUnit);
    int64_t s = begin;
    for (; s + kSteps <= end; s += kSteps, fetch += kSteps * kBytes) {
      int64_t k = s * kStepK;
      if constexpr (step_bytes(kCode) == kByteStepBytes) keep_index(k);
      for_each<kSteps>([&](int i) W4A8_LAMBDA {
        add_step<R, C, kCode, kFetch>(acc, second, rows, weights, s + i, k + i * kStepK, fetch + i * kBytes);
      });
    }
    if constexpr (kUnit != 1) return;
    for (; s < end; ++s, fetch += kBytes) {
      add_step<R, C, kCode, kFetch>(acc, second, rows, weights, s, s * kStepK, fetch);
    }
  }

  template <int R, int C, Code kCode, int64_t kUnit>
  static W4A8_INLINE void accumulate(I (&acc)[R][C][kVecs], const int8_t* const (&rows)[R],
                                     const uint8_t* const (&weights)[C], int64_t begin, int64_t end,
                                     const uint8_t* fetch) {
    if constexpr (may_stream<Base, R, C>()) {
      if (fetch == nullptr) return sum_steps<R, C, kCode, kUnit, false>(acc, rows, weights, begin, end, weights[0]);
    }
    sum_steps<R, C, kCode, kUnit, is_packed(kCode)>(acc, rows, weights, begin, end, fetch);
  }

  template <int R, int C, Code kCode, int64_t kUnit, bool kFetch>
  static W4A8_INLINE void sum_steps(I (&acc)[R][C][kVecs], const int8_t* const (&rows)[R],
                                    const uint8_t* const (&weights)[C], int64_t begin, int64_t end,
                                    const uint8_t* fetch) {
    if constexpr (R * C * kVecs > Base::kDoubled) {
      add_steps<R, C, kCode, kUnit, kFetch>(acc, acc, rows, weights, begin, end, fetch);
    } else {
      I second[R][C][kVecs];
      fill(second, Base::isplat(0));
      add_steps<R, C, kCode, kUnit, kFetch>(acc, second, rows, weights, begin, end, fetch);
      for_each<R, C, kVecs>([&](int r, int c, int v)
                                W4A8_LAMBDA { acc[r][c][v] = Base::iadd(acc[r][c][v], second[r][c][v]); });
    }
  }
};
