"""compressed-tensors (llm-compressor). Whether the inputs are int8 (W4A8) or not (W4A16) changes nothing here."""

from __future__ import annotations

import torch

from w4a8.core.kind import integers_of
from w4a8.core.matrix import Matrix
from w4a8.core.nibbles import check_int4_range, to_nibbles, word_bytes, word_codes
from w4a8.formats.matrix import (
    Tensors,
    check_g_idx,
    checked_zeros,
    expect_shape,
    groups_of,
    take,
    take_bias,
    take_scales,
)


def _rest(
    tensors: Tensors,
    name: str,
    stored: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    symmetric: bool,
    bits: int = 4,
) -> Matrix:
    """The matrix of nibbles, or of codes of 8 bits, with everything that both formats share."""
    rows, features = stored.shape[0], stored.shape[1] * 8 // bits
    groups = groups_of(features, group_size, name, "weight_scale")
    why = f"{features} x {rows} features in groups of {group_size}"
    scales = take_scales(tensors, name, "weight_scale", (rows, groups), why)
    if zeros is not None:
        expect_shape(zeros.shape, name, "weight_zero_point", (rows, groups), why)
        zeros = checked_zeros(zeros, name, "weight_zero_point", symmetric, bits)
    check_g_idx(tensors, name, "weight_g_idx", features, group_size)
    return Matrix(stored, scales, zeros, integers_of(bits), take_bias(tensors, name, rows))


def from_int_quantized(tensors: Tensors, name: str, group_size: int, symmetric: bool) -> Matrix:
    """A matrix in the format ``int-quantized``.

        weight              int8 [N, K] in [-8, 7]
        weight_scale        [N, K/g]
        weight_zero_point   int8 [N, K/g] in [-8, 7]; may be missing if symmetric
        weight_g_idx        int32 [K], the group of each input feature; may be missing
        bias                [N], may be missing

    Args:
        tensors: by these names.
        name: of the matrix, for errors.
        group_size: g, -1 for one group (``channel``).
        symmetric: the configuration says that there are no zero points.

    Raises:
        ValueError: a tensor is missing, has another dtype or shape, or values that this format does not have.
    """
    weight = take(tensors, name, "weight", (torch.int8,), 2)
    groups_of(weight.shape[1], group_size, name, "weight")
    check_int4_range(weight, f"{name}.weight")
    zeros = None
    if tensors.get("weight_zero_point") is not None or not symmetric:
        zeros = take(tensors, name, "weight_zero_point", (torch.int8,), 2).to(torch.int32) + 8
    return _rest(tensors, name, to_nibbles(weight), zeros, group_size, symmetric)


def from_pack_quantized(tensors: Tensors, name: str, group_size: int, symmetric: bool, bits: int = 4) -> Matrix:
    """A matrix in the format ``pack-quantized``.

        weight_packed       int32 [N, ceil(K/c)]     code i of column j: input feature c j + i (c = 32 / bits)
        weight_scale        [N, K/g]
        weight_zero_point   int32 [ceil(N/c), K/g]   code i of row r: output feature c r + i; may be missing
        weight_shape        int64 [2]: N, K
        weight_g_idx, bias  as in :func:`from_int_quantized`

    Args, Raises: as :func:`from_int_quantized`; ``bits`` of a code are 4 or 8.
    """
    in_word = 32 // bits
    words = take(tensors, name, "weight_packed", (torch.int32,), 2)
    shape = tensors.get("weight_shape")
    unknown = shape is not None and shape.is_meta
    rows, features = (len(words), in_word * words.shape[1]) if unknown else stated_shape(tensors, name)
    groups_of(features, group_size, name, "weight_shape")
    check_words(words.shape, name, rows, features, bits)
    zeros = None
    if tensors.get("weight_zero_point") is not None or not symmetric:
        packed = take(tensors, name, "weight_zero_point", (torch.int32,), 2)
        why = f"{rows} x {features} features"
        expect_shape(packed.shape, name, "weight_zero_point", (-(-rows // in_word), packed.shape[1]), why)
        zeros = word_codes(packed.T, bits).T[:rows]
    stored = word_bytes(words)[:, : features * bits // 8].contiguous()
    return _rest(tensors, name, stored, zeros, group_size, symmetric, bits)


def stated_shape(tensors: Tensors, name: str) -> tuple[int, int]:
    """(N, K), as ``weight_shape`` says, int64 or int32 [2].

    Raises:
        ValueError: it is missing, or another tensor than that.
    """
    shape = take(tensors, name, "weight_shape", (torch.int64, torch.int32), 1)
    expect_shape(shape.shape, name, "weight_shape", (2,), "rows and columns")
    return int(shape[0]), int(shape[1])


def check_words(words: tuple[int, ...], name: str, rows: int, features: int, bits: int) -> None:
    """Raises ValueError unless ``weight_packed``, of this shape, has words for that many codes, and no others."""
    expect_shape(words, name, "weight_packed", (rows, -(-features // (32 // bits))), f"{rows} x {features} features")
