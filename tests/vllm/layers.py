"""Layers without an engine: made and filled by vLLM's classes."""

from types import MethodType, SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from w4a8.formats import Scheme
from w4a8.integrations.vllm.moe import ReceivedExperts, W4A8MoEMethod

HIDDEN, EXPERTS = 128, 2
NAME = "model.layers.0.self_attn.qkv_proj"


@pytest.fixture
def rank(monkeypatch):
    """`rank(index, size)`: this is one of so many that share the layers."""

    def become(index, size):
        monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=size, rank_in_group=index))

    become(0, 1)
    with set_current_vllm_config(VllmConfig()):
        yield become


def load(layer, tensors, *shard):
    for name, tensor in tensors.items():
        param = getattr(layer, name)
        param.weight_loader(param, tensor, *shard)


def values_of(layer, k):
    """The weight of a packed linear layer, up to the float rounding of the products: what it makes of units."""
    method = getattr(layer, "scheme", None) or layer.quant_method
    return method.apply(layer, torch.eye(k), None).T


def expert_values(layer, stack, expert, group, k, n):
    """The same of a matrix of a layer of experts, its bias added."""
    packed = getattr(layer, f"{stack}_weight_packed")[expert]
    return torch.ops.w4a8.dyn_quant_matmul_4bit(torch.eye(k), packed, group, k, n)


def close(found, expected):
    """Row by row: parts of a layer are of different sizes."""
    error = (found - expected).abs().amax(1) / expected.abs().amax(1)
    return found.shape == expected.shape and error.max() < 1e-5


def chosen(config, name, experts=False, head=False):
    """The method of a layer that is not filled."""
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    cls = RoutedExperts if experts else ParallelLMHead if head else RowParallelLinear
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    if experts:
        layer.moe_config = make_layer()[0].moe_config
    if head:
        layer.embedding_dim = 64
    return config.get_quant_method(layer, name)


def moe_config(experts, size, dtype):
    """vLLM's configuration of a layer of experts, of one rank."""
    return FusedMoEConfig(
        num_experts=experts,
        experts_per_token=2,
        hidden_dim=size,
        intermediate_size=size,
        num_local_experts=experts,
        num_logical_experts=experts,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=dtype,
    )


def make_layer(
    group_size=32,
    intermediate=64,
    tp_size=1,
    has_bias=False,
    activation="silu",
    form="int-quantized",
    symmetric=True,
    tp_rank=0,
    bits=4,
):
    """(layer, method), with what the plugin reads of vLLM's RoutedExperts and its FusedMoEConfig; parameters empty."""
    parallel = dict.fromkeys(("tp_size", "pcp_size", "dp_size", "ep_size", "sp_size"), 1)
    parallel.update(dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0))
    parallel.update(tp_size=tp_size, tp_rank=tp_rank, use_ep=False, enable_eplb=False)
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
        routing_method=None,
        has_bias=has_bias,
        is_lora_enabled=False,
        has_hash_routing=False,
        swiglu_limit=None,
        swiglu_alpha=None,
        swiglu_beta=None,
    )
    layer.local_num_experts = EXPERTS
    layer._map_global_expert_id_to_local_expert_id = MethodType(lambda self, expert: expert, layer)
    scheme = Scheme(form, group_size, symmetric, bits=bits)
    method = W4A8MoEMethod(ReceivedExperts(scheme), layer, "model.layers.0.mlp.experts")
    method.create_weights(layer, EXPERTS, HIDDEN, intermediate // tp_size, torch.bfloat16)
    return layer, method
