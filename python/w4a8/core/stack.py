"""Matrices of one shape for all experts, each packed into its place as soon as its last piece is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from w4a8.core.activation_groups import PER_TOKEN
from w4a8.core.float8 import multiplied_scales
from w4a8.core.matrix import (
    Matrix,
    codes_in_a_byte,
    middle_code,
    middle_codes,
    needed_zero_points,
    pack_codes,
    unpack_codes,
)
from w4a8.core.memory import fresh_bytes
from w4a8.core.scale_types import has_two_levels, holds_scales, kept_scale_dtypes, scale_type_name


@dataclass(frozen=True)
class PackedAs:
    """What the bytes of a packed stack depend on, beside its shape; of a kind with the same, others fit in its place.

    Attributes:
        values: ``int4``, ``e2m1`` or ``int8``.
        scale_dtype: that scales are packed in, as :func:`pack_codes` takes it.
        zero_points: there is room for them.
        channel_scales: scales have two levels; ``scale_dtype`` says nothing then.
        activation_group: how activations are quantized for it: -1, 32, 64 or 128.
    """

    values: str = "int4"
    scale_dtype: torch.dtype = torch.bfloat16
    zero_points: bool = False
    channel_scales: bool = False
    activation_group: int = PER_TOKEN


def pack_for_stack(tensors: Mapping[str, torch.Tensor | None], group_size: int, packed_as: PackedAs) -> torch.Tensor:
    """uint8 [bytes] of one matrix: ``codes``, ``scales``; ``zero_points``, ``bias``, ``channel_scales`` if any."""
    codes, scales = tensors["codes"], tensors["scales"]
    zeros, bias, channels = (tensors.get(name) for name in ("zero_points", "bias", "channel_scales"))
    dtype, values = packed_as.scale_dtype, packed_as.values
    if not packed_as.zero_points:
        zeros = None
    elif zeros is None:
        zeros = middle_codes(scales, values)
    return pack_codes(codes, scales, bias, group_size, dtype, zeros, values, channels, packed_as.activation_group)


class _Waiting:
    """The pieces of one matrix, until they are complete."""

    def __init__(
        self,
        rows: int,
        columns: int,
        scale_columns: int,
        has_bias: bool,
        zero_points: bool,
        channel_scales: bool,
        values: str,
    ) -> None:
        # One block of pages. Biases and scales as float32, which holds those of every file; of two levels as they are.
        each, width = 1 if channel_scales else 4, columns // codes_in_a_byte(values)
        a_row = (4 if has_bias else 0, 4 if channel_scales else 0, each * scale_columns, width)
        counts = [rows * count for count in a_row]
        bias, channels, scales, codes = fresh_bytes(sum(counts)).split(counts)
        scales = scales if channel_scales else scales.view(torch.float32)
        self.tensors = {"codes": codes.view(rows, width), "scales": scales.view(rows, scale_columns)}
        self._values = values
        if channel_scales:
            self.tensors["channel_scales"] = channels.view(torch.float32)
        if has_bias:
            self.tensors["bias"] = bias.view(torch.float32)
        self.clear()
        if zero_points:
            self.expect_zero_points()

    def expect_zero_points(self) -> None:
        """There are zero points from now on; rows that have come have none, which is the middle."""
        self.tensors["zero_points"] = middle_codes(self.tensors["scales"], self._values)
        self._there["zero_points"] = bytearray(self._there["codes"])

    def put(self, kind: str, rows: slice, piece: torch.Tensor) -> bool:
        """Copies a piece to its rows; returns whether the matrix is complete."""
        if kind not in self.tensors:
            raise ValueError(f"{kind} are given, but none are expected")
        target = self.tensors[kind][rows]
        if target.shape != piece.shape:
            raise ValueError(f"{kind} have shape {tuple(piece.shape)}, but {tuple(target.shape)} is expected")
        target.copy_(piece)
        self._there[kind][rows] = b"\1" * len(piece)
        return all(0 not in there for there in self._there.values())

    def clear(self) -> None:
        """Nothing is there any more; the memory stays."""
        self._there = {kind: bytearray(len(tensor)) for kind, tensor in self.tensors.items()}  # by row


class MatrixStack:
    """Packed matrices [N, K] of E experts, uint8 [E, bytes], put in piece by piece in any order.

    A matrix is packed when its last piece comes; what is incomplete waits as codes and float32 scales. All matrices
    of the stack have as many bytes: their scales are packed in the first of :func:`kept_scale_dtypes` that holds all of
    them. A scale that the type so far would round makes the stack pack again what it has packed already. So does the
    first zero point of 4-bit codes that is not 8: those before get zero points of 8.
    """

    def __init__(
        self,
        experts: int,
        rows: int,
        columns: int,
        group_size: int,
        bias_dtype: torch.dtype | None = None,
        packed_as: PackedAs | None = None,
        *,
        values: str | None = None,
        zero_points: bool = False,
        channel_scales: bool | None = None,
        activation_group: int = PER_TOKEN,
    ) -> None:
        """An empty stack.

        Args:
            experts: E.
            rows, columns: N and K of each matrix.
            group_size: values of k per scale; -1 is channelwise.
            bias_dtype: type of the model, which biases are rounded to; None if there are none.
            packed_as: how it must be packed; as the matrices ask for if not given.
            values: ``int4``, ``e2m1`` or ``int8``; None is what the first matrix has, ``int4`` if pieces come.
            zero_points: a matrix is not complete without a piece ``zero_points``. (A matrix that is :meth:`put` may
                have them or not, in any case.)
            channel_scales: scales have two levels: they are uint8, bits of float8_e4m3fn, and a matrix is not complete
                without a piece ``channel_scales``; None is what the first matrix has, False if pieces come.
            activation_group: how activations are quantized for all: -1, 32, 64 or 128. ``packed_as`` has its own.
        """
        self.experts, self.rows, self.columns, self.group_size = experts, rows, columns, group_size
        self.bias_dtype = bias_dtype
        self._scale_columns = 1 if group_size == -1 else columns // group_size
        self._values = values if packed_as is None else packed_as.values
        self.packed_as = packed_as or PackedAs(values or "int4", activation_group=activation_group)
        self._is_fixed = packed_as is not None
        self._scale_dtypes: tuple[torch.dtype, ...] = ()  # that hold all that has come, the best first
        self._zero_points = zero_points
        self._channel_scales = channel_scales
        self._keeps_levels = has_two_levels(group_size, columns)
        if channel_scales and packed_as is None:
            self.packed_as = replace(self.packed_as, channel_scales=self._keeps_levels)
        self._packed: torch.Tensor | None = None
        self._done: set[int] = set()
        # Experts are written from the first to the last, so that no memory is taken ahead: with huge pages, the first
        # byte of one takes that of its neighbours. What comes too early is held, packed.
        self._written = 0
        self._held: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._spare: _Waiting | None = None

    @property
    def scale_dtype(self) -> torch.dtype:
        """That scales are kept in, as far as is known."""
        return self.packed_as.scale_dtype

    @property
    def channel_scales(self) -> bool:
        """Whether scales come in two levels, as far as is known."""
        return bool(self._channel_scales)

    def put(self, expert: int, row: int, matrix: Matrix, has_bias: bool = True) -> None:
        """Copies a matrix to rows [row, row + its rows) of an expert; it has a bias if and only if the stack has.

        A matrix without zero points beside others that have them gets the middle everywhere, which is the same.

        Args:
            expert: index.
            row: of the stack.
            matrix: of the same columns, groups and kind.
            has_bias: False puts zeros in place of the bias: another rank adds it.

        Raises:
            ValueError: a matrix of another shape, or of another kind than those before.
        """
        self._agree_on(matrix.kind, matrix.channel_scales is not None)
        rows = slice(row, row + matrix.rows)
        zeros = matrix.zero_points
        if zeros is not None and not self._zero_points:
            self._zero_points = True
            for waiting in (*self._waiting.values(), self._spare):
                if waiting is not None:
                    waiting.expect_zero_points()
        if self.bias_dtype is not None:
            self.put_piece(
                expert, "bias", rows, matrix.bias if has_bias else torch.zeros(matrix.rows, dtype=torch.float32)
            )
        self.put_piece(expert, "scales", rows, matrix.scales)
        if matrix.channel_scales is not None:
            self.put_piece(expert, "channel_scales", rows, matrix.channel_scales)
        if self._zero_points:
            if zeros is None:
                zeros = middle_codes(matrix.scales, matrix.kind)
            self.put_piece(expert, "zero_points", rows, zeros)
        self.put_piece(expert, "codes", rows, matrix.codes)

    def put_piece(self, expert: int, kind: str, rows: slice, piece: torch.Tensor) -> None:
        """Copies one tensor to its rows of an expert's matrix.

        Args:
            expert: index.
            kind: ``codes`` (uint8 [rows, K/2], of 8 bits [rows, K]), ``scales`` ([rows, groups]), ``zero_points``
                (uint8 [rows, groups]), ``bias`` ([rows]) or ``channel_scales`` (float32 [rows]).
            rows: of the stack.
            piece: the values.

        Raises:
            ValueError: a piece of another shape, one that there is none of, or the last one of a matrix that cannot be
                packed as ``packed_as`` says.
        """
        self._agree_on(self._values or "int4", self.channel_scales)
        waiting = self._waiting.get(expert)
        if waiting is None:
            waiting, self._spare = self._spare or self._new_waiting(), None
            self._waiting[expert] = waiting
        if kind == "bias":
            piece = piece.to(self.bias_dtype)
        if waiting.put(kind, rows, piece):
            self._pack(expert, waiting)
            del self._waiting[expert]
            if len(self._done) < self.experts:
                waiting.clear()
                self._spare = waiting

    def _agree_on(self, values: str, channel_scales: bool) -> None:
        if self._values is None:
            self._values = values
            self.packed_as = replace(self.packed_as, values=values)
        if values != self._values:
            raise ValueError(f"the codes are {values}, but {self._values} is expected: a stack is of one kind")
        if self._channel_scales is None:
            self._channel_scales = channel_scales
            if not self._is_fixed:
                self.packed_as = replace(self.packed_as, channel_scales=channel_scales and self._keeps_levels)
        kept = channel_scales and self._keeps_levels
        if channel_scales != self._channel_scales or kept != self.packed_as.channel_scales:
            found, expected = ("two levels", "one") if channel_scales else ("one level", "two")
            raise ValueError(f"scales have {found}, but {expected} is expected: a stack is of one kind")

    def _new_waiting(self) -> _Waiting:
        has_bias = self.bias_dtype is not None
        sizes = self.rows, self.columns, self._scale_columns
        return _Waiting(*sizes, has_bias, self._zero_points, self.channel_scales, self.packed_as.values)

    def _pack(self, expert: int, matrix: _Waiting) -> None:
        tensors = dict(matrix.tensors)
        if self._channel_scales and not self._keeps_levels:
            tensors["scales"] = multiplied_scales(tensors["scales"], tensors.pop("channel_scales"))
        needed = self.packed_as
        if not needed.channel_scales:
            needed = replace(needed, scale_dtype=self._scale_dtype_with(expert, tensors["scales"]))
        zeros = tensors.get("zero_points")
        if not needed.zero_points and needed_zero_points(zeros, needed.values) is not None:
            self._must_not_be_fixed(f"the zero points of expert {expert} are not {middle_code(needed.values)}")
            needed = replace(needed, zero_points=True)
        if needed != self.packed_as:
            self._repack(needed)
        self._store(expert, tensors)

    def _scale_dtype_with(self, expert: int, scales: torch.Tensor) -> torch.dtype:
        """That the stack is packed in, with these scales in it."""
        dtype, values = self.packed_as.scale_dtype, self.packed_as.values
        if self._is_fixed:
            if dtype != torch.float32 and not holds_scales(dtype, scales, values):
                self._must_not_be_fixed(f"the scales of expert {expert} are no {scale_type_name(dtype)} values")
            return dtype
        found = tuple(kept_scale_dtypes(scales, values, self.group_size, self.columns))
        self._scale_dtypes = tuple(dtype for dtype in self._scale_dtypes or found if dtype in found)
        return self._scale_dtypes[0]

    def _must_not_be_fixed(self, problem: str) -> None:
        if self._is_fixed:
            raise ValueError(f"{problem}, which they are to be kept in")

    def _store(self, expert: int, tensors: dict[str, torch.Tensor]) -> None:
        packed = pack_for_stack(tensors, self.group_size, self.packed_as)
        if self._packed is None:
            self._packed = fresh_bytes(self.experts, packed.numel(), huge_pages=True)
        self._done.add(expert)
        if expert > self._written:
            self._held[expert] = fresh_bytes(packed.numel()).copy_(packed)
            return
        self._packed[expert] = packed
        self._written = max(self._written, expert + 1)
        while self._written in self._held:
            self._packed[self._written] = self._held.pop(self._written)
            self._written += 1

    def _repack(self, packed_as: PackedAs) -> None:
        """Packs what is packed as something else."""
        before, written, held = self._packed, self._written, self._held
        self._packed, self._written, self._held = None, 0, {}
        self.packed_as = packed_as
        for expert in sorted(self._done):
            matrix = before[expert] if expert < written else held.pop(expert)
            self._store(expert, unpack_codes(matrix, self.group_size, self.columns, self.rows))

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come (since :meth:`pack`)."""
        return not self._done and not self._waiting

    def pack(self) -> torch.Tensor:
        """uint8 [E, bytes], once all matrices are there; the stack is empty afterwards.

        Raises:
            ValueError: a matrix is incomplete.
        """
        if len(self._done) < self.experts:
            lacking = min(set(range(self.experts)) - self._done)
            raise ValueError(f"the matrix of expert {lacking} is incomplete")
        if self._packed is None:  # a rank without experts
            dtype, values = self.packed_as.scale_dtype, self.packed_as.values
            codes = torch.empty(0, self.rows, self.columns // codes_in_a_byte(values), dtype=torch.uint8)
            bias = None if self.bias_dtype is None else torch.empty(0, self.rows, dtype=torch.float32)
            levels = self.packed_as.channel_scales
            scale_dtype = torch.uint8 if levels else torch.float32
            scales = torch.empty(0, self.rows, self._scale_columns, dtype=scale_dtype)
            zeros = torch.empty(scales.shape, dtype=torch.uint8) if self.packed_as.zero_points else None
            channels = torch.empty(0, self.rows) if levels else None
            kind = (dtype, zeros, values, channels, self.packed_as.activation_group)
            return pack_codes(codes, scales, bias, self.group_size, *kind)
        packed, self._packed, self._spare = self._packed, None, None
        self._done.clear()
        self._written = 0
        return packed
