// topk_routing: checks, views and the output tensors. The core computes.

#include "torch/checks.h"
#include "torch/context.h"
#include "torch/ops.h"
#include "torch/routing_args.h"

namespace w4a8 {
namespace {

void check_types(DeviceCheck check_devices, const Tensor& router_logits,
                 const OptionalTensor& e_score_correction_bias) {
  check_devices({{"router_logits", router_logits}, {"e_score_correction_bias", e_score_correction_bias}});
  activation_dtype("router_logits", router_logits);
  W4A8_CHECK(router_logits.dim() == 2, "router_logits has ", router_logits.dim(), " dimensions, expected [T, E]");
  if (!e_score_correction_bias.has_value()) return;
  const Tensor& bias = *e_score_correction_bias;
  W4A8_CHECK(is_floating(type_of(bias)), "e_score_correction_bias has dtype ", type_of(bias),
             ", expected a floating point type");
  W4A8_CHECK(bias.dim() == 1, "e_score_correction_bias has ", bias.dim(), " dimensions, expected [E]");
}

}  // namespace

std::tuple<Tensor, Tensor> routing_cpu(const Tensor& router_logits, int64_t top_k, bool renormalize, Text scoring_func,
                                       Optional<int64_t> num_expert_group, Optional<int64_t> topk_group,
                                       double routed_scaling_factor, const OptionalTensor& e_score_correction_bias) {
  check_types(check_cpu, router_logits, e_score_correction_bias);
  Optional<int64_t> bias_size;
  Tensor bias;
  if (e_score_correction_bias.has_value()) {
    bias = to_float32(*e_score_correction_bias);
    bias_size = bias.size(0);
  }
  RoutingArgs args = routing_args(router_logits.size(1), top_k, renormalize, scoring_func, num_expert_group, topk_group,
                                  routed_scaling_factor, bias_size);
  const Tensor logits = dense(router_logits);
  Tensor weights = new_tensor({logits.size(0), top_k}, ScalarType::Float, logits);
  Tensor ids = new_tensor({logits.size(0), top_k}, ScalarType::Int, logits);
  args.logits = input_data(logits);
  args.dtype = activation_dtype("router_logits", logits);
  args.tokens = logits.size(0);
  if (bias.defined()) args.bias = input_data<float>(bias);
  args.weights = output_data<float>(weights);
  args.ids = output_data<int32_t>(ids);
  AtenParallel parallel;
  topk_routing(parallel, thread_workspace(), args);
  return {weights, ids};
}

std::tuple<Tensor, Tensor> routing_meta(const Tensor& router_logits, int64_t top_k, bool renormalize, Text scoring_func,
                                        Optional<int64_t> num_expert_group, Optional<int64_t> topk_group,
                                        double routed_scaling_factor, const OptionalTensor& e_score_correction_bias) {
  check_types(check_meta, router_logits, e_score_correction_bias);
  Optional<int64_t> bias_size;
  if (e_score_correction_bias.has_value()) {
    bias_size = known_size(sym_sizes_of(*e_score_correction_bias)[0]);
  }
  std::vector<SymSize> sizes = sym_sizes_of(router_logits);
  routing_args(known_size(sizes[1]), top_k, renormalize, scoring_func, num_expert_group, topk_group,
               routed_scaling_factor, bias_size);
  sizes[1] = top_k;
  return {new_tensor(sizes, ScalarType::Float, router_logits), new_tensor(sizes, ScalarType::Int, router_logits)};
}

}  // namespace w4a8
