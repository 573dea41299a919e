"""Which type the scales of a matrix are packed in: the one place that decides it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from w4a8.core.float8 import are_powers_of_two
from w4a8.core.kind import Kind

# Types that scales of one level are packed in, beside exponents.
SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Exponents of e8m0, by their bits.
E8M0 = torch.uint8


def has_two_levels(group_size: int, columns: int) -> bool:
    """Whether the operators have scales of two levels for such groups of so many input features."""
    return group_size == 16 and columns != 16


def has_exponents(kind: Kind, group_size: int, columns: int) -> bool:
    """Whether the operators have scales of e8m0 for such groups of so many input features."""
    return kind == Kind.E2M1 and group_size > 0 and group_size % 32 == 0 and group_size != columns


def scale_type_name(dtype: torch.dtype) -> str:
    """As :func:`w4a8.read_header` calls a type of scales of one level."""
    return "e8m0" if dtype == E8M0 else str(dtype).removeprefix("torch.")


def scale_type_named(name: str) -> torch.dtype:
    """The inverse of :func:`scale_type_name`."""
    return E8M0 if name == "e8m0" else getattr(torch, name)


def holds_scales(dtype: torch.dtype, scales: torch.Tensor, kind: Kind = Kind.INT4) -> bool:
    """Whether a type holds every scale exactly; of e2m1 also its half, which is what is packed.

    Args:
        dtype: one of :data:`SCALE_TYPES`, or :data:`E8M0`.
        scales: floating point.
        kind: of the codes that they multiply.
    """
    # One matrix of a stack at a time: the temporaries stay small.
    for part in scales if scales.dim() == 3 else (scales,):
        if dtype == E8M0:
            if not are_powers_of_two(part):
                return False
            continue
        kept = part.to(dtype)
        if kept.dtype != part.dtype and not torch.equal(kept.to(part.dtype), part):
            return False
        if kind == Kind.E2M1 and not torch.equal(kept / 2 * 2, kept):
            return False
    return True


def kept_scale_dtypes(scales: torch.Tensor, kind: Kind, group_size: int, columns: int) -> Iterator[torch.dtype]:
    """The types that hold every scale exactly. The first is the one to pack in: the one rule for all formats.

    It has the fewest bytes: :data:`E8M0` where the operators have it, else bfloat16 or float16. Of these two bfloat16
    comes first, which kernels widen by a shift. The last one is float32: where no other holds them, scales are that.

    Args:
        scales: floating point [..., N, groups].
        kind: of the codes that they multiply.
        group_size: values of k per scale; -1 is channelwise.
        columns: K.
    """
    if scales.is_meta:  # where there are no values: what tools write needs its type, or exponents
        exponents = E8M0 if has_exponents(kind, group_size, columns) else torch.bfloat16
        yield exponents if kind == Kind.E2M1 else scales.dtype
        return
    if has_exponents(kind, group_size, columns) and holds_scales(E8M0, scales):
        yield E8M0
    for dtype in (torch.bfloat16, torch.float16):
        if holds_scales(dtype, scales, kind):
            yield dtype
    yield torch.float32
