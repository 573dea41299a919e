// w4a8 for C++ users of libtorch: int4 weights, int8 activations, mixture of experts, on CPUs.
//
// Each function calls the op of the same name in namespace w4a8 (torch.ops.w4a8 in Python) through the dispatcher. All
// tensors of a call are on the CPU, or all on Meta. The ops are for inference: they run with gradients on, but have
// none, so that backward through an output is an error. All throw c10::Error with a message that names the argument,
// what it was and what was expected. Numerics: docs/numerics.md.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

#include "info.h"

namespace w4a8 {

/// Packs 4-bit weights. weights: uint8 [N, K/2] (low nibble even k, high nibble odd k) or [E, N, K/2] for a stack of
/// experts; scales_zeros: float32, bfloat16 or float16 [N, K/block_size] ([E, ...]), or float8_e8m0fnu (its
/// bits as uint8) with values "e2m1" in groups of 32 and more; bias: [N] ([E, N]) or none. block_size: K
/// (channelwise), or 16 or a multiple of 32 that divides K. A nibble n is n - 8; with zero_points, uint8 of the shape
/// of scales_zeros in 0..15, it is n - zero point; with values "e2m1" it is the e2m1 number of these bits. With
/// channel_scales, floating [N] ([E, N]), in groups of 16, scales_zeros is float8_e4m3fn without signs, or its bits as
/// uint8, and a weight is multiplied by both. With values "int8" weights is uint8 [N, K] or [E, N, K], a code n a byte,
/// which is n - zero point, 0..255, or n - 128; with values "int6" a byte in 0..63, which is n - 32, without zero
/// points and channel_scales. activation_group: the rows that the matrix is multiplied with have one scale each (-1),
/// or one for so many values of k: 32, 64 or 128 that divides block_size (of groups of 16, in_features). minimums, of
/// type and shape of scales_zeros, are subtracted: a weight is scale * code - minimum, of nibbles with the code n
/// itself, of bytes with n - 128 (int6: n - 32); without zero points, block_size at most 256. super_scales, float16 [N,
/// K/256] ([E, ...]): scales_zeros is int8, and a scale that times the super-scale; minimums are int8 then, and have
/// super_minimums. K is a multiple of 256 then, block_size 16, 32, 64 or 128, values "iq4", "int6", or "int4" or "int8"
/// without zero points. With values "iq4" a nibble is one of the 16 integers of GGUF's IQ4_NL, without zero points,
/// minimums and channel_scales. Returns uint8 [bytes] or [E, bytes].
W4A8_EXPORT at::Tensor dyn_quant_pack_4bit_weight(const at::Tensor& weights, const at::Tensor& scales_zeros,
                                                  const c10::optional<at::Tensor>& bias, int64_t block_size,
                                                  int64_t in_features, int64_t out_features,
                                                  const c10::optional<at::Tensor>& zero_points = c10::nullopt,
                                                  c10::string_view values = "int4",
                                                  const c10::optional<at::Tensor>& channel_scales = c10::nullopt,
                                                  int64_t activation_group = -1,
                                                  const c10::optional<at::Tensor>& minimums = c10::nullopt,
                                                  const c10::optional<at::Tensor>& super_scales = c10::nullopt,
                                                  const c10::optional<at::Tensor>& super_minimums = c10::nullopt);

/// The exact inverse for int4 without zero points: (weights, scales_zeros, bias); bias is empty if there was none.
W4A8_EXPORT std::tuple<at::Tensor, at::Tensor, at::Tensor> dyn_quant_unpack_4bit_weight(
    const at::Tensor& packed_weights, int64_t block_size, int64_t in_features, int64_t out_features);

/// weights, scales_zeros, zero_points, bias, values, channel_scales, minimums, super_scales, super_minimums,
/// activation_group; what was not given is empty.
using UnpackedAny = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, std::string, at::Tensor, at::Tensor,
                               at::Tensor, at::Tensor, int64_t>;

/// The exact inverse for every kind. Scales of one byte come back as uint8, their bits.
W4A8_EXPORT UnpackedAny dyn_quant_unpack_any_4bit_weight(const at::Tensor& packed_weights, int64_t block_size,
                                                         int64_t in_features, int64_t out_features);

/// Rows of a packed matrix as numbers of `dtype` (float32 by default), [..., K]. rows: int64 or int32 [...], each in
/// [0, out_features), which is N or more: numbers from N on are rows of zeros.
W4A8_EXPORT at::Tensor dequantize_rows(const at::Tensor& packed_weights, const at::Tensor& rows, int64_t in_features,
                                       int64_t out_features, c10::optional<at::ScalarType> dtype = c10::nullopt);

/// inp [..., K] (float32, bfloat16, float16) times a packed matrix: [..., N] of inp's type.
W4A8_EXPORT at::Tensor dyn_quant_matmul_4bit(const at::Tensor& inp, const at::Tensor& packed_weights,
                                             int64_t block_size, int64_t in_features, int64_t out_features);

/// Quantizes x [..., K] (float32, bfloat16, float16) per token to `bits` bits, 2..8: (q, scale, zero_point), q int8
/// when use_sym_quant, else uint8; scale [..., 1] of x's type; zero_point int32 [..., 1]. With activation_group, 32, 64
/// or 128 that divides K, as the matrices packed for it quantize rows: symmetric, 8 bits, scale float32
/// [..., K / activation_group].
W4A8_EXPORT std::tuple<at::Tensor, at::Tensor, at::Tensor> dynamic_per_token_int8_quant(const at::Tensor& x,
                                                                                        bool use_sym_quant,
                                                                                        int64_t bits,
                                                                                        int64_t activation_group = -1);

/// quant_x [..., K] (int8 or uint8, with x_scale and x_zero [..., 1]) times int4 weights: [..., N] of out_dtype
/// (float16 by default). weight: int32 [K/8, N] (nibble i of word j is k = 8j + i) with weight_scale [K/g, N] and
/// weight_zero_point, integers in 0..15, one or [K/g, N]; or a packed matrix, when weight_scale may be empty ([0, N]
/// tells Meta tensors N), and weight_zero_point too. g_idx: none. Activations in groups of 32, 64 or 128: quant_x is
/// int8, x_scale [..., K / group], of which the last two bits are taken as zeros, and x_zero all zeros.
W4A8_EXPORT at::Tensor int4_gemm_w4a8(const at::Tensor& quant_x, const at::Tensor& x_scale, const at::Tensor& x_zero,
                                      const at::Tensor& weight, const at::Tensor& weight_scale,
                                      const at::Tensor& weight_zero_point, int64_t group_size,
                                      const c10::optional<at::Tensor>& g_idx, const c10::optional<at::Tensor>& bias,
                                      c10::optional<at::ScalarType> out_dtype = c10::nullopt);

/// The fused mixture-of-experts layer. x: [..., H]; topk_ids: int32 or int64 [T, k], -1 skips the slot; topk_weights:
/// floating [T, k]; w13_packed: uint8 [E, bytes], I2 x H; w2_packed: [E, bytes], H x I. I2: 2 * I (gated) or I.
/// group_size: -1 is channelwise. activation_kind: 0..8, and limit, alpha, beta, which have a value of the kind's own:
/// docs/numerics.md section 5. Returns the shape and type of x.
W4A8_EXPORT at::Tensor dynamic_4bit_int_moe(const at::Tensor& x, const at::Tensor& topk_ids,
                                            const at::Tensor& topk_weights, const at::Tensor& w13_packed,
                                            const at::Tensor& w2_packed, int64_t H, int64_t I, int64_t I2,
                                            int64_t group_size, bool apply_router_weight_on_input,
                                            int64_t activation_kind, c10::optional<double> limit = c10::nullopt,
                                            c10::optional<double> alpha = c10::nullopt,
                                            c10::optional<double> beta = c10::nullopt);

/// Selects top_k experts for each token from router_logits [T, E] (float32, bfloat16, float16): (topk_weights float32
/// [T, k], topk_ids int32 [T, k]), best first; ties go to the lower index. scoring_func: softmax, sigmoid,
/// sqrtsoftplus, sparsemixer or identity; renormalize: weights of a token are divided by their sum; num_expert_group,
/// topk_group: among the best groups only, both or neither; e_score_correction_bias: [E], for selecting only.
/// docs/numerics.md section 7.
W4A8_EXPORT std::tuple<at::Tensor, at::Tensor> topk_routing(
    const at::Tensor& router_logits, int64_t top_k, bool renormalize, c10::string_view scoring_func = "softmax",
    c10::optional<int64_t> num_expert_group = c10::nullopt, c10::optional<int64_t> topk_group = c10::nullopt,
    double routed_scaling_factor = 1.0, const c10::optional<at::Tensor>& e_score_correction_bias = c10::nullopt);

/// Writes the last tokens of sequences to a paged cache of keys and values. key [T, KV, D], value [T, KV, V] (float32,
/// bfloat16, float16; D and V multiples of 16 up to 512); cache: uint8 or int8 [pages, KV, bytes], whole blocks of 64
/// tokens; block_table: int32 [B, W], the pages of each sequence in order; seq_lens: int32 [B], tokens of each sequence
/// including these; query_start_loc: int32 [B + 1], where the tokens of each sequence are in key. kind: "int8",
/// "bfloat16", or "latent": D up to 576, and value is key[..., :V], V below D. window: as in paged_attention.
/// docs/numerics.md section 9.
W4A8_EXPORT void paged_attention_write(const at::Tensor& key, const at::Tensor& value, at::Tensor& cache,
                                       const at::Tensor& block_table, const at::Tensor& seq_lens,
                                       const at::Tensor& query_start_loc, c10::string_view kind = "int8",
                                       int64_t window = 0);

/// Attention over such a cache. The tokens of query are the last ones of each sequence and are in the cache already.
/// query: [T, H, D], H a multiple of KV; returns [T, H, V] of query's type. scale: factor of the scores. value_size: V,
/// if it is not D. causal: a token sees itself and the tokens before it; else its whole sequence. window: a token sees
/// only so many of these tokens, the last ones, itself included (not causal: to both sides); 0: all.
/// soft_cap: scores become cap * tanh(score / cap); 0: none. sinks: floating [H], a score without a value. chunk:
/// causal; sequences are cut into runs of so many tokens, and a token sees its own; 0: they are not cut.
W4A8_EXPORT at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& cache, const at::Tensor& block_table,
                                       const at::Tensor& seq_lens, const at::Tensor& query_start_loc, double scale,
                                       c10::string_view kind = "int8", c10::optional<int64_t> value_size = c10::nullopt,
                                       bool causal = true, int64_t window = 0, double soft_cap = 0.0,
                                       const c10::optional<at::Tensor>& sinks = c10::nullopt, int64_t chunk = 0);

/// codes, scales, zero_points (empty unless asked for): what dyn_quant_pack_4bit_weight takes.
using RoundedTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// Rounds float weights [N, K] or [E, N, K] (float64, float32, bfloat16, float16; finite) to codes, block_size of them
/// to a scale, as dyn_quant_pack_4bit_weight takes them. values: int4 (also with zero_points), e2m1, int6 or int8.
/// scale_dtype: float32 (the default) or bfloat16, to which scales are rounded before codes are chosen. effort: 0, a
/// rule for each group; 1 or 2, scales and zero points are searched for. importance: floating [K] or [E, K], what
/// squared errors count. docs/quantization.md.
W4A8_EXPORT RoundedTensors round_weights(const at::Tensor& weights, int64_t block_size,
                                         c10::string_view values = "int4", bool zero_points = false,
                                         c10::optional<at::ScalarType> scale_dtype = c10::nullopt, int64_t effort = 2,
                                         const c10::optional<at::Tensor>& importance = c10::nullopt);

}  // namespace w4a8
