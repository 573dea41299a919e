// Linear attention without vector instructions: the definition that the others are compared with.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/half.h"
#include "kernels/linear_attention/linear_attention.h"
#include "kernels/ops.h"
#include "kernels/target.h"

#define W4A8_NO_VECTORS

namespace w4a8::isa {
namespace {

#include "kernels/attention/scalar-inl.h"
#include "kernels/linear_attention/linear_attention-inl.h"

}  // namespace

extern const LinearAttentionFunctions scalar_linear_attention;
constinit const LinearAttentionFunctions scalar_linear_attention = linear_attention_of<Ops, 16>();

}  // namespace w4a8::isa
