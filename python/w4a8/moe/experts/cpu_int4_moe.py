"""Experts with int4 weights and dynamically quantized int8 activations, computed by ``torch.ops.w4a8``.

Mirrors ``vllm.model_executor.layers.fused_moe.experts.cpu_int4_moe`` of vLLM 0.24; docs/vllm_mirror.md lists what these
support beyond it.
"""

from __future__ import annotations

import torch

from w4a8.core.activation import MoEActivation, as_activation, kernel_activation_kind
from w4a8.core.experts import ExpertSizes, run_experts, unsupported_width
from w4a8.core.matrix import is_group_size
from w4a8.core.routing import ROUTING_METHODS, route
from w4a8.moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig, RoutingMethodType
from w4a8.moe.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEExperts,
    FusedMoEExpertsModular,
    FusedMoEExpertsMonolithic,
    TopKWeightAndReduceNoOP,
)
from w4a8.moe.platforms import current_platform
from w4a8.moe.quant_key import GroupShape, QuantKey

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def upstream_activation_kind(activation: MoEActivation) -> int:
    """The integer that upstream vLLM 0.24 hands its own op: 0 SWIGLUSTEP, 1 SWIGLUOAI, 2 SILU.

    For code that must agree with upstream's numbering; nothing in this package computes with it, because upstream's
    kernel reads 1 as the clamped SwiGLU of gpt-oss, and this op as the plain ``SiLU(u) * g`` that the number is
    documented to mean; and for SWIGLUSTEP upstream's kernel forgets the clamps at 7.

    Raises:
        ValueError: one of the activations that upstream 0.24 does not have.
    """
    kinds = {MoEActivation.SWIGLUSTEP: 0, MoEActivation.SWIGLUOAI: 1, MoEActivation.SILU: 2}
    if activation not in kinds:
        raise ValueError(f"Unsupported activation '{activation}'")
    return kinds[activation]


class _Int4Experts(FusedMoEExperts):
    """What the two kinds of experts share: what they support, and the call of the op."""

    @property
    def expects_unquantized_inputs(self) -> bool:
        """The op quantizes each row itself."""
        return True

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
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
        """Tensor and expert parallelism, whose only exchange is the caller's all-reduce.

        Data and context parallelism would have to bring tokens of other ranks here first.
        """
        return moe_parallel_config.dp_size == 1 and moe_parallel_config.pcp_size == 1

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        """Symmetric int4 weights in int8, channelwise or in groups that the operators have; unquantized input."""
        if weight_key is None or activation_key is not None:
            return False
        scale = weight_key.scale
        if weight_key.dtype != torch.int8 or weight_key.scale2 is not None or not weight_key.symmetric:
            return False
        if not scale.static or scale.dtype not in (torch.float32, torch.bfloat16):
            return False
        shape = scale.group_shape
        return shape == GroupShape.PER_CHANNEL or (shape.row == 1 and shape.col > 0 and is_group_size(shape.col))

    @staticmethod
    def _unsupported_shape(moe_config: FusedMoEConfig, weight_key: QuantKey | None) -> str | None:
        if moe_config.in_dtype not in INPUT_DTYPES:
            return f"input dtype {moe_config.in_dtype}"
        assert weight_key is not None, "quantization scheme has been checked"
        shape = weight_key.scale.group_shape
        group_size = -1 if shape == GroupShape.PER_CHANNEL else shape.col
        return unsupported_width("hidden size", moe_config.hidden_dim, group_size) or unsupported_width(
            "intermediate size per partition", moe_config.intermediate_size_per_partition, group_size
        )

    def supports_expert_map(self) -> bool:
        """Remote experts become skipped slots of the op."""
        return True

    def _activation_kind(self, activation: MoEActivation | str) -> int:
        """The op's ``activation_kind``; not upstream's integers, see :func:`kernel_activation_kind`."""
        return kernel_activation_kind(as_activation(activation))

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
        """One call of the op: hidden states [T, H], weights and global ids [T, k], packed stacks -> [T, H]."""
        activation = as_activation(activation)
        moe = self.moe_config
        return run_experts(
            hidden_states,
            topk_weights,
            topk_ids,
            w13_packed,
            w2_packed,
            ExpertSizes(
                moe.num_local_experts,
                moe.hidden_dim,
                moe.intermediate_size_per_partition,
                self.quant_config.group_size,
                activation.is_gated,
            ),
            activation,
            expert_map,
            apply_router_weight_on_input,
        )


class CPUExpertsInt4(_Int4Experts, FusedMoEExpertsMonolithic):
    """Routing and experts in one call."""

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig) -> None:
        """Experts of one layer.

        Args:
            moe_config: sizes and routing.
            quant_config: group size of the packed weights.
        """
        super().__init__(moe_config, quant_config)

    @staticmethod
    def _supports_routing_method(
        routing_method: RoutingMethodType,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
    ) -> bool:
        """All that say how to route; a custom router needs :class:`CPUExpertsInt4Modular`."""
        return routing_method in ROUTING_METHODS

    @staticmethod
    def _supports_router_logits_dtype(
        router_logits_dtype: torch.dtype | None,
        routing_method: RoutingMethodType,
    ) -> bool:
        """Any: logits are converted to float32 first."""
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
        """Routes, and runs the experts this rank holds.

        Args:
            hidden_states: float32, bfloat16 or float16 [T, H].
            w1: uint8 [local experts, bytes], packed w13.
            w2: uint8 [local experts, bytes], packed w2.
            router_logits: [T, global experts], any real dtype.
            activation: between w13 and w2.
            global_num_experts: columns of router_logits; -1 if unknown.
            expert_map: [global experts], local index or -1, or None if this rank holds all experts.
            a1q_scale: unused: rows are quantized inside the op.
            apply_router_weight_on_input: router weights multiply the input instead of the output.
            num_expert_group: groups of experts, None for routing without groups.
            e_score_correction_bias: [global experts] or None, added to scores for selecting.
            routed_scaling_factor: multiplies router weights; None is 1.
            topk_group: groups that are kept.

        Returns:
            [T, H] in the dtype of hidden_states: the sum over the experts of this rank.
        """
        topk_weights, topk_ids = route(
            self.moe_config.routing_method,
            hidden_states,
            router_logits,
            self.moe_config.experts_per_token,
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            e_score_correction_bias=e_score_correction_bias,
            routed_scaling_factor=routed_scaling_factor,
        )
        return self.run(
            hidden_states, topk_weights, topk_ids, w1, w2, activation, expert_map, apply_router_weight_on_input
        )


class CPUExpertsInt4Modular(_Int4Experts, FusedMoEExpertsModular):
    """Experts alone: the router is outside, and may be anything."""

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """Sizes that packed weights [E, bytes] do not show.

        Returns:
            (local experts, T, rows of w13, H, k).
        """
        intermediate = self.moe_config.intermediate_size_per_partition
        rows = 2 * intermediate if self.moe_config.is_act_and_mul else intermediate
        return w1.shape[0], a1.shape[0], rows, self.moe_config.hidden_dim, topk_ids.shape[1]

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
        """None, none (the op has its own scratch), and [M, K]."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceNoOP:
        """The op weights and adds."""
        return TopKWeightAndReduceNoOP()

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
        """Runs the experts this rank holds and writes their weighted sum.

        Args:
            output: [T, H], overwritten.
            hidden_states: [T, H].
            w1: uint8 [local experts, bytes], packed w13.
            w2: uint8 [local experts, bytes], packed w2.
            topk_weights: [T, k].
            topk_ids: [T, k], global; -1 is skipped.
            activation: between w13 and w2.
            global_num_experts: of the model.
            expert_map: [global experts], local index or -1, or None.
            a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta: unused.
            apply_router_weight_on_input: the weights are already in hidden_states (``prepare`` does it), so the
                experts must not weight again.
        """
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        output.copy_(self.run(hidden_states, weights, topk_ids, w1, w2, activation, expert_map, False))
