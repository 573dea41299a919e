"""The operators of ``torch.ops.w4a8`` with names, types and documentation. The wrappers add no computation.

Common to all: an int4 value v in [-8, 7] is stored as the nibble v + 8, with a zero point z as v + z, an e2m1 number as
its four bits; ``block_size`` (``group_size``) is the number
of consecutive input features that share a scale: 16 or a multiple of 32, dividing ``in_features``, or ``in_features``
itself for channelwise scales. Every violation is a RuntimeError that names the argument, what was given and what was
expected.
"""

from enum import IntEnum
from typing import Any, NamedTuple, TypedDict

import torch

from w4a8 import compiled

# Of round_weights.
DEFAULT_EFFORT = 2
# Of paged_attention: sizes that heads can have, and tokens of a block of the cache, of which a page has whole ones.
HEAD_SIZES = range(16, 257, 16)
BLOCK_TOKENS = 64


class Activation(IntEnum):
    """``activation_kind`` of dynamic_4bit_int_moe. g is the gate half of w13, u the other half.

    0 to 3 are one formula, that of SWIGLU_OAI. Where none are given, limit, alpha and beta are infinity, 1 and 0; of
    SWIGLU_OAI 7, 1.702 and 1. The limit of SWIGLU_STEP is 7.
    """

    SILU_GATE_UP = 0  # SiLU(g) * u
    SILU_UP_GATE = 1  # SiLU(u) * g
    SILU = 2  # SiLU(g) * u, or SiLU(g) when ungated
    SWIGLU_OAI = 3  # c * sigmoid(alpha c) * (clamp(u, -limit, limit) + beta) with c = min(g, limit)
    SWIGLU_STEP = 4  # min(SiLU(g), limit) * clamp(u, -limit, limit)
    GELU = 5  # GELU(g) * u, by the normal distribution function
    GELU_TANH = 6  # GELU(g) * u, by its tanh approximation
    RELU2 = 7  # max(g, 0)^2 * u


class PackedHeader(TypedDict):
    """What a packed matrix says about itself."""

    version: int
    n: int  # out_features
    k: int  # in_features
    group: int  # equal to k when channelwise
    # "float32", "bfloat16", "float16", "e5m3" (float8 scales beside channel scales), "e8m0", "super" (int8 beside
    # super-scales)
    scale_dtype: str
    has_bias: bool
    values: str  # "int4", "e2m1", "int8", "iq4" or "int6"
    has_zero_points: bool
    has_minimums: bool
    activation_group: int  # values of k of a row of activations that share a scale; -1: the whole row
    bytes: int  # of the whole packed matrix


def dyn_quant_pack_4bit_weight(
    weights: torch.Tensor,
    scales_zeros: torch.Tensor,
    bias: torch.Tensor | None,
    block_size: int,
    in_features: int,
    out_features: int,
    *,
    zero_points: torch.Tensor | None = None,
    values: str = "int4",
    channel_scales: torch.Tensor | None = None,
    activation_group: int = -1,
    minimums: torch.Tensor | None = None,
    super_scales: torch.Tensor | None = None,
    super_minimums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Packs weights of 4, 6 or 8 bits, scales and bias into the layout every kernel reads (docs/packed_layout.md).

    Args:
        weights: uint8 [N, K/2], low nibble = even k, high nibble = odd k; or [E, N, K/2], a stack of experts. Of int8
            and int6 [N, K] or [E, N, K], a code a byte; of int6 0 to 63.
        scales_zeros: float32, bfloat16 or float16 [N, K / block_size] ([N, 1] channelwise), with a leading E for a
            stack; packed in the type given. With e2m1 half of a scale must be exact: one below 2**-125 (float16:
            2**-13) must be even in its last bit. With e2m1 in groups that are multiples of 32, more than one in a row,
            also float8_e8m0fnu, or its bits as uint8: 2**(b - 127), b from 0 to 254; 255 is its NaN, and refused.
        bias: floating point [N] ([E, N] for a stack), or None. Kept as float32.
        block_size: values of k per scale: in_features, or 16 or a multiple of 32 that divides it.
        in_features: K, even, at most 2**20; 2**19 with zero points, e2m1, iq4, int6 or int8. Of int8 and iq4 block_size
            is at most 2**16, with zero points 2**15, of int6 2**18.
        out_features: N.
        zero_points: uint8 of the shape of scales_zeros, 0 to 15: the value of a nibble n is (n - zero point) * scale.
            None: n - 8. Zero points that are all 8 mean the same, but take the room of any others: no value changes the
            size of what is returned. Of int8 0 to 255; None: n - 128.
        values: "int4"; or "e2m1": a nibble is a sign, two bits of exponent and one of mantissa, as in MXFP4: 0, 0.5,
            1, 1.5, 2, 3, 4, 6 and their negatives, without zero points; or "int8": codes have 8 bits;
            or "iq4": a nibble is an index of -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
            as in IQ4_NL and IQ4_XS of GGUF, without zero points and minimums; or "int6": codes have 6 bits, and n
            stands for n - 32, without zero points.
        channel_scales: floating point [N] ([E, N] for a stack), kept as float32: scales of two levels, as NVFP4 has.
            Then scales_zeros is float8_e4m3fn, or its bits as uint8, numbers without a sign, and a weight is multiplied
            by its scale and by the channel scale of its output feature. For a block_size of 16 alone, and int4 or e2m1.
        activation_group: how the operators that multiply quantize activations for this matrix. -1: asymmetrically, one
            scale for each row. 32, 64 or 128: symmetrically, one scale for so many values of k. That must divide
            block_size; in_features where block_size is 16 or in_features.
        minimums: of dtype and shape of scales_zeros, subtracted: a weight is scale * n - minimum (of int8 n - 128
            instead of n, of int6 n - 32). For int4, int6 and int8 without zero points, in groups of at most 256.
        super_scales: float16 [N, K / 256] ([E, N, K / 256]): scales of two levels, as the K-quants of GGUF have. Then
            scales_zeros is int8, and a scale is that times its super-scale. K is a multiple of 256 then, block_size 16,
            32, 64 or 128, and weights are iq4 or int6, or int4 or int8 without zero points.
        super_minimums: float16 of the shape of super_scales, for int8 minimums; together with both.

    Returns:
        uint8 [bytes], or [E, bytes]: row e is itself a valid packed matrix. The same on every machine and good for
        saving; any byte alignment is fine when it is loaded again.
    """
    op = torch.ops.w4a8.dyn_quant_pack_4bit_weight.default
    return op(
        weights,
        scales_zeros,
        bias,
        block_size,
        in_features,
        out_features,
        zero_points=zero_points,
        values=values,
        channel_scales=channel_scales,
        activation_group=activation_group,
        minimums=minimums,
        super_scales=super_scales,
        super_minimums=super_minimums,
    )


def dyn_quant_unpack_4bit_weight(
    packed_weights: torch.Tensor, block_size: int, in_features: int, out_features: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The exact inverse of dyn_quant_pack_4bit_weight for int4 without zero points; other kinds are refused.

    Args:
        packed_weights: uint8 [bytes] or [E, bytes].
        block_size, in_features, out_features: as given when packing.

    Returns:
        weights uint8 [N, K/2], scales [N, K / block_size] in the dtype they were packed with, and bias float32 [N], or
        [0] if there was none; all with a leading E for a stack.
    """
    return torch.ops.w4a8.dyn_quant_unpack_4bit_weight.default(packed_weights, block_size, in_features, out_features)


class UnpackedWeights(NamedTuple):
    """What dyn_quant_pack_4bit_weight was given. A tensor that was not has the shape [0]."""

    weights: torch.Tensor
    scales_zeros: torch.Tensor
    zero_points: torch.Tensor
    bias: torch.Tensor
    values: str
    channel_scales: torch.Tensor
    minimums: torch.Tensor
    super_scales: torch.Tensor
    super_minimums: torch.Tensor
    activation_group: int


def dyn_quant_unpack_any_4bit_weight(
    packed_weights: torch.Tensor, block_size: int, in_features: int, out_features: int
) -> UnpackedWeights:
    """The exact inverse of dyn_quant_pack_4bit_weight for every kind of weights.

    Args:
        packed_weights: uint8 [bytes] or [E, bytes], all of one kind.
        block_size, in_features, out_features: as given when packing.

    Returns:
        What was given when packing, bias and channel_scales as float32, float8 scales as uint8.
    """
    op = torch.ops.w4a8.dyn_quant_unpack_any_4bit_weight.default
    return UnpackedWeights(*op(packed_weights, block_size, in_features, out_features))


def dyn_quant_matmul_4bit(
    inp: torch.Tensor, packed_weights: torch.Tensor, block_size: int, in_features: int, out_features: int
) -> torch.Tensor:
    """``inp @ weights.T + bias`` with inp quantized to int8 on the fly, as the matrix says (docs/numerics.md).

    Args:
        inp: float32, bfloat16 or float16 [..., K], any number of leading dimensions, any strides, zero rows allowed.
        packed_weights: uint8 [bytes] of dyn_quant_pack_4bit_weight with the same three sizes.
        block_size, in_features, out_features: as given when packing.

    Returns:
        [..., N] in the dtype of inp. A row with a NaN or an infinity is all NaN and changes no other row.
    """
    return torch.ops.w4a8.dyn_quant_matmul_4bit.default(inp, packed_weights, block_size, in_features, out_features)


def dynamic_per_token_int8_quant(
    x: torch.Tensor, use_sym_quant: bool, bits: int, *, activation_group: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantizes each row of x to integers: ``x ~ (q - zero_point) * scale`` (docs/numerics.md, sections 1 and 6).

    Args:
        x: float32, bfloat16 or float16 [..., K]; zero rows allowed.
        use_sym_quant: to signed integers around zero, or to unsigned ones with a zero point.
        bits: 2 to 8.
        activation_group: -1, one scale for each row; or 32, 64 or 128 that divides K: one for so many values, as the
            operators that multiply quantize rows for a matrix packed with it. Symmetric and 8 bits alone.

    Returns:
        q [..., K], int8 when symmetric, else uint8; scale [..., 1] in the dtype of x, in groups float32
        [..., K / activation_group]; zero_point int32 [..., 1]: 0 when symmetric, else in [0, 2**bits - 1]. A row with a
        NaN or an infinity has q = 0 and scales of NaN.
    """
    op = torch.ops.w4a8.dynamic_per_token_int8_quant.default
    return op(x, use_sym_quant, bits, activation_group=activation_group)


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
        x_scale: floating point [..., 1]; in groups of 32, 64 or 128 [..., K / group], of which the last two bits of a
            float32 count as zeros. A packed weight must be packed for that group.
        x_zero: int32, int8 or int64 [..., 1], in the range of quant_x's dtype; for x_scale in groups zeros.
        weight: int32 [K/8, N] of any strides, nibble i of word j = value of k = 8 j + i, plus its zero point; or the
            uint8 [bytes] of dyn_quant_pack_4bit_weight. The int32 form is packed anew by each call; the bits are the
            same.
        weight_scale: float32, bfloat16 or float16 [K / group_size, N]. Not read when weight is packed, and may then be
            empty; as [0, N] it still tells Meta tensors (torch.compile) N.
        weight_zero_point: integers from 0 to 15: one, or [K / group_size, N]; 8 is symmetric. May be empty when weight
            is packed, and must be if what is packed is not int4 without zero points.
        group_size: values of k per scale, 16 or a multiple of 32 that divides K; -1 or K is channelwise.
        g_idx: None; act-order is not supported.
        bias: floating point [N], or None; added in float32.
        out_dtype: float16 (None), bfloat16 or float32.

    Returns:
        [..., N] of out_dtype.
    """
    op = torch.ops.w4a8.int4_gemm_w4a8.default
    return op(
        quant_x, x_scale, x_zero, weight, weight_scale, weight_zero_point, group_size, g_idx, bias, out_dtype=out_dtype
    )


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
        topk_ids: int32 or int64 [T, k], in [0, E). -1 is a slot that another rank holds: it contributes nothing.
        topk_weights: floating point [T, k].
        w13_packed: uint8 [E, bytes], packed with out_features = I2 and in_features = H.
        w2_packed: uint8 [E, bytes], packed with out_features = H and in_features = I.
        H: hidden size.
        I: intermediate size.
        I2: rows of w13: 2 * I (gated: rows [0, I) are the gate g, [I, 2I) are u) or I (ungated).
        group_size: block size of both weights; -1 is channelwise.
        apply_router_weight_on_input: the router weight multiplies the input row instead of the output.
        activation_kind: an Activation.
        limit: above 0, may be infinity; of kinds 0 to 4. None: the kind's own.
        alpha, beta: finite; of kinds 0 to 3.

    Returns:
        The shape and dtype of x. A token's bits depend on nothing but that token: not on the kernel, the number of
        threads, or the rest of the batch.
    """
    op = torch.ops.w4a8.dynamic_4bit_int_moe.default
    how = (H, I, I2, group_size, apply_router_weight_on_input, int(activation_kind))
    return op(x, topk_ids, topk_weights, w13_packed, w2_packed, *how, limit=limit, alpha=alpha, beta=beta)


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

    Experts are selected by their logits, or with a bias by score + bias. Between equal ones the lower index wins; a NaN
    counts as the largest.

    Args:
        router_logits: float32, bfloat16 or float16 [T, E]; computed with as float32; zero rows allowed.
        top_k: experts per token, 1 to E.
        renormalize: divide the weights of a token by their sum.
        scoring_func: "softmax" (over all experts; with renormalize over the selected), "sigmoid", "sqrtsoftplus" or
            "identity".
        num_expert_group: select among the best groups of neighbouring experts only: how many groups there are, a
            divisor of E. A group counts as its best expert, with a bias as the sum of its two best. None: no groups.
        topk_group: how many groups are kept; their experts are at least top_k. None without num_expert_group.
        routed_scaling_factor: multiplies the weights, last.
        e_score_correction_bias: floating point [E], added to the scores for selecting only, or None.

    Returns:
        topk_weights float32 [T, top_k] and topk_ids int32 [T, top_k], in descending order of what they were selected
        by. A token's bits depend on nothing but that token: not on the CPU, the number of threads, or the batch.
    """
    op = torch.ops.w4a8.topk_routing.default
    return op(
        router_logits,
        top_k,
        renormalize,
        scoring_func,
        num_expert_group,
        topk_group,
        routed_scaling_factor,
        e_score_correction_bias,
    )


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

    A token is quantized once, when it is written: the cache is the same however its tokens were spread over calls.

    Args:
        key: float32, bfloat16 or float16 [T, KV, D], D a multiple of 16 up to 256, behind the rotary embedding.
        value: [T, KV, V] of the same dtype, V likewise.
        cache: uint8 or int8 [pages, KV, bytes], changed in place. bytes: attention_block_bytes(kind, D, V) for each 64
            tokens of a page. What was in it before does not matter.
        block_table: int32 [B, W]: token t of sequence b is in page block_table[b, t // tokens of a page].
        seq_lens: int32 [B], the tokens of each sequence, those of this call included.
        query_start_loc: int32 [B + 1]: the tokens of sequence b are key[query_start_loc[b] : query_start_loc[b + 1]],
            its last ones.
        kind: "int8" or "bfloat16".
        window: what paged_attention will be called with.
    """
    op = torch.ops.w4a8.paged_attention_write.default
    op(key, value, cache, block_table, seq_lens, query_start_loc, kind=kind, window=window)


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
) -> torch.Tensor:
    """Attention of the last tokens of sequences over a paged cache that has them already.

    The bits of a row depend on nothing but its sequence: not on the other rows, on chunks or on the number of threads.

    Args:
        query: float32, bfloat16 or float16 [T, H, D]; query head h uses key head h // (H / KV).
        cache, block_table, seq_lens, query_start_loc, kind: as for paged_attention_write.
        scale: scores are query times key times this.
        value_size: V; D if None.
        causal: a token sees itself and those before; otherwise all of its sequence.
        window: of these the last ones alone, itself included; not causal: so many to both sides. 0: all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap). 0: none.
        sinks: floating point [H], a score in the softmax that has no value, or None.

    Returns:
        [T, H, V] of the dtype of query. NaN for a row that sees a key or value that is not finite.
    """
    op = torch.ops.w4a8.paged_attention.default
    return op(
        query,
        cache,
        block_table,
        seq_lens,
        query_start_loc,
        scale,
        kind=kind,
        value_size=value_size,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )


def attention_block_bytes(kind: str, key_size: int, value_size: int) -> int:
    """Bytes of 64 tokens of one key head in the cache of paged_attention.

    Raises:
        ValueError: kind is neither "int8" nor "bfloat16".
    """
    if kind == "bfloat16":
        return BLOCK_TOKENS * 2 * (key_size + value_size)
    if kind != "int8":
        raise ValueError(f"kind is {kind!r}, expected 'int8' or 'bfloat16'")
    reference = (2 * key_size + 63) // 64 * 64
    return BLOCK_TOKENS * (key_size + value_size + 8) + reference


def round_weights(
    weights: torch.Tensor,
    block_size: int,
    *,
    values: str = "int4",
    zero_points: bool = False,
    scale_dtype: torch.dtype | None = None,
    effort: int = DEFAULT_EFFORT,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds float weights to codes and scales, as :func:`dyn_quant_pack_4bit_weight` takes them.

    Scales are rounded to their type before codes are chosen. docs/quantization.md, "Rounding".

    Args:
        weights: float32, bfloat16, float16 or float64 (rounded to float32) [N, K], or [E, N, K] for a stack of experts;
            finite.
        block_size: values of k per scale: K, or 16 or a multiple of 32 that divides K.
        values: ``int4``, ``e2m1``, ``int6`` or ``int8``.
        zero_points: a zero point for each group, of int4.
        scale_dtype: float32 (None) or bfloat16.
        effort: 0, a rule for each group; 1 or 2, scales and zero points with a smaller error are searched for, which is
            never more than the rule's.
        importance: floating point [K], or [E, K]: what the squared error of a weight counts in the search; 0 or more.
            None, and zeros in all of a group: the weight's magnitude plus the root mean square of its group.

    Returns:
        codes uint8 [..., N, K/2] (int6 and int8: [..., N, K]), scales [..., N, K/block_size], zero_points uint8 of the
        shape of scales, or [0] without. The bits depend neither on the CPU nor on the number of threads.
    """
    op = torch.ops.w4a8.round_weights.default
    return op(
        weights,
        block_size,
        values=values,
        zero_points=zero_points,
        scale_dtype=scale_dtype,
        effort=effort,
        importance=importance,
    )


def read_header(data: Any) -> PackedHeader:
    """What a packed matrix says about itself.

    Args:
        data: one packed matrix: a contiguous uint8 CPU tensor [bytes], or any object with the buffer protocol (bytes,
            numpy array, memoryview, mmap).

    Raises:
        ValueError: it is not a packed matrix of this version, or it is truncated; says which field is wrong.
    """
    if isinstance(data, torch.Tensor):
        data = data.numpy()
    return compiled.read_header(data)


# Names of the wrappers above that are operators, whose arguments they have.
OPERATORS = (
    "dyn_quant_pack_4bit_weight",
    "dyn_quant_unpack_4bit_weight",
    "dyn_quant_unpack_any_4bit_weight",
    "dyn_quant_matmul_4bit",
    "dynamic_per_token_int8_quant",
    "int4_gemm_w4a8",
    "dynamic_4bit_int_moe",
    "topk_routing",
    "paged_attention",
    "paged_attention_write",
    "round_weights",
)
