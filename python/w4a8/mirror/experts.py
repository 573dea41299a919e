"""Experts with int4 weights and dynamically quantized int8 activations, computed by ``torch.ops.w4a8``.

Mirrors ``vllm.model_executor.layers.fused_moe.experts.cpu_int4_moe`` of vLLM 0.24; docs/vllm_mirror.md lists what these
support beyond it.
"""

from __future__ import annotations

from w4a8.core.activation import MoEActivation
from w4a8.core.routing import ROUTING_METHODS, RoutingMethodType
from w4a8.mirror.config import QuantKey
from w4a8.mirror.modular_kernel import FusedMoEExpertsModular, FusedMoEExpertsMonolithic


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


class CPUExpertsInt4(FusedMoEExpertsMonolithic):
    """Routing and experts in one call."""

    @staticmethod
    def _supports_routing_method(
        routing_method: RoutingMethodType, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        """All that say how to route; a custom router needs :class:`CPUExpertsInt4Modular`."""
        return routing_method in ROUTING_METHODS


class CPUExpertsInt4Modular(FusedMoEExpertsModular):
    """Experts alone: the router is outside, and may be anything."""
