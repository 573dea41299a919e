"""The experts of one layer, packed and ready to run: the part common to all kinds of files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from w4a8.checkpoint.settings import MoESettings
from w4a8.core.experts import ExpertSizes, determine_expert_map
from w4a8.core.json_fields import CheckpointError
from w4a8.core.matrix import Matrix
from w4a8.core.packer import ExpertPacker
from w4a8.nn import W4A8MoE
from w4a8.progress import progress_bar


class Ranks(NamedTuple):
    """Which part of the experts this process holds: a slice of each (``tp``), or some of them whole (``ep``)."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def local(self, experts: int) -> tuple[Sequence[int], torch.Tensor | None]:
        """This process's part of so many experts, and :attr:`W4A8MoE.expert_map`."""
        _, expert_map = determine_expert_map(self.ep_size, self.ep_rank, experts)
        return range(experts) if expert_map is None else torch.nonzero(expert_map != -1).flatten().tolist(), expert_map


class Experts:
    """The experts of one layer in files; each kind of files has a subclass.

    Attributes:
        name: of the layer.
        settings: of the layer; None: the layer is packed, but not built.
        experts: of the layer, in all processes.
        hidden, intermediate: sizes of a whole expert.
        is_gated: experts have a gate.
        group_sizes: weights that share a scale, of w13 and of w2.
        bias_dtype: biases are rounded to this type; None: there are no biases.
        w13_interleaved: rows of a fused gate and up projection alternate.
    """

    name: str
    settings: MoESettings | None
    experts: int
    hidden: int
    intermediate: int
    is_gated: bool
    group_sizes: tuple[int, int]
    bias_dtype: torch.dtype | None
    w13_interleaved: bool = False

    def matrices(self, expert: int) -> Iterator[tuple[str, Matrix, str]]:
        """The matrices of one expert: kind (``w1``, ``w13`` ...), matrix, name in the files."""
        raise NotImplementedError

    def correction_bias(self) -> tuple[torch.Tensor, str] | None:
        """The correction bias of the router, and its name in the file; None: the router has none."""
        raise NotImplementedError

    def wanted_activation_group(self, asked: int | None) -> int | None:
        """``activation_group`` of :func:`w4a8.load`, or the checkpoint's setting for inputs."""
        return asked

    def pack(
        self,
        experts: Sequence[int],
        activation_group: int | None,
        ranks: Ranks = Ranks(),  # noqa: B008 (it does not change)
        packed_one: Callable[[], object] = lambda: None,
    ) -> tuple[ExpertSizes, dict[str, torch.Tensor]]:
        """The sizes of this process's experts, and the packed stacks ``w13`` and ``w2`` by name, uint8 [E, bytes].

        Args:
            experts: of this process.
            activation_group: as of :func:`w4a8.load`.
            ranks: which part of each expert this process holds.
            packed_one: called after each expert.

        Raises:
            CheckpointError: a matrix that does not fit the others.
            NotImplementedError: the operators cannot run experts of these sizes; names the layer and the sizes.
            ValueError: the number of ranks does not divide the intermediate size; or ``activation_group`` does not fit
                (names the layer).
        """
        intermediate, tp_size = self.intermediate, ranks.tp_size
        if intermediate % tp_size != 0:
            raise ValueError(f"intermediate_size {intermediate} cannot be cut for {tp_size} tensor-parallel ranks")
        w13_group, w2_group = self.group_sizes
        sizes = ExpertSizes(len(experts), self.hidden, intermediate // tp_size, w13_group, self.is_gated, w2_group)
        problem = sizes.unsupported()
        if problem is not None:
            raise NotImplementedError(f"{self.name}: kernel does not support {problem}")
        try:
            groups = sizes.activation_groups(self.wanted_activation_group(activation_group))
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        how = ranks.tp_rank, tp_size, self.w13_interleaved
        packer = ExpertPacker(sizes, self.bias_dtype, *how, activation_groups=groups)
        for index, expert in enumerate(experts):
            for shard, matrix, name in self.matrices(expert):
                try:
                    packer.put(index, shard, matrix, name)
                except ValueError as error:
                    raise CheckpointError(str(error)) from error
            packed_one()
        return sizes, packer.pack()

    def build(self, ranks: Ranks, activation_group: int | None, packed_one: Callable[[], object]) -> W4A8MoE:
        """The layer, with routing by the settings; arguments and errors as of :meth:`pack`.

        Raises:
            CheckpointError: the correction bias is not one finite number an expert; names the key.
        """
        local, expert_map = ranks.local(self.experts)
        bias, settings = self._checked_bias(), self.settings
        sizes, packed = self.pack(local, activation_group, ranks, packed_one)
        return W4A8MoE(
            packed["w13"],
            packed["w2"],
            sizes,
            settings.top_k,
            settings.routing_method,
            activation=settings.activation,
            expert_map=expert_map,
            apply_router_weight_on_input=settings.apply_router_weight_on_input,
            num_expert_group=settings.num_expert_group,
            topk_group=settings.topk_group,
            e_score_correction_bias=bias,
            routed_scaling_factor=settings.routed_scaling_factor,
            numbers=settings.numbers,
        )

    def _checked_bias(self) -> torch.Tensor | None:
        found = self.correction_bias()
        if found is None:
            return None
        bias, key = found[0].to(torch.float32), found[1]
        if bias.shape != (self.experts,):
            raise CheckpointError(f"tensor {key!r} has shape {tuple(bias.shape)}, but ({self.experts},) is expected")
        if not bool(torch.isfinite(bias).all()):
            raise CheckpointError(f"tensor {key!r} holds a NaN or an infinity")
        return bias


def build_all(
    layers: Iterable[Experts], ranks: Ranks, activation_group: int | None, progress: bool
) -> dict[str, W4A8MoE]:
    """The layers by name, one after the other."""
    layers = list(layers)
    total = sum(len(ranks.local(layer.experts)[0]) for layer in layers)
    with progress_bar(total, progress, "expert", "packing experts") as advance:
        return {layer.name: layer.build(ranks, activation_group, advance) for layer in layers}
