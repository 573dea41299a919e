"""compressed-tensors (llm-compressor). Whether the inputs are int8 (W4A8) or not (W4A16) changes nothing here."""

from __future__ import annotations

import torch

from w4a8.core.matrix import Matrix4
from w4a8.core.nibbles import check_int4_range, to_nibbles
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
from w4a8.formats.words import CODES, codes, word_bytes


def _rest(
    tensors: Tensors, name: str, nibbles: torch.Tensor, zeros: torch.Tensor | None, group_size: int, symmetric: bool
) -> Matrix4:
    """The matrix, with everything that both formats share."""
    rows, features = nibbles.shape[0], 2 * nibbles.shape[1]
    groups = groups_of(features, group_size, name, "weight_scale")
    why = f"{features} x {rows} features in groups of {group_size}"
    scales = take_scales(tensors, name, "weight_scale", (rows, groups), why)
    if zeros is not None:
        expect_shape(zeros, name, "weight_zero_point", (rows, groups), why)
        zeros = checked_zeros(zeros, name, "weight_zero_point", symmetric)
    check_g_idx(tensors, name, "weight_g_idx", features, group_size)
    return Matrix4(nibbles, scales, zeros, "int4", take_bias(tensors, name, rows))


def from_int_quantized(tensors: Tensors, name: str, group_size: int, symmetric: bool) -> Matrix4:
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


def from_pack_quantized(tensors: Tensors, name: str, group_size: int, symmetric: bool) -> Matrix4:
    """A matrix in the format ``pack-quantized``.

        weight_packed       int32 [N, ceil(K/8)]     code i of column c: input feature 8 c + i
        weight_scale        [N, K/g]
        weight_zero_point   int32 [ceil(N/8), K/g]   code i of row r: output feature 8 r + i; may be missing
        weight_shape        int64 [2]: N, K
        weight_g_idx, bias  as in :func:`from_int_quantized`

    Args, Raises: as :func:`from_int_quantized`.
    """
    words = take(tensors, name, "weight_packed", (torch.int32,), 2)
    rows, features = (int(size) for size in _shape(tensors, name))
    groups_of(features, group_size, name, "weight_shape")
    why = f"{rows} x {features} features"
    expect_shape(words, name, "weight_packed", (rows, -(-features // CODES)), why)
    zeros = None
    if tensors.get("weight_zero_point") is not None or not symmetric:
        packed = take(tensors, name, "weight_zero_point", (torch.int32,), 2)
        expect_shape(packed, name, "weight_zero_point", (-(-rows // CODES), packed.shape[1]), why)
        zeros = codes(packed.T).T[:rows]
    nibbles = word_bytes(words)[:, : features // 2].contiguous()
    return _rest(tensors, name, nibbles, zeros, group_size, symmetric)


def _shape(tensors: Tensors, name: str) -> torch.Tensor:
    shape = take(tensors, name, "weight_shape", (torch.int64, torch.int32), 1)
    expect_shape(shape, name, "weight_shape", (2,), "rows and columns")
    return shape
