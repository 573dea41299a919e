"""Experts with int4 weights and dynamically quantized int8 activations, computed by ``torch.ops.w4a8``.

Mirrors ``vllm.model_executor.layers.fused_moe.experts.cpu_int4_moe`` of vLLM 0.24; docs/vllm_mirror.md lists what
these classes support beyond upstream.
"""

from __future__ import annotations

from w4a8.core.activation import MoEActivation
from w4a8.core.routing import ROUTING_METHODS, RoutingMethodType
from w4a8.moe.config import QuantKey
from w4a8.moe.modular_kernel import FusedMoEExpertsModular, FusedMoEExpertsMonolithic


def upstream_activation_kind(activation: MoEActivation) -> int:
    """The integer that upstream vLLM 0.24 passes to its own op: 0 SWIGLUSTEP, 1 SWIGLUOAI, 2 SILU.

    For code that must agree with upstream's numbers. This package does not compute with these numbers: upstream
    documents 1 as the plain ``SiLU(u) * g``, which this package's op computes for 1, but upstream's kernel computes the
    clamped SwiGLU of gpt-oss. For SWIGLUSTEP upstream's kernel lacks the clamps at 7.

    Raises:
        ValueError: upstream 0.24 does not have the activation.
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
        """All of ROUTING_METHODS; a custom router needs :class:`CPUExpertsInt4Modular`."""
        return routing_method in ROUTING_METHODS


class CPUExpertsInt4Modular(FusedMoEExpertsModular):
    """Experts alone, behind any router outside of the layer."""
