// AVX-VNNI kernel: VPDPBUSD on 256-bit registers, for CPUs that have it without AVX-512.
//
//   instruction                      Alder Lake P      (uops.info, read 2026-11)
//   VPDPBUSD ymm, ymm, ymm           2 a cycle, 5
//
//   A step of a panel (8 k x 16 columns) is two registers, columns 0..7 and 8..15, as in x86_avx2.cpp; what the
//   instruction does to each 32-bit lane is drawn in x86_avx512vnni.cpp. No 16-bit sums, so nothing to widen. Whole
//   rows are x86_avx2's.
//
//   W4A8_EVEX_TWIN: the same with the AVX-512 form of VPDPBUSD, for tests on CPUs that lack this one (tests/twins).
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "kernels/cpu_features.h"
#include "kernels/kernel.h"
#include "kernels/ops.h"
#include "kernels/row_params.h"
#include "kernels/target.h"

// {vex}, {evex}: the assembler must not choose the form.
#ifndef W4A8_EVEX_TWIN
#define W4A8_AVXVNNI x86_avxvnni
#define W4A8_AVXVNNI_ATTENTION x86_avxvnni_attention
#define W4A8_AVXVNNI_NAME "x86_avxvnni"
#define W4A8_AVXVNNI_NEEDS kAvxVnni
#define W4A8_VPDPBUSD "%{vex%} vpdpbusd"
W4A8_TARGET("avx2,fma,f16c,avxvnni")
#else
#define W4A8_AVXVNNI x86_avxvnni_evex
#define W4A8_AVXVNNI_ATTENTION x86_avxvnni_evex_attention
#define W4A8_AVXVNNI_NAME "x86_avxvnni_evex"
#define W4A8_AVXVNNI_NEEDS (kAvx512 | kAvx512Vnni)
#define W4A8_VPDPBUSD "%{evex%} vpdpbusd"
W4A8_TARGET("avx2,fma,f16c,avx512vl,avx512vnni")
#endif
namespace w4a8::isa {

extern const Kernel x86_avx2;

namespace {

#include "kernels/avx2_ops-inl.h"
#include "kernels/ops_tiles-inl.h"
#include "kernels/row_functions-inl.h"
#include "kernels/tile_vnni-inl.h"

struct AvxVnniOps : Avx2Ops {
  // 6 rows x 2 halves, two weights, broadcast: 15 of 16 registers. Unpacking shares ports with VPDPBUSD on Intel.
  static constexpr int kRows[] = {6};
  static constexpr int kDoubled = 6;
  static constexpr int64_t kUnpackRows = 12;
  static constexpr int64_t kUnpackSteps = 96;  // 12 KiB of unpacked weights

  // asm statements for the reason said in avx512_ops-inl.h.
  static W4A8_INLINE I broadcast4(const int8_t* p) {
    struct Four {
      int8_t bytes[4];
    };
    I four;
    __asm__ volatile("vpbroadcastd %1, %0" : "=x"(four) : "m"(*reinterpret_cast<const Four*>(p)));
    return four;
  }
  static W4A8_INLINE void dot(I& acc, I u8, I s8) {
    __asm__ volatile(W4A8_VPDPBUSD " %2, %1, %0" : "+x"(acc) : "x"(u8), "x"(s8));
  }
  // One half of an unpacked step: there are registers for one at a time, and GCC would load each again for every use.
  static W4A8_INLINE void take_half(const uint8_t* w, I (&u)[2]) {
    __asm__ volatile("vmovdqu %1, %0" : "=x"(u[0]) : "m"(*reinterpret_cast<const __m256i_u*>(w)));
    __asm__ volatile("vmovdqu %1, %0" : "=x"(u[1]) : "m"(*reinterpret_cast<const __m256i_u*>(w + 32)));
  }
  template <Code kCode>
  static W4A8_INLINE void load_step(const uint8_t* w, int64_t s, I (&lo)[2], I (&hi)[2]) {
    load_half<kCode, false>(w, s, lo);
    load_half<kCode, true>(w, s, hi);
  }
};
using Ops = VnniOps<AvxVnniOps>;

}  // namespace

extern const Kernel W4A8_AVXVNNI;
extern const AttentionFunctions W4A8_AVXVNNI_ATTENTION;
extern const LinearAttentionFunctions x86_avx2_linear_attention;
constinit const Kernel W4A8_AVXVNNI = {shared_rows<x86_avx2>(), gemm_of<Ops>(),
                                       &W4A8_AVXVNNI_ATTENTION, &x86_avx2_linear_attention,
                                       W4A8_AVXVNNI_NAME,       kAvx2 | kFma | kF16c | W4A8_AVXVNNI_NEEDS};

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
