"""vLLM's W4A8-int8 classes, mirrored without vLLM. docs/vllm_mirror.md lists what is the same and what differs.

    method                  CompressedTensorsW4A8Int8MoEMethod of vLLM 0.24
    method_v0_17            the class of that name in vLLM 0.17
    oracle.w4a8_int8        selection of the experts class, conversion of weights
    experts.cpu_int4_moe    CPUExpertsInt4, CPUExpertsInt4Modular
    layer                   RoutedExperts, which holds the weights, and MoEWeightLoader, which loads them
    config, modular_kernel  the classes of vLLM that the modules above use

The linear kernel is in ``w4a8.linear``. Routing (``select_experts``), activations and the call of the operator are in
``w4a8.core``. Nothing else in the package imports these modules: ``w4a8.checkpoint.read_layers`` gives layers of
``w4a8.nn``.
"""

from w4a8.core.activation import MoEActivation, kernel_activation_kind
from w4a8.core.experts import determine_expert_map
from w4a8.core.quant_args import QuantizationArgs, QuantizationStrategy
from w4a8.core.routing import RoutingMethodType, route, select_experts
from w4a8.moe import loader, platforms, quant_key  # noqa: F401
from w4a8.moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    FusedMoEQuantDesc,
    GroupShape,
    QuantKey,
    ScaleDesc,
)
from w4a8.moe.experts.cpu_int4_moe import CPUExpertsInt4, CPUExpertsInt4Modular, upstream_activation_kind
from w4a8.moe.layer import MoEWeightLoader, RoutedExperts
from w4a8.moe.method import CompressedTensorsW4A8Int8MoEMethod
from w4a8.moe.oracle.w4a8_int8 import (
    W4A8Int8MoeBackend,
    convert_to_w4a8_int8_moe_format,
    make_w4a8_int8_moe_kernel,
    make_w4a8_int8_moe_quant_config,
    pack_int4_weights_for_kleidi,
    select_w4a8_int8_moe_backend,
)

__all__ = [
    "CPUExpertsInt4",
    "CPUExpertsInt4Modular",
    "CompressedTensorsW4A8Int8MoEMethod",
    "FusedMoEConfig",
    "FusedMoEParallelConfig",
    "FusedMoEQuantConfig",
    "FusedMoEQuantDesc",
    "GroupShape",
    "MoEActivation",
    "MoEWeightLoader",
    "QuantKey",
    "QuantizationArgs",
    "QuantizationStrategy",
    "RoutedExperts",
    "RoutingMethodType",
    "ScaleDesc",
    "W4A8Int8MoeBackend",
    "convert_to_w4a8_int8_moe_format",
    "determine_expert_map",
    "kernel_activation_kind",
    "make_w4a8_int8_moe_kernel",
    "make_w4a8_int8_moe_quant_config",
    "pack_int4_weights_for_kleidi",
    "route",
    "select_experts",
    "select_w4a8_int8_moe_backend",
    "upstream_activation_kind",
]
