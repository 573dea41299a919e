"""The experts of one mixture-of-experts layer as a module (upstream: ``RoutedExperts``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from w4a8.moe.config import FusedMoEConfig, RoutingMethodType
from w4a8.moe.loader import MoEWeightLoader
from w4a8.moe.method import CompressedTensorsW4A8Int8MoEMethod
from w4a8.nn.packed import PackedModule


class RoutedExperts(PackedModule):
    """Expert weights, how tokens are routed to them, and the method that runs them.

    On construction it has the int8 parameters of ``create_weights``, each with a ``weight_loader``; fill them, call
    ``process_weights_after_loading()``, and it can run. Under tensor or expert parallelism its output is this rank's
    summand: all-reduce it. The state dict of a packed layer loads into one that is packed or not, and makes it packed;
    that it has stacks of these shapes is checked.
    """

    def __init__(
        self,
        moe: FusedMoEConfig,
        quant_method: CompressedTensorsW4A8Int8MoEMethod,
        params_dtype: torch.dtype | None = None,
        *,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        e_score_correction_bias: torch.Tensor | None = None,
        routed_scaling_factor: float | None = None,
        w13_interleaved: bool = False,
    ) -> None:
        """Creates the parameters.

        Args:
            moe: the layer.
            quant_method: made for the same ``moe``.
            params_dtype: of the biases; ``moe.in_dtype`` if not given.
            expert_map: int32 [global experts], local index or -1; None if this rank has all.
            apply_router_weight_on_input: router weights multiply the input instead of the output.
            num_expert_group: groups of experts to route in, None for no groups.
            topk_group: groups that are kept.
            e_score_correction_bias: [global experts], or None.
            routed_scaling_factor: multiplies router weights; None is 1.
            w13_interleaved: a fused w13 will be loaded whose rows alternate gate and up.
        """
        super().__init__()
        if expert_map is None and moe.num_local_experts != moe.num_experts:
            raise ValueError(f"{moe.num_local_experts} of {moe.num_experts} experts are local: an expert_map is needed")
        if w13_interleaved and not moe.is_act_and_mul:
            raise ValueError(f"w13_interleaved needs a gate, which activation {moe.activation.value!r} does not have")
        self.moe_config = moe
        self.quant_method = quant_method
        self.activation = moe.activation
        self.global_num_experts = moe.num_experts
        self.top_k = moe.experts_per_token
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.routed_scaling_factor = routed_scaling_factor
        self.w13_interleaved = w13_interleaved
        self.register_buffer("expert_map", expert_map, persistent=False)
        self.register_buffer("e_score_correction_bias", e_score_correction_bias)
        parallel = moe.moe_parallel_config
        self.weight_loader = MoEWeightLoader(
            parallel.tp_rank, parallel.tp_size, expert_map, w13_interleaved, gated=bool(moe.is_act_and_mul)
        )
        quant_method.create_weights(
            self,
            num_experts=moe.num_local_experts,
            hidden_size=moe.hidden_dim,
            intermediate_size_per_partition=moe.intermediate_size_per_partition,
            params_dtype=params_dtype if params_dtype is not None else moe.in_dtype,
            weight_loader=self.weight_loader,
        )

    def packed_shapes(self) -> dict[str, dict[str, int | str]]:
        """What the headers must say."""
        moe, group = self.moe_config, self.quant_method.group_size
        hidden, inner = moe.hidden_dim, moe.intermediate_size_per_partition
        rows = 2 * inner if moe.is_act_and_mul else inner
        return {
            "w13_weight_packed": {"n": rows, "k": hidden, "group": hidden if group == -1 else group},
            "w2_weight_packed": {"n": hidden, "k": inner, "group": inner if group == -1 else group},
        }

    def check_packed(self, name: str, packed: torch.Tensor) -> None:
        """Raises ValueError if a tensor is not the packed stack of this name; says why."""
        experts = self.moe_config.num_local_experts
        if packed.dim() != 2 or len(packed) != experts:
            raise ValueError(f"{name} is {list(packed.shape)}, expected [{experts}, bytes]")
        super().check_packed(name, packed)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        given = [state_dict.get(prefix + name) for name in self.packed_shapes()]
        if all(packed is not None and packed.shape == (0,) for packed in given):  # of a layer that is not packed yet
            torch.nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _make_room(self, given: Mapping[str, torch.Tensor]) -> None:
        own = {name: getattr(self, name) for name in given}
        if len(given) == 2 and any(given[name].shape != own[name].shape for name in given):
            room = (torch.empty_like(packed, device=own[name].device) for name, packed in given.items())
            self.quant_method.take_packed(self, *room)

    @property
    def use_grouped_topk(self) -> bool:
        """Whether routing knows groups."""
        return self.num_expert_group is not None

    @property
    def renormalize(self) -> bool:
        """Whether softmax weights are divided by their sum (read by the method of vLLM 0.17)."""
        return self.moe_config.routing_method in (RoutingMethodType.Renormalize, RoutingMethodType.RenormalizeNaive)

    def _expert_routing_tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """None: experts are placed in order, which needs no tables."""
        return None

    def process_weights_after_loading(self) -> None:
        """Packs what was loaded; afterwards the layer can run."""
        self.quant_method.process_weights_after_loading(self)

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the layer: with the router's logits, or, if its routing method is custom, with a router's choice.

        Args:
            hidden_states: float32, bfloat16 or float16 [..., H].
            router_logits: [..., global experts].
            topk_weights: [..., k].
            topk_ids: int32 or int64 [..., k], global.

        Returns:
            The shape and dtype of hidden_states.
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.quant_method.is_monolithic:
            if router_logits is None:
                raise ValueError("this layer routes by itself: it needs router_logits")
            out = self.quant_method.apply_monolithic(self, x, router_logits.reshape(-1, router_logits.shape[-1]))
        else:
            if topk_weights is None or topk_ids is None:
                raise ValueError("this layer's router is outside: it needs topk_weights and topk_ids")
            k = topk_ids.shape[-1]
            out = self.quant_method.apply(self, x, topk_weights.reshape(-1, k), topk_ids.reshape(-1, k), None, None)
        return out.view(hidden_states.shape)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        moe = self.moe_config
        return (
            f"experts={moe.num_local_experts}/{moe.num_experts}, top_k={moe.experts_per_token}, "
            f"hidden={moe.hidden_dim}, intermediate={moe.intermediate_size_per_partition}, "
            f"group_size={self.quant_method.group_size}, activation={moe.activation.value}"
        )
