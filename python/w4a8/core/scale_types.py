"""The one place that decides the type of a matrix's packed scales."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from w4a8.core.float8_scales import are_powers_of_two
from w4a8.core.kind import Kind
from w4a8.ops import form_problem

# Types of packed scales of one level, beside E8M0.
SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16)
# e8m0 exponents, as their bits.
E8M0 = torch.uint8


def has_two_levels(group_size: int, columns: int) -> bool:
    """Whether the operators have channel scales for groups of ``group_size`` in K = ``columns``."""
    return not form_problem(columns if group_size == -1 else group_size, columns, 1, scale_dtype="e5m3")


def has_exponents(kind: Kind, group_size: int, columns: int) -> bool:
    """Whether the operators have e8m0 scales for this kind, in groups of ``group_size`` in K = ``columns``."""
    group = columns if group_size == -1 else group_size
    return not form_problem(group, columns, 1, values=str(kind), scale_dtype="e8m0")


def scale_type_name(dtype: torch.dtype) -> str:
    """The ``scale_dtype`` of :func:`w4a8.read_header` for a type of scales of one level."""
    return "e8m0" if dtype == E8M0 else str(dtype).removeprefix("torch.")


def scale_type_named(name: str) -> torch.dtype:
    """The inverse of :func:`scale_type_name`."""
    return E8M0 if name == "e8m0" else getattr(torch, name)


def holds_scales(dtype: torch.dtype, scales: torch.Tensor, kind: Kind = Kind.INT4) -> bool:
    """Whether a type holds every scale exactly; for e2m1 (except E8M0) also scale / 2, the number that is packed.

    Args:
        dtype: one of :data:`SCALE_TYPES`, or :data:`E8M0`.
        scales: floating point.
        kind: kind of the codes.
    """
    # One matrix of a stack at a time keeps temporaries small.
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
    """The types that hold every scale exactly. Scales of all formats are packed in the first of them.

    Smaller types come first: :data:`E8M0` where the operators have it, bfloat16, float16, and always float32. bfloat16
    is before float16 because kernels widen bfloat16 by a shift.

    Args:
        scales: floating point [..., N, groups].
        kind: kind of the codes.
        group_size: values of k per scale; -1 is channelwise.
        columns: K.
    """
    if scales.is_meta:  # no values: assume the type of the scales; for e2m1 E8M0, or bfloat16 without E8M0
        exponents = E8M0 if has_exponents(kind, group_size, columns) else torch.bfloat16
        yield exponents if kind == Kind.E2M1 else scales.dtype
        return
    if has_exponents(kind, group_size, columns) and holds_scales(E8M0, scales):
        yield E8M0
    for dtype in (torch.bfloat16, torch.float16):
        if holds_scales(dtype, scales, kind):
            yield dtype
    yield torch.float32
