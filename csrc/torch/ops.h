// CPU and Meta implementations of the ops; schemas are in ops.inc, contracts in w4a8.h.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "torch/tensor.h"

namespace w4a8 {

using UnpackedAny = std::tuple<Tensor, Tensor, Tensor, Tensor, std::string, Tensor, Tensor, Tensor, Tensor, int64_t>;
using RoundedTensors = std::tuple<Tensor, Tensor, Tensor>;

Tensor pack_cpu(const Tensor& weights, const Tensor& scales_zeros, const OptionalTensor& bias, int64_t block_size,
                int64_t in_features, int64_t out_features, const OptionalTensor& zero_points, Text values,
                const OptionalTensor& channel_scales, int64_t activation_group, const OptionalTensor& minimums,
                const OptionalTensor& super_scales, const OptionalTensor& super_minimums);
decltype(pack_cpu) pack_meta;

void pack_blocks_cpu(const Tensor& packed, const Tensor& blocks, const OptionalTensor& bias, Text type,
                     int64_t first_row, int64_t in_features, int64_t out_features, Optional<ScalarType> scale_dtype,
                     int64_t activation_group);

void pack_words_cpu(const Tensor& packed, const Tensor& words, const Tensor& scales, const OptionalTensor& bias,
                    const OptionalTensor& zero_points, Text order, int64_t first_row, int64_t block_size,
                    int64_t in_features, int64_t out_features, Text values, int64_t activation_group);

std::tuple<Tensor, Tensor, Tensor> unpack_cpu(const Tensor& packed_weights, int64_t block_size, int64_t in_features,
                                              int64_t out_features);
UnpackedAny unpack_any_cpu(const Tensor& packed_weights, int64_t block_size, int64_t in_features, int64_t out_features);
Tensor dequantize_rows_cpu(const Tensor& packed_weights, const Tensor& rows, int64_t in_features, int64_t out_features,
                           Optional<ScalarType> dtype);
decltype(dequantize_rows_cpu) dequantize_rows_meta;

std::string form_problem(int64_t block_size, int64_t in_features, int64_t out_features, Text values, bool zero_points,
                         bool minimums, Text scale_dtype, int64_t activation_group);
int64_t form_bytes(int64_t block_size, int64_t in_features, int64_t out_features, Text values, bool zero_points,
                   bool minimums, Text scale_dtype, int64_t activation_group);

Tensor matmul_cpu(const Tensor& inp, const Tensor& packed_weights, int64_t block_size, int64_t in_features,
                  int64_t out_features);
decltype(matmul_cpu) matmul_meta;

std::tuple<Tensor, Tensor, Tensor> token_quant_cpu(const Tensor& x, bool use_sym_quant, int64_t bits,
                                                   int64_t activation_group);
decltype(token_quant_cpu) token_quant_meta;

Tensor int4_gemm_cpu(const Tensor& quant_x, const Tensor& x_scale, const Tensor& x_zero, const Tensor& weight,
                     const Tensor& weight_scale, const Tensor& weight_zero_point, int64_t group_size,
                     const OptionalTensor& g_idx, const OptionalTensor& bias, Optional<ScalarType> out_dtype);
decltype(int4_gemm_cpu) int4_gemm_meta;

Tensor moe_cpu(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13_packed,
               const Tensor& w2_packed, int64_t H, int64_t I, int64_t I2, int64_t group_size,
               bool apply_router_weight_on_input, int64_t activation_kind, Optional<double> limit,
               Optional<double> alpha, Optional<double> beta);
decltype(moe_cpu) moe_meta;
/// moe_cpu on threads of the caller's choice.
Tensor moe_on(Parallel& parallel, const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
              const Tensor& w13_packed, const Tensor& w2_packed, int64_t H, int64_t I, int64_t I2, int64_t group_size,
              bool apply_router_weight_on_input, int64_t activation_kind, Optional<double> limit,
              Optional<double> alpha, Optional<double> beta);
void queue_experts_cpu(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13_packed,
                       const Tensor& w2_packed, int64_t H, int64_t I, int64_t I2, int64_t group_size,
                       bool apply_router_weight_on_input, int64_t activation_kind, const Tensor& out,
                       const Tensor& error, int64_t stream, int64_t launch, int64_t threads, Optional<double> limit,
                       Optional<double> alpha, Optional<double> beta);
Tensor moe_gated_cpu(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w13_packed,
                     const Tensor& w2_packed, int64_t H, int64_t I, int64_t group_size,
                     bool apply_router_weight_on_input, int64_t activation_kind, Optional<double> limit,
                     Optional<double> alpha, Optional<double> beta);
decltype(moe_gated_cpu) moe_gated_meta;

std::tuple<Tensor, Tensor> routing_cpu(const Tensor& router_logits, int64_t top_k, bool renormalize, Text scoring_func,
                                       Optional<int64_t> num_expert_group, Optional<int64_t> topk_group,
                                       double routed_scaling_factor, const OptionalTensor& e_score_correction_bias);
decltype(routing_cpu) routing_meta;

RoundedTensors rounding_cpu(const Tensor& weights, int64_t block_size, Text values, bool zero_points,
                            Optional<ScalarType> scale_dtype, int64_t effort, const OptionalTensor& importance);
decltype(rounding_cpu) rounding_meta;

void attention_write_cpu(const Tensor& key, const Tensor& value, const Tensor& cache, const Tensor& block_table,
                         const Tensor& seq_lens, const Tensor& query_start_loc, Text kind, int64_t window);
decltype(attention_write_cpu) attention_write_meta;
Tensor attention_cpu(const Tensor& query, const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens,
                     const Tensor& query_start_loc, double scale, Text kind, Optional<int64_t> value_size, bool causal,
                     int64_t window, double soft_cap, const OptionalTensor& sinks, int64_t chunk);
decltype(attention_cpu) attention_meta;

Tensor gated_delta_cpu(const Tensor& qkv, const Tensor& z, const Tensor& ba, const Tensor& conv_weight, const Tensor& a,
                       const Tensor& dt_bias, const Tensor& norm, const Tensor& conv_state, const Tensor& state,
                       const Tensor& slots, const Tensor& query_start_loc, const Tensor& fresh, int64_t key_heads,
                       int64_t value_heads, double norm_eps, Text gate, const OptionalTensor& decay,
                       const OptionalTensor& out_slots, const OptionalTensor& accepted, double beta_scale);
decltype(gated_delta_cpu) gated_delta_meta;
Tensor state_space_cpu(const Tensor& xbc, const OptionalTensor& z, const Tensor& dt, const Tensor& conv_weight,
                       const OptionalTensor& conv_bias, const Tensor& a, const Tensor& dt_bias, const Tensor& d,
                       const OptionalTensor& norm, const Tensor& conv_state, const Tensor& state, const Tensor& slots,
                       const Tensor& query_start_loc, const Tensor& fresh, int64_t groups, double norm_eps,
                       int64_t norm_groups, bool norm_first, const OptionalTensor& out_slots,
                       const OptionalTensor& accepted);
decltype(state_space_cpu) state_space_meta;
Tensor short_conv_cpu(const Tensor& bcx, const Tensor& conv_weight, const OptionalTensor& conv_bias,
                      const Tensor& conv_state, const Tensor& slots, const Tensor& query_start_loc, const Tensor& fresh,
                      const OptionalTensor& out_slots, const OptionalTensor& accepted);
decltype(short_conv_cpu) short_conv_meta;

Tensor decoder_create_cpu(const Tensor& norm, const OptionalTensor& head, int64_t hidden_size, double eps,
                          bool centered);
void decoder_add_layer_cpu(const Tensor& decoder, Tensors gate_up, const OptionalTensor& down,
                           const OptionalTensor& input_norm, const OptionalTensor& attention_norm,
                           const OptionalTensor& mlp_input_norm, const OptionalTensor& mlp_norm,
                           int64_t activation_kind, double residual, bool parallel, double output_scale,
                           Optional<double> alpha, Optional<double> beta);
void decoder_add_attention_cpu(const Tensor& decoder, Tensors qkv, const Tensor& out, int64_t heads, int64_t kv_heads,
                               int64_t head_size, double scale, Text kind, int64_t window, bool drops_pages,
                               double soft_cap, const OptionalTensor& sinks, const OptionalTensor& q_norm,
                               const OptionalTensor& k_norm, int64_t rope, bool interleaved,
                               const OptionalTensor& qkv_bias, const OptionalTensor& out_bias, bool gated,
                               const OptionalTensor& q_up, const OptionalTensor& k_up, const OptionalTensor& v_up,
                               const OptionalTensor& kv_up, Optional<double> qk_norm_eps, bool turn_first,
                               const OptionalTensor& v_norm, Text projected, int64_t chunk,
                               Optional<int64_t> query_rope);
void decoder_add_linear_attention_cpu(const Tensor& decoder, Tensors projections, const OptionalTensor& gates,
                                      const Tensor& out, const Tensor& conv_weight, Text kind, int64_t key_heads,
                                      int64_t value_heads, int64_t key_size, int64_t value_size,
                                      const OptionalTensor& conv_bias, const OptionalTensor& a,
                                      const OptionalTensor& dt_bias, const OptionalTensor& d,
                                      const OptionalTensor& norm, double norm_eps, Text gate, int64_t norm_groups,
                                      bool norm_first, bool interleaved, double beta_scale, const OptionalTensor& z_up,
                                      const OptionalTensor& decay_up);
void decoder_add_experts_cpu(const Tensor& decoder, const Tensor& router, const OptionalTensor& router_bias,
                             const Tensor& w13_packed, const Tensor& w2_packed, int64_t top_k, bool renormalize,
                             Text scoring_func, Optional<int64_t> num_expert_group, Optional<int64_t> topk_group,
                             double routed_scaling_factor, const OptionalTensor& e_score_correction_bias,
                             int64_t activation_kind, const OptionalTensor& shared_gate, Optional<double> limit,
                             Optional<double> alpha, Optional<double> beta, const OptionalTensor& input_norm,
                             const OptionalTensor& router_norm, const OptionalTensor& output_norm,
                             const OptionalTensor& shared_norm, const OptionalTensor& expert_factors,
                             const OptionalTensor& expert_map, bool apply_router_weight_on_input);
void decoder_set_factors_cpu(const Tensor& decoder, Text product, const Tensor& factors);
void decoder_add_layer_input_cpu(const Tensor& decoder, const Tensor& gate, const Tensor& down,
                                 const OptionalTensor& norm, int64_t activation_kind);
int64_t decoder_ranks_bytes(int64_t ranks);
Tensor decoder_ranks_gather_cpu(const Tensor& part, const Tensor& memory, int64_t rank, int64_t ranks, double timeout);
void decoder_set_ranks_cpu(const Tensor& decoder, const Tensor& memory, int64_t rank, int64_t ranks, double timeout,
                           int64_t exchange);
Tensor decoder_step_cpu(const Tensor& decoder, const Tensor& hidden, const Tensor& positions, Tensors caches,
                        Tensors block_tables, const Tensor& seq_lens, const Tensor& query_start_loc, Tensors ropes,
                        Tensors conv_states, Tensors states, Tensors slots, const OptionalTensor& fresh,
                        Tensors out_slots, const OptionalTensor& accepted, const OptionalTensor& rows,
                        const OptionalTensor& normed, int64_t threads, const OptionalTensor& layer_inputs,
                        Optional<ScalarType> dtype);
void decoder_destroy_cpu(const Tensor& decoder);

}  // namespace w4a8
