"""GPTQ (AutoGPTQ, GPTQModel)."""

from __future__ import annotations

import torch

from w4a8.core.matrix import Matrix4
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


def from_gptq(tensors: Tensors, name: str, group_size: int, symmetric: bool, version: int = 1) -> Matrix4:
    """A matrix of a GPTQ checkpoint.

        qweight   int32 [K/8, N]     code i of row r: input feature 8 r + i
        qzeros    int32 [K/g, N/8]   code i of column c: output feature 8 c + i; version 1 has the zero point minus 1
        scales    [K/g, N]
        g_idx     int32 [K]          the group of each input feature; may be missing
        bias      [N]                may be missing

    Args:
        tensors: by these names.
        name: of the matrix, for errors.
        group_size: g, -1 for one group.
        symmetric: the configuration says that zero points are 8; then ``qzeros`` may be missing.
        version: 1, or 2 for ``checkpoint_format: gptq_v2``.

    Raises:
        ValueError: a tensor is missing, has another dtype or shape, or values that this format does not have.
    """
    if version not in (1, 2):
        raise ValueError(f"{name}: GPTQ version {version}, but 1 or 2 is expected")
    weight = take(tensors, name, "qweight", (torch.int32,), 2)
    features, rows = CODES * weight.shape[0], weight.shape[1]
    groups = groups_of(features, group_size, name, "qweight")
    why = f"{features} x {rows} features in groups of {group_size}"
    scales = take_scales(tensors, name, "scales", (groups, rows), why)
    zeros = None
    if tensors.get("qzeros") is not None or not symmetric:
        if rows % CODES != 0:
            raise ValueError(f"{name}.qzeros: {rows} output features are not whole words of {CODES}")
        words = take(tensors, name, "qzeros", (torch.int32,), 2)
        expect_shape(words, name, "qzeros", (groups, rows // CODES), why)
        zeros = codes(words).T.to(torch.int32) + (2 - version)
        zeros = checked_zeros(zeros, name, "qzeros", symmetric)
    check_g_idx(tensors, name, "g_idx", features, group_size)
    return Matrix4(word_bytes(weight.T), scales.T.contiguous(), zeros, "int4", take_bias(tensors, name, rows))
