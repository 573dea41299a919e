"""MXFP4 layers of AMD Quark without an engine: made and filled by vLLM's classes, beside the weights multiplied out."""

import pytest
import tool_formats
import torch
from test_experts import HIDDEN, make_layer
from test_nvfp4 import NAME, chosen, close, load, rank, values_of
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from w4a8.formats import Stored
from w4a8.integrations.vllm.config_quark import W4A8QuarkConfig
from w4a8.integrations.vllm.linear_layers import W4A8LinearMethod
from w4a8.integrations.vllm.moe import W4A8MoEMethod
from w4a8.integrations.vllm.quark_gpt_oss import W4A8QuarkGptOssMethod

__all__ = ["rank"]  # a fixture

K = 96
STORED = Stored("quark-mxfp4", 32, True, weight_only="input_tensors is not int8")
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
FP8 = {"weight": FP8, "input_tensors": FP8}


def config_of(skipped=(), **changes):
    return W4A8QuarkConfig.from_config({**tool_formats.config("quark", 32, True, list(skipped), False), **changes})


def matrix(rows, columns=K, seed=0):
    """(tensors, float32 values) of a matrix."""
    return tool_formats.rounded(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)), "quark")


@pytest.mark.parametrize("ranks", [1, 2])
def test_parts_of_a_layer(ranks, rank):
    parts = {"q": matrix(64, seed=1), "k": matrix(32, seed=2), "v": matrix(32, seed=3)}
    for index in range(ranks):
        rank(index, ranks)
        layer = QKVParallelLinear(K, 16, 4, 2, bias=False, quant_config=config_of(), prefix=NAME,
                                  params_dtype=torch.float32)  # fmt: skip
        for name, (tensors, _) in reversed(parts.items()):
            load(layer, tensors, name)
        layer.quant_method.process_weights_after_loading(layer)
        assert close(values_of(layer, K), torch.cat([plain.chunk(ranks)[index] for _, plain in parts.values()]))


def test_columns_are_cut_between_blocks(rank):
    tensors, plain = matrix(40, 64)
    for index in range(2):
        rank(index, 2)
        layer = RowParallelLinear(64, 40, bias=False, quant_config=config_of(), prefix=NAME, params_dtype=torch.float32)
        load(layer, tensors)
        assert close(values_of(layer, 32), plain.chunk(2, 1)[index])
    with pytest.raises(ValueError, match=r"48 input features per rank \(of 96\) are not a multiple of 32"):
        RowParallelLinear(96, 40, bias=False, quant_config=config_of(), prefix=NAME)


def test_scales_of_inputs_may_be_there(rank):
    """Static ones of FP8, one number each, which nothing reads."""
    for first in (True, False, None):
        layer = RowParallelLinear(K, 32, bias=False, quant_config=config_of(), prefix=NAME, params_dtype=torch.float32)
        tensors, plain = matrix(32)
        inputs = {} if first is None else {"input_scale": torch.tensor(0.5).bfloat16()}
        load(layer, inputs if first else tensors)
        load(layer, tensors if first else inputs)
        assert close(values_of(layer, K), plain)


def test_a_missing_tensor(rank):
    layer = MergedColumnParallelLinear(K, [32, 32], bias=False, quant_config=config_of(), prefix=NAME)
    tensors, _ = matrix(32)
    load(layer, tensors, 0)
    load(layer, {"weight": tensors["weight"]}, 1)
    with pytest.raises(ValueError, match=rf"w4a8: {NAME}: the checkpoint lacks weights: weight_scale: 96 of 192 elem"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight_scale", torch.full((32, 3), 255, dtype=torch.uint8), "weight_scale: 255, which is not a number"),
        ("weight_scale", torch.ones(32, 3), "dtype torch.float32, but torch.uint8 is expected"),
        ("weight", torch.ones(32, 48).to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn, but torch.uint8"),
    ],
)
def test_a_damaged_tensor(name, value, message, rank):
    layer = RowParallelLinear(K, 32, bias=False, quant_config=config_of(), prefix=NAME)
    with pytest.raises(ValueError, match=message) as caught:
        load(layer, {**matrix(32)[0], name: value})
    assert NAME in str(caught.value) and not hasattr(layer, "weight_packed")


@pytest.mark.parametrize("index", [None, 0, 1])
def test_experts(index):
    ranks = 1 if index is None else 2
    layer, method = make_layer(32, 64, ranks, form="quark-mxfp4", tp_rank=index or 0)
    plain = {}
    for expert in range(2):
        for number, shard in enumerate(("w1", "w3", "w2")):
            stack, n, k = ("w2", HIDDEN, 64) if shard == "w2" else ("w13", 64, HIDDEN)
            tensors, plain[expert, shard] = matrix(n, k, seed=3 * expert + number)
            for name, tensor in {**tensors, "input_scale": torch.tensor(0.5)}.items():
                param = getattr(layer, f"{stack}_{name}")
                call = {"weight_name": f"experts.{stack}_{name}", "shard_id": shard, "expert_id": expert}
                assert param.weight_loader(param, tensor, return_success=True, **call)
    method.process_weights_after_loading(layer)
    own = slice(None) if index is None else slice(32 * index, 32 * index + 32)
    for expert in range(2):
        halves = torch.cat([plain[expert, "w1"][own], plain[expert, "w3"][own]])
        for stack, expected in (("w13", halves), ("w2", plain[expert, "w2"][:, own])):
            (n, k), packed = expected.shape, getattr(layer, f"{stack}_weight_packed")[expert]
            assert close(torch.ops.w4a8.dyn_quant_matmul_4bit(torch.eye(k), packed, 32, k, n).T, expected)


def gpt_oss_layer():
    """(layer, method), as vLLM's model of gpt-oss fills it: into the parameters, rows in turns; what is meant."""
    layer = make_layer(32, 64, has_bias=True, activation="swigluoai")[0]
    for name in list(layer._parameters):
        delattr(layer, name)
    method = W4A8QuarkGptOssMethod(STORED, layer, NAME)
    method.create_weights(layer, 2, HIDDEN, 64, torch.bfloat16)
    plain = {}
    for expert in range(2):
        for stack, n, k in (("w13", 128, HIDDEN), ("w2", HIDDEN, 64)):
            tensors, values = matrix(n, k, seed=expert)
            bias = torch.randn(n).bfloat16()
            plain[expert, stack] = values, bias.float()
            for name, tensor in {**tensors, "bias": bias, "input_scale": torch.tensor(0.5)}.items():
                getattr(layer, f"{stack}_{name}").data[expert].copy_(tensor)
    return layer, method, plain


def test_experts_of_gpt_oss():
    layer, method, plain = gpt_oss_layer()
    method.process_weights_after_loading(layer)
    for (expert, stack), (values, bias) in plain.items():
        if stack == "w13":
            values, bias = (torch.cat([part[0::2], part[1::2]]) for part in (values, bias))
        (n, k), packed = values.shape, getattr(layer, f"{stack}_weight_packed")[expert]
        found = torch.ops.w4a8.dyn_quant_matmul_4bit(torch.eye(k), packed, 32, k, n) - bias
        assert close(found.T, values)
    packed = layer.w13_weight_packed
    method.process_weights_after_loading(layer)  # nothing has come since
    assert layer.w13_weight_packed is packed and layer.w13_weight.numel() == 0


@pytest.mark.parametrize("name", ["w13_weight", "w2_weight_scale", "w13_bias", "w2_bias"])
def test_experts_of_gpt_oss_lack_something(name):
    layer, method, _ = gpt_oss_layer()
    fresh = W4A8QuarkGptOssMethod(STORED, make_layer(32, 64, has_bias=True, activation="swigluoai")[0], NAME)
    empty = torch.nn.Module()
    empty.local_num_experts = 2
    fresh.create_weights(empty, 2, HIDDEN, 64, torch.bfloat16)
    getattr(layer, name).data[1] = getattr(empty, name).data[1]
    with pytest.raises(ValueError, match=f"w4a8: {NAME}: the checkpoint lacks weights: {name} of expert 1"):
        method.process_weights_after_loading(layer)


EXPERTS = "model.layers.0.mlp.experts"


def projections_of(layer, names=("gate_proj", "up_proj", "down_proj")):
    return [f"model.layers.{layer}.mlp.experts.{expert}.{name}" for expert in range(2) for name in names]


def experts_of(config, name, activation="silu", use_ep=False):
    """The method of a layer of experts that is not filled, None if it is left to vLLM."""
    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.moe_config = make_layer(activation=activation)[0].moe_config
    layer.moe_config.moe_parallel_config.use_ep = use_ep
    for part in ("gate", "up", "down"):
        setattr(layer, f"ckpt_{part}_proj_name", f"{part}_proj")
    return config.method_of(layer, name)


def linear_of(config, name):
    """As `experts_of`, of a linear layer."""
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    layer = RowParallelLinear.__new__(RowParallelLinear)
    torch.nn.Module.__init__(layer)
    return config.method_of(layer, name)


def test_rules():
    """Names that Quark has written, and vLLM's regular expressions; all of what vLLM joins, or nothing of it."""
    skipped = ["lm_head", "model.layers.0.mlp.gate", "re:model.layers.1[.]self_attn.*", *projections_of(3)]
    skipped += [f"model.layers.2.self_attn.{name}_proj" for name in "qkv"]
    config = config_of(skipped)
    for name, taken in {
        "model.layers.0.mlp.gate": False,
        "model.layers.0.self_attn.qkv_proj": True,
        "model.layers.1.self_attn.qkv_proj": False,
        "model.layers.1.self_attn.o_proj": False,
        "model.layers.2.self_attn.qkv_proj": False,
        "model.layers.2.self_attn.o_proj": True,
        "model.layers.2.mlp.down_proj": True,
    }.items():
        method = chosen(config, name)
        assert isinstance(method, W4A8LinearMethod if taken else UnquantizedLinearMethod), name
    assert isinstance(experts_of(config, EXPERTS), W4A8MoEMethod)
    assert experts_of(config, "model.layers.3.mlp.experts") is None


def test_what_is_left_to_vllm(monkeypatch):
    """FP8 layers of layer_quant_config; gpt-oss's experts on ranks of theirs; all, where the plugin is told so."""
    config = config_of(layer_quant_config={"*self_attn*": FP8, "*.layers.5.*experts*": FP8})
    assert linear_of(config, "model.layers.0.self_attn.qkv_proj") is None
    assert isinstance(linear_of(config, "model.layers.0.mlp.down_proj"), W4A8LinearMethod)
    assert experts_of(config, "model.layers.5.mlp.experts") is None
    assert isinstance(experts_of(config, EXPERTS), W4A8MoEMethod)
    assert isinstance(experts_of(config, EXPERTS, activation="swigluoai"), W4A8QuarkGptOssMethod)
    assert experts_of(config, EXPERTS, activation="swigluoai", use_ep=True) is None
    assert isinstance(experts_of(config, EXPERTS, use_ep=True), W4A8MoEMethod)
    assert linear_of(config_of(global_quant_config=FP8), "a.o_proj") is None
    fake = {"kv_cache_group": [], "weight_format": "fake_quantized"}
    assert linear_of(config_of(export=fake), "a.o_proj") is None
    assert linear_of(config_of(algo_config=[{"name": "rotation", "r4": True}]), "a.o_proj") is None
    monkeypatch.setenv("W4A8_VLLM_W4A16", "0")
    assert experts_of(config, EXPERTS) is None


def test_names_that_vllm_changes():
    """Those of the configuration are changed with them."""
    from vllm.model_executor.models.utils import WeightsMapper

    config = config_of(["model.language_model.layers.0.self_attn.o_proj"])
    name = "language_model.model.layers.0.self_attn.o_proj"
    assert isinstance(chosen(config, name), W4A8LinearMethod)
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.language_model.": "language_model.model."}))
    assert isinstance(chosen(config, name), UnquantizedLinearMethod)
