"""Layers of experts without an engine: what the plugin refuses, in words, and what it notices to be missing."""

from types import MethodType, SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from w4a8.core.quant_args import QuantizationArgs
from w4a8.integrations.vllm.moe import W4A8MoEMethod

HIDDEN, EXPERTS = 128, 2


def make_layer(group_size=32, intermediate=64, tp_size=1, has_bias=False, activation="silu"):
    """(layer, method), with what the plugin reads of vLLM's RoutedExperts and its FusedMoEConfig; parameters empty."""
    parallel = dict.fromkeys(("tp_size", "pcp_size", "dp_size", "ep_size", "sp_size"), 1)
    parallel.update(dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0))
    parallel.update(tp_size=tp_size, use_ep=False, enable_eplb=False)
    layer = torch.nn.Module()
    layer.moe_config = SimpleNamespace(
        num_experts=EXPERTS,
        experts_per_token=2,
        hidden_dim=HIDDEN,
        intermediate_size=intermediate,
        num_local_experts=EXPERTS,
        activation=MoEActivation(activation),
        moe_parallel_config=SimpleNamespace(**parallel),
        in_dtype=torch.bfloat16,
        router_logits_dtype=None,
        has_bias=has_bias,
        is_lora_enabled=False,
        has_hash_routing=False,
        swiglu_limit=None,
        swiglu_alpha=None,
        swiglu_beta=None,
    )
    layer.local_num_experts = EXPERTS
    layer._map_global_expert_id_to_local_expert_id = MethodType(lambda self, expert: expert, layer)
    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=group_size)
    method = W4A8MoEMethod(weights, "int-quantized", layer, "model.layers.0.mlp.experts")
    method.create_weights(layer, EXPERTS, HIDDEN, intermediate // tp_size, torch.bfloat16)
    return layer, method


def load(layer, name, shape, shard, expert, dtype=torch.bfloat16):
    parameter = getattr(layer, name)
    return parameter.weight_loader(
        param=parameter,
        loaded_weight=torch.ones(shape, dtype=dtype),
        weight_name=f"model.layers.0.mlp.experts.{name}",
        shard_id=shard,
        expert_id=expert,
        return_success=True,
    )


def load_weights(layer, without=()):
    for expert in range(EXPERTS):
        for stack, shard, n, k in (("w13", "w1", 64, 128), ("w13", "w3", 64, 128), ("w2", "w2", 128, 64)):
            for name, shape, dtype in (
                (f"{stack}_weight", (n, k), torch.int8),
                (f"{stack}_weight_scale", (n, k // 32), torch.bfloat16),
                (f"{stack}_bias", (n,), torch.bfloat16),
            ):
                if hasattr(layer, name) and (name, shard, expert) not in without:
                    assert load(layer, name, shape, shard, expert, dtype)


def test_groups_that_tensor_parallelism_cuts():
    """DeepSeek-V2-Lite in groups of 128 on two ranks: the sentence that docs/vllm.md promises, with the sizes."""
    message = (
        "w4a8: model.layers.0.mlp.experts: kernel does not support intermediate size per partition 704, which is not a "
        "multiple of the group size 128"
    )
    with pytest.raises(ValueError, match=message):
        make_layer(group_size=128, intermediate=1408, tp_size=2)


@pytest.mark.parametrize("has_bias", [False, True])
def test_everything_is_there(has_bias):
    layer, method = make_layer(has_bias=has_bias)
    load_weights(layer)
    method.process_weights_after_loading(layer)
    assert layer.w13_weight_packed.shape[0] == EXPERTS


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (("w13_bias", "w3", 1), "w13_bias: 3 of 4 tensors"),
        (("w2_bias", "w2", 0), "w2_bias: 1 of 2 tensors"),
        (("w2_weight_scale", "w2", 1), "w2_weight_scale: 1 of 2 tensors"),
    ],
)
def test_a_missing_tensor(lost, message):
    """A bias as well: the layer would run on zeros."""
    layer, method = make_layer(has_bias=True)
    load_weights(layer, without=(lost,))
    with pytest.raises(ValueError, match=f"model.layers.0.mlp.experts: the checkpoint lacks weights: {message}"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("shard", ["w1", "w3"])
def test_separate_gate_and_up_where_rows_alternate(shard):
    """vLLM calls the halves of a fused tensor w1 and w3 too, so it cannot be told which rows these are."""
    layer, _ = make_layer(activation="swigluoai")
    with pytest.raises(ValueError, match=rf"w13_weight: {shard} of a layer whose rows alternate gate and up"):
        load(layer, "w13_weight", (64, 128), shard, 0, torch.int8)
    assert load(layer, "w13_weight", (128, 128), "gpt_oss_w13", 0, torch.int8)
    layer, _ = make_layer()
    assert load(layer, "w13_weight", (64, 128), shard, 0, torch.int8)
