// CPU and Meta implementations of the ops; schemas are in library.cpp, contracts in w4a8.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

#include "torch/w4a8.h"

namespace w4a8 {

at::Tensor pack_cpu(const at::Tensor& weights, const at::Tensor& scales_zeros, const c10::optional<at::Tensor>& bias,
                    int64_t block_size, int64_t in_features, int64_t out_features,
                    const c10::optional<at::Tensor>& zero_points, c10::string_view values,
                    const c10::optional<at::Tensor>& channel_scales, int64_t activation_group);
at::Tensor pack_meta(const at::Tensor& weights, const at::Tensor& scales_zeros, const c10::optional<at::Tensor>& bias,
                     int64_t block_size, int64_t in_features, int64_t out_features,
                     const c10::optional<at::Tensor>& zero_points, c10::string_view values,
                     const c10::optional<at::Tensor>& channel_scales, int64_t activation_group);

std::tuple<at::Tensor, at::Tensor, at::Tensor> unpack_cpu(const at::Tensor& packed_weights, int64_t block_size,
                                                          int64_t in_features, int64_t out_features);
UnpackedAny unpack_any_cpu(const at::Tensor& packed_weights, int64_t block_size, int64_t in_features,
                           int64_t out_features);

at::Tensor matmul_cpu(const at::Tensor& inp, const at::Tensor& packed_weights, int64_t block_size, int64_t in_features,
                      int64_t out_features);
at::Tensor matmul_meta(const at::Tensor& inp, const at::Tensor& packed_weights, int64_t block_size, int64_t in_features,
                       int64_t out_features);

std::tuple<at::Tensor, at::Tensor, at::Tensor> token_quant_cpu(const at::Tensor& x, bool use_sym_quant, int64_t bits,
                                                               int64_t activation_group);
std::tuple<at::Tensor, at::Tensor, at::Tensor> token_quant_meta(const at::Tensor& x, bool use_sym_quant, int64_t bits,
                                                                int64_t activation_group);

at::Tensor int4_gemm_cpu(const at::Tensor& quant_x, const at::Tensor& x_scale, const at::Tensor& x_zero,
                         const at::Tensor& weight, const at::Tensor& weight_scale, const at::Tensor& weight_zero_point,
                         int64_t group_size, const c10::optional<at::Tensor>& g_idx,
                         const c10::optional<at::Tensor>& bias, c10::optional<at::ScalarType> out_dtype);
at::Tensor int4_gemm_meta(const at::Tensor& quant_x, const at::Tensor& x_scale, const at::Tensor& x_zero,
                          const at::Tensor& weight, const at::Tensor& weight_scale, const at::Tensor& weight_zero_point,
                          int64_t group_size, const c10::optional<at::Tensor>& g_idx,
                          const c10::optional<at::Tensor>& bias, c10::optional<at::ScalarType> out_dtype);

at::Tensor moe_cpu(const at::Tensor& x, const at::Tensor& topk_ids, const at::Tensor& topk_weights,
                   const at::Tensor& w13_packed, const at::Tensor& w2_packed, int64_t H, int64_t I, int64_t I2,
                   int64_t group_size, bool apply_router_weight_on_input, int64_t activation_kind);
at::Tensor moe_meta(const at::Tensor& x, const at::Tensor& topk_ids, const at::Tensor& topk_weights,
                    const at::Tensor& w13_packed, const at::Tensor& w2_packed, int64_t H, int64_t I, int64_t I2,
                    int64_t group_size, bool apply_router_weight_on_input, int64_t activation_kind);
at::Tensor moe_gated_cpu(const at::Tensor& x, const at::Tensor& topk_ids, const at::Tensor& topk_weights,
                         const at::Tensor& w13_packed, const at::Tensor& w2_packed, int64_t H, int64_t I,
                         int64_t group_size, bool apply_router_weight_on_input, int64_t activation_kind);
at::Tensor moe_gated_meta(const at::Tensor& x, const at::Tensor& topk_ids, const at::Tensor& topk_weights,
                          const at::Tensor& w13_packed, const at::Tensor& w2_packed, int64_t H, int64_t I,
                          int64_t group_size, bool apply_router_weight_on_input, int64_t activation_kind);

std::tuple<at::Tensor, at::Tensor> routing_cpu(const at::Tensor& router_logits, int64_t top_k, bool renormalize,
                                               c10::string_view scoring_func, c10::optional<int64_t> num_expert_group,
                                               c10::optional<int64_t> topk_group, double routed_scaling_factor,
                                               const c10::optional<at::Tensor>& e_score_correction_bias);
std::tuple<at::Tensor, at::Tensor> routing_meta(const at::Tensor& router_logits, int64_t top_k, bool renormalize,
                                                c10::string_view scoring_func, c10::optional<int64_t> num_expert_group,
                                                c10::optional<int64_t> topk_group, double routed_scaling_factor,
                                                const c10::optional<at::Tensor>& e_score_correction_bias);

RoundedTensors rounding_cpu(const at::Tensor& weights, int64_t block_size, c10::string_view values, bool zero_points,
                            c10::optional<at::ScalarType> scale_dtype, int64_t effort,
                            const c10::optional<at::Tensor>& importance);
RoundedTensors rounding_meta(const at::Tensor& weights, int64_t block_size, c10::string_view values, bool zero_points,
                             c10::optional<at::ScalarType> scale_dtype, int64_t effort,
                             const c10::optional<at::Tensor>& importance);

}  // namespace w4a8
