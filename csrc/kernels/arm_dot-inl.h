// SDOT tiles, for arm_dotprod and for the few rows of arm_i8mm.
// Included inside a target region with dotprod and an anonymous namespace, behind arm_ops-inl.h.
//
//   A step of a panel (8 k x 16 columns) is four registers, j = 0..3:
//      w[j]   [ b0 b1 b2 b3 | b0 b1 b2 b3 | .. ]     byte i of column 4 j + c: low nibble k0 + i, high nibble k0 + 4 + i
//      a      [ a0..a3 | a4..a7 | a8..a11 | a12..a15 ]     16 activations of one row: the lanes of two steps
//      acc[j] += (w[j] & 15) . a.lane[0],  acc[j] += (w[j] >> 4) . a.lane[1];  the next step takes lanes 2 and 3
//
//   Nibbles 0..15 are positive as signed bytes too. They are w + 8, hence acc starts at -8 * sum(a).
//   |acc| <= K * 15 * 128 < 2^31 for K <= 2^20.

struct DotOps : NeonOps {
  // Adds step s. kLane: of the first 4 activations in a.
  template <int R, int C, bool kUnpacked, int kLane>
  static W4A8_INLINE void add_step(I (&acc)[R][C][4], const int8x16_t (&a)[R], const uint8_t* const (&weights)[C],
                                   int64_t s) {
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      const uint8_t* w = weights[c] + s * (kUnpacked ? 2 * kStepBytes : kStepBytes);
      int8x16_t low[4];
      int8x16_t high[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const uint8x16_t both = vld1q_u8(w + 16 * j);
        low[j] = vreinterpretq_s8_u8(kUnpacked ? both : vandq_u8(both, vdupq_n_u8(0x0f)));
        high[j] = vreinterpretq_s8_u8(kUnpacked ? vld1q_u8(w + kStepBytes + 16 * j) : vshrq_n_u8(both, 4));
      }
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r][c][j] = vdotq_laneq_s32(acc[r][c][j], low[j], a[r], kLane);
      }
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r][c][j] = vdotq_laneq_s32(acc[r][c][j], high[j], a[r], kLane + 1);
      }
    }
  }

  template <int R, int C, bool kUnpacked>
  static W4A8_INLINE void add_two_steps(I (&acc)[R][C][4], const int8_t* const (&rows)[R],
                                        const uint8_t* const (&weights)[C], int64_t s, int64_t ahead) {
    if constexpr (!kUnpacked) {
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        __builtin_prefetch(weights[c] + s * kStepBytes + ahead);
        __builtin_prefetch(weights[c] + (s + 1) * kStepBytes + ahead);
      }
    }
    int8x16_t a[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) a[r] = vld1q_s8(rows[r] + s * kStepK);
    add_step<R, C, kUnpacked, 0>(acc, a, weights, s);
    add_step<R, C, kUnpacked, 2>(acc, a, weights, s + 1);
  }

  template <int R, int C, bool kUnpacked, bool kBlocks>
  static W4A8_INLINE void accumulate(I (&acc)[R][C][4], const int8_t* const (&rows)[R],
                                     const uint8_t* const (&weights)[C], int64_t begin, int64_t end, int64_t ahead) {
    int64_t s = begin;
    for (; s + kBlockSteps <= end; s += kBlockSteps) {
      add_two_steps<R, C, kUnpacked>(acc, rows, weights, s, ahead);
      add_two_steps<R, C, kUnpacked>(acc, rows, weights, s + 2, ahead);
    }
    if constexpr (kBlocks) return;
    for (; s < end; ++s) {
      int8x16_t a[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) a[r] = vcombine_s8(vld1_s8(rows[r] + s * kStepK), vdup_n_s8(0));
      add_step<R, C, kUnpacked, 0>(acc, a, weights, s);
    }
  }
};
