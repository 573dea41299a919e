"""The parts of a fused mixture-of-experts kernel (upstream: ``vllm...layers.fused_moe.modular_kernel``).

An upstream kernel runs three steps: prepare, experts, finalize. Here prepare and finalize do nothing. Monolithic
experts take router logits. Modular experts take the expert ids and weights that a router outside has chosen.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from w4a8.core.activation import MoEActivation, as_activation, kernel_activation_kind
from w4a8.core.experts import run_experts
from w4a8.core.matrix import is_group_size
from w4a8.core.routing import RoutingMethodType, route
from w4a8.moe.config import (
    INPUT_DTYPES,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    GroupShape,
    QuantKey,
    current_platform,
    first_reason,
)


class FusedMoEActivationFormat(Enum):
    """How tokens reach the experts."""

    Standard = "standard"  # [T, H]
    BatchedExperts = "batched_experts"  # [E, tokens of an expert, H]


class FusedMoEExperts:
    """Base of both kinds of experts: supported configurations, and the call of ``torch.ops.w4a8``.

    All experts here have int4 weights. The op quantizes their activations to int8.
    """

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        self.moe_config = moe_config
        self.quant_config = quant_config

    @staticmethod
    def is_monolithic() -> bool:
        """Whether ``apply`` takes router logits."""
        raise NotImplementedError

    @property
    def expects_unquantized_inputs(self) -> bool:
        """True: the op quantizes each row."""
        return True

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        """The format of tokens that the experts take."""
        return FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return isinstance(activation, MoEActivation)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        """Tensor and expert parallelism: ranks exchange data only in the caller's all-reduce.

        Data and context parallelism would first have to bring tokens of other ranks here.
        """
        return moe_parallel_config.dp_size == 1 and moe_parallel_config.pcp_size == 1

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        """Symmetric int4 weights held as int8, channelwise or in groups that the operators have; unquantized input."""
        if weight_key is None or activation_key is not None:
            return False
        scale, shape = weight_key.scale, weight_key.scale.group_shape
        return (
            (weight_key.dtype, weight_key.scale2, weight_key.symmetric) == (torch.int8, None, True)
            and (scale.static and scale.dtype in (torch.float32, torch.bfloat16))
            and (shape == GroupShape.of_weights(shape.group_size) and is_group_size(shape.group_size))
        )

    @staticmethod
    def _supports_routing_method(
        routing_method: RoutingMethodType, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        """Any method: the router is outside of the layer."""
        return True

    @staticmethod
    def _supports_router_logits_dtype(
        router_logits_dtype: torch.dtype | None, routing_method: RoutingMethodType
    ) -> bool:
        return True

    @staticmethod
    def _unsupported_shape(moe_config: FusedMoEConfig, weight_key: QuantKey) -> str | None:
        """The input dtype or size that is not supported, in words, or None."""
        if moe_config.in_dtype not in INPUT_DTYPES:
            return f"input dtype {moe_config.in_dtype}"
        return moe_config.expert_sizes(weight_key.scale.group_shape.group_size).unsupported()

    def supports_expert_map(self) -> bool:
        """True: the op skips slots with experts of other ranks."""
        return True

    def _activation_kind(self, activation: MoEActivation | str) -> int:
        """The op's ``activation_kind``, not upstream's integer (see :func:`kernel_activation_kind`)."""
        return kernel_activation_kind(as_activation(activation))

    @staticmethod
    def is_supported_config(
        cls: type[FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        """(True, None) if ``cls`` can run a layer, else (False, "kernel does not support ...") with the first reason.

        ``activation_key``: quantization of the input of the experts; None if the input is not quantized.
        """
        parallel, routing = moe_config.moe_parallel_config, moe_config.routing_method
        logits, scheme = moe_config.router_logits_dtype, (weight_key, activation_key)
        checks = (
            (cls._supports_current_device(), f"current device {current_platform.device_name}"),
            (moe_config.is_act_and_mul or cls._supports_no_act_and_mul(), "no act_and_mul MLP layer"),
            (cls._supports_activation(moe_config.activation), f"{moe_config.activation} activation"),
            (cls._supports_quant_scheme(*scheme), f"quantization scheme {weight_key}x{activation_key}"),
            (cls._supports_parallel_config(parallel), f"parallel config {parallel}"),
            (cls._supports_routing_method(routing, *scheme), f"routing method {routing!r}"),
            (cls._supports_router_logits_dtype(logits, routing), f"router logits dtype {logits}"),
        )
        reason = first_reason(checks) or cls._unsupported_shape(moe_config, weight_key)
        if reason is None and activation_format != cls.activation_format():
            reason = f"{activation_format.value} activation format"
        return (True, None) if reason is None else (False, f"kernel does not support {reason}")

    def run(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        w13_packed: torch.Tensor,
        w2_packed: torch.Tensor,
        activation: MoEActivation | str,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        """:func:`run_experts` with the sizes of this rank's experts."""
        sizes = self.moe_config.expert_sizes(self.quant_config.group_size)
        sizes = replace(sizes, gated=as_activation(activation).is_gated)
        what = (hidden_states, topk_weights, topk_ids, w13_packed, w2_packed)
        return run_experts(*what, sizes, activation, expert_map, apply_router_weight_on_input)


class FusedMoEExpertsMonolithic(FusedMoEExperts):
    """Experts that also route. Router logits may have any dtype; routing computes in float32."""

    @staticmethod
    def is_monolithic() -> bool:
        return True

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
        """Routes hidden states [T, H] by logits [T, global experts] (:func:`route`) and runs the experts of this rank.

        w1 and w2 are the packed stacks. Other arguments: as in :func:`run_experts`. global_num_experts is unused, since
        the logits show it; a1q_scale is unused, since the op quantizes rows. Returns this rank's sum, [T, H].
        """
        method, top_k = self.moe_config.routing_method, self.moe_config.experts_per_token
        groups = (num_expert_group, topk_group, e_score_correction_bias, routed_scaling_factor)
        chosen = route(method, hidden_states, router_logits, top_k, *groups)
        return self.run(hidden_states, *chosen, w1, w2, activation, expert_map, apply_router_weight_on_input)


class FusedMoEExpertsModular(FusedMoEExperts):
    """Experts behind a router outside of the layer."""

    @staticmethod
    def is_monolithic() -> bool:
        return False

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
    ) -> torch.Tensor:
        """Runs the experts with the router's ids and weights [T, k] for hidden states [T, H].

        Arguments: as in :func:`run_experts`; global_num_experts is unused. ``apply_router_weight_on_input`` needs k of
        1: each row of hidden_states is first multiplied by its weight. Returns this rank's sum, [T, H].
        """
        if apply_router_weight_on_input:
            if topk_weights.shape[1] != 1:
                raise ValueError(
                    "apply_router_weight_on_input with a router outside the experts is only implemented for top-1, "
                    f"but each token has {topk_weights.shape[1]} experts"
                )
            hidden_states = hidden_states * topk_weights.to(hidden_states.dtype)
            topk_weights = torch.ones_like(topk_weights)
        return self.run(hidden_states, topk_weights, topk_ids, w1, w2, activation, expert_map, False)


class MoEPrepareAndFinalizeNoDPEPMonolithic:
    """Prepare and finalize of monolithic experts. Both do nothing: ranks exchange nothing."""


class MoEPrepareAndFinalizeNoDPEPModular:
    """Prepare and finalize of modular experts. Both do nothing: ranks exchange nothing."""


class FusedMoEKernel:
    """Prepare and finalize, and experts. A ValueError if one is monolithic and the other modular."""

    def __init__(
        self,
        prepare_finalize: MoEPrepareAndFinalizeNoDPEPMonolithic | MoEPrepareAndFinalizeNoDPEPModular,
        fused_experts: FusedMoEExperts,
    ) -> None:
        if isinstance(prepare_finalize, MoEPrepareAndFinalizeNoDPEPMonolithic) != fused_experts.is_monolithic():
            raise ValueError(
                f"{type(prepare_finalize).__name__} and {type(fused_experts).__name__} are not of the same kind"
            )
        self.prepare_finalize = prepare_finalize
        self.fused_experts = fused_experts

    @property
    def is_monolithic(self) -> bool:
        """Whether to call ``apply_monolithic``; otherwise ``apply``."""
        return self.fused_experts.is_monolithic()

    def apply_monolithic(self, *args: torch.Tensor, **how: Any) -> torch.Tensor:
        """As :meth:`FusedMoEExpertsMonolithic.apply`, without ``a1q_scale``."""
        assert isinstance(self.fused_experts, FusedMoEExpertsMonolithic)
        return self.fused_experts.apply(*args, a1q_scale=None, **how)

    def apply(
        self,
        *args: torch.Tensor,
        shared_experts: object | None = None,
        shared_experts_input: torch.Tensor | None = None,
        **how: Any,
    ) -> torch.Tensor:
        """As :meth:`FusedMoEExpertsModular.apply`.

        The caller runs shared experts. Upstream overlaps shared experts with communication; there is none here.
        """
        assert isinstance(self.fused_experts, FusedMoEExpertsModular)
        if shared_experts is not None:
            raise ValueError("shared experts are not run here: call them and add their output to this one")
        return self.fused_experts.apply(*args, **how)
