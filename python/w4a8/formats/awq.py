"""AWQ (AutoAWQ's GEMM packing), and AutoRound's format, which is this or GPTQ's."""

from __future__ import annotations

import torch

from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix
from w4a8.core.nibbles import CODES, word_bytes, word_codes
from w4a8.formats.gptq import from_gptq
from w4a8.formats.matrix import (
    Tensors,
    checked_zeros,
    expect_shape,
    groups_of,
    take,
    take_bias,
    take_scales,
)

# Where the codes of a word belong: code i is output feature 8 c + ORDER[i], so feature j is code INVERSE[j].
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
INVERSE = tuple(ORDER.index(j) for j in range(CODES))


def output_features(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N/8] to uint8 codes [R, N] in the order of output features."""
    return word_codes(words).unflatten(-1, (-1, CODES))[..., list(INVERSE)].flatten(-2)


def output_nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [K, N/8] to uint8 [N, K/2]: :func:`output_features` of even and odd rows in pairs, eight codes at once."""
    even, odd = words.T[:, 0::2], words.T[:, 1::2]
    # Codes 0, 2, 4, 6 of two rows in the bytes of a word; codes 1, 3, 5, 7.
    low = (even & 0x0F0F0F0F) | (odd & 0x0F0F0F0F) << 4
    high = (even >> 4 & 0x0F0F0F0F) | (odd & -0x0F0F0F10)
    found = torch.empty(words.shape[1], CODES, words.shape[0] // 2, dtype=torch.uint8, device=words.device)
    for first, pairs_of in enumerate((low, high)):
        four = word_bytes(pairs_of).unflatten(-1, (-1, 4))
        for i in range(4):
            found[:, ORDER[2 * i + first]] = four[..., i]
    return found.flatten(0, 1)


def from_awq(tensors: Tensors, name: str, group_size: int, symmetric: bool = False) -> Matrix:
    """A matrix of an AWQ checkpoint.

        qweight   int32 [K, N/8]     output features of a word in the order 0, 2, 4, 6, 1, 3, 5, 7
        qzeros    int32 [K/g, N/8]   likewise
        scales    [K/g, N]
        bias      [N]                may be missing

    Args:
        tensors: by these names.
        name: of the matrix, for errors.
        group_size: g, -1 for one group.
        symmetric: the configuration says ``zero_point: false``: they are 8, and ``qzeros`` may be missing.

    Raises:
        ValueError: a tensor is missing, has another dtype or shape, or values that this format does not have.
    """
    weight = take(tensors, name, "qweight", (torch.int32,), 2)
    features, rows = weight.shape[0], CODES * weight.shape[1]
    groups = groups_of(features, group_size, name, "qweight")
    why = f"{features} x {rows} features in groups of {group_size}"
    scales = take_scales(tensors, name, "scales", (groups, rows), why)
    zeros = None
    if tensors.get("qzeros") is not None or not symmetric:
        words = take(tensors, name, "qzeros", (torch.int32,), 2)
        expect_shape(words.shape, name, "qzeros", (groups, rows // CODES), why)
        zeros = checked_zeros(output_features(words).T, name, "qzeros", symmetric)
    return Matrix(output_nibbles(weight), scales.T.contiguous(), zeros, Kind.INT4, take_bias(tensors, name, rows))


def packing_of(packing: str) -> tuple[str, int] | None:
    """What AutoRound's ``packing_format`` is: ``gptq`` or ``awq``, and the version of GPTQ; None if it is another."""
    kind = packing.rpartition(":")[2]
    if kind in ("awq", "auto_awq"):
        return "awq", 1
    if kind in ("gptq", "auto_gptq", "auto"):
        return "gptq", 1
    if kind in ("auto_round", "gptqmodel"):  # zero points as they are
        return "gptq", 2
    return None


def from_auto_round(tensors: Tensors, name: str, group_size: int, symmetric: bool, packing: str) -> Matrix:
    """A matrix of an AutoRound checkpoint: :func:`from_awq`, or :func:`from_gptq` without ``g_idx``.

    Args:
        tensors, name, group_size, symmetric: as there.
        packing: the configuration's ``packing_format``, such as ``auto_round:auto_gptq``.

    Raises:
        ValueError: an unknown packing, and as there.
    """
    found = packing_of(packing)
    if found is None:
        raise ValueError(f"{name}: packing_format {packing!r}, but one of auto_gptq and auto_awq is expected")
    if found[0] == "awq":
        return from_awq(tensors, name, group_size, symmetric)
    return from_gptq(tensors, name, group_size, symmetric, version=found[1])
