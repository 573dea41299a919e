"""Packs the experts of a layer while the tensors of a checkpoint come, in any order."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from w4a8.core.activation_groups import PER_TOKEN
from w4a8.core.experts import ExpertSizes, slice_of_rank
from w4a8.core.matrix import Matrix, codes_in_a_byte
from w4a8.core.nibbles import check_int4_range, to_nibbles, word_nibbles
from w4a8.core.stack import MatrixStack, PackedAs

KINDS = {
    "weight": "codes",
    "weight_scale": "scales",
    "zero_points": "zero_points",
    "bias": "bias",
    "global_scale": "channel_scales",
}
# What there is one of for each group of columns.
_BY_GROUP = ("weight_scale", "zero_points")


class ExpertPacker:
    """Two stacks, w13 and w2, and what each tensor is to them (``w1`` the gate, ``w3`` up, ``w2`` down).

    Rows of w13 are packed as a gate half and an up half, however they come.
    """

    def __init__(
        self,
        sizes: ExpertSizes,
        bias_dtype: torch.dtype | None,
        tp_rank: int = 0,
        tp_size: int = 1,
        w13_interleaved: bool = False,
        packed_as: dict[str, PackedAs] | None = None,
        *,
        values: dict[str, str] | None = None,
        zero_points: Collection[str] = (),
        channel_scales: Collection[str] = (),
        activation_groups: Mapping[str, int] | None = None,
    ) -> None:
        """Empty stacks.

        Args:
            sizes: of this rank's experts.
            bias_dtype: as in :class:`MatrixStack`.
            tp_rank, tp_size: which part of each expert this rank holds.
            w13_interleaved: rows of a fused w13 alternate gate and up.
            packed_as, values: of ``w13`` and ``w2``, as in :class:`MatrixStack`.
            zero_points: of which of the two zero points come as tensors of their own.
            channel_scales: of which of the two scales come in two levels, as pieces (:meth:`put`).
            activation_groups: of ``w13`` and ``w2``, as in :class:`MatrixStack`
                (:meth:`ExpertSizes.activation_groups`); -1 if not given.

        Raises:
            ValueError: H or I is no multiple of the group size, or odd.
        """
        problem = sizes.unsupported()
        if problem is not None:
            raise ValueError(f"kernel does not support {problem}")
        self.sizes = sizes
        self.has_bias = bias_dtype is not None
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._interleaved = w13_interleaved
        self.stacks = {
            name: MatrixStack(
                sizes.experts,
                rows,
                columns,
                sizes.group_size,
                bias_dtype,
                (packed_as or {}).get(name),
                values=(values or {}).get(name),
                zero_points=name in zero_points,
                channel_scales=True if name in channel_scales else None,
                activation_group=(activation_groups or {}).get(name, PER_TOKEN),
            )
            for name, rows, columns in sizes.stacks
        }

    def put(self, expert: int, shard: str, kind: str, tensor: torch.Tensor, name: str) -> None:
        """Takes one tensor of one expert; it is copied.

        Args:
            expert: index on this rank.
            shard: ``w1``, ``w2``, ``w3``, or ``w13`` for a fused one.
            kind: ``weight`` (int8 [rows, columns], int32 [rows, ceil(columns / 8)], or codes, uint8
                [rows, columns / 2], low nibble first; of 8 bits int32 [rows, ceil(columns / 4)] or uint8
                [rows, columns]), ``weight_scale``, ``zero_points`` (uint8) or ``bias``, of the whole expert. With two
                levels of scales ``weight_scale`` is uint8, bits of float8_e4m3fn, and ``global_scale`` one number that
                they are multiplied by, float32 [] or [1].
            tensor: the values.
            name: for errors.

        Raises:
            ValueError: a tensor of the wrong dtype or shape, a weight outside [-8, 7], a zero point of 4-bit codes
                outside [0, 15], or a shard that the layer does not have.
        """
        stack = self.stacks["w2" if shard == "w2" else "w13"]
        if kind == "weight":
            columns = self.sizes.intermediate * self._tp_size if shard == "w2" else self.sizes.hidden
            tensor = _codes(tensor, columns, stack.packed_as.values, name)
        elif kind == "zero_points":
            _check_zero_points(tensor, stack.packed_as.values, name)
        elif kind == "weight_scale" and stack.channel_scales:
            if tensor.dtype != torch.uint8:
                raise ValueError(f"{name}: dtype {tensor.dtype}, but uint8 is expected")
        elif not tensor.dtype.is_floating_point:
            raise ValueError(f"{name}: dtype {tensor.dtype}, but a float is expected")
        if kind == "global_scale":
            if tensor.numel() != 1:
                raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but one number is expected")
            tensor = tensor.reshape(1).expand(self._rows(shard))
        dim = 1 if kind in ("bias", "global_scale") else 2
        if tensor.dim() != dim:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but {dim} dimensions are expected")
        pieces = self._w2_piece(kind, tensor, name) if shard == "w2" else self._w13_pieces(shard, tensor, name)
        for rows, piece in pieces:
            try:
                stack.put_piece(expert, KINDS[kind], rows, piece)
            except (ValueError, RuntimeError) as error:  # the second: values that the operators do not have
                raise ValueError(f"{name}: {error}") from None

    def put_matrix(self, expert: int, shard: str, matrix: Matrix, name: str) -> None:
        """Takes one matrix of one expert, whole, as a reader of a format gives it; it is copied.

        It has a bias if and only if the packer has; gate and up, and all experts, are of one kind.

        Args:
            expert, shard, name: as in :meth:`put`.
            matrix: of the whole expert.

        Raises:
            ValueError: a matrix of another size, groups or kind, or a shard that the layer does not have.
        """
        rank, ranks = self._tp_rank, self._tp_size
        rows, columns = self._rows(shard), self.sizes.hidden
        if shard == "w2":
            columns = self.sizes.intermediate * ranks
        if (matrix.rows, matrix.columns) != (rows, columns):
            raise ValueError(f"{name} is [{matrix.rows}, {matrix.columns}], but [{rows}, {columns}] is expected")
        if (matrix.bias is None) == self.has_bias:
            raise ValueError(f"{name} has {'no' if self.has_bias else 'a'} bias, unlike the layer")
        try:
            if shard == "w2":
                begin = rank * self.sizes.intermediate
                part = matrix.with_columns(begin, begin + self.sizes.intermediate)
                self.stacks["w2"].put(expert, 0, part, has_bias=rank == 0)  # the sum over the ranks has it once
                return
            mine = slice(rank * self.sizes.intermediate, (rank + 1) * self.sizes.intermediate)
            for target, source in self._halves(shard, matrix.rows, name):
                self.stacks["w13"].put(expert, target.start, matrix.with_rows(source).with_rows(mine))
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{name}: {error}") from None

    def _rows(self, shard: str) -> int:
        """Of a matrix of a whole expert."""
        if shard == "w2":
            return self.sizes.hidden
        return (2 if shard == "w13" else 1) * self.sizes.intermediate * self._tp_size

    def _w2_piece(self, kind: str, tensor: torch.Tensor, name: str) -> list[tuple[slice, torch.Tensor]]:
        rows = slice(0, self.sizes.hidden)
        if kind == "bias":  # the sum over the ranks has it once
            return [(rows, tensor if self._tp_rank == 0 else torch.zeros_like(tensor))]
        if kind == "global_scale":
            return [(rows, tensor)]
        if kind in _BY_GROUP and self.sizes.group_size == -1:
            return [(rows, tensor)]
        columns = self.sizes.intermediate
        unit = codes_in_a_byte(self.stacks["w2"].packed_as.values) if kind == "weight" else self.sizes.group_size
        wanted = columns // unit
        return [(rows, slice_of_rank(tensor, 1, wanted, self._tp_rank, self._tp_size, name))]

    def _w13_pieces(self, shard: str, tensor: torch.Tensor, name: str) -> list[tuple[slice, torch.Tensor]]:
        part = self.sizes.intermediate
        return [
            (target, slice_of_rank(tensor[source], 0, part, self._tp_rank, self._tp_size, name))
            for target, source in self._halves(shard, len(tensor), name)
        ]

    def _halves(self, shard: str, rows: int, name: str) -> list[tuple[slice, slice]]:
        """Rows of w13 on this rank, and which of a tensor's go there before it is cut for this rank."""
        part = self.sizes.intermediate
        gate, up, everything = slice(0, part), slice(part, 2 * part), slice(None)
        if not self.sizes.gated:
            if shard != "w1":
                raise ValueError(f"{name}: a layer without a gate has w1 and w2, but no {shard}")
            return [(gate, everything)]
        if shard != "w13":
            return [(gate if shard == "w1" else up, everything)]
        if self._interleaved:
            return [(gate, slice(0, None, 2)), (up, slice(1, None, 2))]
        return [(gate, slice(0, rows // 2)), (up, slice(rows // 2, None))]

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come (since :meth:`pack`)."""
        return all(stack.is_empty for stack in self.stacks.values())

    def pack(self) -> dict[str, torch.Tensor]:
        """``w13`` and ``w2``, uint8 [E, bytes], once all is there."""
        return {name: stack.pack() for name, stack in self.stacks.items()}


def _codes(tensor: torch.Tensor, columns: int, values: str, name: str) -> torch.Tensor:
    """uint8 codes as a stack of ``values`` takes them: of int8 values, packed int32 words, or what it is already."""
    width = columns // codes_in_a_byte(values)
    if tensor.dtype == torch.uint8:
        if tensor.dim() != 2 or tensor.shape[-1] != width:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but {columns} columns make {width} bytes")
        return tensor
    if tensor.dtype == torch.int32:
        words = (width + 3) // 4
        if tensor.dim() != 2 or tensor.shape[-1] != words:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but {columns} columns make {words} words")
        return word_nibbles(tensor, 2 * width)
    if tensor.dtype != torch.int8 or values == "int8":
        values = "uint8" if values == "int8" else "int8"
        raise ValueError(f"{name}: dtype {tensor.dtype}, but {values} or packed int32 is expected")
    if tensor.dim() != 2 or tensor.shape[-1] != columns:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but {columns} columns are expected")
    check_int4_range(tensor, name)
    return to_nibbles(tensor)


def _check_zero_points(tensor: torch.Tensor, values: str, name: str) -> None:
    if tensor.dtype != torch.uint8:
        raise ValueError(f"{name}: dtype {tensor.dtype}, but uint8 is expected")
    if values != "int8" and tensor.numel() > 0 and int(tensor.max()) > 15:
        raise ValueError(f"{name} holds {int(tensor.max())}, but zero points are in [0, 15]")
