// Linear attention by AVX-512.
//
//   A tile of the delta rule is 32 columns, two registers: two FMAs a cycle of 4 cycles each wait for nothing, and the
//   tile of a head of 128 keys, 16 KiB, stays in a first-level cache.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "kernels/half.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/ops.h"
#include "kernels/target.h"

W4A8_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
namespace w4a8::isa {
namespace {

#include "kernels/attention/avx512-inl.h"
#include "kernels/linear_attention/linear_attention-inl.h"

}  // namespace

extern const LinearAttentionFunctions x86_avx512vnni_linear_attention;
constinit const LinearAttentionFunctions x86_avx512vnni_linear_attention = linear_attention_of<Ops, 32>();

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
