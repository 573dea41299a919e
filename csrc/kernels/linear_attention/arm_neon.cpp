// Linear attention by NEON, plain armv8-a. A tile of the delta rule is 16 columns, four registers.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstdint>

#include "kernels/half.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/ops.h"
#include "kernels/target.h"

namespace w4a8::isa {
namespace {

#include "kernels/attention/neon-inl.h"
#include "kernels/linear_attention/linear_attention-inl.h"

}  // namespace

extern const LinearAttentionFunctions arm_neon_linear_attention;
constinit const LinearAttentionFunctions arm_neon_linear_attention = linear_attention_of<Ops, 16>();

}  // namespace w4a8::isa
#endif
