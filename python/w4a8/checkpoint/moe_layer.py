"""What every reader of experts does, whatever the file: checks of sizes and of the correction bias, and the layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from w4a8.checkpoint.settings import MoESettings
from w4a8.core.experts import ExpertSizes
from w4a8.core.json_fields import CheckpointError
from w4a8.nn import W4A8MoE


def sizes_of_rank(
    name: str, experts: int, intermediate: int, hidden: int, gated: bool, tp_size: int, groups: tuple[int, int]
) -> ExpertSizes:
    """Sizes of what one rank holds of a layer.

    Args:
        name: of the layer, for errors.
        experts: that the rank holds.
        intermediate: of a whole expert.
        hidden: H.
        gated: experts have a gate.
        tp_size: ranks that each expert is cut for.
        groups: weights that share a scale, of w13 and w2.

    Raises:
        ValueError: the experts cannot be cut for so many ranks.
        NotImplementedError: the operators cannot run them.
    """
    if intermediate % tp_size != 0:
        raise ValueError(f"intermediate_size {intermediate} cannot be cut for {tp_size} tensor-parallel ranks")
    sizes = ExpertSizes(experts, hidden, intermediate // tp_size, groups[0], gated, groups[1])
    problem = sizes.unsupported()
    if problem is not None:
        raise NotImplementedError(f"{name}: kernel does not support {problem}")
    return sizes


def checked_correction_bias(bias: torch.Tensor, key: str, experts: int) -> torch.Tensor:
    """The correction bias of a router as float32.

    Raises:
        CheckpointError: it is not one finite number an expert; names the key.
    """
    if bias.shape != (experts,):
        raise CheckpointError(f"tensor {key!r} has shape {tuple(bias.shape)}, but ({experts},) is expected")
    bias = bias.to(torch.float32)
    if not bool(torch.isfinite(bias).all()):
        raise CheckpointError(f"tensor {key!r} holds a NaN or an infinity")
    return bias


def moe_layer(
    settings: MoESettings,
    sizes: ExpertSizes,
    packed: Mapping[str, torch.Tensor],
    expert_map: torch.Tensor | None,
    correction_bias: torch.Tensor | None,
) -> W4A8MoE:
    """A layer that routes as the settings say.

    Args:
        settings: of the layer.
        sizes: of the experts that this process holds.
        packed: ``w13`` and ``w2``, the packed stacks.
        expert_map: as of :class:`W4A8MoE`.
        correction_bias: of :func:`checked_correction_bias`, or None.
    """
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
        e_score_correction_bias=correction_bias,
        routed_scaling_factor=settings.routed_scaling_factor,
        numbers=settings.numbers,
    )
