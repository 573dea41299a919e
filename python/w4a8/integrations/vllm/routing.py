"""Which experts a token goes to, as the attributes of vLLM's layer say."""

from __future__ import annotations

import torch

from w4a8.core.routing import select_experts


@torch.library.custom_op("w4a8::select_experts_in_groups", mutates_args=())
def _in_groups(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    grouped: bool,
    topk_group: int | None,
    groups: int | None,
    scoring: str,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As one operator, into which the compiler does not look.

    vLLM 0.32 compiles what a layer of experts does on CPUs. Of this it makes (torch 2.13, its own passes, vectorized
    code) something that selects other experts: tests/vllm, deepseek_v3 compiled.
    """
    return select_experts(
        logits,  # stands for the tokens, which only custom functions read
        logits,
        top_k,
        use_grouped_topk=grouped,
        renormalize=renormalize,
        topk_group=topk_group,
        num_expert_group=groups,
        scoring_func=scoring,
        routed_scaling_factor=scale,
        e_score_correction_bias=bias,
    )


@_in_groups.register_fake
def _(logits, bias, top_k, renormalize, grouped, topk_group, groups, scoring, scale):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def select(layer: torch.nn.Module, x: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [T, H] and router logits [T, E] to weights float32 [T, k] and global expert ids int32 [T, k]."""
    bias, custom = layer.e_score_correction_bias, layer.custom_routing_function
    if custom is None and (layer.use_grouped_topk or bias is not None):
        return _in_groups(
            router_logits,
            bias,
            layer.top_k,
            layer.renormalize,
            layer.use_grouped_topk,
            layer.topk_group,
            layer.num_expert_group,
            layer.scoring_func,
            layer.routed_scaling_factor,
        )
    return select_experts(
        x,
        router_logits,
        layer.top_k,
        use_grouped_topk=layer.use_grouped_topk,
        renormalize=layer.renormalize,
        topk_group=layer.topk_group,
        num_expert_group=layer.num_expert_group,
        custom_routing_function=custom,
        scoring_func=layer.scoring_func,
        routed_scaling_factor=layer.routed_scaling_factor,
        e_score_correction_bias=bias,
    )
