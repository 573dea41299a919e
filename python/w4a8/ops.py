"""The operators of ``torch.ops.w4a8`` with names, types and documentation. The wrappers add no computation.

An int4 value v in [-8, 7] is stored as the nibble v + 8, or v + z with a zero point z. An e2m1 number is stored as its
four bits. ``block_size`` (``group_size``) is the number of consecutive input features that share a scale:
``in_features`` for channelwise scales, else 16 or a multiple of 32 that divides ``in_features``. An operator refuses an
argument with a RuntimeError that names the argument, the given and the expected value.
"""

from enum import IntEnum

import torch

from w4a8.compiled import operator
from w4a8.linear_attention import gated_delta, short_conv, state_space
from w4a8.packing import (
    PackedHeader,
    dequantize_rows,
    dyn_quant_pack_4bit_weight,
    dyn_quant_unpack_4bit_weight,
    dyn_quant_unpack_any_4bit_weight,
    form_bytes,
    form_problem,
    pack_blocks,
    pack_words,
    read_header,
    round_weights,
)

__all__ = [
    "Activation",
    "PackedHeader",
    "attention_block_bytes",
    "dequantize_rows",
    "dyn_quant_matmul_4bit",
    "dyn_quant_pack_4bit_weight",
    "dyn_quant_unpack_4bit_weight",
    "dyn_quant_unpack_any_4bit_weight",
    "dynamic_4bit_int_moe",
    "dynamic_per_token_int8_quant",
    "form_bytes",
    "form_problem",
    "gated_delta",
    "int4_gemm_w4a8",
    "pack_blocks",
    "pack_words",
    "paged_attention",
    "paged_attention_write",
    "read_header",
    "round_weights",
    "short_conv",
    "state_space",
    "topk_routing",
]
# The wrappers that call the operator of their name, with the same arguments.
OPERATORS = [name for name in __all__ if name.islower() and name not in ("attention_block_bytes", "read_header")]

HEAD_SIZES = range(16, 513, 16)  # that paged_attention takes
STATE_SIZES = range(16, 257, 16)  # that the operators of linear attention take
LATENT_SIZES = range(32, 577, 16)  # of keys, in a cache of kind "latent"
BLOCK_TOKENS = 64  # tokens of a block in the cache of paged_attention; a page has whole blocks


class Activation(IntEnum):
    """``activation_kind`` of dynamic_4bit_int_moe. g is the gate half of w13, u the up half.

    Kinds 0 to 3 compute the formula of SWIGLU_OAI. The defaults of limit, alpha and beta are 7, 1.702 and 1 for
    SWIGLU_OAI; infinity, 1 and 0 for kinds 0 to 2; alpha and beta of XIELU are 0.8. The default limit of SWIGLU_STEP is
    7. Every kind has an ungated form (docs/numerics.md, section 5).
    """

    SILU_GATE_UP = 0  # SiLU(g) * u
    SILU_UP_GATE = 1  # SiLU(u) * g
    SILU = 2  # SiLU(g) * u, or SiLU(g) when ungated
    SWIGLU_OAI = 3  # c * sigmoid(alpha c) * (clamp(u, -limit, limit) + beta) with c = min(g, limit)
    SWIGLU_STEP = 4  # min(SiLU(g), limit) * clamp(u, -limit, limit)
    GELU = 5  # GELU(g) * u, by the normal distribution function
    GELU_TANH = 6  # GELU(g) * u, by its tanh approximation
    RELU2 = 7  # max(g, 0)^2 * u
    XIELU = 8  # (alpha g^2 + g / 2 above 0, else beta (expm1(min(g, -1e-6)) - g) + g / 2) * u


@operator
def dyn_quant_matmul_4bit(
    inp: torch.Tensor, packed_weights: torch.Tensor, block_size: int, in_features: int, out_features: int
) -> torch.Tensor:
    """``inp @ weights.T + bias`` with inp quantized to int8 by the matrix's activation_group (docs/numerics.md).

    Args:
        inp: float32, bfloat16 or float16 [..., K], any number of leading dimensions, any strides, zero rows allowed.
        packed_weights: uint8 [bytes] of dyn_quant_pack_4bit_weight with the same three sizes.
        block_size, in_features, out_features: as given when packing.

    Returns:
        [..., N] in the dtype of inp. A row with a NaN or an infinity becomes a row of NaN and changes no other row.
    """


@operator
def dynamic_per_token_int8_quant(
    x: torch.Tensor, use_sym_quant: bool, bits: int, *, activation_group: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantizes each row of x to integers: ``x ~ (q - zero_point) * scale`` (docs/numerics.md, sections 1 and 6).

    Args:
        x: float32, bfloat16 or float16 [..., K]; zero rows allowed.
        use_sym_quant: True: signed integers around zero; False: unsigned integers with a zero point.
        bits: 2 to 8.
        activation_group: -1: one scale for each row. 32, 64 or 128 that divides K: one scale for so many values, as for
            a matrix packed with this activation_group. Then use_sym_quant must be True and bits 8.

    Returns:
        q [..., K], int8 when symmetric, else uint8; scale [..., 1] in the dtype of x, in groups float32
        [..., K / activation_group]; zero_point int32 [..., 1]: 0 when symmetric, else in [0, 2**bits - 1]. A row with a
        NaN or an infinity has q = 0 and scales of NaN.
    """


@operator
def int4_gemm_w4a8(
    quant_x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor,
    group_size: int,
    g_idx: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``((quant_x - x_zero) * x_scale) @ W + bias`` for activations that are quantized already.

    Args:
        quant_x: int8 or uint8 [..., K], as dynamic_per_token_int8_quant gives it.
        x_scale: floating point [..., 1], or [..., K / group] for groups of 32, 64 or 128. In groups the last two bits
            of a float32 count as zeros, and a packed weight must be packed with this activation_group.
        x_zero: int32, int8 or int64 [..., 1], in the range of quant_x's dtype; zeros for x_scale in groups.
        weight: int32 [K/8, N] of any strides, nibble i of word j = value of k = 8 j + i, plus its zero point; or the
            uint8 [bytes] of dyn_quant_pack_4bit_weight. Each call packs the int32 form again. Both forms give the
            same bits.
        weight_scale: float32, bfloat16 or float16 [K / group_size, N]. Not read for a packed weight, and may
            then be empty. The shape [0, N] tells Meta tensors (torch.compile) N.
        weight_zero_point: integers from 0 to 15: one, or [K / group_size, N]; 8 is symmetric. May be empty for a
            packed weight; must be empty unless the packed weight is int4 without zero points.
        group_size: values of k per scale, 16 or a multiple of 32 that divides K; -1 or K is channelwise.
        g_idx: None; act-order is not supported.
        bias: floating point [N], or None; added in float32.
        out_dtype: float16 (None), bfloat16 or float32.

    Returns:
        [..., N] of out_dtype.
    """


def dynamic_4bit_int_moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13_packed: torch.Tensor,
    w2_packed: torch.Tensor,
    H: int,
    I: int,
    I2: int,
    group_size: int,
    apply_router_weight_on_input: bool,
    activation_kind: int,
    *,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
) -> torch.Tensor:
    """A mixture-of-experts layer: ``out[t] = sum_j topk_weights[t, j] * w2[e](act(w13[e](x[t])))``, e = topk_ids[t, j].

    Args:
        x: float32, bfloat16 or float16 [..., H], T rows in all; zero rows allowed.
        topk_ids: int32 or int64 [T, k], in [0, E). -1: the expert is on another rank, the slot adds nothing.
        topk_weights: floating point [T, k].
        w13_packed: uint8 [E, bytes], packed with out_features = I2 and in_features = H.
        w2_packed: uint8 [E, bytes], packed with out_features = H and in_features = I.
        H: hidden size.
        I: intermediate size.
        I2: rows of w13: 2 * I (gated: rows [0, I) are the gate g, [I, 2I) are u) or I (ungated).
        group_size: block size of both weights; -1: both are channelwise; 0: as each packed tensor says.
        apply_router_weight_on_input: the router weight multiplies the input row instead of the output.
        activation_kind: an Activation.
        limit: above 0 or infinity; for kinds 0 to 4. None: the default of the kind.
        alpha, beta: finite; for kinds 0 to 3. None: the default of the kind.

    Returns:
        The shape and dtype of x. A token's bits depend on that token alone, not on the kernel, the number of threads,
        or the rest of the batch.
    """
    op = torch.ops.w4a8.dynamic_4bit_int_moe.default
    how = (H, I, I2, group_size, apply_router_weight_on_input, int(activation_kind))
    return op(x, topk_ids, topk_weights, w13_packed, w2_packed, *how, limit=limit, alpha=alpha, beta=beta)


@operator
def topk_routing(
    router_logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    scoring_func: str = "softmax",
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects the experts of each token, with their weights (docs/numerics.md, section 7).

    Experts are selected by their logits, or by score + bias if there is a bias. Between equal values the lower index
    wins. NaN counts as the largest value.

    Args:
        router_logits: float32, bfloat16 or float16 [T, E]; widened to float32; zero rows allowed.
        top_k: experts per token, 1 to E.
        renormalize: divide the weights of a token by their sum.
        scoring_func: "softmax" (over all experts, with renormalize over the selected ones), "sigmoid", "sqrtsoftplus",
            "identity", or "sparsemixer" (Phi-3.5-MoE; without the arguments renormalize to topk_group and bias).
        num_expert_group: number of groups of neighbouring experts, a divisor of E; None: no groups. The value of a
            group is that of its best expert; with a bias, the sum of its two best.
        topk_group: number of best groups to select from, with at least top_k experts. None without num_expert_group.
        routed_scaling_factor: multiplies the weights, last.
        e_score_correction_bias: floating point [E], added to the scores for selecting only, or None.

    Returns:
        topk_weights float32 [T, top_k] and topk_ids int32 [T, top_k], in descending order of the value that selected
        them. A token's bits depend on that token alone, not on the CPU, the number of threads, or the batch.
    """


@operator
def paged_attention_write(
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    kind: str = "int8",
    window: int = 0,
) -> None:
    """Writes the last tokens of sequences to a paged cache of keys and values (docs/numerics.md section 9).

    A token is quantized once, when it is written: the split of tokens into calls does not change the cache.

    Args:
        key: float32, bfloat16 or float16 [T, KV, D], D a multiple of 16 up to 512, after the rotary embedding.
        value: [T, KV, V] of the same dtype, V a multiple of 16 up to 512. kind "latent": key[..., :V], V less than D,
            D up to 576.
        cache: uint8 or int8 [pages, KV, bytes], changed in place. bytes: attention_block_bytes(kind, D, V) for each 64
            tokens of a page. A new cache may hold any bytes.
        block_table: int32 [B, W]: token t of sequence b is in page block_table[b, t // tokens of a page].
        seq_lens: int32 [B], the tokens of each sequence, with the tokens of this call.
        query_start_loc: int32 [B + 1]: key[query_start_loc[b] : query_start_loc[b + 1]] are the last tokens of
            sequence b.
        kind: "int8", "bfloat16", or "latent": bfloat16 keys whose first V channels are the values, as multi-head latent
            attention has them (DeepSeek: D is 576, V 512).
        window: the window that paged_attention will get for this cache.
    """


@operator
def paged_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    *,
    kind: str = "int8",
    value_size: int | None = None,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    chunk: int = 0,
) -> torch.Tensor:
    """Attention of the last tokens of sequences over a paged cache, to which these tokens are already written.

    The bits of a row depend on its sequence alone, not on other rows, on chunks or on the number of threads.

    Args:
        query: float32, bfloat16 or float16 [T, H, D]; query head h uses key head h // (H / KV).
        cache, block_table, seq_lens, query_start_loc, kind: as for paged_attention_write.
        scale: a score is query times key times scale.
        value_size: V; None: D. kind "latent": required, less than D.
        causal: a token sees itself and the tokens before; otherwise all tokens of its sequence.
        window: a token sees itself and window - 1 tokens before (not causal: window - 1 to both sides). 0: all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); up to 2**127. 0: none.
        sinks: floating point [H], one more score in the softmax of each head, without a value; or None.
        chunk: causal alone: sequences are cut into runs of so many tokens, and a token sees its own. 0: not cut.

    Returns:
        [T, H, V] of the dtype of query. NaN for a row that sees a key or value that is not finite.
    """


def attention_block_bytes(kind: str, key_size: int, value_size: int) -> int:
    """Bytes of 64 tokens of one key head in the cache of paged_attention.

    Raises:
        ValueError: kind is not "int8", "bfloat16" or "latent".
    """
    if kind in ("bfloat16", "latent"):
        return BLOCK_TOKENS * 2 * (key_size + (value_size if kind == "bfloat16" else 0))
    if kind != "int8":
        raise ValueError(f"kind is {kind!r}, expected 'int8', 'bfloat16' or 'latent'")
    reference = (2 * key_size + 63) // 64 * 64
    return BLOCK_TOKENS * (key_size + value_size + 8) + reference
