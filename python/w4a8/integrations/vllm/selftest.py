"""Whether vLLM's internals are what the plugin builds on, and whether the operators compute what they should."""

from __future__ import annotations

import dataclasses

from w4a8.integrations.selftest import missing, more_to_implement, operator_problems, parameters
from w4a8.integrations.vllm.selftest_layers import layer_problems

# Attributes of a layer of experts; vLLM sets each from the argument of the same name.
LAYER_ARGUMENTS = (
    "renormalize",
    "use_grouped_topk",
    "num_expert_group",
    "topk_group",
    "custom_routing_function",
    "scoring_func",
    "routed_scaling_factor",
    "e_score_correction_bias",
    "apply_router_weight_on_input",
    "ckpt_gate_proj_name",
    "ckpt_up_proj_name",
    "ckpt_down_proj_name",
)
MOE_FIELDS = (
    "num_experts",
    "experts_per_token",
    "hidden_dim",
    "intermediate_size",
    "num_local_experts",
    "activation",
    "moe_parallel_config",
    "in_dtype",
    "router_logits_dtype",
    "has_bias",
    "is_lora_enabled",
    "swiglu_limit",
    "swiglu_alpha",
    "swiglu_beta",
)
PARALLEL_FIELDS = (
    *("tp_size", "tp_rank", "pcp_size", "pcp_rank", "dp_size", "dp_rank", "ep_size", "ep_rank"),
    *("sp_size", "use_ep", "enable_eplb"),
)


def interface_problems() -> list[str]:
    """What of vLLM is not as the plugin expects it."""
    from vllm import envs
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme

    def fields(cls: type) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    config, method = CompressedTensorsConfig, FusedMoEMethodBase
    experts = "RoutedExperts"
    return [
        *missing("vllm.envs", ("environment_variables", "compile_factors"), vars(envs)),
        *missing(f"{experts}.__init__", LAYER_ARGUMENTS, parameters(RoutedExperts.__init__)),
        *missing(experts, ("_map_global_expert_id_to_local_expert_id",), dir(RoutedExperts)),
        *missing("FusedMoEConfig", MOE_FIELDS, fields(FusedMoEConfig)),
        *missing("FusedMoEParallelConfig", PARALLEL_FIELDS, fields(FusedMoEParallelConfig)),
        *missing(config.__name__, ("get_scheme_dict", "_add_fused_moe_to_target_scheme_map"), dir(config)),
        *missing("get_quant_method", ("layer", "prefix"), parameters(config.get_quant_method)),
        *missing("get_scheme", ("layer", "layer_name"), parameters(config.get_scheme)),
        *missing("apply_monolithic", ("layer", "x", "router_logits", "input_ids"), parameters(method.apply_monolithic)),
        *missing("apply", ("layer", "x", "topk_weights", "topk_ids"), parameters(method.apply)),
        *missing(
            "create_weights",
            ("layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"),
            parameters(method.create_weights),
        ),
        *more_to_implement(
            method, ("create_weights", "get_fused_moe_quant_config", "process_weights_after_loading", "apply")
        ),
        *more_to_implement(
            CompressedTensorsScheme,
            ("get_min_capability", "create_weights", "apply_weights", "process_weights_after_loading"),
        ),
    ]


def problems() -> list[str]:
    """Everything that speaks against taking over; empty if nothing does."""
    try:
        found = interface_problems()
    except (ImportError, AttributeError, TypeError) as error:
        found = [f"{type(error).__name__}: {error}"]
    found += operator_problems()
    return found or layer_problems()
