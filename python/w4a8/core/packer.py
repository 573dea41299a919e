"""Packs the experts of a layer while the tensors of a checkpoint come, in any order."""

from __future__ import annotations

import torch

from w4a8.core.experts import ExpertSizes
from w4a8.core.loader import slice_of_rank
from w4a8.core.nibbles import check_int4_range, to_nibbles, word_nibbles
from w4a8.core.stack import MatrixStack

KINDS = {"weight": "nibbles", "weight_scale": "scales", "bias": "bias"}


class ExpertPacker:
    """Two stacks, w13 and w2, and what each tensor is to them: see :class:`w4a8.core.loader.MoEWeightLoader`.

    Rows of w13 are packed as a gate half and an up half, however they come.
    """

    def __init__(
        self,
        sizes: ExpertSizes,
        bias_dtype: torch.dtype | None,
        tp_rank: int = 0,
        tp_size: int = 1,
        w13_interleaved: bool = False,
        scale_dtypes: dict[str, torch.dtype] | None = None,
    ) -> None:
        """Empty stacks.

        Args:
            sizes: of this rank's experts.
            bias_dtype: as in :class:`MatrixStack`.
            tp_rank, tp_size: which part of each expert this rank holds.
            w13_interleaved: rows of a fused w13 alternate gate and up.
            scale_dtypes: of ``w13`` and ``w2``, that scales must be kept in; by exactness if not given.

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
        dtypes = scale_dtypes or {}
        self.stacks = {
            name: MatrixStack(sizes.experts, rows, columns, sizes.group_size, bias_dtype, dtypes.get(name))
            for name, rows, columns in sizes.stacks
        }

    def put(self, expert: int, shard: str, kind: str, tensor: torch.Tensor, name: str) -> None:
        """Takes one tensor of one expert; it is copied.

        Args:
            expert: index on this rank.
            shard: ``w1``, ``w2``, ``w3``, or ``w13`` for a fused one.
            kind: ``weight`` (int8 [rows, columns] or int32 [rows, ceil(columns / 8)]), ``weight_scale`` or ``bias``,
                of the whole expert.
            tensor: the values.
            name: for errors.

        Raises:
            ValueError: a tensor of the wrong dtype or shape, a weight outside [-8, 7], or a shard that the layer does
                not have.
        """
        if kind == "weight":
            columns = self.sizes.intermediate * self._tp_size if shard == "w2" else self.sizes.hidden
            tensor = _nibbles(tensor, columns, name)
        elif not tensor.dtype.is_floating_point:
            raise ValueError(f"{name}: dtype {tensor.dtype}, but a float is expected")
        dim = 1 if kind == "bias" else 2
        if tensor.dim() != dim:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but {dim} dimensions are expected")
        pieces = self._w2_piece(kind, tensor, name) if shard == "w2" else self._w13_pieces(shard, tensor, name)
        for rows, piece in pieces:
            try:
                self.stacks["w2" if shard == "w2" else "w13"].put_piece(expert, KINDS[kind], rows, piece)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None

    def _w2_piece(self, kind: str, tensor: torch.Tensor, name: str) -> list[tuple[slice, torch.Tensor]]:
        rows = slice(0, self.sizes.hidden)
        if kind == "bias":  # the sum over the ranks has it once
            return [(rows, tensor if self._tp_rank == 0 else torch.zeros_like(tensor))]
        if kind == "weight_scale" and self.sizes.group_size == -1:
            return [(rows, tensor)]
        columns = self.sizes.intermediate
        wanted = columns // 2 if kind == "weight" else columns // self.sizes.group_size
        return [(rows, slice_of_rank(tensor, 1, wanted, self._tp_rank, self._tp_size, name))]

    def _w13_pieces(self, shard: str, tensor: torch.Tensor, name: str) -> list[tuple[slice, torch.Tensor]]:
        part = self.sizes.intermediate
        halves = {"w1": slice(0, part), "w3": slice(part, 2 * part)}
        if not self.sizes.gated:
            if shard != "w1":
                raise ValueError(f"{name}: a layer without a gate has w1 and w2, but no {shard}")
            found = {"w1": tensor}
        elif shard != "w13":
            found = {shard: tensor}
        elif self._interleaved:
            found = {"w1": tensor[0::2], "w3": tensor[1::2]}
        else:
            half = len(tensor) // 2
            found = {"w1": tensor[:half], "w3": tensor[half:]}
        return [
            (halves[which], slice_of_rank(piece, 0, part, self._tp_rank, self._tp_size, name))
            for which, piece in found.items()
        ]

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come (since :meth:`pack`)."""
        return all(stack.is_empty for stack in self.stacks.values())

    def pack(self) -> dict[str, torch.Tensor]:
        """``w13`` and ``w2``, uint8 [E, bytes], once all is there."""
        return {name: stack.pack() for name, stack in self.stacks.items()}


def _nibbles(tensor: torch.Tensor, columns: int, name: str) -> torch.Tensor:
    """uint8 [rows, columns / 2] of int8 values or packed int32 words."""
    if tensor.dtype == torch.int32:
        words = (columns + 7) // 8
        if tensor.dim() != 2 or tensor.shape[-1] != words:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but {columns} columns make {words} words")
        return word_nibbles(tensor, columns)
    if tensor.dtype != torch.int8:
        raise ValueError(f"{name}: dtype {tensor.dtype}, but int8 or packed int32 is expected")
    if tensor.dim() != 2 or tensor.shape[-1] != columns:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, but {columns} columns are expected")
    check_int4_range(tensor, name)
    return to_nibbles(tensor)
