"""Experts with int4 weights and dynamically quantized int8 activations, computed by ``torch.ops.w4a8``.

Mirrors ``vllm.model_executor.layers.fused_moe.experts.cpu_int4_moe`` of vLLM 0.24; docs/vllm_mirror.md lists what these
support beyond it.
"""

from __future__ import annotations

import torch

from w4a8.core.activation import MoEActivation, as_activation, kernel_activation_kind
from w4a8.core.experts import unsupported_width
from w4a8.core.matrix import is_group_size
from w4a8.core.routing import ROUTING_METHODS, RoutingMethodType
from w4a8.mirror.config import FusedMoEConfig, FusedMoEParallelConfig, GroupShape, QuantKey, current_platform
from w4a8.mirror.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEExperts,
    FusedMoEExpertsModular,
    FusedMoEExpertsMonolithic,
)

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
    """What the two kinds of experts share: what they support."""

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


class CPUExpertsInt4(_Int4Experts, FusedMoEExpertsMonolithic):
    """Routing and experts in one call."""

    @staticmethod
    def _supports_routing_method(
        routing_method: RoutingMethodType, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        """All that say how to route; a custom router needs :class:`CPUExpertsInt4Modular`."""
        return routing_method in ROUTING_METHODS


class CPUExpertsInt4Modular(_Int4Experts, FusedMoEExpertsModular):
    """Experts alone: the router is outside, and may be anything."""
