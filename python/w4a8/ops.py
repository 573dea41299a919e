"""The operators of ``torch.ops.w4a8`` with names, types and documentation. The wrappers add no computation.

An int4 value v in [-8, 7] is stored as the nibble v + 8, or v + z with a zero point z. An e2m1 number is stored as its
four bits. ``block_size`` (``group_size``) is the number of consecutive input features that share a scale:
``in_features`` for channelwise scales, else 16 or a multiple of 32 that divides ``in_features``. An operator refuses an
argument with a RuntimeError that names the argument, the given and the expected value.
"""

from enum import IntEnum
from typing import Any, NamedTuple, TypedDict

import torch

from w4a8 import compiled
from w4a8.linear_attention import gated_delta, short_conv, state_space

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

DEFAULT_EFFORT = 2  # of round_weights
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


class PackedHeader(TypedDict):
    """The header of a packed matrix."""

    version: int
    n: int  # out_features
    k: int  # in_features
    group: int  # values of k that share a scale; k when channelwise
    # "float32", "bfloat16", "float16", "e5m3" (float8 scales beside channel scales), "e8m0", "super" (int8 beside
    # super-scales)
    scale_dtype: str
    has_bias: bool
    values: str  # "int4", "e2m1", "int8", "iq4" or "int6"
    has_zero_points: bool
    has_minimums: bool
    activation_group: int  # values of k that share a scale in a row of activations; -1: the whole row
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
        weights: uint8 [N, K/2], low nibble = even k, high nibble = odd k; or [E, N, K/2], a stack of experts. int8
            and int6: [N, K] or [E, N, K], one code a byte; int6 codes are 0 to 63.
        scales_zeros: float32, bfloat16 or float16 [N, K / block_size] ([N, 1] channelwise), with a leading E for a
            stack. Packed scales keep this type. e2m1 needs the exact half of each scale: the last bit of a scale below
            2**-125 (float16: 2**-13) must be 0. e2m1 in groups of a multiple of 32, several in a row, also takes
            float8_e8m0fnu, or its bits as uint8: b from 0 to 254 is 2**(b - 127). 255 is NaN and refused.
        bias: floating point [N] ([E, N] for a stack), or None. Kept as float32.
        block_size: values of k per scale: in_features, or 16 or a multiple of 32 that divides in_features.
            At most 2**16 for int8 and iq4, 2**15 for int8 with zero points, 2**18 for int6.
        in_features: K, even, at most 2**20; 2**19 with zero points, minimums, e2m1, iq4, int6 or int8.
        out_features: N.
        zero_points: uint8 of the shape of scales_zeros, 0 to 15 (int8: 0 to 255): a code n stands for
            (n - zero point) * scale. None: zero points of 8 (int8: 128). Given zero points take room even if all are 8:
            the size of the result does not depend on values.
        values: "int4"; "int8": codes have 8 bits; "int6": codes have 6 bits, n stands for n - 32, without zero points;
            "e2m1": a nibble is a sign, two bits of exponent and one of mantissa, as in MXFP4: 0, 0.5, 1, 1.5, 2, 3, 4,
            6 and their negatives, without zero points and minimums; "iq4": a nibble is an index of -127, -104, -83,
            -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113, as in IQ4_NL and IQ4_XS of GGUF, without zero
            points and minimums.
        channel_scales: floating point [N] ([E, N] for a stack), kept as float32: the second level of scales, as in
            NVFP4. A weight is multiplied by its scale and by the channel scale of its output feature. scales_zeros is
            then float8_e4m3fn, or its bits as uint8, without signs. For int4 or e2m1 in groups of 16, several in a row.
        activation_group: how the operators that multiply quantize activations for this matrix. -1: asymmetrically, one
            scale for each row. 32, 64 or 128: symmetrically, one scale for so many values of k. activation_group must
            divide block_size, or in_features where block_size is 16 or in_features.
        minimums: of dtype and shape of scales_zeros. A weight is scale * n - minimum (int8: n - 128 instead of n,
            int6: n - 32). For int4, int6 and int8 without zero points, in groups of at most 256, not channelwise.
        super_scales: float16 [N, K / 256] ([E, N, K / 256]): the second level of scales, as in GGUF's K-quants.
            scales_zeros is then int8, and a scale is the int8 number times its super-scale. K must be a multiple of
            256, block_size 16, 32, 64 or 128, and weights iq4, int6, or int4 or int8 without zero points.
        super_minimums: float16 of the shape of super_scales. Given if and only if super_scales and minimums are.

    Returns:
        uint8 [bytes], or [E, bytes]: row e is itself a valid packed matrix. The bytes are the same on every machine and
        can be saved. A loaded tensor may have any byte alignment.
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


def pack_blocks(
    packed: torch.Tensor,
    blocks: torch.Tensor,
    bias: torch.Tensor | None,
    type: str,
    first_row: int,
    in_features: int,
    out_features: int,
    *,
    scale_dtype: torch.dtype | None = None,
    activation_group: int = -1,
) -> None:
    """Packs rows of a GGUF file as they are: the bytes that dyn_quant_pack_4bit_weight makes of their codes and scales.

    Args:
        packed: uint8 [bytes], contiguous, of the whole packed matrix, changed in place: the rows, and with row 0 the
            header.
        blocks: uint8 [rows, in_features / weights of a block * bytes of a block], rows at any distance.
        bias: floating point [rows], or None, for all rows of the matrix alike.
        type: ggml's name of a type in w4a8.formats.gguf_blocks, other than NVFP4.
        first_row: row of the matrix that the first one of blocks is, a multiple of 16.
        in_features, out_features: K and N of the matrix. rows is a multiple of 16, or ends at N.
        scale_dtype: for types with float16 scales, the type to pack them in: float16 (None) or bfloat16, which must
            hold each scale and minimum exactly.
        activation_group: as of dyn_quant_pack_4bit_weight.
    """
    how = {"scale_dtype": scale_dtype, "activation_group": activation_group}
    op = torch.ops.w4a8.pack_blocks.default
    op(packed, blocks, bias, type, first_row, in_features, out_features, **how)


def pack_words(
    packed: torch.Tensor,
    words: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    zero_points: torch.Tensor | None,
    order: str,
    first_row: int,
    block_size: int,
    in_features: int,
    out_features: int,
    *,
    values: str = "int4",
    activation_group: int = -1,
) -> None:
    """Packs rows of GPTQ's or AWQ's words: the bytes that dyn_quant_pack_4bit_weight makes of their codes.

    Args:
        packed, first_row, in_features, out_features: as of pack_blocks; in_features is a multiple of 8.
        words: int32, rows at any distance. "gptq": [in_features / codes in a word, rows], code i of a word in bits
            4 i (int8: 8 i); "awq": [in_features, rows / 8], rows of a word in the order 0, 2, 4, 6, 1, 3, 5, 7.
        scales, zero_points: [rows, groups], as dyn_quant_pack_4bit_weight takes them; float scales alone.
        bias: floating point [rows], or None, for all rows of the matrix alike.
        order: "gptq" or "awq".
        block_size, activation_group: as of dyn_quant_pack_4bit_weight.
        values: "int4", or of "gptq" "int8".
    """
    how = {"values": values, "activation_group": activation_group}
    sizes = first_row, block_size, in_features, out_features
    torch.ops.w4a8.pack_words.default(packed, words, scales, bias, zero_points, order, *sizes, **how)


def dyn_quant_unpack_4bit_weight(
    packed_weights: torch.Tensor, block_size: int, in_features: int, out_features: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of dyn_quant_pack_4bit_weight for int4 with one level of scales, without zero points and minimums.

    Args:
        packed_weights: uint8 [bytes] or [E, bytes].
        block_size, in_features, out_features: as given when packing.

    Returns:
        weights uint8 [N, K/2], scales [N, K / block_size] in the dtype given when packing, and bias float32 [N]; all
        with a leading E for a stack. Without a bias, [0].
    """
    return torch.ops.w4a8.dyn_quant_unpack_4bit_weight.default(packed_weights, block_size, in_features, out_features)


def form_problem(
    block_size: int,
    in_features: int,
    out_features: int,
    *,
    values: str = "int4",
    zero_points: bool = False,
    minimums: bool = False,
    scale_dtype: str = "float32",
    activation_group: int = -1,
) -> str:
    """Why the operators cannot run matrices of a form, by the check that packing and multiplying begin with.

    Args:
        block_size, in_features, out_features, values, activation_group: as in dyn_quant_pack_4bit_weight.
        zero_points, minimums: whether the matrix has them.
        scale_dtype: as in :class:`PackedHeader`.

    Returns:
        The argument, the given and the expected value; "" if the operators can.
    """
    op = torch.ops.w4a8.form_problem.default
    how = {"values": values, "zero_points": zero_points, "minimums": minimums, "scale_dtype": scale_dtype}
    return op(block_size, in_features, out_features, **how, activation_group=activation_group)


def form_bytes(
    block_size: int,
    in_features: int,
    out_features: int,
    *,
    values: str = "int4",
    zero_points: bool = False,
    minimums: bool = False,
    scale_dtype: str = "float32",
    activation_group: int = -1,
) -> int:
    """Bytes of a packed matrix of a form; arguments as in :func:`form_problem`. A bias changes nothing."""
    op = torch.ops.w4a8.form_bytes.default
    how = {"values": values, "zero_points": zero_points, "minimums": minimums, "scale_dtype": scale_dtype}
    return op(block_size, in_features, out_features, **how, activation_group=activation_group)


class UnpackedWeights(NamedTuple):
    """The arguments of dyn_quant_pack_4bit_weight. A tensor that was not given has the shape [0]."""

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
        The arguments given when packing; bias and channel_scales as float32, float8 scales as uint8.
    """
    op = torch.ops.w4a8.dyn_quant_unpack_any_4bit_weight.default
    return UnpackedWeights(*op(packed_weights, block_size, in_features, out_features))


def dequantize_rows(
    packed_weights: torch.Tensor,
    rows: torch.Tensor,
    in_features: int,
    out_features: int,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Rows of a packed matrix as numbers: the lookup of an embedding.

    Args:
        packed_weights: uint8 [bytes] of a matrix of every kind.
        rows: int64 or int32 [...], numbers in [0, out_features), in any order.
        in_features: K.
        out_features: N, or more: numbers from N on are rows of zeros, such as the padding of a vocabulary.
        dtype: float32 (the default), bfloat16 or float16.

    Returns:
        [..., K]: each weight as :class:`w4a8.core.matrix.Matrix` has it, in float32, then rounded to ``dtype``.
    """
    op = torch.ops.w4a8.dequantize_rows.default
    return op(packed_weights, rows, in_features, out_features, dtype=dtype)


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
    return torch.ops.w4a8.dyn_quant_matmul_4bit.default(inp, packed_weights, block_size, in_features, out_features)


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
        ValueError: kind is not "int8", "bfloat16" or "latent".
    """
    if kind in ("bfloat16", "latent"):
        return BLOCK_TOKENS * 2 * (key_size + (value_size if kind == "bfloat16" else 0))
    if kind != "int8":
        raise ValueError(f"kind is {kind!r}, expected 'int8', 'bfloat16' or 'latent'")
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
        zero_points: a zero point for each group; int4 alone.
        scale_dtype: float32 (None) or bfloat16.
        effort: 0: a rule for each group. 1 or 2: a search for scales and zero points with a smaller error. The error is
            never larger than the rule's.
        importance: floating point [K], or [E, K]: factor of a weight's squared error in the search; finite, 0 or more.
            If None, or zero in all of a group: the weight's magnitude plus the root mean square of its group.

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
    """The header of a packed matrix.

    Args:
        data: one packed matrix: a contiguous uint8 CPU tensor [bytes], or any object with the buffer protocol (bytes,
            numpy array, memoryview, mmap).

    Raises:
        ValueError: data is not a packed matrix of this version, or is truncated; names the wrong field.
    """
    if isinstance(data, torch.Tensor):
        data = data.numpy()
    return compiled.read_header(data)
