// AVX-512 VNNI kernel: int4 weights (unsigned nibbles) x int8 activations.
//
//   instruction                         Ice Lake / SPR    Zen 4          (ports and latency: uops.info, read 2026-11)
//   VPDPBUSD zmm, zmm, m32{1to16}       2 a cycle, 5      1 a cycle, 4
//   VPANDD, VPSRLW zmm                  same ports as VPDPBUSD on Intel: unpacking costs, once for many rows; free on
//                                       Zen 4, where storing what was unpacked costs
//
//   A step of a panel (8 k x 16 columns) is one register:
//      w    zmm   [ b0 b1 b2 b3 | b0 b1 b2 b3 | .. ]     byte i of column c: low nibble k0 + i, high nibble k0 + 4 + i
//      lo = w & 0x0f   hi = (w >> 4) & 0x0f
//      a    zmm   [ a0 a1 a2 a3 | a0 a1 a2 a3 | .. ]     4 activations, broadcast from memory
//      acc += lo . a[k0..k0+3],  acc += hi . a[k0+4..k0+7]
//
//   The stored nibble is w + 8, hence acc starts at -8 * sum(a). |acc| <= K * 15 * 128 < 2^31 for K <= 2^20.
//
// W4A8_OTHER_HOST_TWIN: the same as cores run it that do otherwise well than this one, for tests (tests/twins).
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <utility>

#include "kernels/cpu_features.h"
#include "kernels/kernel.h"
#include "kernels/ops.h"
#include "kernels/row_params.h"
#include "kernels/target.h"

W4A8_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
namespace w4a8::isa {
namespace {

#ifndef W4A8_OTHER_HOST_TWIN
#define W4A8_AVX512VNNI x86_avx512vnni
#define W4A8_AVX512VNNI_ATTENTION x86_avx512vnni_attention
#define W4A8_AVX512VNNI_NAME "x86_avx512vnni"
#else
#define W4A8_AVX512VNNI x86_avx512vnni_other_host
#define W4A8_AVX512VNNI_ATTENTION x86_avx512vnni_other_host_attention
#define W4A8_AVX512VNNI_NAME "x86_avx512vnni_other_host"
// Found before those of cpu_features.h.
bool host_unpacks_for_free() { return !w4a8::host_unpacks_for_free(); }
bool host_streams_by_itself() { return !w4a8::host_streams_by_itself(); }
bool host_likes_one_stream() { return !w4a8::host_likes_one_stream(); }
#endif

#include "kernels/avx512_ops-inl.h"
#include "kernels/ops_tiles-inl.h"
#include "kernels/row_functions-inl.h"
#include "kernels/tile_vnni-inl.h"

using Ops = VnniOps<Avx512Ops>;

bool unpacking_pays() { return !host_unpacks_for_free(); }

}  // namespace

extern const Kernel W4A8_AVX512VNNI;
extern const AttentionFunctions W4A8_AVX512VNNI_ATTENTION;
extern const LinearAttentionFunctions x86_avx512vnni_linear_attention;
constinit const Kernel W4A8_AVX512VNNI = {rows_of<Ops>(),
                                          gemm_of<Ops>(unpacking_pays),
                                          &W4A8_AVX512VNNI_ATTENTION,
                                          &x86_avx512vnni_linear_attention,
                                          W4A8_AVX512VNNI_NAME,
                                          kAvx2 | kFma | kF16c | kAvx512 | kAvx512Vnni};

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
