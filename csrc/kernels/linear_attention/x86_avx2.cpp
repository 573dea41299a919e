// Linear attention by AVX2 and FMA.
//
//   A tile of the delta rule is 32 columns. In registers: sums of a token and of the next one, 4 each, and 4 of the row
//   that is worked on. What a row of the state gets, d, is read from memory by the FMAs.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "kernels/half.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/ops.h"
#include "kernels/target.h"

W4A8_TARGET("avx2,fma,f16c")
namespace w4a8::isa {
namespace {

#include "kernels/attention/avx2-inl.h"
#include "kernels/linear_attention/linear_attention-inl.h"

}  // namespace

extern const LinearAttentionFunctions x86_avx2_linear_attention;
constinit const LinearAttentionFunctions x86_avx2_linear_attention = linear_attention_of<Ops, 32>();

}  // namespace w4a8::isa
W4A8_TARGET_END
#endif
