"""GPTQ (AutoGPTQ, GPTQModel)."""

from __future__ import annotations

import torch

from w4a8.core.kind import integers_of
from w4a8.core.matrix import Matrix
from w4a8.core.nibbles import word_bytes, word_codes
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


def from_gptq(tensors: Tensors, name: str, group_size: int, symmetric: bool, version: int = 1, bits: int = 4) -> Matrix:
    """A matrix of a GPTQ checkpoint.

        qweight   int32 [K/c, N]     code i of row r: input feature c r + i, of c = 32 / bits codes in a word
        qzeros    int32 [K/g, N/c]   code i of column j: output feature c j + i; version 1 has the zero point minus 1
        scales    [K/g, N]
        g_idx     int32 [K]          the group of each input feature; may be missing
        bias      [N]                may be missing

    Args:
        tensors: by these names.
        name: of the matrix, for errors.
        group_size: g, -1 for one group.
        symmetric: the configuration says that zero points are 8 (128 of 8 bits); then ``qzeros`` may be missing.
        version: 1, or 2 for ``checkpoint_format: gptq_v2``.
        bits: of a code, 4 or 8.

    Raises:
        ValueError: a tensor is missing, has another dtype or shape, or values that this format does not have.
    """
    if bits not in (4, 8):
        raise ValueError(f"{name}: codes of {bits} bits, but 4 or 8 are expected")
    if version not in (1, 2):
        raise ValueError(f"{name}: GPTQ version {version}, but 1 or 2 is expected")
    weight = take(tensors, name, "qweight", (torch.int32,), 2)
    in_word = 32 // bits
    features, rows = in_word * weight.shape[0], weight.shape[1]
    groups = groups_of(features, group_size, name, "qweight")
    why = f"{features} x {rows} features in groups of {group_size}"
    scales = take_scales(tensors, name, "scales", (groups, rows), why)
    zeros = None
    if tensors.get("qzeros") is not None or not symmetric:
        if rows % in_word != 0:
            raise ValueError(f"{name}.qzeros: {rows} output features are not whole words of {in_word}")
        words = take(tensors, name, "qzeros", (torch.int32,), 2)
        expect_shape(words.shape, name, "qzeros", (groups, rows // in_word), why)
        zeros = checked_zeros(stored_zeros(words, version, bits), name, "qzeros", symmetric, bits)
    check_g_idx(tensors, name, "g_idx", features, group_size)
    bias = take_bias(tensors, name, rows)
    return Matrix(word_bytes(weight.T), scales.T.contiguous(), zeros, integers_of(bits), bias)


def stored_zeros(words: torch.Tensor, version: int, bits: int) -> torch.Tensor:
    """``qzeros``, int32 [K/g, N/c], as zero points int32 [N, K/g], which may be no codes."""
    return word_codes(words, bits).T.to(torch.int32) + (2 - version)
