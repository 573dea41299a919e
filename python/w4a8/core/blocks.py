"""Rows of a matrix in the blocks of a file, which the operators pack as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix, PackedAs
from w4a8.core.scale_types import E8M0, has_exponents, holds_scales
from w4a8.ops import pack_blocks

PANEL_ROWS = 16  # rows of a packed matrix that are packed together (docs/packed_layout.md)


@dataclass(frozen=True)
class BlockType:
    """A type of blocks.

    Attributes:
        name: ggml's name.
        id: number in the file.
        weights: weights of a block.
        bytes: bytes of a block.
        group: weights that share a scale.
        read: blocks, uint8 [N, K / weights, bytes], to the matrix [N, K].
        halves: float16 in front of a block that are its scale and its minimum; 0: scales are something else.
        is_packed: :func:`w4a8.pack_blocks` takes the type.
    """

    name: str
    id: int
    weights: int
    bytes: int
    group: int
    read: Callable[[torch.Tensor], Matrix]
    halves: int = 0
    is_packed: bool = True

    def matrix(self, rows: torch.Tensor) -> Matrix:
        """Rows, uint8 [N, K / weights * bytes], as a matrix [N, K]."""
        return self.read(rows.unflatten(1, (-1, self.bytes)))


@cache
def _one_block(kind: BlockType) -> Matrix:
    return kind.matrix(torch.zeros(1, kind.bytes, dtype=torch.uint8, device="cpu"))


@dataclass(frozen=True)
class Blocks:
    """A matrix that is not decoded. What it does not have itself, :meth:`matrix` has.

    Attributes:
        data: uint8 [N, K / weights * bytes of a block], on the CPU.
        type: of the blocks.
        bias: as of :class:`Matrix`.
    """

    data: torch.Tensor
    type: BlockType
    bias: torch.Tensor | None = None
    zero_points = None
    in_file = True

    @property
    def rows(self) -> int:
        """N."""
        return self.data.shape[0]

    @property
    def columns(self) -> int:
        """K."""
        return self.data.shape[1] // self.type.bytes * self.type.weights

    @property
    def kind(self) -> Kind:
        """Kind of the codes."""
        return self.form.kind

    @property
    def form(self) -> Matrix:
        """A matrix of one block, with the kind and the tensors that :meth:`matrix` has."""
        return _one_block(self.type)

    def matrix(self) -> Matrix:
        """The decoded matrix."""
        return replace(self.type.matrix(self.data), bias=self.bias)

    def with_rows(self, rows: slice | torch.Tensor) -> Blocks:
        """As :meth:`Matrix.with_rows`."""
        return replace(self, data=self.data[rows], bias=None if self.bias is None else self.bias[rows])

    def with_columns(self, begin: int, end: int) -> Blocks | Matrix:
        """As :meth:`Matrix.with_columns`."""
        size, width = self.type.weights, self.type.bytes
        if begin % size != 0 or end % size != 0:
            return self.matrix().with_columns(begin, end)
        return replace(self, data=self.data[:, begin // size * width : end // size * width])

    def with_runs(self, order: torch.Tensor) -> Matrix:
        """As :meth:`Matrix.with_runs`."""
        return self.matrix().with_runs(order)

    def floats(self) -> torch.Tensor:
        """As :meth:`Matrix.floats`."""
        return self.matrix().floats()

    def zeros(self, rows: int) -> Matrix:
        """As :meth:`Matrix.zeros`."""
        return self.with_rows(slice(0, 1)).matrix().zeros(rows)

    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """Of :func:`kept_scale_dtypes` those that are the first one of some matrix of this type; (): decode it."""
        blocks = self.data.unflatten(1, (-1, self.type.bytes))
        if self.kind == Kind.E2M1:  # bfloat16 holds what e8m0 does
            fits = has_exponents(Kind.E2M1, self.type.group, self.columns) and not bool((blocks[..., 0] == 255).any())
            return (E8M0, torch.bfloat16, torch.float32) if fits else ()
        for some in (blocks[:1], blocks):  # the first row says no nearly always
            scales = some[..., : 2 * self.type.halves].contiguous().view(torch.float16)
            if not holds_scales(torch.bfloat16, scales):
                return torch.float16, torch.float32
        return torch.bfloat16, torch.float16, torch.float32

    def packs_in(self, form: PackedAs) -> bool:
        """Whether :meth:`pack_into` takes a form of this kind."""
        types = (torch.bfloat16, torch.float16) if self.type.halves else (E8M0,)
        return not form.zero_points and (form.super_scales or form.scale_dtype in types)

    def pack_into(self, packed: torch.Tensor, row: int, rows: int, form: PackedAs) -> None:
        """Packs the rows by :func:`w4a8.pack_blocks`, as rows from ``row`` on of a matrix of ``rows`` rows.

        ``form``: with one of :meth:`scale_dtypes`.
        """
        dtype = form.scale_dtype if self.type.halves else None
        pack_blocks(
            *(packed, self.data, self.bias, self.type.name, row, self.columns, rows),
            scale_dtype=dtype,
            activation_group=form.activation_group,
        )
