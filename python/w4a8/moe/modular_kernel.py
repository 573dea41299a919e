"""What a fused mixture-of-experts kernel is made of (upstream: ``vllm...layers.fused_moe.modular_kernel``).

    FusedMoEKernel = PrepareAndFinalize (what happens before and after) + Experts (the computation)

Monolithic experts take router logits, modular ones take the experts and weights that a router outside has chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

import torch

from w4a8.core.activation import MoEActivation
from w4a8.moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig, RoutingMethodType
from w4a8.moe.platforms import current_platform
from w4a8.moe.quant_key import QuantKey


class FusedMoEActivationFormat(Enum):
    """How tokens reach the experts."""

    Standard = "standard"  # [T, H]
    BatchedExperts = "batched_experts"  # [E, tokens of an expert, H]


class TopKWeightAndReduceNoOP:
    """The experts have already weighted and added a token's outputs."""

    def apply(self, output: torch.Tensor) -> torch.Tensor:
        """Returns [T, H] as it is."""
        return output


class FusedMoEExperts(ABC):
    """Base of both kinds of experts: what they support, and their two configurations."""

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        self.moe_config = moe_config
        self.quant_config = quant_config

    @staticmethod
    def is_monolithic() -> bool:
        """Whether ``apply`` takes router logits."""
        raise NotImplementedError

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Whether the experts quantize their input themselves."""
        return False

    @staticmethod
    @abstractmethod
    def activation_format() -> FusedMoEActivationFormat:
        """How they want the tokens."""

    @staticmethod
    @abstractmethod
    def _supports_current_device() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_no_act_and_mul() -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_activation(activation: MoEActivation) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool: ...

    @staticmethod
    @abstractmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool: ...

    @staticmethod
    def _supports_routing_method(
        routing_method: RoutingMethodType, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return True

    @staticmethod
    def _supports_router_logits_dtype(
        router_logits_dtype: torch.dtype | None, routing_method: RoutingMethodType
    ) -> bool:
        return True

    @staticmethod
    def _unsupported_shape(moe_config: FusedMoEConfig, weight_key: QuantKey | None) -> str | None:
        """What about the sizes and the input dtype is not supported, in words, or None."""
        return None

    def supports_expert_map(self) -> bool:
        """Whether ``apply`` takes an expert map."""
        return False

    @staticmethod
    def is_supported_config(
        cls: type[FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        """Whether the experts can run a layer, and if not the first reason, in words.

        Args:
            cls: the class that is asked (static, as upstream, so that it is given).
            moe_config: the layer.
            weight_key: quantization of the weights.
            activation_key: quantization of the input before it reaches the experts, None for none.
            activation_format: how tokens will arrive.

        Returns:
            (True, None), or (False, "kernel does not support ...").
        """
        reason = cls._first_unsupported(moe_config, weight_key, activation_key)
        if reason is None and activation_format != cls.activation_format():
            reason = f"{activation_format.value} activation format"
        return (True, None) if reason is None else (False, f"kernel does not support {reason}")

    @classmethod
    def _first_unsupported(
        cls, moe_config: FusedMoEConfig, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> str | None:
        parallel, routing = moe_config.moe_parallel_config, moe_config.routing_method
        if not cls._supports_current_device():
            return f"current device {current_platform.device_name}"
        if not (moe_config.is_act_and_mul or cls._supports_no_act_and_mul()):
            return "no act_and_mul MLP layer"
        if not cls._supports_activation(moe_config.activation):
            return f"{moe_config.activation} activation"
        if not cls._supports_quant_scheme(weight_key, activation_key):
            return f"quantization scheme {weight_key}x{activation_key}"
        if not cls._supports_parallel_config(parallel):
            return f"parallel config {parallel}"
        if not cls._supports_routing_method(routing, weight_key, activation_key):
            return f"routing method {routing!r}"
        if not cls._supports_router_logits_dtype(moe_config.router_logits_dtype, routing):
            return f"router logits dtype {moe_config.router_logits_dtype}"
        return cls._unsupported_shape(moe_config, weight_key)


class FusedMoEExpertsMonolithic(FusedMoEExperts):
    """Experts that route by themselves."""

    @staticmethod
    def is_monolithic() -> bool:
        return True

    @abstractmethod
    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        router_logits: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        num_expert_group: int | None = None,
        e_score_correction_bias: torch.Tensor | None = None,
        routed_scaling_factor: float | None = None,
        topk_group: int | None = None,
    ) -> torch.Tensor:
        """The layer from hidden states [T, H] and router logits [T, E] to [T, H]."""


class FusedMoEExpertsModular(FusedMoEExperts):
    """Experts behind a router of someone else's."""

    @staticmethod
    def is_monolithic() -> bool:
        return False

    @abstractmethod
    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """(experts, tokens, rows of w13, hidden size, k)."""

    @abstractmethod
    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: object | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of the two workspaces and of the output."""

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceNoOP:
        """What remains to be done with the output."""

    @abstractmethod
    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: object | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes the layer's result to ``output``."""


class MoEPrepareAndFinalizeNoDPEPMonolithic:
    """Nothing is exchanged between ranks, and the experts quantize for themselves: nothing to do."""

    def prepare(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns hidden states [T, H] and logits [T, E] as they are."""
        return hidden_states, router_logits

    def finalize(self, output: torch.Tensor) -> torch.Tensor:
        """Returns [T, H] as it is."""
        return output


class MoEPrepareAndFinalizeNoDPEPModular:
    """Nothing is exchanged between ranks; router weights may go into the input here."""

    def prepare(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, apply_router_weight_on_input: bool
    ) -> torch.Tensor:
        """The input of the experts.

        Args:
            hidden_states: [T, H].
            topk_weights: [T, k].
            apply_router_weight_on_input: multiply each row by its weight, which must then be the only one.

        Returns:
            [T, H] in the dtype of hidden_states.
        """
        if not apply_router_weight_on_input:
            return hidden_states
        if topk_weights.shape[1] != 1:
            raise ValueError(
                "apply_router_weight_on_input with a router outside the experts is only implemented for top-1, "
                f"but each token has {topk_weights.shape[1]} experts"
            )
        return hidden_states * topk_weights.to(hidden_states.dtype)

    def finalize(self, output: torch.Tensor, reduce: TopKWeightAndReduceNoOP) -> torch.Tensor:
        """The layer's result [T, H] from what the experts wrote."""
        return reduce.apply(output)


class FusedMoEKernel:
    """Prepare, experts, finalize."""

    def __init__(
        self,
        prepare_finalize: MoEPrepareAndFinalizeNoDPEPMonolithic | MoEPrepareAndFinalizeNoDPEPModular,
        fused_experts: FusedMoEExperts,
    ) -> None:
        """Puts the two parts together.

        Args:
            prepare_finalize: of the same kind (monolithic or modular) as the experts.
            fused_experts: the computation.
        """
        if isinstance(prepare_finalize, MoEPrepareAndFinalizeNoDPEPMonolithic) != fused_experts.is_monolithic():
            raise ValueError(
                f"{type(prepare_finalize).__name__} and {type(fused_experts).__name__} are not of the same kind"
            )
        self.prepare_finalize = prepare_finalize
        self.fused_experts = fused_experts

    @property
    def is_monolithic(self) -> bool:
        """Whether ``apply_monolithic`` is the one to call; else ``apply``."""
        return self.fused_experts.is_monolithic()

    def apply_monolithic(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        router_logits: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        num_expert_group: int | None = None,
        e_score_correction_bias: torch.Tensor | None = None,
        routed_scaling_factor: float | None = None,
        topk_group: int | None = None,
    ) -> torch.Tensor:
        """The layer from hidden states [T, H] and router logits [T, E] to [T, H]."""
        assert isinstance(self.fused_experts, FusedMoEExpertsMonolithic)
        hidden_states, router_logits = self.prepare_finalize.prepare(hidden_states, router_logits)
        output = self.fused_experts.apply(
            hidden_states,
            w1,
            w2,
            router_logits,
            activation,
            global_num_experts,
            expert_map,
            None,
            apply_router_weight_on_input,
            num_expert_group=num_expert_group,
            e_score_correction_bias=e_score_correction_bias,
            routed_scaling_factor=routed_scaling_factor,
            topk_group=topk_group,
        )
        return self.prepare_finalize.finalize(output)

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        shared_experts: object | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer from hidden states [T, H] and a router's choice [T, k] to [T, H].

        Shared experts overlap with communication upstream; there is none here, so they are the caller's to run.
        """
        assert isinstance(self.fused_experts, FusedMoEExpertsModular)
        if shared_experts is not None:
            raise ValueError("shared experts are not run here: call them and add their output to this one")
        a1 = self.prepare_finalize.prepare(hidden_states, topk_weights, apply_router_weight_on_input)
        experts = self.fused_experts
        local_experts, tokens, rows, hidden, top_k = experts.moe_problem_size(a1, w1, w2, topk_ids)
        shape13, shape2, out_shape = experts.workspace_shapes(
            tokens, rows, hidden, top_k, global_num_experts, local_experts, None, activation
        )
        output = torch.empty(out_shape, dtype=hidden_states.dtype, device=hidden_states.device)
        experts.apply(
            output,
            a1,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation,
            global_num_experts,
            expert_map,
            None,
            None,
            output.new_empty(shape13),
            output.new_empty(shape2),
            None,
            apply_router_weight_on_input,
        )
        return self.prepare_finalize.finalize(output, experts.finalize_weight_and_reduce_impl())
