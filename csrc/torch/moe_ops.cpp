// The fused MoE op: checks, views and the output tensor. The core computes.

#include "core/moe/fused_moe.h"
#include "torch/checks.h"
#include "torch/context.h"
#include "torch/ops.h"

namespace w4a8 {
namespace {

// I2 of a gated layer; I is not checked yet, so it wraps around instead of overflowing.
int64_t twice(int64_t I) { return static_cast<int64_t>(2 * static_cast<uint64_t>(I)); }

// Everything that does not need the data of a tensor, for CPU and Meta alike.
Activation check_arguments(DeviceCheck check_devices, const Tensor& x, const Tensor& topk_ids,
                           const Tensor& topk_weights, const Tensor& w13_packed, const Tensor& w2_packed, int64_t H,
                           int64_t I, int64_t I2, int64_t group_size, int64_t activation_kind, Optional<double> limit,
                           Optional<double> alpha, Optional<double> beta) {
  check_devices({{"x", x},
                 {"topk_ids", topk_ids},
                 {"topk_weights", topk_weights},
                 {"w13_packed", w13_packed},
                 {"w2_packed", w2_packed}});
  activation_dtype("x", x);
  const Activation activation = activation_of(activation_kind, limit, alpha, beta);
  W4A8_CHECK(type_of(topk_ids) == ScalarType::Int || type_of(topk_ids) == ScalarType::Long, "topk_ids has dtype ",
             type_of(topk_ids), ", expected int32 or int64");
  W4A8_CHECK(is_floating(type_of(topk_weights)), "topk_weights has dtype ", type_of(topk_weights),
             ", expected a floating point type");
  W4A8_CHECK(topk_ids.dim() == 2, "topk_ids has ", topk_ids.dim(), " dimensions, expected [T, k]");
  W4A8_CHECK(topk_weights.dim() == 2, "topk_weights has ", topk_weights.dim(), " dimensions, expected [T, k]");
  W4A8_CHECK(x.dim() >= 1, "x has no dimensions, expected [..., H]");
  check_packed("w13_packed", w13_packed, /*stack=*/true);
  check_packed("w2_packed", w2_packed, /*stack=*/true);
  for (const auto& [name, value] : {std::pair<const char*, int64_t>{"H", H}, {"I", I}}) {
    W4A8_CHECK(value >= 2 && value <= kMaxK && value % 2 == 0, name, " is ", value, ", expected an even number in 2..",
               kMaxK);
    W4A8_CHECK(group_size == -1 || group_size == kAnyGroup || is_group(group_size, value), "group_size is ", group_size,
               ", expected -1 (channelwise), 0 (as the packed tensors say), or 16 or a multiple of 32 that "
               "divides ",
               name, " = ", value);
  }
  W4A8_CHECK(I2 == 2 * I || I2 == I, "I2 is ", I2, ", expected 2 * I = ", 2 * I, " (gated) or I = ", I);
  return activation;
}

}  // namespace

Tensor moe_on(Parallel& parallel, const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
              const Tensor& w13_packed, const Tensor& w2_packed, int64_t H, int64_t I, int64_t I2, int64_t group_size,
              bool apply_router_weight_on_input, int64_t activation_kind, Optional<double> limit,
              Optional<double> alpha, Optional<double> beta) {
  const Activation activation = check_arguments(check_cpu, x, topk_ids, topk_weights, w13_packed, w2_packed, H, I, I2,
                                                group_size, activation_kind, limit, alpha, beta);
  W4A8_CHECK(x.size(-1) == H, "x has shape ", shape_text(x.sizes()), ", expected [..., ", H, "] for H = ", H);
  const int64_t tokens = x.numel() / H;
  W4A8_CHECK(topk_ids.size(0) == tokens, "topk_ids has shape ", shape_text(topk_ids.sizes()), ", expected [", tokens,
             ", k]: x has ", tokens, " tokens");
  W4A8_CHECK(same_sizes(topk_weights, topk_ids), "topk_weights has shape ", shape_text(topk_weights.sizes()),
             ", expected that of topk_ids, ", shape_text(topk_ids.sizes()));
  W4A8_CHECK(w13_packed.size(0) == w2_packed.size(0), "w2_packed has ", w2_packed.size(0),
             " experts, expected as many as w13_packed, ", w13_packed.size(0));

  const Tensor input = dense(x);
  const Tensor ids = dense(topk_ids);
  const Tensor weights = to_float32(topk_weights);
  const Tensor w13 = dense(w13_packed);
  const Tensor w2 = dense(w2_packed);
  Tensor out = new_tensor(input.sizes(), type_of(input), input);

  MoeArgs args;
  args.x = input_data(input);
  args.out = output_data(out);
  args.dtype = activation_dtype("x", input);
  args.tokens = tokens;
  args.top_k = ids.size(1);
  if (type_of(ids) == ScalarType::Int) {
    args.ids = input_data<int32_t>(ids);
  } else {
    args.ids64 = input_data<int64_t>(ids);
  }
  args.weights = input_data<float>(weights);
  args.experts = w13.size(0);
  args.w13 = input_data<uint8_t>(w13);
  args.w13_bytes = w13.size(1);
  args.w2 = input_data<uint8_t>(w2);
  args.w2_bytes = w2.size(1);
  args.hidden = H;
  args.intermediate = I;
  args.gated = I2 == 2 * I;
  args.group = group_size;
  args.weight_on_input = apply_router_weight_on_input;
  args.activation = activation;
  fused_moe(op_kernel(), parallel, thread_workspace(), args);
  return out;
}

Tensor moe_cpu(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13_packed,
               const Tensor& w2_packed, int64_t H, int64_t I, int64_t I2, int64_t group_size,
               bool apply_router_weight_on_input, int64_t activation_kind, Optional<double> limit,
               Optional<double> alpha, Optional<double> beta) {
  AtenParallel parallel;
  return moe_on(parallel, x, topk_ids, topk_weights, w13_packed, w2_packed, H, I, I2, group_size,
                apply_router_weight_on_input, activation_kind, limit, alpha, beta);
}

Tensor moe_meta(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13_packed,
                const Tensor& w2_packed, int64_t H, int64_t I, int64_t I2, int64_t group_size,
                bool /*apply_router_weight_on_input*/, int64_t activation_kind, Optional<double> limit,
                Optional<double> alpha, Optional<double> beta) {
  check_arguments(check_meta, x, topk_ids, topk_weights, w13_packed, w2_packed, H, I, I2, group_size, activation_kind,
                  limit, alpha, beta);
  const std::vector<SymSize> sizes = sym_sizes_of(x);
  W4A8_CHECK(sizes.back() == H, "x has last dimension ", sizes.back(), ", expected H = ", H);
  return new_tensor(sizes, type_of(x), x);
}

Tensor moe_gated_cpu(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13_packed,
                     const Tensor& w2_packed, int64_t H, int64_t I, int64_t group_size,
                     bool apply_router_weight_on_input, int64_t activation_kind, Optional<double> limit,
                     Optional<double> alpha, Optional<double> beta) {
  return moe_cpu(x, topk_ids, topk_weights, w13_packed, w2_packed, H, I, twice(I), group_size,
                 apply_router_weight_on_input, activation_kind, limit, alpha, beta);
}

Tensor moe_gated_meta(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13_packed,
                      const Tensor& w2_packed, int64_t H, int64_t I, int64_t group_size,
                      bool apply_router_weight_on_input, int64_t activation_kind, Optional<double> limit,
                      Optional<double> alpha, Optional<double> beta) {
  return moe_meta(x, topk_ids, topk_weights, w13_packed, w2_packed, H, I, twice(I), group_size,
                  apply_router_weight_on_input, activation_kind, limit, alpha, beta);
}

}  // namespace w4a8
