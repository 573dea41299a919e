// What arm_dotprod and arm_i8mm share: SDOT on packed weights, and unpacking.
// Included inside a target region with dotprod and an anonymous namespace.
//
//   A step of a panel (8 k x 16 columns) is four registers, j = 0..3:
//      w[j]   [ b0 b1 b2 b3 | b0 b1 .. ]   byte i of column 4 j + c: low nibble k0 + i, high nibble k0 + 4 + i
//      a      [ a0..a3 | a4..a7 | .. ]     16 activations of one row: the lanes of two steps
//      acc[j] += (w[j] & 15) . a.lane[0],  acc[j] += (w[j] >> 4) . a.lane[1];  the next step takes lanes 2 and 3
//
//   Nibbles 0..15 are positive as signed bytes too. They are w + 8, hence acc starts at -8 * sum(a); w + z, hence it
//   starts at -z * sum(a). Those of e2m1 and iq4 are looked up. Six bits are positive, too, n = w + 32. A step of bytes
//   is eight registers, four for each half of k; the bytes are taken less 128. |acc| <= K * 15 * 128 < 2^31 for K <=
//   2^20, of bytes and iq4 K * 128 * 128 for K <= 2^16.
//
// Sums of groups become floats without SCVTF, which has a quarter of the rate of FSUB: they start at the bits of the
// float 1.5 * 2^23, of which a float one larger is one larger as int32, too. Exact while |sum| <= 2^22 (is_small).
//
// Loads and SDOT of the loops are asm statements: GCC 12 takes one row after the other through several steps otherwise,
// loads the weights again for each and spills. `volatile` keeps their order. Packed weights and rows were written
// long before by other functions; what was just unpacked needs a barrier in front.
#pragma once

#include "kernels/arm_ops-inl.h"
#include "kernels/ops_tiles-inl.h"

alignas(32) constexpr float kMiddles[] = {0x1.8p23f, 0x1.8p23f, 0x1.8p23f, 0x1.8p23f,
                                          0x1.8p23f, 0x1.8p23f, 0x1.8p23f, 0x1.8p23f};
// Whether |sum| of a group is at most 2^22 for the largest |w| and |q|: bytes 128 * 128 * 256 and six bits
// 32 * 128 * 1024 are 2^22, nibbles 15 * 128 * 2048 are less. Only the tiles of unpacked weights ask.
constexpr bool is_small(const PanelLayout& layout) {
  const int64_t most = are_wide(layout.kind.values) ? 256 : (layout.kind.values == Values::kInt6 ? 1024 : 2048);
  return layout.group_steps * kStepK <= most;
}

struct DotOps : NeonOps {
  using Bytes = int8x16_t;
  static constexpr bool kE2M1IsWide = false;
  static constexpr bool kInt6IsWide = false;

  static W4A8_INLINE void barrier() { __asm__ volatile("" ::: "memory"); }
  // Two registers from p + kOffset.
  template <int kOffset, class Register>
  static W4A8_INLINE void load_pair(const void* p, Register& a, Register& b) {
    __asm__ volatile("ldp %q0, %q1, [%2, %3]" : "=w"(a), "=w"(b) : "r"(p), "i"(kOffset));
  }
  // Two registers, and p moves by kBytes.
  template <int kBytes = 32, class Pointer>
  static W4A8_INLINE void take_pair(Pointer& p, Bytes& a, Bytes& b) {
    __asm__ volatile("ldp %q0, %q1, [%2], %3" : "=w"(a), "=w"(b), "+r"(p) : "i"(kBytes));
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

  // What the sums of a small group start at; read again for each, since no register is free to copy it from.
  static W4A8_INLINE void start_small(I& a, I& b) { load_pair<0>(kMiddles, a, b); }
  static W4A8_INLINE F middle() {
    F middle;
    __asm__ volatile("ldr %q0, %1" : "=w"(middle) : "m"(kMiddles));
    return middle;
  }
  template <bool kSmall>
  static W4A8_INLINE F group_sum(I acc, F middle) {
    return kSmall ? sub(float_bits(acc), middle) : to_float(acc);
  }

  // Adds half a step of bytes, four k, which are activation lane kLane of a: V registers of columns. weights moves on.
  template <int kLane, Code kCode, int R, int C, int V>
  static W4A8_INLINE void add_bytes(I (&acc)[R][C][V], const Bytes (&a)[R], const uint8_t*& weights, int c,
                                    int64_t ahead) {
    if constexpr (is_packed(kCode)) __builtin_prefetch(weights + ahead, 0, 2);
    for_each<V / 2>([&](int pair) W4A8_LAMBDA {
      Bytes w[2];
      take_pair<2 * kLineBytes / V>(weights, w[0], w[1]);
      for_each<2>([&](int i) W4A8_LAMBDA {
        const Bytes u = kCode == Code::kInt8 ? less_128(w[i]) : w[i];
        for_each<R>([&](int r) W4A8_LAMBDA { dot<kLane>(acc[r][c][2 * pair + i], u, a[r]); });
      });
    });
  }
  static W4A8_INLINE Bytes less_128(Bytes bytes) { return veorq_s8(bytes, vdupq_n_s8(-128)); }

  // Adds the step at weights[c], which moves on. kLane: of the first 4 activations in a.
  template <int kLane, Code kCode, int R, int C, int V>
  static W4A8_INLINE void add_step(I (&acc)[R][C][V], const Bytes (&a)[R], const uint8_t* (&weights)[C],
                                   int64_t ahead) {
    for_each<C>([&](int c) W4A8_LAMBDA {
      if constexpr (step_bytes(kCode) == kByteStepBytes) {
        add_bytes<kLane, kCode>(acc, a, weights[c], c, ahead);
        add_bytes<kLane + 1, kCode>(acc, a, weights[c], c, ahead);
      } else {
        const Bytes nibble = vdupq_n_s8(0x0f);
        Bytes both[4];
        __builtin_prefetch(weights[c] + ahead, 0, 2);
        take_pair(weights[c], both[0], both[1]);
        take_pair(weights[c], both[2], both[3]);
        for_each<4>([&](int j) W4A8_LAMBDA {
          Bytes low = vandq_s8(both[j], nibble);
          if constexpr (is_looked_up<kCode>) low = look_up<kCode>(vreinterpretq_u8_s8(low));
          for_each<R>([&](int r) W4A8_LAMBDA { dot<kLane>(acc[r][c][j], low, a[r]); });
        });
        for_each<4>([&](int j) W4A8_LAMBDA {
          Bytes high = vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(both[j]), 4));
          if constexpr (is_looked_up<kCode>) high = look_up<kCode>(vreinterpretq_u8_s8(high));
          for_each<R>([&](int r) W4A8_LAMBDA { dot<kLane + 1>(acc[r][c][j], high, a[r]); });
        });
      }
    });
  }

  static W4A8_INLINE Bytes load_one(const uint8_t* p) {
    Bytes bytes;
    __asm__ volatile("ldr %q0, %1" : "=w"(bytes) : "m"(*reinterpret_cast<const Bytes*>(p)));
    return bytes;
  }
  // Adds four k of a block of six bits of four columns, then those behind: one after the other, for few registers.
  template <int kQuarter, int R, int C, int V>
  static W4A8_INLINE void add_quarters(I (&acc)[R][C][V], const Bytes (&a)[R], const Bytes (&both)[2], Bytes bits,
                                       int c, int j) {
    const Bytes u = join_six<kQuarter>(vreinterpretq_u8_s8(both[kQuarter / 2]), vreinterpretq_u8_s8(bits));
    for_each<R>([&](int r) W4A8_LAMBDA { dot<kQuarter>(acc[r][c][j], u, a[r]); });
    if constexpr (kQuarter < 3) add_quarters<kQuarter + 1>(acc, a, both, bits, c, j);
  }
  // Adds the two steps of the block at weights[c], which moves on.
  template <int R, int C>
  static W4A8_INLINE void add_six(I (&acc)[R][C][4], const Bytes (&a)[R], const uint8_t* (&weights)[C], int64_t ahead) {
    for_each<C>([&](int c) W4A8_LAMBDA {
      const uint8_t* block = weights[c];
      for (int64_t i = 0; i < kSixBlockBytes; i += kLineBytes) __builtin_prefetch(block + i + ahead, 0, 2);
      for_each<4>([&](int j) W4A8_LAMBDA {
        const Bytes both[2] = {load_one(block + 16 * j), load_one(block + kStepBytes + 16 * j)};
        add_quarters<0>(acc, a, both, load_one(block + kSixSteps * kStepBytes + 16 * j), c, j);
      });
      weights[c] = block + kSixBlockBytes;
    });
  }
  // Two steps, whose 16 activations are in a.
  template <Code kCode, int R, int C, int V>
  static W4A8_INLINE void add_two_steps(I (&acc)[R][C][V], const Bytes (&a)[R], const uint8_t* (&w)[C], int64_t ahead) {
    if constexpr (kCode == Code::kSix) {
      add_six(acc, a, w, ahead);
    } else {
      add_step<0, kCode>(acc, a, w, ahead);
      add_step<2, kCode>(acc, a, w, ahead);
    }
  }

  // Four steps. q and w move behind them.
  template <Code kCode, int R, int C, int V>
  static W4A8_INLINE void add_block(I (&acc)[R][C][V], const int8_t* (&q)[R], const uint8_t* (&w)[C], int64_t ahead) {
    Bytes a[R];
    Bytes b[R];
    for_each<R>([&](int r) W4A8_LAMBDA { take_pair(q[r], a[r], b[r]); });
    add_two_steps<kCode>(acc, a, w, ahead);
    add_two_steps<kCode>(acc, b, w, ahead);
  }

  // Two steps. q and w move behind them.
  template <Code kCode, int R, int C, int V>
  static W4A8_INLINE void add_least_group(I (&acc)[R][C][V], const int8_t* (&q)[R], const uint8_t* (&w)[C],
                                          int64_t ahead) {
    Bytes a[R];
    for_each<R>([&](int r) W4A8_LAMBDA { take_one(q[r], a[r]); });
    add_two_steps<kCode>(acc, a, w, ahead);
  }

  template <int R, int C, Code kCode, int64_t kUnit>
  static W4A8_INLINE void accumulate(I (&acc)[R][C][4], const int8_t* const (&rows)[R],
                                     const uint8_t* const (&weights)[C], int64_t begin, int64_t end,
                                     const uint8_t* fetch) {
    const int64_t ahead = fetch - (weights[0] + begin * step_bytes(kCode));  // the same for each panel
    const int8_t* q[R];
    const uint8_t* w[C];
    for_each<R>([&](int r) W4A8_LAMBDA { q[r] = rows[r] + begin * kStepK; });
    for_each<C>([&](int c) W4A8_LAMBDA { w[c] = weights[c] + begin * step_bytes(kCode); });
    if constexpr (!is_packed(kCode)) barrier();
    if constexpr (kUnit == kLeastGroupSteps) return add_least_group<kCode>(acc, q, w, ahead);
    int64_t left = end - begin;
    for (; left >= kBlockSteps; left -= kBlockSteps) add_block<kCode>(acc, q, w, ahead);
    if constexpr (kCode == Code::kSix) {
      if (kUnit == 1 && left > 0) add_least_group<kCode>(acc, q, w, ahead);
      return;
    }
    for (; kUnit == 1 && left > 0; --left) {
      Bytes a[R];
      for_each<R>([&](int r) W4A8_LAMBDA { take_half(q[r], a[r]); });
      add_step<0, kCode>(acc, a, w, ahead);
    }
  }
};

// The steps of a chunk of nibbles as w: less 8, less their zero points, or looked up. Tiles::store_step puts a step
// where its tile wants it.
template <class Tiles, Code kCode, bool kZeroPoints>
void unpack_signed(const Chunk& chunk, uint8_t* bytes) {
  using Bytes = DotOps::Bytes;
  for_each_run<kZeroPoints>(chunk, [&](const uint8_t* packed, int64_t count, const uint8_t* zeros) {
    Bytes zero[4];
    for_each<4>([&](int j) W4A8_LAMBDA {
      zero[j] = vdupq_n_s8(8);
      if constexpr (kZeroPoints) {
        uint32_t z = 0;
        __builtin_memcpy(&z, zeros + 4 * j, sizeof(z));
        const uint8x16_t all = vreinterpretq_u8_u32(vdupq_n_u32(z & 0x0f0f0f0f));
        const uint8x16_t index = vcombine_u8(vcreate_u8(0x0101010100000000), vcreate_u8(0x0303030302020202));
        zero[j] = vreinterpretq_s8_u8(vqtbl1q_u8(all, index));
      }
    });
    const auto w = [&](uint8x16_t nibbles, int j) W4A8_LAMBDA {
      if constexpr (NeonOps::is_looked_up<kCode>) return NeonOps::look_up<kCode>(nibbles);
      return vsubq_s8(vreinterpretq_s8_u8(nibbles), zero[j]);
    };
    for (; count > 0; --count, bytes += kByteStepBytes) {
      __builtin_prefetch(packed + chunk.ahead, 0, 2);
      Bytes both[4];
      Bytes low[4];
      Bytes high[4];
      DotOps::take_pair(packed, both[0], both[1]);
      DotOps::take_pair(packed, both[2], both[3]);
      for_each<4>([&](int j) W4A8_LAMBDA {
        low[j] = w(vandq_u8(vreinterpretq_u8_s8(both[j]), vdupq_n_u8(15)), j);
        high[j] = w(vshrq_n_u8(vreinterpretq_u8_s8(both[j]), 4), j);
      });
      Tiles::store_step(low, high, bytes);
    }
  });
}

// The same for bytes: less 128.
template <class Tiles>
void unpack_bytes(const Chunk& chunk, uint8_t* bytes) {
  using Bytes = DotOps::Bytes;
  for_each_run<false>(chunk, [&](const uint8_t* packed, int64_t count, const uint8_t*) {
    for (; count > 0; --count, bytes += kByteStepBytes) {
      Bytes halves[2][4];
      for_each<2>([&](int h) W4A8_LAMBDA {
        __builtin_prefetch(packed + chunk.ahead, 0, 2);
        DotOps::take_pair(packed, halves[h][0], halves[h][1]);
        DotOps::take_pair(packed, halves[h][2], halves[h][3]);
        for_each<4>([&](int j) W4A8_LAMBDA { halves[h][j] = DotOps::less_128(halves[h][j]); });
      });
      Tiles::store_step(halves[0], halves[1], bytes);
    }
  });
}

// The same for blocks of six bits: less 32.
template <class Tiles>
void unpack_blocks(const Chunk& chunk, uint8_t* bytes) {
  using Bytes = DotOps::Bytes;
  for_each_run<false>(chunk, [&](const uint8_t* packed, int64_t count, const uint8_t*) {
    const auto unpack_step = [&]<int kStep>() W4A8_LAMBDA {
      Bytes halves[2][4];
      for_each<4>([&](int j) W4A8_LAMBDA {
        const uint8x16_t both = vreinterpretq_u8_s8(DotOps::load_one(packed + kStep * kStepBytes + 16 * j));
        const uint8x16_t bits = vreinterpretq_u8_s8(DotOps::load_one(packed + kSixSteps * kStepBytes + 16 * j));
        halves[0][j] = vsubq_s8(DotOps::join_six<2 * kStep>(both, bits), vdupq_n_s8(32));
        halves[1][j] = vsubq_s8(DotOps::join_six<2 * kStep + 1>(both, bits), vdupq_n_s8(32));
      });
      Tiles::store_step(halves[0], halves[1], bytes);
      bytes += kByteStepBytes;
    };
    for (; count > 0; count -= kSixSteps, packed += kSixBlockBytes) {
      for (int64_t i = 0; i < kSixBlockBytes; i += kLineBytes) __builtin_prefetch(packed + i + chunk.ahead, 0, 2);
      unpack_step.template operator()<0>();
      unpack_step.template operator()<1>();
    }
  });
}

// What both Tiles that unpack have in common: they unpack to w, so that sums start at 0.
template <class Tiles>
struct SignedTiles {
  using Vectors = DotOps;
  static constexpr bool kUnpacks = true;
  static constexpr bool kTakesZeros = true;
  static constexpr bool kSplitsGroups = false;
  static constexpr int64_t kMostColumns = 1;

  static void unpack(const TileArgs&, const Chunk& chunk, uint8_t* bytes) {
    DotOps::barrier();  // not before the tiles have read what this overwrites
    switch (chunk.layout.kind.values) {
      case Values::kInt4:
        return chunk.layout.kind == kInt4 ? unpack_signed<Tiles, Code::kNibbles, false>(chunk, bytes)
                                          : unpack_signed<Tiles, Code::kNibbles, true>(chunk, bytes);
      case Values::kE2M1: return unpack_signed<Tiles, Code::kE2M1, false>(chunk, bytes);
      case Values::kIQ4: return unpack_signed<Tiles, Code::kIQ4, false>(chunk, bytes);
      case Values::kInt8: return unpack_bytes<Tiles>(chunk, bytes);
      case Values::kInt6: return unpack_blocks<Tiles>(chunk, bytes);
    }
  }
};

// GemmFn: few rows take packed weights as they are, by kFew of Many. So do all rows of int8 with zero points, whose w
// no byte holds, and of activations in groups beside one scale for all of K, whose sums go from chunk to chunk. Many:
// Tiles that unpack, kManyRows = rows from which that pays, kMostRows = rows of the largest.
template <class Many>
void gemm_arm(const Rows& rows, int64_t m, const Panels& panels, int64_t panel_count, float* out, int64_t ldc,
              uint8_t* scratch) {
  if (scratch == nullptr || m < Many::kManyRows || panels.kind == kInt8ZeroPoints ||
      (panels.scaled && panels.channelwise)) {
    return Many::kFew(rows, m, panels, panel_count, out, ldc, nullptr);
  }
  Many many;
  multiply(many, rows, m, panels, panel_count, out, ldc, scratch, Many::kMostColumns);
}

template <class Many>
constexpr GemmFunctions gemm_arm_of() {
  return {gemm_arm<Many>, cached_rows<Many::kMostRows>, scratch_bytes<Many, Many::kManyRows>, always};
}
