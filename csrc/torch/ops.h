// CPU and Meta implementations of the ops; schemas are in library.cpp, contracts in w4a8.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <tuple>

#include "torch/w4a8.h"

namespace w4a8 {

// Of the public function of the op.
decltype(dyn_quant_pack_4bit_weight) pack_cpu, pack_meta;
decltype(dyn_quant_unpack_4bit_weight) unpack_cpu;
decltype(dyn_quant_unpack_any_4bit_weight) unpack_any_cpu;
decltype(dyn_quant_matmul_4bit) matmul_cpu, matmul_meta;
decltype(dynamic_per_token_int8_quant) token_quant_cpu, token_quant_meta;
decltype(int4_gemm_w4a8) int4_gemm_cpu, int4_gemm_meta;
decltype(dynamic_4bit_int_moe) moe_cpu, moe_meta;
decltype(topk_routing) routing_cpu, routing_meta;
decltype(round_weights) rounding_cpu, rounding_meta;

at::Tensor moe_gated_cpu(const at::Tensor& x, const at::Tensor& topk_ids, const at::Tensor& topk_weights,
                         const at::Tensor& w13_packed, const at::Tensor& w2_packed, int64_t H, int64_t I,
                         int64_t group_size, bool apply_router_weight_on_input, int64_t activation_kind);
at::Tensor moe_gated_meta(const at::Tensor& x, const at::Tensor& topk_ids, const at::Tensor& topk_weights,
                          const at::Tensor& w13_packed, const at::Tensor& w2_packed, int64_t H, int64_t I,
                          int64_t group_size, bool apply_router_weight_on_input, int64_t activation_kind);

}  // namespace w4a8
