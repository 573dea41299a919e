// What arm_dotprod and arm_i8mm share: SDOT on packed weights, and unpacking.
// Included inside a target region with dotprod and an anonymous namespace, behind arm_ops-inl.h and tile_driver-inl.h.
//
//   A step of a panel (8 k x 16 columns) is four registers, j = 0..3:
//      w[j]   [ b0 b1 b2 b3 | b0 b1 .. ]   byte i of column 4 j + c: low nibble k0 + i, high nibble k0 + 4 + i
//      a      [ a0..a3 | a4..a7 | .. ]     16 activations of one row: the lanes of two steps
//      acc[j] += (w[j] & 15) . a.lane[0],  acc[j] += (w[j] >> 4) . a.lane[1];  the next step takes lanes 2 and 3
//
//   Nibbles 0..15 are positive as signed bytes too. They are w + 8, hence acc starts at -8 * sum(a); w + z, hence it
//   starts at -z * sum(a). Those of e2m1 are looked up. A step of bytes is eight registers, four for each half of k; the
//   bytes are taken less 128. |acc| <= K * 15 * 128 < 2^31 for K <= 2^20, of bytes K * 128 * 128 for K <= 2^16.
//
// Loads and SDOT of the loops are asm statements: GCC 12 takes one row after the other through several steps otherwise,
// loads the weights again for each and spills. `volatile` keeps their order. Packed weights and rows were written
// long before by other functions; what was just unpacked needs a barrier in front.

struct DotOps : NeonOps {
  using Bytes = int8x16_t;
  static constexpr bool kE2M1IsWide = false;

  static W4A8_INLINE void barrier() { __asm__ volatile("" ::: "memory"); }
  // Two registers from p + kOffset.
  template <int kOffset>
  static W4A8_INLINE void load_pair(const uint8_t* p, Bytes& a, Bytes& b) {
    __asm__ volatile("ldp %q0, %q1, [%2, %3]" : "=w"(a), "=w"(b) : "r"(p), "i"(kOffset));
  }
  // Two registers, and p moves behind them.
  template <class Pointer>
  static W4A8_INLINE void take_pair(Pointer& p, Bytes& a, Bytes& b) {
    __asm__ volatile("ldp %q0, %q1, [%2], 32" : "=w"(a), "=w"(b), "+r"(p));
  }
  static W4A8_INLINE void take_one(const int8_t*& p, Bytes& a) {
    __asm__ volatile("ldr %q0, [%1], 16" : "=w"(a), "+r"(p));
  }
  // 8 activations, zeros behind, and p moves behind them.
  static W4A8_INLINE void take_half(const int8_t*& p, Bytes& a) {
    __asm__ volatile("ldr %d0, [%1], 8" : "=w"(a), "+r"(p));
  }
  // A number in all lanes, and p moves behind it.
  static W4A8_INLINE I take_splat(const int32_t*& p) {
    I splat;
    __asm__ volatile("ld1r {%0.4s}, [%1], 4" : "=w"(splat), "+r"(p));
    return splat;
  }
  template <int kLane>
  static W4A8_INLINE void dot(I& acc, Bytes w, Bytes a) {
    __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(acc) : "w"(w), "w"(a), "i"(kLane));
  }

  // Adds half a step of bytes, four k, which are activation lane kLane of a.
  template <int R, int C, int kLane>
  static W4A8_INLINE void add_bytes(I (&acc)[R][C][4], const Bytes (&a)[R], const uint8_t*& weights, int c,
                                    int64_t ahead) {
    __builtin_prefetch(weights + ahead, 0, 2);
    Bytes w[4];
    take_pair(weights, w[0], w[1]);
    take_pair(weights, w[2], w[3]);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Bytes less = less_128(w[j]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) dot<kLane>(acc[r][c][j], less, a[r]);
    }
  }
  static W4A8_INLINE Bytes less_128(Bytes bytes) { return veorq_s8(bytes, vdupq_n_s8(-128)); }

  // Adds the step at weights[c], which moves on. kLane: of the first 4 activations in a.
  template <int R, int C, int kLane, Code kCode>
  static W4A8_INLINE void add_step(I (&acc)[R][C][4], const Bytes (&a)[R], const uint8_t* (&weights)[C],
                                   int64_t ahead) {
    const Bytes nibble = vdupq_n_s8(0x0f);
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) {
      if constexpr (kCode == Code::kInt8) {
        add_bytes<R, C, kLane>(acc, a, weights[c], c, ahead);
        add_bytes<R, C, kLane + 1>(acc, a, weights[c], c, ahead);
        continue;
      }
      Bytes both[4];
      __builtin_prefetch(weights[c] + ahead, 0, 2);
      take_pair(weights[c], both[0], both[1]);
      take_pair(weights[c], both[2], both[3]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        Bytes low = vandq_s8(both[j], nibble);
        if constexpr (kCode == Code::kE2M1) low = look_up(vreinterpretq_u8_s8(low));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) dot<kLane>(acc[r][c][j], low, a[r]);
      }
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        Bytes high = vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(both[j]), 4));
        if constexpr (kCode == Code::kE2M1) high = look_up(vreinterpretq_u8_s8(high));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) dot<kLane + 1>(acc[r][c][j], high, a[r]);
      }
    }
  }

  // Four steps. q and w move behind them.
  template <int R, int C, Code kCode>
  static W4A8_INLINE void add_block(I (&acc)[R][C][4], const int8_t* (&q)[R], const uint8_t* (&w)[C], int64_t ahead) {
    Bytes a[R];
    Bytes b[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) take_pair(q[r], a[r], b[r]);
    add_step<R, C, 0, kCode>(acc, a, w, ahead);
    add_step<R, C, 2, kCode>(acc, a, w, ahead);
    add_step<R, C, 0, kCode>(acc, b, w, ahead);
    add_step<R, C, 2, kCode>(acc, b, w, ahead);
  }

  // Two steps. q and w move behind them.
  template <int R, int C, Code kCode>
  static W4A8_INLINE void add_least_group(I (&acc)[R][C][4], const int8_t* (&q)[R], const uint8_t* (&w)[C],
                                          int64_t ahead) {
    Bytes a[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) take_one(q[r], a[r]);
    add_step<R, C, 0, kCode>(acc, a, w, ahead);
    add_step<R, C, 2, kCode>(acc, a, w, ahead);
  }

  template <int R, int C, Code kCode, int64_t kUnit>
  static W4A8_INLINE void accumulate(I (&acc)[R][C][4], const int8_t* const (&rows)[R],
                                     const uint8_t* const (&weights)[C], int64_t begin, int64_t end,
                                     const uint8_t* fetch) {
    const int64_t ahead = fetch - (weights[0] + begin * step_bytes(kCode));  // the same for each panel
    const int8_t* q[R];
    const uint8_t* w[C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) q[r] = rows[r] + begin * kStepK;
#pragma GCC unroll 2
    for (int c = 0; c < C; ++c) w[c] = weights[c] + begin * step_bytes(kCode);
    int64_t left = end - begin;
    for (; left >= kBlockSteps; left -= kBlockSteps) add_block<R, C, kCode>(acc, q, w, ahead);
    for (; kUnit == 1 && left > 0; --left) {
      Bytes a[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) take_half(q[r], a[r]);
      add_step<R, C, 0, kCode>(acc, a, w, ahead);
    }
  }
};

// The steps of a chunk as w, for kinds other than kInt4. Tiles::store_step puts a step where its tile wants it.
template <class Tiles>
void unpack_signed(const Chunk& chunk, uint8_t* bytes) {
  using Bytes = DotOps::Bytes;
  const bool zero_points = chunk.layout.kind.zero_points;
  for_each_run<true>(chunk, [&](const uint8_t* packed, int64_t count, const uint8_t* zeros) {
    Bytes zero[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      uint32_t z = 0;
      if (zero_points) __builtin_memcpy(&z, zeros + 4 * j, sizeof(z));
      const uint8x16_t all = vreinterpretq_u8_u32(vdupq_n_u32(z & 0x0f0f0f0f));
      const uint8x16_t index = vcombine_u8(vcreate_u8(0x0101010100000000), vcreate_u8(0x0303030302020202));
      zero[j] = vreinterpretq_s8_u8(vqtbl1q_u8(all, index));
    }
    for (; count > 0; --count, bytes += kByteStepBytes) {
      __builtin_prefetch(packed + chunk.ahead, 0, 2);
      Bytes both[4];
      Bytes low[4];
      Bytes high[4];
      DotOps::take_pair(packed, both[0], both[1]);
      DotOps::take_pair(packed, both[2], both[3]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const uint8x16_t nibbles = vandq_u8(vreinterpretq_u8_s8(both[j]), vdupq_n_u8(15));
        const uint8x16_t others = vshrq_n_u8(vreinterpretq_u8_s8(both[j]), 4);
        low[j] = zero_points ? vsubq_s8(vreinterpretq_s8_u8(nibbles), zero[j]) : NeonOps::look_up(nibbles);
        high[j] = zero_points ? vsubq_s8(vreinterpretq_s8_u8(others), zero[j]) : NeonOps::look_up(others);
      }
      Tiles::store_step(low, high, bytes);
    }
  });
}

// The same for kInt8: bytes less 128.
template <class Tiles>
void unpack_bytes(const Chunk& chunk, uint8_t* bytes) {
  using Bytes = DotOps::Bytes;
  for_each_run<false>(chunk, [&](const uint8_t* packed, int64_t count, const uint8_t*) {
    for (; count > 0; --count, bytes += kByteStepBytes) {
      __builtin_prefetch(packed + chunk.ahead, 0, 2);
      __builtin_prefetch(packed + chunk.ahead + kLineBytes, 0, 2);
      Bytes low[4];
      Bytes high[4];
      DotOps::take_pair(packed, low[0], low[1]);
      DotOps::take_pair(packed, low[2], low[3]);
      DotOps::take_pair(packed, high[0], high[1]);
      DotOps::take_pair(packed, high[2], high[3]);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        low[j] = DotOps::less_128(low[j]);
        high[j] = DotOps::less_128(high[j]);
      }
      Tiles::store_step(low, high, bytes);
    }
  });
}

// What Tiles::unpack does, for all kinds but kInt4.
template <class Tiles>
void unpack_others(const Chunk& chunk, uint8_t* bytes) {
  (chunk.layout.kind == kInt8 ? unpack_bytes<Tiles> : unpack_signed<Tiles>)(chunk, bytes);
}

// GemmFn: few rows take packed weights as they are, by kFew of Many, and so do all rows of int8 with zero points, whose w
// no byte holds. Many: Tiles that unpack, kManyRows = rows from which that pays, kMostRows = rows of the largest.
template <class Many>
void gemm_arm(const Rows& rows, int64_t m, const Panels& panels, int64_t panel_count, float* out, int64_t ldc,
              uint8_t* scratch) {
  if (scratch == nullptr || m < Many::kManyRows || panels.kind == kInt8ZeroPoints) {
    return Many::kFew(rows, m, panels, panel_count, out, ldc, nullptr);
  }
  Many many;
  multiply(many, rows, m, panels, panel_count, out, ldc, scratch, Many::kMostColumns);
}

template <class Many>
constexpr GemmFunctions gemm_arm_of() {
  return {gemm_arm<Many>, cached_rows<Many::kMostRows>, scratch_bytes<Many, Many::kManyRows>, always};
}
