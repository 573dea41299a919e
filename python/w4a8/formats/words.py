"""int32 words of eight 4-bit codes, code i in bits 4i to 4i + 3; or of four 8-bit codes, likewise."""

from __future__ import annotations

import sys

import torch

CODES = 8  # in a word


def word_bytes(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., W] to uint8 [..., 4 W]: codes 2i (low nibble) and 2i + 1 in byte i."""
    # Flat first: of a dimension of one, a "contiguous" tensor may have any stride.
    found = words.contiguous().reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    if sys.byteorder == "big":
        found = found.unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
    return found


def words_of(nibbles: torch.Tensor) -> torch.Tensor:
    """uint8 [R, B], two codes each, to int32 [R, ceil(B / 4)]: the inverse of :func:`word_bytes`, zeros behind."""
    padded = torch.nn.functional.pad(nibbles, (0, -nibbles.shape[1] % 4))
    if sys.byteorder == "big":
        padded = padded.unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
    return padded.reshape(-1).view(torch.int32).view(len(padded), padded.shape[1] // 4)


def codes(words: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """int32 [..., W] to uint8 [..., 32 / bits W], one code of 4 or 8 bits each."""
    pairs = word_bytes(words)
    if bits == 8:
        return pairs
    return torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(-2)
