"""Scales of one byte, by their bits: float8_e4m3fn (NVFP4) and e8m0 (MXFP4). Older torch lacks these types."""

from __future__ import annotations

from functools import cache

import torch

# float8_e4m3fn; where torch lacks the type, its bits as uint8.
E4M3: torch.dtype = getattr(torch, "float8_e4m3fn", torch.uint8)


@cache
def e4m3_values() -> torch.Tensor:
    """float32 [256], the number of each byte: a sign, 4 bits of exponent, 3 of mantissa; bytes 127 and 255 are NaN."""
    positive = [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)]
    positive[127] = float("nan")
    return torch.tensor([*positive, *(-value for value in positive)], device="cpu")


def multiplied_scales(scales: torch.Tensor, channel_scales: torch.Tensor) -> torch.Tensor:
    """Scales of two levels as one level: float32 [..., N, G], each product rounded once.

    Args:
        scales: uint8 [..., N, G], bits of float8_e4m3fn.
        channel_scales: float32 [..., N].
    """
    values = scales.float() if scales.is_meta else e4m3_values()[scales.long()]
    return values * channel_scales.unsqueeze(-1)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """e8m0 as float32: uint8 s in 0..254 to 2^(s - 127)."""
    # The exponent's bits of a float32; 2^-127 is a denormal.
    bits = (exponents.to(torch.int32) << 23).masked_fill_(exponents == 0, 1 << 22)
    return bits.view(torch.float32)


def are_powers_of_two(scales: torch.Tensor) -> bool:
    """Whether e8m0 can hold every number of a floating point tensor: powers of two from 2^-127 to 2^127."""
    numbers = scales.to(torch.float32)
    exponents = exponents_of(numbers)
    # Compare bits: where denormals are flushed, 2^-127 equals 0. Exponent 255 is infinity or NaN in float32.
    same = torch.equal(powers_of_two(exponents).view(torch.int32), numbers.view(torch.int32))
    return same and not bool((exponents == 255).any())


def exponents_of(scales: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`powers_of_two`; for another positive number, the exponent of the power of two below it."""
    if scales.is_meta:  # torch 1 has no shifts on the meta device
        return torch.empty_like(scales, dtype=torch.uint8)
    return (scales.to(torch.float32).contiguous().view(torch.int32) >> 23).to(torch.uint8)
