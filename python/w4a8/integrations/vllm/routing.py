"""Which experts a token goes to, as the attributes of vLLM's layer say."""

from __future__ import annotations

import torch

from w4a8.core.routing import select_experts


def select(layer: torch.nn.Module, x: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [T, H] and router logits [T, E] to weights float32 [T, k] and global expert ids int32 [T, k]."""
    return select_experts(
        x,
        router_logits,
        layer.top_k,
        use_grouped_topk=layer.use_grouped_topk,
        renormalize=layer.renormalize,
        topk_group=layer.topk_group,
        num_expert_group=layer.num_expert_group,
        custom_routing_function=layer.custom_routing_function,
        scoring_func=layer.scoring_func,
        routed_scaling_factor=layer.routed_scaling_factor,
        e_score_correction_bias=layer.e_score_correction_bias,
    )
