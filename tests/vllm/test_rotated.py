"""Checkpoints of compressed-tensors whose transform_config says what is to be done to inputs and outputs of modules."""

from types import SimpleNamespace

import pytest
import torch
from layers import moe_config, rank
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors  # noqa: F401  the next one wants it
from vllm.model_executor.layers.quantization.compressed_tensors.transform.linear import (
    CompressedTensorsLinearTransformMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.transform.module import HadamardTransform
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from w4a8.integrations.vllm.configs import W4A8CompressedTensorsConfig
from w4a8.integrations.vllm.linear_layers import W4A8LinearScheme
from w4a8.integrations.vllm.moe import W4A8MoEMethod

__all__ = ["rank"]  # a fixture

K, N, EXPERTS, GROUP = 64, 48, 3, 32
NAME = "model.layers.0.mlp.experts"
DOWN = ["re:.*down_proj$"]


def config_of(*rotations, inputs=True, targets=("Linear",)):
    """Of int4 experts and linear layers. A rotation: (targets, location) and perhaps more fields of it."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    tokens = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": list(targets), "weights": weights, "input_activations": tokens if inputs else None}
    form = "int-quantized" if inputs else "pack-quantized"
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}
    apply = [{"targets": names, "location": where, **dict(*more)} for names, where, *more in rotations]
    if apply:
        config["transform_config"] = {"config_groups": {"R4": {"type": "random-matrix", "apply": apply}}}
    return W4A8CompressedTensorsConfig.from_config(config)


def experts(config):
    """The method of a layer of experts as vLLM makes it."""
    moe = moe_config(EXPERTS, K, torch.float32)
    here = SimpleNamespace(
        local_num_experts=EXPERTS,
        placement_strategy="linear",
        expert_map=None,
        expert_mask=None,
        routing_tables=None,
        num_fused_shared_experts=0,
        map_global_to_local=lambda expert: expert,
    )
    return RoutedExperts(NAME, torch.float32, moe, config, expert_map_manager=here).quant_method


ROTATED = {
    "inputs of down_proj": (DOWN, "input"),
    "outputs of all": (["Linear"], "output"),
    "of one matrix": ([f"{NAME}.2.up_proj"], "input"),
    "of one expert": (["re:.*experts[.]1[.]"], "input"),
}


@pytest.mark.parametrize("which", ROTATED)
def test_experts_are_refused(rank, which):
    """No vLLM rotates what goes into an expert or comes out of one."""
    targets, location = ROTATED[which]
    with pytest.raises(ValueError) as caught:
        experts(config_of((targets, location), (targets, f"weight_{location}", {"inverse": True})))
    assert str(caught.value).startswith(f"w4a8: {NAME}.")
    assert f"transform_config.config_groups.R4 rotates the {location} of " in str(caught.value)


@pytest.mark.parametrize(
    "rotations",
    [
        [],
        [(DOWN, "weight_input"), (["Linear"], "weight_output", {"inverse": True})],
        [(["re:.*self_attn.*"], "input")],
        [(DOWN, "input", {"ignore": ["re:.*experts.*"]})],
        [(["Qwen3MoeAttention"], "k_cache"), (["Qwen3MoeAttention"], "q_attn")],
    ],
    ids=["none", "in the weights already", "attention", "ignored", "the cache"],
)
def test_experts_that_are_not_rotated(rank, rotations):
    assert isinstance(experts(config_of(*rotations)), W4A8MoEMethod)


def test_experts_of_others_are_theirs(rank, monkeypatch):
    """Weight-only models that are left to vLLM: its refusal, not this package's."""
    monkeypatch.setenv("W4A8_VLLM_W4A16", "0")
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    with pytest.raises(NotImplementedError, match="No WNA16 MoE backend"):
        experts(config_of((DOWN, "input"), inputs=False))


def test_output_layers_are_refused(rank):
    """vLLM rotates nothing for them either."""
    config = config_of((["lm_head"], "input"), targets=("Linear", "lm_head"))
    with pytest.raises(ValueError, match=r"w4a8: lm_head: transform_config.config_groups.R4 rotates the input of"):
        ParallelLMHead(64, K, params_dtype=torch.float32, quant_config=config, prefix="lm_head")
    head = ParallelLMHead(
        64, K, params_dtype=torch.float32, quant_config=config_of(targets=("Linear", "lm_head")), prefix="lm_head"
    )
    assert isinstance(head.scheme, W4A8LinearScheme)


@pytest.mark.parametrize("location", ["input", "output"])
def test_linear_layers_have_the_rotations_of_vllm(rank, location):
    """They stay around the layer of this package (and fail on CPUs, at their first forward, in 0.32)."""
    layer = ReplicatedLinear(
        K,
        N,
        params_dtype=torch.float32,
        quant_config=config_of((DOWN, location)),
        prefix="model.layers.0.mlp.down_proj",
    )
    assert isinstance(layer.scheme, W4A8LinearScheme)
    assert isinstance(layer.quant_method, CompressedTensorsLinearTransformMethod)
    assert isinstance(getattr(layer, f"R4_{location}"), HadamardTransform)
