"""Layers of NVFP4 without an engine: made and filled by vLLM's classes, beside the weights multiplied out."""

from types import SimpleNamespace

import pytest
import tool_formats
import torch
from test_experts import HIDDEN, make_layer
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from w4a8.integrations.vllm.config import W4A8CompressedTensorsConfig
from w4a8.integrations.vllm.config_inc import W4A8INCConfig
from w4a8.integrations.vllm.config_modelopt import W4A8ModelOptConfig, W4A8ModelOptMixedConfig
from w4a8.integrations.vllm.linear_layers import W4A8LinearMethod, W4A8LinearScheme
from w4a8.integrations.vllm.moe import W4A8MoEMethod

K = 144  # nine blocks
E4M3 = torch.float8_e4m3fn
# Names of the codes, of the scale of all, and of that of inputs.
NAMES = {
    "modelopt-nvfp4": ("weight", "weight_scale_2", "input_scale"),
    "nvfp4-pack-quantized": ("weight_packed", "weight_global_scale", "input_global_scale"),
}
FORMS = list(NAMES)
NAME = "model.layers.0.self_attn.qkv_proj"


def matrix(rows, columns=K, form="modelopt-nvfp4", size=1.0, seed=0):
    """(tensors, float32 values) of a matrix; ``size`` is that of its greatest value."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return tool_formats.rounded(size * weight / weight.abs().max(), form)


def config_of(form, **changes):
    classes = {"modelopt-nvfp4": W4A8ModelOptConfig, "nvfp4-pack-quantized": W4A8CompressedTensorsConfig}
    return classes[form].from_config({**tool_formats.config(form, 16, True, [], False), **changes})


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


def values_of(layer, k=K):
    """The weight of a packed linear layer, up to the float rounding of the products: what it makes of units."""
    method = getattr(layer, "scheme", None) or layer.quant_method
    return method.apply(layer, torch.eye(k), None).T


def close(found, expected):
    """Row by row: parts of a layer are of different sizes."""
    error = (found - expected).abs().amax(1) / expected.abs().amax(1)
    return found.shape == expected.shape and error.max() < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_scales_of_parts_stay_their_own(form, ranks, rank):
    """Queries, keys and values of sizes that are far from each other: vLLM alone would give all the greatest scale."""
    parts = {name: matrix(32, form=form, size=size, seed=i) for i, (name, size) in
             enumerate({"q": 1.0, "k": 1e-3, "v": 30.0}.items())}  # fmt: skip
    parts["q"] = matrix(64, form=form, seed=9)
    for index in range(ranks):
        rank(index, ranks)
        layer = QKVParallelLinear(K, 16, 4, 2, bias=False, quant_config=config_of(form), prefix=NAME,
                                  params_dtype=torch.float32)  # fmt: skip
        for name, (tensors, _) in reversed(parts.items()):
            load(layer, tensors, name)
        layer.quant_method.process_weights_after_loading(layer)
        mine = [plain.chunk(ranks)[index] for _, plain in parts.values()]
        assert close(values_of(layer), torch.cat(mine))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shard", [None, (0, 1)])
def test_parts_that_are_one_matrix_in_the_file(form, shard, rank):
    """One scale for all of them."""
    tensors, plain = matrix(96, form=form)
    layer = MergedColumnParallelLinear(K, [32, 64], bias=False, quant_config=config_of(form), prefix=NAME,
                                       params_dtype=torch.float32)  # fmt: skip
    load(layer, tensors, *(() if shard is None else (shard,)))
    assert close(values_of(layer), plain)


@pytest.mark.parametrize("form", FORMS)
def test_columns_are_cut_between_blocks(form, rank):
    """Of 6 blocks each of 2 ranks has 3, which is no multiple of 32 columns."""
    tensors, plain = matrix(40, 96, form)
    for index in range(2):
        rank(index, 2)
        layer = RowParallelLinear(96, 40, bias=False, quant_config=config_of(form), prefix=NAME,
                                  params_dtype=torch.float32)  # fmt: skip
        load(layer, tensors)
        assert close(values_of(layer, 48), plain.chunk(2, 1)[index])


@pytest.mark.parametrize(("columns", "ranks"), [(136, 1), (144, 2)])
def test_columns_that_are_not_whole_blocks(columns, ranks, rank):
    rank(0, ranks)
    message = rf"{columns // ranks} input features per rank \(of {columns}\) are not a multiple of 16"
    with pytest.raises(ValueError, match=message):
        RowParallelLinear(columns, 32, bias=False, quant_config=config_of("modelopt-nvfp4"), prefix=NAME)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lost", [0, 1, "weight_scale"])
def test_a_missing_tensor(form, lost, rank):
    lost = NAMES[form][lost] if isinstance(lost, int) else lost
    layer = MergedColumnParallelLinear(K, [32, 32], bias=False, quant_config=config_of(form), prefix=NAME)
    tensors, _ = matrix(32, form=form)
    load(layer, tensors, 0)
    load(layer, {name: tensor for name, tensor in tensors.items() if name != lost}, 1)
    with pytest.raises(ValueError, match=rf"w4a8: {NAME}: the checkpoint lacks weights: {lost}: \d+ of \d+ elements$"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("form", FORMS)
def test_scales_of_inputs_may_come_last_or_not_at_all(form, rank):
    for first in (True, False, None):
        layer = RowParallelLinear(K, 32, bias=False, quant_config=config_of(form), prefix=NAME)
        tensors, plain = matrix(32, form=form)
        name = NAMES[form][2]
        inputs = {name: tensors.pop(name)}
        load(layer, {} if first is None else inputs if first else tensors)
        load(layer, tensors if first in (True, None) else inputs)
        assert close(values_of(layer), plain)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight_scale", torch.full((32, 9), 127, dtype=torch.uint8).view(E4M3), "not all scales are numbers"),
        ("weight_scale", torch.ones(32, 9, dtype=torch.float8_e5m2), "dtype torch.float8_e5m2, but torch.float8_e4m3"),
        ("weight_scale", torch.ones(32, 9), "dtype torch.float32, but torch.float8_e4m3fn"),
        ("weight_scale_2", torch.tensor(float("inf")), "is inf, of which no finite scales"),
        ("weight_scale_2", torch.ones(32), r"weight_scale_2: shape \(32,\) is no part of a weight \[32, 144\] in gr"),
        ("weight", torch.zeros(32, 60, dtype=torch.uint8), r"weight: shape \(32, 60\) is no part of a weight"),
    ],
)
def test_a_damaged_tensor(name, value, message, rank):
    layer = RowParallelLinear(K, 32, bias=False, quant_config=config_of("modelopt-nvfp4"), prefix=NAME)
    with pytest.raises(ValueError, match=message) as caught:
        load(layer, {**matrix(32)[0], name: value})
    assert NAME in str(caught.value) and not hasattr(layer, "weight_packed")


def load_experts(layer, form, intermediate, without=(), shards=("w1", "w3", "w2")):
    """The values by expert and shard."""
    plain = {}
    for expert in range(2):
        for shard in shards:
            stack, n, k = ("w2", HIDDEN, intermediate) if shard == "w2" else ("w13", intermediate, HIDDEN)
            size = {"w1": 1.0, "w3": 1e-3, "w2": 20.0}[shard] * (1 + expert)
            tensors, plain[expert, shard] = matrix(n, k, form, size, seed=expert)
            for name, tensor in tensors.items():
                if (name, shard, expert) in without:
                    continue
                param = getattr(layer, f"{stack}_{name}")
                call = {"weight_name": f"experts.{stack}_{name}", "shard_id": shard, "expert_id": expert}
                assert param.weight_loader(param, tensor, return_success=True, **call)
    return plain


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("index", [None, 0, 1])
def test_experts(form, index):
    """Each matrix has a scale of its own. Cut for two ranks, whose 48 rows of an expert are no multiple of 32."""
    ranks = 1 if index is None else 2
    layer, method = make_layer(16, 96, ranks, form=form, tp_rank=index or 0)
    plain = load_experts(layer, form, 96)
    method.process_weights_after_loading(layer)
    own = slice(None) if index is None else slice(48 * index, 48 * index + 48)
    for expert in range(2):
        halves = torch.cat([plain[expert, "w1"][own], plain[expert, "w3"][own]])
        for stack, expected in (("w13", halves), ("w2", plain[expert, "w2"][:, own])):
            (n, k), packed = expected.shape, getattr(layer, f"{stack}_weight_packed")[expert]
            assert close(torch.ops.w4a8.dyn_quant_matmul_4bit(torch.eye(k), packed, 16, k, n).T, expected)


def test_experts_without_a_gate():
    """One scale for w13, which has one half."""
    layer, method = make_layer(16, 96, form="modelopt-nvfp4", activation="relu2_no_mul")
    assert layer.w13_weight_scale_2.shape == (2, 1)
    plain = load_experts(layer, "modelopt-nvfp4", 96, shards=("w1", "w2"))
    method.process_weights_after_loading(layer)
    for expert in range(2):
        found = torch.ops.w4a8.dyn_quant_matmul_4bit(torch.eye(HIDDEN), layer.w13_weight_packed[expert], 16, HIDDEN, 96)
        assert close(found.T, plain[expert, "w1"])


def test_experts_that_are_not_whole_blocks():
    """704 columns of 1408 are 44 blocks; 72 of 144 are four and a half."""
    make_layer(16, 1408, 2, form="modelopt-nvfp4")
    message = "kernel does not support intermediate size per partition 72, which is not a multiple of the group size 16"
    with pytest.raises(ValueError, match=f"w4a8: model.layers.0.mlp.experts: {message}"):
        make_layer(16, 144, 2, form="modelopt-nvfp4")


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_scale_of_experts(form):
    lost = NAMES[form][1]
    layer, method = make_layer(16, 96, form=form)
    load_experts(layer, form, 96, [(lost, "w3", 1)])
    with pytest.raises(ValueError, match=f"the checkpoint lacks weights: w13_{lost}: 3 of 4 tensors$"):
        method.process_weights_after_loading(layer)


def chosen(config, name, experts=False):
    """The method of a layer that is not filled."""
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    if experts:
        from vllm.model_executor.layers.fused_moe import RoutedExperts

        layer = RoutedExperts.__new__(RoutedExperts)
        torch.nn.Module.__init__(layer)
        layer.moe_config = make_layer()[0].moe_config
        return config.get_quant_method(layer, name)
    layer = RowParallelLinear.__new__(RowParallelLinear)
    torch.nn.Module.__init__(layer)
    return config.get_quant_method(layer, name)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
@pytest.mark.parametrize("nested", [False, True])
def test_modelopts_rules(algorithm, nested):
    """Names, and names with asterisks; in the two forms of its configuration."""
    skipped = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.self_attn*", "model.layers.2.self_attn.q_proj",
               "model.layers.2.self_attn.k_proj", "model.layers.2.self_attn.v_proj", "model.layers.3.mlp*"]  # fmt: skip
    if nested:
        rules = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": skipped}
        config = W4A8ModelOptConfig.from_config({"producer": {"name": "modelopt"}, "quantization": rules})
    else:
        config = config_of("modelopt-nvfp4", ignore=skipped, quant_algo=algorithm)
    for name, taken in {
        "model.layers.0.mlp.gate": False,
        "model.layers.0.self_attn.qkv_proj": True,
        "model.layers.1.self_attn.qkv_proj": False,
        "model.layers.1.self_attn.o_proj": False,
        "model.layers.2.self_attn.qkv_proj": False,
        "model.layers.2.self_attn.o_proj": True,
        "model.layers.2.mlp.down_proj": True,
        "vision_tower.layers.2.mlp.down_proj": False,
    }.items():
        method = chosen(config, name)
        assert isinstance(method, W4A8LinearMethod if taken else UnquantizedLinearMethod), name
    assert isinstance(chosen(config, "model.layers.0.mlp.experts", experts=True), W4A8MoEMethod)
    assert chosen(config, "model.layers.3.mlp.experts", experts=True) is None


def test_what_is_left_to_vllm(monkeypatch):
    """Other groups; and all, where the plugin is told so."""
    config = config_of("modelopt-nvfp4", group_size=32)
    assert type(chosen(config, "a.o_proj")).__module__.startswith("vllm.")
    monkeypatch.setenv("W4A8_VLLM_W4A16", "0")
    assert type(chosen(config_of("modelopt-nvfp4"), "a.o_proj")).__module__.startswith("vllm.")


def test_modelopts_mixed_algorithms():
    layers = {"model.layers.0.self_attn.o_proj": "FP8", "model.layers.0.mlp.experts.0.up_proj": "NVFP4"}
    layers["model.layers.0.self_attn.q_proj"] = "W4A16_NVFP4"
    quantized = {name: {"quant_algo": algorithm, "group_size": 16} for name, algorithm in layers.items()}
    stated = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": quantized}
    config = W4A8ModelOptMixedConfig.from_config(stated)
    assert W4A8ModelOptMixedConfig.override_quantization_method(stated, None) == "modelopt_mixed"
    assert isinstance(chosen(config, "model.layers.0.self_attn.q_proj"), W4A8LinearMethod)
    assert isinstance(chosen(config, "model.layers.0.mlp.experts", experts=True), W4A8MoEMethod)
    assert type(chosen(config, "model.layers.0.self_attn.o_proj")).__name__ == "ModelOptLinearMethod"
    assert isinstance(chosen(config, "model.layers.0.mlp.down_proj"), UnquantizedLinearMethod)


@pytest.mark.parametrize(("group", "taken"), [(16, True), (32, False)])
def test_autorounds_data_type(group, taken):
    stated = {"quant_method": "auto-round", "bits": 4, "group_size": group, "data_type": "nv_fp", "sym": True}
    rules = {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}}
    stated.update(packing_format="auto_round:llm_compressor", block_name_to_quantize="model.layers", extra_config=rules)
    config = W4A8INCConfig.from_config(stated)
    assert isinstance(chosen(config, "model.layers.0.mlp.gate"), UnquantizedLinearMethod)
    if taken:
        method = chosen(config, "model.layers.0.self_attn.o_proj")
        assert method.stored.format == "nvfp4-pack-quantized" and method.stored.group_size == 16
    else:
        with pytest.raises(ValueError, match="o_proj: a layer of NVFP4 that this cannot run, and vLLM neither"):
            chosen(config, "model.layers.0.self_attn.o_proj")


def test_compressed_tensors_scheme():
    config = config_of("nvfp4-pack-quantized")
    layer = RowParallelLinear.__new__(RowParallelLinear)
    torch.nn.Module.__init__(layer)
    for inputs in ({}, {"input_activations": None}):
        config.target_scheme_map["Linear"].update(inputs)
        assert isinstance(config.get_scheme(layer, "model.layers.0.self_attn.o_proj"), W4A8LinearScheme)
