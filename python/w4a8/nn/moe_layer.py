"""A mixture-of-experts layer: a router's arithmetic and the experts that this process holds."""

from __future__ import annotations

import torch

from w4a8.core.activation import OWN_NUMBERS, GateNumbers, MoEActivation
from w4a8.core.experts import ExpertSizes, run_experts
from w4a8.core.routing import RoutingMethodType, route
from w4a8.nn.experts import PackedExperts


class W4A8MoE(PackedExperts):
    """Tokens and router logits to the weighted sum of the chosen experts. ``w4a8.load`` makes these layers.

    Where the experts are cut or distributed over processes, the output is this process's summand.

    Attributes:
        sizes: of the experts that this process holds.
        num_experts: of the model; a token has as many logits.
        top_k, routing_method and so on: arguments of the constructor.
    """

    expert_map: torch.Tensor | None
    e_score_correction_bias: torch.Tensor | None

    def __init__(
        self,
        w13_packed: torch.Tensor,
        w2_packed: torch.Tensor,
        sizes: ExpertSizes,
        top_k: int,
        routing_method: RoutingMethodType,
        *,
        activation: MoEActivation = MoEActivation.SILU,
        expert_map: torch.Tensor | None = None,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        e_score_correction_bias: torch.Tensor | None = None,
        routed_scaling_factor: float | None = None,
        apply_router_weight_on_input: bool = False,
        numbers: GateNumbers = OWN_NUMBERS,
    ) -> None:
        """Takes packed stacks and the settings of routing.

        Args:
            w13_packed, w2_packed, sizes: as :class:`PackedExperts`.
            top_k: experts per token.
            routing_method: how router logits are read.
            activation: between w13 and w2.
            expert_map: int32 [experts of the model], index in the stacks or -1; None if they are the same.
            num_expert_group: groups of experts to route in; None for no groups.
            topk_group: groups that are kept.
            e_score_correction_bias: float32 [experts of the model], or None.
            routed_scaling_factor: multiplies the router's weights; None is 1.
            apply_router_weight_on_input: the router's weights multiply the input instead of the output.
            numbers: of the activation.

        Raises:
            ValueError: a stack is not of these sizes; says why.
        """
        super().__init__(w13_packed, w2_packed, sizes)
        self.num_experts = sizes.experts if expert_map is None else len(expert_map)
        self.top_k = top_k
        self.routing_method = routing_method
        self.activation = activation
        self.numbers = numbers
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.routed_scaling_factor = routed_scaling_factor
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.register_buffer("expert_map", expert_map, persistent=False)
        self.register_buffer("e_score_correction_bias", e_score_correction_bias)

    def route(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [T, H] and logits [T, num_experts] to weights float32 [T, k] and expert ids of the model int32 [T, k].

        Raises:
            ValueError: another number of logits, or a routing method without defined arithmetic.
        """
        if router_logits.shape[-1] != self.num_experts:
            raise ValueError(f"router_logits is {list(router_logits.shape)}, expected [..., {self.num_experts}]")
        return route(
            self.routing_method,
            hidden_states,
            router_logits,
            self.top_k,
            num_expert_group=self.num_expert_group,
            topk_group=self.topk_group,
            e_score_correction_bias=self.e_score_correction_bias,
            routed_scaling_factor=self.routed_scaling_factor,
        )

    def run(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Runs the chosen experts: tokens [T, H], weights [T, k] and expert ids of the model [T, k] to [T, H]."""
        return run_experts(
            hidden_states,
            topk_weights,
            topk_ids,
            self.w13_packed,
            self.w2_packed,
            self.sizes,
            self.activation,
            self.expert_map,
            self.apply_router_weight_on_input,
            self.numbers,
        )

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """The layer.

        Args:
            hidden_states: float32, bfloat16 or float16 [..., H].
            router_logits: [..., num_experts], any real dtype.

        Returns:
            The shape and dtype of hidden_states.

        Raises:
            ValueError: as :meth:`route`.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = self.route(tokens, router_logits.reshape(-1, router_logits.shape[-1]))
        return self.run(tokens, weights, ids).view(hidden_states.shape)

    def extra_repr(self) -> str:
        """Sizes and kind, for print()."""
        kind = f"activation={self.activation.value}{self.numbers}{self.kind_repr()}"
        return f"{self.routed_repr(self.num_experts, self.top_k)}, {kind}"
