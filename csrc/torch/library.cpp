// The ops of namespace w4a8: registration, and the functions of w4a8.h.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "torch/named_op.h"
#include "torch/ops.h"
#include "torch/w4a8.h"

namespace w4a8 {
namespace {

// One row of the table. For inference: with gradients on, an op runs, and backward is an error that names it.
template <OpName kName, c10::DispatchKey kKey, auto kFunction, auto kMeta, Backward kBackward>
void register_op(torch::Library& m, const char* schema) {
  m.def(schema);
  m.impl(kName.text, torch::dispatch(kKey, NamedOp<kName, kFunction>::call));
  if constexpr (kMeta != nullptr) {
    m.impl(kName.text, torch::dispatch(c10::DispatchKey::Meta, NamedOp<kName, kMeta>::call));
  }
  m.impl(kName.text, torch::dispatch(c10::DispatchKey::Autograd, kBackward == Backward::kRefused
                                                                     ? torch::autograd::autogradNotImplementedFallback()
                                                                     : torch::CppFunction::makeFallthrough()));
}

}  // namespace
}  // namespace w4a8

TORCH_LIBRARY(w4a8, m) {
  using namespace w4a8;
#define W4A8_OP(name, key, function, meta, backward, schema) \
  register_op<name, c10::DispatchKey::key, function, meta, Backward::k##backward>(m, name schema);
#include "torch/ops.inc"
}

namespace w4a8 {
namespace {

// The op of that name and C++ signature, through the dispatcher: with what torch adds to a call (autograd, profiler).
template <OpName kName, class Function>
const auto& op() {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow((std::string("w4a8::") + kName.text).c_str(), "")
                                 .template typed<Function>();
  return handle;
}

}  // namespace

at::Tensor dyn_quant_pack_4bit_weight(const at::Tensor& weights, const at::Tensor& scales_zeros,
                                      const c10::optional<at::Tensor>& bias, int64_t block_size, int64_t in_features,
                                      int64_t out_features, const c10::optional<at::Tensor>& zero_points,
                                      c10::string_view values, const c10::optional<at::Tensor>& channel_scales,
                                      int64_t activation_group, const c10::optional<at::Tensor>& minimums,
                                      const c10::optional<at::Tensor>& super_scales,
                                      const c10::optional<at::Tensor>& super_minimums) {
  return op<"dyn_quant_pack_4bit_weight", decltype(dyn_quant_pack_4bit_weight)>().call(
      weights, scales_zeros, bias, block_size, in_features, out_features, zero_points, values, channel_scales,
      activation_group, minimums, super_scales, super_minimums);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> dyn_quant_unpack_4bit_weight(const at::Tensor& packed_weights,
                                                                            int64_t block_size, int64_t in_features,
                                                                            int64_t out_features) {
  return op<"dyn_quant_unpack_4bit_weight", decltype(dyn_quant_unpack_4bit_weight)>().call(packed_weights, block_size,
                                                                                           in_features, out_features);
}

UnpackedAny dyn_quant_unpack_any_4bit_weight(const at::Tensor& packed_weights, int64_t block_size, int64_t in_features,
                                             int64_t out_features) {
  return op<"dyn_quant_unpack_any_4bit_weight", decltype(dyn_quant_unpack_any_4bit_weight)>().call(
      packed_weights, block_size, in_features, out_features);
}

at::Tensor dequantize_rows(const at::Tensor& packed_weights, const at::Tensor& rows, int64_t in_features,
                           int64_t out_features, c10::optional<at::ScalarType> dtype) {
  return op<"dequantize_rows", decltype(dequantize_rows)>().call(packed_weights, rows, in_features, out_features,
                                                                 dtype);
}

at::Tensor dyn_quant_matmul_4bit(const at::Tensor& inp, const at::Tensor& packed_weights, int64_t block_size,
                                 int64_t in_features, int64_t out_features) {
  return op<"dyn_quant_matmul_4bit", decltype(dyn_quant_matmul_4bit)>().call(inp, packed_weights, block_size,
                                                                             in_features, out_features);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> dynamic_per_token_int8_quant(const at::Tensor& x, bool use_sym_quant,
                                                                            int64_t bits, int64_t activation_group) {
  return op<"dynamic_per_token_int8_quant", decltype(dynamic_per_token_int8_quant)>().call(x, use_sym_quant, bits,
                                                                                           activation_group);
}

at::Tensor int4_gemm_w4a8(const at::Tensor& quant_x, const at::Tensor& x_scale, const at::Tensor& x_zero,
                          const at::Tensor& weight, const at::Tensor& weight_scale, const at::Tensor& weight_zero_point,
                          int64_t group_size, const c10::optional<at::Tensor>& g_idx,
                          const c10::optional<at::Tensor>& bias, c10::optional<at::ScalarType> out_dtype) {
  return op<"int4_gemm_w4a8", decltype(int4_gemm_w4a8)>().call(quant_x, x_scale, x_zero, weight, weight_scale,
                                                               weight_zero_point, group_size, g_idx, bias, out_dtype);
}

at::Tensor dynamic_4bit_int_moe(const at::Tensor& x, const at::Tensor& topk_ids, const at::Tensor& topk_weights,
                                const at::Tensor& w13_packed, const at::Tensor& w2_packed, int64_t H, int64_t I,
                                int64_t I2, int64_t group_size, bool apply_router_weight_on_input,
                                int64_t activation_kind, c10::optional<double> limit, c10::optional<double> alpha,
                                c10::optional<double> beta) {
  return op<"dynamic_4bit_int_moe", decltype(dynamic_4bit_int_moe)>().call(
      x, topk_ids, topk_weights, w13_packed, w2_packed, H, I, I2, group_size, apply_router_weight_on_input,
      activation_kind, limit, alpha, beta);
}

std::tuple<at::Tensor, at::Tensor> topk_routing(const at::Tensor& router_logits, int64_t top_k, bool renormalize,
                                                c10::string_view scoring_func, c10::optional<int64_t> num_expert_group,
                                                c10::optional<int64_t> topk_group, double routed_scaling_factor,
                                                const c10::optional<at::Tensor>& e_score_correction_bias) {
  // Not decltype(topk_routing): the core has another function of that name.
  return op<"topk_routing", decltype(routing_cpu)>().call(router_logits, top_k, renormalize, scoring_func,
                                                          num_expert_group, topk_group, routed_scaling_factor,
                                                          e_score_correction_bias);
}

void paged_attention_write(const at::Tensor& key, const at::Tensor& value, at::Tensor& cache,
                           const at::Tensor& block_table, const at::Tensor& seq_lens, const at::Tensor& query_start_loc,
                           c10::string_view kind, int64_t window) {
  op<"paged_attention_write", decltype(attention_write_cpu)>().call(key, value, cache, block_table, seq_lens,
                                                                    query_start_loc, kind, window);
}

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& cache, const at::Tensor& block_table,
                           const at::Tensor& seq_lens, const at::Tensor& query_start_loc, double scale,
                           c10::string_view kind, c10::optional<int64_t> value_size, bool causal, int64_t window,
                           double soft_cap, const c10::optional<at::Tensor>& sinks, int64_t chunk) {
  return op<"paged_attention", decltype(attention_cpu)>().call(query, cache, block_table, seq_lens, query_start_loc,
                                                               scale, kind, value_size, causal, window, soft_cap, sinks,
                                                               chunk);
}

RoundedTensors round_weights(const at::Tensor& weights, int64_t block_size, c10::string_view values, bool zero_points,
                             c10::optional<at::ScalarType> scale_dtype, int64_t effort,
                             const c10::optional<at::Tensor>& importance) {
  // Not decltype(round_weights): the core has another function of that name.
  return op<"round_weights", decltype(rounding_cpu)>().call(weights, block_size, values, zero_points, scale_dtype,
                                                            effort, importance);
}

}  // namespace w4a8
