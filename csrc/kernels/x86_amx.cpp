// AMX kernel: tiles of int8 for many rows; few rows, and whole ones, are x86_avx512vnni's.
//
//   instruction (Granite Rapids, measured 2026-11)      cycles
//   TDPBSSD 16 x 16 x 64 bytes of k                     16: eight times VPDPBUSD
//   TDPBSSD, M rows, K bytes of k                       about max(M, K / 4)
//   TILELOADD from the first-level cache, TILESTORED    10, 19
//   LDTILECFG and TILERELEASE                           260: once per call
//   VGF2P8AFFINEQB zmm                                  one a cycle; nibble to int8 at once, see unpack_step
//
//   Tile instructions hardly overlap with AVX-512 arithmetic, which shares port 5: converting the sums of groups and
//   multiplying add up. tile_unit-inl.h has the loops.
//
//   |sum| <= K * 8 * 128 < 2^31 for K <= 2^20; K * 15 * 128 for K <= 2^19; K * 32 * 128 of int6 for
//   K <= 2^18; of int8 and iq4 K * 128 * 128 for K <= 2^16.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "kernels/cpu_features.h"
#include "kernels/kernel.h"
#include "kernels/ops.h"
#include "kernels/row_params.h"
#include "kernels/target.h"

W4A8_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,gfni")
namespace w4a8::isa {

extern const Kernel x86_avx512vnni;

namespace {

#include "kernels/avx512_ops-inl.h"
#include "kernels/ops_tiles-inl.h"
#include "kernels/row_functions-inl.h"
#include "kernels/tile_unit-inl.h"
struct AmxOps : Avx512Ops {
  // The matrix of VGF2P8AFFINEQB that makes of a byte the int8 n - 8, n its nibble at bit `shift`: result bits 0..2 are
  // those of n, bits 3..7 are bit 3 of n, which 0xf8 flips. The row of result bit i is byte 7 - i.
  static constexpr uint64_t signed_nibble(int shift) {
    uint64_t matrix = 0;
    for (int i = 0; i < 8; ++i) matrix |= (uint64_t{1} << (shift + (i < 3 ? i : 3))) << (8 * (7 - i));
    return matrix;
  }
  static W4A8_INLINE void unpack_step(const uint8_t* packed, uint8_t* bytes) {
    const I both = iload(packed);
    const I low = _mm512_set1_epi64(static_cast<int64_t>(signed_nibble(0)));
    const I high = _mm512_set1_epi64(static_cast<int64_t>(signed_nibble(4)));
    _mm512_storeu_si512(bytes, _mm512_gf2p8affine_epi64_epi8(both, low, 0xf8));
    _mm512_storeu_si512(bytes + kStepBytes, _mm512_gf2p8affine_epi64_epi8(both, high, 0xf8));
  }
  // The same with zero points [16], or by a table.
  static W4A8_INLINE void unpack_step_from(const uint8_t* packed, const uint8_t* zeros, uint8_t* bytes) {
    const __m128i four_times = _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    const I zero = _mm512_shuffle_epi8(iand(load_widened(zeros), isplat(15)), _mm512_broadcast_i32x4(four_times));
    I lo[1];
    I hi[1];
    load_step<Code::kNibbles>(packed, 0, lo, hi);
    _mm512_storeu_si512(bytes, _mm512_sub_epi8(lo[0], zero));
    _mm512_storeu_si512(bytes + kStepBytes, _mm512_sub_epi8(hi[0], zero));
  }
  template <const int8_t* kWeights>
  static W4A8_INLINE void unpack_step_by(const uint8_t* packed, uint8_t* bytes) {
    const I table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kWeights)));
    I lo[1];
    I hi[1];
    load_step<Code::kNibbles>(packed, 0, lo, hi);
    _mm512_storeu_si512(bytes, _mm512_shuffle_epi8(table, lo[0]));
    _mm512_storeu_si512(bytes + kStepBytes, _mm512_shuffle_epi8(table, hi[0]));
  }
  // A block of six bits.
  static W4A8_INLINE void unpack_block(const uint8_t* block, uint8_t* bytes) {
    I u[4][1];
    load_six<0>(block, u[0]);
    load_six<1>(block, u[1]);
    load_six<2>(block, u[2]);
    load_six<3>(block, u[3]);
    for_each<4>([&](int i) W4A8_LAMBDA {
      _mm512_storeu_si512(bytes + i * kLineBytes, _mm512_sub_epi8(u[i][0], _mm512_set1_epi8(32)));
    });
  }
  static W4A8_INLINE void unpack_step_int8(const uint8_t* packed, uint8_t* bytes) {
    const I flip = _mm512_set1_epi8(-128);
    _mm512_storeu_si512(bytes, _mm512_xor_si512(iload(packed), flip));
    _mm512_storeu_si512(bytes + kLineBytes, _mm512_xor_si512(iload(packed + kLineBytes), flip));
  }
};

// Fewest rows for which tiles beat VPDPBUSD: the costs above beside what is left of the kernel without tile
// instructions, timed on Zen 5. Tiles of groups of 32 are half as deep.
constexpr int64_t kTileLeastRows = 8;
constexpr int64_t kTileLeastRowsOf32 = 12;

bool takes_tiles(int64_t rows, bool channelwise, int64_t group_steps) {
  if (!tiles_can(channelwise, group_steps)) return false;
  const bool whole = channelwise || group_steps % kTileSteps == 0;
  return rows >= (whole ? kTileLeastRows : kTileLeastRowsOf32);
}

int64_t amx_scratch_bytes(int64_t rows, int64_t k, int64_t group) {
  const int64_t few = x86_avx512vnni.scratch_bytes(rows, k, group);
  const bool tiles = takes_tiles(rows, group == k, group / kStepK);
  const int64_t many = tiles ? tile_scratch_bytes(rows, is_split(group == k, group / kStepK)) : 0;
  return few > many ? few : many;
}

// Rows of a task are read again for every two panels: they should stay in a second-level cache of 2 MiB.
int64_t amx_task_rows(int64_t k) {
  constexpr int64_t kBytes = 1024 * 1024;
  const int64_t rows = kBytes / k / kTileRows * kTileRows;
  return rows < 2 * kTileRows ? 2 * kTileRows : (rows > 512 ? 512 : rows);
}

void amx_gemm(const Rows& rows, int64_t m, const Panels& panels, int64_t panel_count, float* out, int64_t ldc,
              uint8_t* scratch) {
  if (scratch != nullptr && tiles_hold(panels.kind) && tiles_can_scale(panels) &&
      takes_tiles(m, panels.channelwise, panels.part_steps)) {
    gemm_tiles<AmxOps>(rows, m, panels, panel_count, out, ldc, scratch);
  } else {
    x86_avx512vnni.gemm(rows, m, panels, panel_count, out, ldc, scratch);
  }
}

}  // namespace

extern const Kernel x86_amx;
extern const AttentionFunctions x86_avx512vnni_attention;
extern const LinearAttentionFunctions x86_avx512vnni_linear_attention;
constinit const Kernel x86_amx = {shared_rows<x86_avx512vnni>(),
                                  {amx_gemm, amx_task_rows, amx_scratch_bytes, always},
                                  &x86_avx512vnni_attention,
                                  &x86_avx512vnni_linear_attention,
                                  "x86_amx",
                                  kAvx2 | kFma | kF16c | kAvx512 | kAvx512Vnni | kGfni | kAmxInt8,
                                  ask_for_amx};

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
