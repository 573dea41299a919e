"""The operators that make packed weights and read them. Part of :mod:`w4a8.ops`."""

from typing import Any, NamedTuple, TypedDict

import torch

from w4a8 import compiled
from w4a8.compiled import operator

DEFAULT_EFFORT = 2  # of round_weights


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


@operator
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


@operator
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


@operator
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


@operator
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


@operator
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


@operator
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


@operator
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


@operator
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
