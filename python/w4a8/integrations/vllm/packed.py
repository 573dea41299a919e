"""Packed matrices that vLLM joins in one layer (docs/vllm.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from w4a8.core.matrix import Matrix, PackedAs
from w4a8.core.scale_types import E8M0
from w4a8.core.stack import MatrixStack
from w4a8.ops import PackedHeader


def joined(matrices: Iterable[Matrix], headers: Sequence[PackedHeader]) -> torch.Tensor:
    """The rows of all as one packed matrix, uint8 [bytes]; they are of one kind, K, group and activation group.

    ``headers``: of the packed matrices before unpacking. The number of bytes depends on the headers alone, not on
    values.
    """
    rows, columns, group, has_bias, form = _joined_form(headers)
    stack, row = MatrixStack(1, rows, columns, group, torch.float32 if has_bias else None, packed_as=form), 0
    for matrix in matrices:
        stack.put(0, row, matrix, has_bias=matrix.bias is not None)
        row += matrix.rows
    return stack.pack()[0]


def joined_bytes(headers: Sequence[PackedHeader]) -> int:
    """Bytes of the result of :func:`joined` for these headers."""
    rows, columns, group, _, form = _joined_form(headers)
    return form.bytes(rows, columns, group)


def _joined_form(headers: Sequence[PackedHeader]) -> tuple[int, int, int, bool, PackedAs]:
    """N of all, K, values of k per scale, whether one has a bias, and the form that holds zeros and scales of all.

    A single type of scales stays. bfloat16 and e8m0 become bfloat16. Every other mixture becomes float32.
    """
    rows, has_bias = sum(header["n"] for header in headers), any(header["has_bias"] for header in headers)
    forms = [PackedAs.of_header(header) for header in headers]
    dtypes = {form.scale_dtype for form in forms}
    dtype = torch.bfloat16 if dtypes == {E8M0, torch.bfloat16} else torch.float32
    dtype = dtypes.pop() if len(dtypes) == 1 else dtype
    form = replace(forms[0], scale_dtype=dtype, zero_points=any(form.zero_points for form in forms))
    return rows, headers[0]["k"], headers[0]["group"], has_bias, form
