"""Mixture-of-experts layers with int4 weights and int8 activations, shaped like vLLM's and independent of it.

One module per module of vLLM that is mirrored (docs/vllm_mirror.md says what is the same and what is not):

    method            CompressedTensorsW4A8Int8MoEMethod of vLLM 0.24
    method_v0_17      the same of vLLM 0.17
    oracle.w4a8_int8  selection of the experts class, conversion of weights
    experts.cpu_int4_moe  CPUExpertsInt4, CPUExpertsInt4Modular
    layer             RoutedExperts, the module that holds the weights
    loader            MoEWeightLoader, what fills them from the tensors of a checkpoint
    parameters        the parameters of a layer, and the packed stacks that take their place
    config, quant_key, modular_kernel, platforms
                      what the modules above read of vLLM

Routing (``select_experts``), activations and the call of the operator are ``w4a8.core``'s. Nothing else in the package
imports this mirror: ``w4a8.load`` gives layers of ``w4a8.nn``.
"""

from w4a8.core.activation import MoEActivation, kernel_activation_kind
from w4a8.core.experts import determine_expert_map
from w4a8.core.quant_args import QuantizationArgs, QuantizationStrategy
from w4a8.core.routing import route, select_experts
from w4a8.moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    FusedMoEQuantDesc,
    RoutingMethodType,
)
from w4a8.moe.experts.cpu_int4_moe import CPUExpertsInt4, CPUExpertsInt4Modular, upstream_activation_kind
from w4a8.moe.layer import RoutedExperts
from w4a8.moe.loader import MoEWeightLoader
from w4a8.moe.method import CompressedTensorsW4A8Int8MoEMethod
from w4a8.moe.oracle.w4a8_int8 import (
    W4A8Int8MoeBackend,
    convert_to_w4a8_int8_moe_format,
    make_w4a8_int8_moe_kernel,
    make_w4a8_int8_moe_quant_config,
    pack_int4_weights_for_kleidi,
    select_w4a8_int8_moe_backend,
)
from w4a8.moe.quant_key import GroupShape, QuantKey, ScaleDesc

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
