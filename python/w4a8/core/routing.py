"""From router logits to experts and their weights: ``torch.ops.w4a8.topk_routing`` with the names of vLLM's methods.

Everything is float32. Between equal scores the expert with the lower index wins. A token's experts are in descending
order of the score that selected them. ``dynamic_4bit_int_moe`` sums the experts in this order, so the order changes the
result's bits.

Without a correction bias, experts are selected by their logits. Every scoring function is monotonic, so the choice is
the same, and different logits stay apart where their scores round to the same float.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from w4a8.ops import topk_routing


class RoutingMethodType(IntEnum):
    """How router logits become experts and weights (docs/vllm_mirror.md, "Routing")."""

    Default = 0  # softmax over all experts, top-k
    Renormalize = 1  # top-k, softmax over the selected experts
    DeepSeekV3 = 2  # sigmoid, + bias, groups, top-k, unbiased weights renormalized and scaled
    Llama4 = 3  # top-k, sigmoid
    RenormalizeNaive = 4  # softmax over all experts, top-k, divided by their sum
    TopK = 5  # the logits themselves
    SigmoidRenorm = 6  # sigmoid, top-k, divided by their sum
    MiniMax2 = 7  # DeepSeekV3 without groups
    Sigmoid = 8  # sigmoid, top-k
    Unspecified = 9
    DeepseekV4 = 100  # sqrt(softplus), + bias, top-k, unbiased weights renormalized and scaled
    Custom = 101


SCORING_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus", "identity")

_LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # others are converted


def _check_groups(experts: int, top_k: int, num_expert_group: int | None, topk_group: int | None) -> None:
    if num_expert_group is None or topk_group is None:
        raise ValueError("grouped routing needs num_expert_group and topk_group")
    if num_expert_group < 1 or experts % num_expert_group != 0:
        raise ValueError(f"{experts} experts cannot be divided into {num_expert_group} groups")
    if not 1 <= topk_group <= num_expert_group:
        raise ValueError(f"topk_group {topk_group} is outside [1, {num_expert_group}]")
    if top_k > experts // num_expert_group * topk_group:
        raise ValueError(
            f"top_k {top_k} exceeds the {experts // num_expert_group * topk_group} experts of {topk_group} groups"
        )


def select_experts(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    top_k: int,
    use_grouped_topk: bool,
    renormalize: bool,
    topk_group: int | None = None,
    num_expert_group: int | None = None,
    custom_routing_function: Callable | None = None,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects the experts of each token (upstream: ``...fused_moe.cpu_fused_moe.select_experts``).

    Upstream's CPU version has softmax and sigmoid, leaves ties to ``torch.topk``, and without groups silently ignores a
    correction bias and the scaling factor.

    Args:
        hidden_states: [T, H]; only the custom function reads it.
        router_logits: [T, E], any real dtype; converted to float32.
        top_k: experts per token, at most E.
        use_grouped_topk: select among the best ``topk_group`` of ``num_expert_group`` groups of neighbouring experts.
        renormalize: divide the weights of a token by their sum.
        topk_group: number of groups that are kept.
        num_expert_group: number of groups.
        custom_routing_function: ``f(hidden_states=, gating_output=, topk=, renormalize=)``, called instead of all this.
        scoring_func: softmax, sigmoid, sqrtsoftplus or identity.
        routed_scaling_factor: multiplies the weights, last.
        e_score_correction_bias: [E], added to the scores for selecting; the weights are the scores without it.

    Returns:
        Weights float32 [T, top_k] and global expert indices int32 [T, top_k].

    Raises:
        ValueError: an unknown scoring function, or groups or top_k that do not fit the number of experts.
    """
    if custom_routing_function is not None:
        weights, ids = custom_routing_function(
            hidden_states=hidden_states, gating_output=router_logits, topk=top_k, renormalize=renormalize
        )
        return weights.to(torch.float32), ids.to(torch.int32)
    if scoring_func not in SCORING_FUNCTIONS:
        raise ValueError(f"Unsupported scoring function: {scoring_func}")
    experts = router_logits.shape[-1]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k {top_k} is outside [1, {experts}], the number of experts")
    if use_grouped_topk:
        _check_groups(experts, top_k, num_expert_group, topk_group)
    else:
        num_expert_group = topk_group = None
    if router_logits.dtype not in _LOGIT_DTYPES:
        router_logits = router_logits.to(torch.float32)
    return topk_routing(
        router_logits,
        top_k,
        renormalize,
        scoring_func,
        num_expert_group,
        topk_group,
        routed_scaling_factor,
        e_score_correction_bias,
    )


# (scoring function, renormalize) of each method
_METHODS = {
    RoutingMethodType.Default: ("softmax", False),
    RoutingMethodType.Renormalize: ("softmax", True),
    RoutingMethodType.RenormalizeNaive: ("softmax", True),
    RoutingMethodType.TopK: ("identity", False),
    RoutingMethodType.Sigmoid: ("sigmoid", False),
    RoutingMethodType.SigmoidRenorm: ("sigmoid", True),
    RoutingMethodType.Llama4: ("sigmoid", False),
    RoutingMethodType.MiniMax2: ("sigmoid", True),
    RoutingMethodType.DeepSeekV3: ("sigmoid", True),
    RoutingMethodType.DeepseekV4: ("sqrtsoftplus", True),
}

ROUTING_METHODS = frozenset(_METHODS)


class Router(NamedTuple):
    """How logits become experts and weights, without the number of experts and the values of a bias.

    Routers are made from the keys of a GGUF file, from a config.json, or from a config of transformers.

    Attributes:
        routing_method: scoring function and renormalization.
        num_expert_group, topk_group: number of groups of neighbouring experts, and of kept groups; None for no groups.
        routed_scaling_factor: multiplies the weights, last.
        has_correction_bias: an ``e_score_correction_bias`` is added to scores for selecting.
        apply_router_weight_on_input: the weights multiply the input of the experts.
    """

    routing_method: RoutingMethodType
    num_expert_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    has_correction_bias: bool = False
    apply_router_weight_on_input: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``topk_routing`` and ``decoder_add_experts``, by name, without the bias."""
        scoring_func, renormalize = _METHODS[self.routing_method]
        return {
            "scoring_func": scoring_func,
            "renormalize": renormalize,
            "num_expert_group": self.num_expert_group,
            "topk_group": self.topk_group,
            "routed_scaling_factor": self.routed_scaling_factor,
        }


def route(
    routing_method: RoutingMethodType,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    top_k: int,
    num_expert_group: int | None = None,
    topk_group: int | None = None,
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`select_experts`, with the scoring function and the renormalization of one of ROUTING_METHODS.

    Every method takes groups, a correction bias and a scaling factor (None is 1). For example, DeepSeek-V2 is Default
    with groups. Llama4 multiplies the input by the weights, by ``apply_router_weight_on_input`` of the layer.

    Raises:
        ValueError: a method without a defined computation (Unspecified, Custom).
    """
    if routing_method not in _METHODS:
        raise ValueError(f"{routing_method!r} does not say how to select experts: select them outside the layer")
    scoring_func, renormalize = _METHODS[routing_method]
    return select_experts(
        hidden_states,
        router_logits,
        top_k,
        use_grouped_topk=num_expert_group is not None,
        renormalize=renormalize,
        topk_group=topk_group,
        num_expert_group=num_expert_group,
        scoring_func=scoring_func,
        routed_scaling_factor=1.0 if routed_scaling_factor is None else routed_scaling_factor,
        e_score_correction_bias=e_score_correction_bias,
    )
