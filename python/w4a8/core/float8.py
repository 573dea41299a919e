"""float8_e4m3fn, which scales of NVFP4 are, by its bits: a torch of old has no such type."""

from __future__ import annotations

from functools import cache

import torch

# The type of such a tensor; where torch has none, its bits.
E4M3: torch.dtype = getattr(torch, "float8_e4m3fn", torch.uint8)


def bits_of(scales: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn as uint8 of the same shape (a view); uint8 as it is."""
    return scales.view(torch.uint8)


@cache
def e4m3_values() -> torch.Tensor:
    """float32 [256]: the number of each byte: a sign, four bits of exponent, three of mantissa; 127 and 255 are NaN."""
    positive = [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)]
    positive[127] = float("nan")
    return torch.tensor([*positive, *(-value for value in positive)], device="cpu")


def multiplied_scales(scales: torch.Tensor, channel_scales: torch.Tensor) -> torch.Tensor:
    """Scales of two levels as one: float32 [..., N, G], each product rounded once.

    Args:
        scales: uint8 [..., N, G], bits of float8_e4m3fn.
        channel_scales: float32 [..., N].
    """
    return e4m3_values()[scales.long()] * channel_scales.unsqueeze(-1)
