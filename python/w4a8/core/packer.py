"""Packs the weights of linear layers, and the experts of a layer, matrix by matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from w4a8.core.activation_groups import PER_TOKEN, resolve_activation_group
from w4a8.core.experts import ExpertSizes, gate_and_up
from w4a8.core.matrix import Matrix, PackedAs
from w4a8.core.stack import MatrixStack
from w4a8.core.weight import Cut, ExpertWeights, wanted_activation_group
from w4a8.ops import read_header


@dataclass(frozen=True)
class Packed:
    """A packed matrix.

    Attributes:
        bytes: uint8 [bytes].
        rows, columns: N and K.
        group: values of k that share a scale.
        form: of the matrix.
        has_bias: the matrix has the bias.
    """

    bytes: torch.Tensor
    rows: int
    columns: int
    group: int
    form: PackedAs
    has_bias: bool


def pack_rows(
    cuts: Sequence[Cut], activation_group: int | None, packed_as: PackedAs | None = None, padding: int = 0
) -> Packed:
    """Packs parts of weights as one matrix, one part below the other. One piece of rows is in memory at a time.

    Args:
        cuts: of weights of one :attr:`Weight.form`, all with the same number of columns.
        activation_group: the one that the user asks for, or None.
        packed_as: the form of an earlier matrix in whose place this one is put; None: the form that the parts need.
        padding: rows of zeros behind the parts.

    Raises:
        ValueError: parts that do not fit each other, values that the operators do not have, or an activation group that
            does not fit.
    """
    rows, columns, group = sum(cut.rows for cut in cuts) + padding, cuts[0].columns, cuts[0].weight.group
    whole = columns if group == -1 else group
    stored = cuts[0].weight.packed
    if stored is not None and len(cuts) == 1 and cuts[0].is_whole and padding == 0:
        header = read_header(packed := stored())
        form = PackedAs.of_header(header)
        if packed_as in (None, form):
            return Packed(packed, rows, columns, whole, form, header["has_bias"])
    wanted = wanted_activation_group([cut.weight for cut in cuts], activation_group)
    activations = resolve_activation_group(wanted, group, columns)
    has_bias = any(cut.has_bias for cut in cuts)
    bias = torch.float32 if has_bias else None
    stack, row = MatrixStack(1, rows, columns, group, bias, packed_as, activation_group=activations), 0
    for cut in cuts:
        for at, matrix in cut.read():
            stack.put(0, row + at, matrix, has_bias=matrix.bias is not None)
        row += cut.rows
    if padding:
        stack.put(0, row, cuts[0].zeros(padding), has_bias=False)
    return Packed(stack.pack()[0], rows, columns, whole, stack.packed_as, has_bias)


def pack_experts(
    experts: ExpertWeights,
    local: Sequence[int],
    activation_group: int | None,
    rank: int = 0,
    ranks: int = 1,
    packed_one: Callable[[], object] = lambda: None,
    packed_as: dict[str, PackedAs] | None = None,
) -> tuple[ExpertSizes, dict[str, torch.Tensor], dict[str, PackedAs]]:
    """Packs this rank's part of the experts of a layer. One matrix is in memory at a time.

    Args:
        experts: of the layer.
        local: numbers of the experts that this rank holds, in their order here.
        activation_group: the one that the user asks for, or None.
        rank, ranks: this tensor-parallel rank, and their number.
        packed_one: called after each expert.
        packed_as: the forms of earlier experts in whose place these are put; None: the forms that the experts need.

    Returns:
        Sizes of the experts here; ``w13`` and ``w2``, uint8 [E, bytes]; and their forms.

    Raises:
        ValueError: matrices that do not fit each other, the ranks or the operators; names the matrix.
    """
    if experts.intermediate % ranks != 0:
        raise ValueError(f"intermediate_size {experts.intermediate} cannot be cut for {ranks} tensor-parallel ranks")
    (group, down), part = experts.group_sizes, experts.intermediate // ranks
    sizes = ExpertSizes(len(local), experts.hidden, part, group, experts.is_gated, down)
    stored = {"w2" if shard == "w2" else "w13": weights[0] for shard, weights in experts.shards.items()}
    if ranks == 1 and all(weight.packed is not None for weight in stored.values()):
        packed, forms = {stack: weight.packed() for stack, weight in stored.items()}, {}
        for stack, found in packed.items():
            expected = read_header(found[0])
            forms[stack] = PackedAs.of_header(expected)
            for expert in local:
                header = read_header(found[expert])
                if header != expected:
                    raise ValueError(f"{stored[stack].name}: header of expert {expert} is {header}, not {expected}")
        if packed_as in (None, forms):
            as_stored = list(local) == list(range(experts.experts))
            return sizes, {stack: found if as_stored else found[list(local)] for stack, found in packed.items()}, forms
    sizes.check()
    wanted = {
        stack: wanted_activation_group([weight] if weight.is_fixed else experts.all, activation_group)
        for stack, weight in stored.items()
    }
    groups = sizes.activation_groups(wanted)
    packer = ExpertPacker(sizes, experts.bias, rank, ranks, experts.interleaved, packed_as, activation_groups=groups)
    for index, expert in enumerate(local):
        for shard, matrix, name in experts.matrices(expert):
            packer.put(index, shard, matrix, name)
        packed_one()
    forms = {name: stack.packed_as for name, stack in packer.stacks.items()}
    return sizes, packer.pack(), forms


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
        sizes.check()
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
