"""Whether vLLM's internals are what the plugin builds on, and whether the operators compute what they should."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable

import torch

from w4a8.integrations.vllm.selftest_layers import layer_problems
from w4a8.ops import Activation, dyn_quant_matmul_4bit, dyn_quant_pack_4bit_weight, dynamic_4bit_int_moe

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


def _missing(owner: str, wanted: Iterable[str], there: Iterable[str]) -> list[str]:
    missing = [name for name in wanted if name not in set(there)]
    return [f"{owner} has no {', '.join(missing)}"] if missing else []


def _parameters(function: Callable) -> list[str]:
    return list(inspect.signature(function).parameters)


def _more_to_implement(cls: type, implemented: Iterable[str]) -> list[str]:
    more = sorted(set(getattr(cls, "__abstractmethods__", ())) - set(implemented))
    return [f"{cls.__name__} wants {', '.join(more)}"] if more else []


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
        *_missing("vllm.envs", ("environment_variables", "compile_factors"), vars(envs)),
        *_missing(f"{experts}.__init__", LAYER_ARGUMENTS, _parameters(RoutedExperts.__init__)),
        *_missing(experts, ("_map_global_expert_id_to_local_expert_id",), dir(RoutedExperts)),
        *_missing("FusedMoEConfig", MOE_FIELDS, fields(FusedMoEConfig)),
        *_missing("FusedMoEParallelConfig", PARALLEL_FIELDS, fields(FusedMoEParallelConfig)),
        *_missing(config.__name__, ("get_scheme_dict", "_add_fused_moe_to_target_scheme_map"), dir(config)),
        *_missing("get_quant_method", ("layer", "prefix"), _parameters(config.get_quant_method)),
        *_missing("get_scheme", ("layer", "layer_name"), _parameters(config.get_scheme)),
        *_missing(
            "apply_monolithic", ("layer", "x", "router_logits", "input_ids"), _parameters(method.apply_monolithic)
        ),
        *_missing("apply", ("layer", "x", "topk_weights", "topk_ids"), _parameters(method.apply)),
        *_missing(
            "create_weights",
            ("layer", "num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype"),
            _parameters(method.create_weights),
        ),
        *_more_to_implement(
            method, ("create_weights", "get_fused_moe_quant_config", "process_weights_after_loading", "apply")
        ),
        *_more_to_implement(
            CompressedTensorsScheme,
            ("get_min_capability", "create_weights", "apply_weights", "process_weights_after_loading"),
        ),
    ]


def operator_problems() -> list[str]:
    """What the operators compute wrongly on this machine; a linear layer and a layer of experts are tried.

    The inputs are integers that dynamic quantization represents exactly, so the answers are exact.
    """
    generator = torch.Generator().manual_seed(0)
    K, N, E = 64, 32, 2
    nibbles = torch.randint(256, (E, N, K // 2), dtype=torch.uint8, generator=generator)
    values = (torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(-2).to(torch.int32) - 8).to(torch.float32)
    packed = dyn_quant_pack_4bit_weight(nibbles, torch.ones(E, N, 1, dtype=torch.float32), None, K, K, N)
    # A range of 255 makes the step of the quantizer 1.
    x = torch.randint(-128, 128, (3, K), generator=generator).to(torch.float32)
    x[:, 0], x[:, 1] = -128.0, 127.0
    expected = x @ values[0].T
    found = []
    if not torch.equal(dyn_quant_matmul_4bit(x, packed[0], K, K, N), expected):
        found.append("dyn_quant_matmul_4bit gives wrong sums")

    down = torch.full((E, K, N // 2), 0x88, dtype=torch.uint8)  # zeros, but for one 1 per expert: output k is input k
    for k in range(0, N, 2):
        down[:, k, k // 2], down[:, k + 1, k // 2] = 0x89, 0x98
    w2 = dyn_quant_pack_4bit_weight(down, torch.ones(E, K, 1, dtype=torch.float32), None, N, N, K)
    ids, weights = torch.tensor([[1, -1]] * 3), torch.ones(3, 2)
    out = dynamic_4bit_int_moe(x, ids, weights, packed, w2, K, N, N, -1, False, Activation.RELU2)
    hidden = (x @ values[1].T).clamp(min=0).square()
    # The second quantization has 255 steps over the range of a row, and rounds to the nearest.
    bound = hidden.amax(1, keepdim=True) / 255
    if not ((out[:, :N] - hidden).abs() <= bound).all() or out[:, N:].any():
        found.append("dynamic_4bit_int_moe gives wrong sums")
    return found


def problems() -> list[str]:
    """Everything that speaks against taking over; empty if nothing does."""
    try:
        found = interface_problems()
    except (ImportError, AttributeError, TypeError) as error:
        found = [f"{type(error).__name__}: {error}"]
    found += operator_problems()
    return found or layer_problems()
