"""int4 values between the two forms checkpoints and the op give them.

int8:    one value in [-8, 7] per byte                                       [..., K]
nibbles: value + 8, low nibble = even k, high nibble = odd k, uint8          [..., K / 2]
int32:   value + 8, nibble i of a word = k + i (compressed-tensors' packing) [..., ceil(K / 8)]
"""

from __future__ import annotations

import sys

import torch


def to_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Packs int8 values in pairs.

    Args:
        values: int8 [..., K] in [-8, 7], K even.

    Returns:
        uint8 [..., K / 2]. Its temporaries never exceed one copy of ``values``.
    """
    # The nibble v + 8 is the low half of two's complement with its sign bit flipped, so bit operations suffice.
    packed = values[..., 1::2] << 4
    low = values[..., ::2] & 0xF
    packed |= low
    packed ^= -0x78  # 0x88 as int8: both sign bits
    return packed.view(torch.uint8)


def from_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`to_nibbles`: uint8 [..., K / 2] to int8 [..., K]."""
    values = torch.stack((nibbles & 0xF, nibbles >> 4), dim=-1).flatten(-2)
    values -= 8  # wraps around in uint8, which is right in int8
    return values.view(torch.int8)


def pairs(codes: torch.Tensor) -> torch.Tensor:
    """uint8 4-bit codes [N, K] to [N, K / 2]."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def from_int32(words: torch.Tensor, columns: int) -> torch.Tensor:
    """Unpacks compressed-tensors' ``weight_packed``.

    Args:
        words: int32 [..., ceil(columns / 8)].
        columns: K, even.

    Returns:
        int8 [..., columns].
    """
    return from_nibbles(word_nibbles(words, columns))


def word_nibbles(words: torch.Tensor, columns: int) -> torch.Tensor:
    """int32 [..., ceil(columns / 8)] as nibbles, uint8 [..., columns / 2]: a view if the words are contiguous."""
    words = words.contiguous()
    if sys.byteorder == "big":  # the nibble of k = 0 must come first in memory
        bytes_ = words.view(torch.uint8).unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
    else:
        bytes_ = words.view(torch.uint8)
    return bytes_[..., : columns // 2]


def check_int4_range(values: torch.Tensor, name: str) -> None:
    """Raises ValueError if int8 values are outside [-8, 7]; packing would turn them into others."""
    if values.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(values))
    if low < -8 or high > 7:
        raise ValueError(f"{name} holds values in [{low}, {high}], but int4 values are in [-8, 7]")
