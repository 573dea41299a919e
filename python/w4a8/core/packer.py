"""Packs the experts of a layer, matrix by matrix, in any order."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from w4a8.core.activation_groups import PER_TOKEN
from w4a8.core.experts import ExpertSizes, gate_and_up
from w4a8.core.matrix import Matrix, PackedAs
from w4a8.core.stack import MatrixStack


class ExpertPacker:
    """Two stacks, w13 and w2, with this rank's part of a layer's experts.

    The place of each matrix, for I intermediate features on this rank:

        w1 (gate)   rows [0, I) of w13      cut by rows
        w3 (up)     rows [I, 2I) of w13     cut by rows
        w13         gate and up in one matrix, gate rows first, or alternating if w13_interleaved; packed as two halves
        w2 (down)   w2                      cut by columns; bias on rank 0 only, so that the sum has the bias once

    A layer without a gate has only w1 and w2.
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
        activation_groups: Mapping[str, int] | None = None,
    ) -> None:
        """Empty stacks.

        Args:
            sizes: sizes of this rank's experts.
            bias_dtype: as in :class:`MatrixStack`.
            tp_rank, tp_size: this tensor-parallel rank, and the number of ranks.
            w13_interleaved: rows of a fused w13 alternate gate and up.
            packed_as: by stack, ``w13`` and ``w2``, as in :class:`MatrixStack`.
            activation_groups: by stack, as in :class:`MatrixStack` (:meth:`ExpertSizes.activation_groups`); default -1.

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
        groups, forms = activation_groups or {}, packed_as or {}
        self.stacks = {
            name: MatrixStack(
                *(sizes.experts, rows, columns, sizes.group_sizes[name], bias_dtype, forms.get(name)),
                activation_group=groups.get(name, PER_TOKEN),
            )
            for name, rows, columns in sizes.stacks
        }

    def shape(self, shard: str) -> tuple[int, int]:
        """(rows, columns) of a matrix of a whole expert: ``w1``, ``w2``, ``w3``, or ``w13`` (gate and up fused)."""
        intermediate = self.sizes.intermediate * self._tp_size
        if shard == "w2":
            return self.sizes.hidden, intermediate
        return (2 if shard == "w13" else 1) * intermediate, self.sizes.hidden

    def put(self, expert: int, shard: str, matrix: Matrix, name: str) -> None:
        """Copies this rank's part of one matrix of a whole expert.

        The matrix must have a bias if and only if the packer has. All matrices of a stack must be of one kind.

        Args:
            expert: index on this rank.
            shard: ``w1``, ``w2``, ``w3``, or ``w13`` (gate and up fused).
            matrix, name: the matrix, and its name for errors.

        Raises:
            ValueError: a matrix of another size, group size or kind, or a shard that the layer does not have.
        """
        if not self.sizes.gated and shard not in ("w1", "w2"):
            raise ValueError(f"{name}: a layer without a gate has w1 and w2, but no {shard}")
        rows, columns = self.shape(shard)
        if (matrix.rows, matrix.columns) != (rows, columns):
            raise ValueError(f"{name} is [{matrix.rows}, {matrix.columns}], but [{rows}, {columns}] is expected")
        if (matrix.bias is None) == self.has_bias:
            raise ValueError(f"{name} has {'no' if self.has_bias else 'a'} bias, unlike the layer")
        part = self.sizes.intermediate
        begin, end = self._tp_rank * part, (self._tp_rank + 1) * part
        try:
            if shard == "w2":
                cut = matrix.with_columns(begin, end)
                self.stacks["w2"].put(expert, 0, cut, has_bias=self._tp_rank == 0)
            elif shard == "w13":
                for half, source in enumerate(gate_and_up(rows, self._interleaved)):
                    mine = matrix.with_rows(source).with_rows(slice(begin, end))
                    self.stacks["w13"].put(expert, half * part, mine)
            else:
                self.stacks["w13"].put(expert, part if shard == "w3" else 0, matrix.with_rows(slice(begin, end)))
        except (ValueError, RuntimeError) as error:  # RuntimeError: the operators refuse a value
            raise ValueError(f"{name}: {error}") from None

    @property
    def is_empty(self) -> bool:
        """Whether no matrix was put in since :meth:`pack`."""
        return all(stack.is_empty for stack in self.stacks.values())

    def pack(self) -> dict[str, torch.Tensor]:
        """``w13`` and ``w2``, uint8 [E, bytes]. All matrices must have been put in."""
        return {name: stack.pack() for name, stack in self.stacks.items()}
