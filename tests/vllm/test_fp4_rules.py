"""Which layers of NVFP4 and MXFP4 the plugin takes: the rules of ModelOpt, AutoRound, compressed-tensors and Quark."""

import pytest
import tool_formats
import torch
from layers import chosen, make_layer
from test_fp4 import config_of
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.models.utils import WeightsMapper

from w4a8.integrations.vllm import config as shared
from w4a8.integrations.vllm.configs import (
    W4A8AWQConfig,
    W4A8CompressedTensorsConfig,
    W4A8GptOssConfig,
    W4A8INCConfig,
    W4A8ModelOptConfig,
    W4A8ModelOptMixedConfig,
    W4A8QuarkConfig,
)
from w4a8.integrations.vllm.linear_layers import Rounded, W4A8LinearMethod, W4A8LinearScheme
from w4a8.integrations.vllm.moe import W4A8MoEMethod, W4A8QuarkGptOssMethod

NOT_QUANTIZED, EXPERTS = "not quantized", "model.layers.0.mlp.experts"
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
FP8 = {"weight": FP8, "input_tensors": FP8}
# What is taken, with layer 1's attention, layer 2's queries, keys and values, and layer 3's experts left out.
TAKEN = {
    "model.layers.0.mlp.gate": False,
    "model.layers.0.self_attn.qkv_proj": True,
    "model.layers.1.self_attn.qkv_proj": False,
    "model.layers.1.self_attn.o_proj": False,
    "model.layers.2.self_attn.qkv_proj": False,
    "model.layers.2.self_attn.o_proj": True,
    "model.layers.2.mlp.down_proj": True,
}
LEFT_OUT = ["lm_head", "model.layers.0.mlp.gate", *(f"model.layers.2.self_attn.{name}_proj" for name in "qkv")]


@pytest.fixture(autouse=True)
def floats(monkeypatch):
    """vLLM's method of experts that are not quantized wants more of a layer than there is here."""
    monkeypatch.setattr(shared, "UnquantizedFusedMoEMethod", lambda moe: NOT_QUANTIZED)


def assert_taken(config, names):
    for name, taken in names.items():
        expected = W4A8LinearMethod if taken else UnquantizedLinearMethod
        assert isinstance(chosen(config, name), expected), name


def modelopt(**changes):
    stated = tool_formats.config("modelopt-nvfp4", 16, True, [], False)
    return W4A8ModelOptConfig.from_config({**stated, **changes})


def quark(**changes):
    return W4A8QuarkConfig.from_config({**tool_formats.config("quark", 32, True, [], False), **changes})


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
@pytest.mark.parametrize("nested", [False, True])
def test_modelopt(algorithm, nested):
    """Names, and names with asterisks; in the two forms of its configuration."""
    skipped = [*LEFT_OUT, "model.layers.1.self_attn*", "model.layers.3.mlp*"]
    if nested:
        rules = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": skipped}
        config = W4A8ModelOptConfig.from_config({"producer": {"name": "modelopt"}, "quantization": rules})
    else:
        config = modelopt(ignore=skipped, quant_algo=algorithm)
    assert_taken(config, {**TAKEN, "vision_tower.layers.2.mlp.down_proj": False})
    assert isinstance(chosen(config, EXPERTS, experts=True), W4A8MoEMethod)
    assert chosen(config, "model.layers.3.mlp.experts", experts=True) == NOT_QUANTIZED


def test_what_modelopt_leaves_to_vllm(monkeypatch):
    """Other groups; and all, where the plugin is told so."""
    assert type(chosen(modelopt(group_size=32), "a.o_proj")).__module__.startswith("vllm.")
    monkeypatch.setenv("W4A8_VLLM_W4A16", "0")
    assert type(chosen(modelopt(), "a.o_proj")).__module__.startswith("vllm.")


def test_modelopts_mixed_algorithms():
    layers = {"model.layers.0.self_attn.o_proj": "FP8", "model.layers.0.mlp.experts.0.up_proj": "NVFP4"}
    layers["model.layers.0.self_attn.q_proj"] = "W4A16_NVFP4"
    quantized = {name: {"quant_algo": algorithm, "group_size": 16} for name, algorithm in layers.items()}
    stated = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": quantized}
    config = W4A8ModelOptMixedConfig.from_config(stated)
    assert W4A8ModelOptMixedConfig.override_quantization_method(stated, None) == "modelopt_mixed"
    assert_taken(config, {"model.layers.0.self_attn.q_proj": True, "model.layers.0.mlp.down_proj": False})
    assert isinstance(chosen(config, EXPERTS, experts=True), W4A8MoEMethod)
    assert type(chosen(config, "model.layers.0.self_attn.o_proj")).__name__ == "ModelOptLinearMethod"


@pytest.mark.parametrize(("group", "taken"), [(16, True), (32, False)])
def test_autorounds_data_type(group, taken):
    stated = {"quant_method": "auto-round", "bits": 4, "group_size": group, "data_type": "nv_fp", "sym": True}
    rules = {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}}
    stated.update(packing_format="auto_round:llm_compressor", block_name_to_quantize="model.layers", extra_config=rules)
    config = W4A8INCConfig.from_config(stated)
    assert_taken(config, {"model.layers.0.mlp.gate": False})
    if taken:
        method = chosen(config, "model.layers.0.self_attn.o_proj")
        assert method.filler.scheme.format == "nvfp4-pack-quantized" and method.filler.scheme.group_size == 16
    else:
        with pytest.raises(ValueError, match="o_proj: a layer of NVFP4 that this cannot run, and vLLM neither"):
            chosen(config, "model.layers.0.self_attn.o_proj")


def test_compressed_tensors_scheme():
    config = config_of("nvfp4-pack-quantized")
    for inputs in ({}, {"input_activations": None}):
        config.target_scheme_map["Linear"].update(inputs)
        assert isinstance(config.get_scheme(empty(RowParallelLinear), "model.layers.0.o_proj"), W4A8LinearScheme)


def test_names_beat_patterns_in_compressed_tensors():
    """Of single layers and of joined ones, in whatever order they are; as compressed_tensors.utils.match_targets."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    attention = "model.layers.0.self_attn"
    named = [f"{attention}.{name}_proj" for name in "qkvo"]
    groups = [(["re:.*"], 32), (["Linear"], 64), (named, 128)]
    for order in (groups, groups[::-1]):
        made = {f"g{size}": {"targets": names, "weights": {**weights, "group_size": size}} for names, size in order}
        stated = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": made, "ignore": []}
        config = W4A8CompressedTensorsConfig.from_config(stated)
        config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        for name, size in (("self_attn.qkv_proj", 128), ("self_attn.o_proj", 128), ("mlp.down_proj", 32)):
            for _ in range(2):  # upstream changes what it has found
                found = config.get_scheme_dict(empty(RowParallelLinear), f"model.layers.0.{name}")
                assert found["weights"].group_size == size, (name, order)


@pytest.mark.parametrize("skipped", ["model.layers.0.mlp.experts", ".*layers[.]0[.]"])
def test_experts_of_gpt_oss_that_are_not_quantized(skipped, monkeypatch):
    """vLLM's model would take their floats for blocks of MXFP4, and copy them without transposing them."""
    stated = {"quant_method": "gpt_oss_mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", skipped]}
    config = W4A8GptOssConfig.from_config(stated)  # with vLLM's own name for the method
    with pytest.raises(ValueError, match=f"w4a8: {EXPERTS}: .*modules_to_not_convert names it, but vLLM's gpt-oss"):
        experts_of(config, EXPERTS, activation="swigluoai")
    other = experts_of(config, "model.layers.1.mlp.experts", activation="swigluoai")
    assert isinstance(other, W4A8MoEMethod) and other.filler.scheme.format == "mxfp4"
    assert isinstance(chosen(config, "model.layers.0.self_attn.o_proj"), UnquantizedLinearMethod)
    with pytest.raises(ValueError, match="modules_to_not_convert is 5, but a list is expected"):
        W4A8GptOssConfig.from_config({**stated, "modules_to_not_convert": 5})
    monkeypatch.setenv("W4A8_VLLM_W4A16", "0")
    assert experts_of(config, EXPERTS, activation="swigluoai") is None


# --- Quark ------------------------------------------------------------------------------------------------------------


def empty(cls):
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    return layer


def experts_of(config, name, activation="silu", use_ep=False):
    """The method of a layer of experts that is not filled, None if it is left to vLLM."""
    layer = empty(RoutedExperts)
    layer.moe_config = make_layer(activation=activation)[0].moe_config
    layer.moe_config.moe_parallel_config.use_ep = use_ep
    for part in ("gate", "up", "down"):
        setattr(layer, f"ckpt_{part}_proj_name", f"{part}_proj")
    return config.method_of(layer, name)


def linear_of(config, name):
    """As `experts_of`, of a linear layer."""
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return config.method_of(empty(RowParallelLinear), name)


def test_quark():
    """Names that Quark has written, and vLLM's regular expressions; all of what vLLM joins, or nothing of it."""
    parts = [f"{expert}.{part}_proj" for expert in range(2) for part in ("gate", "up", "down")]
    skipped = [*LEFT_OUT, "re:model.layers.1[.]self_attn.*", *(f"model.layers.3.mlp.experts.{part}" for part in parts)]
    config = quark(exclude=skipped)
    assert_taken(config, TAKEN)
    assert isinstance(experts_of(config, EXPERTS), W4A8MoEMethod)
    assert experts_of(config, "model.layers.3.mlp.experts") == NOT_QUANTIZED


def test_wildcards_of_quark():
    """What our rules leave out is not asked of vLLM's, which know no wildcards."""
    config = quark(exclude=["*.mlp.gate", "*.1.self_attn.*", "*.2.self_attn.q_proj", "*.3.mlp.experts.*", "lm_*"])
    assert_taken(config, {name: taken for name, taken in TAKEN.items() if ".2." not in name})
    assert isinstance(chosen(config, "lm_head", head=True).filler, Rounded)
    assert experts_of(config, "model.layers.3.mlp.experts") == NOT_QUANTIZED
    with pytest.raises(ValueError, match=r"2\.self_attn\.qkv_proj: .*q_proj is not quantized: .* but others of"):
        chosen(config, "model.layers.2.self_attn.qkv_proj")


def test_experts_that_are_not_quantized():
    """By the names of their matrices, which upstream does not ask about: its rules are about the layer's name."""
    parts = [f"{EXPERTS}.{expert}.{part}_proj" for expert in range(2) for part in ("gate", "up", "down")]
    rounds = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int", "sym": True}
    rounds.update(packing_format="auto_round:auto_gptq", extra_config={name: {"bits": 16} for name in parts})
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    for config in (
        W4A8INCConfig.from_config(rounds),
        W4A8AWQConfig.from_config({**awq, "modules_to_not_convert": [".gate_proj", ".up_proj", ".down_proj"]}),
        quark(exclude=parts),
    ):
        assert experts_of(config, EXPERTS) == NOT_QUANTIZED


def test_experts_of_gpt_oss_that_quark_has_not_quantized(monkeypatch):
    """vLLM's model fails with them, and names no layer."""
    config = quark(exclude=["*.0.mlp.experts.1.*"])
    with pytest.raises(ValueError, match=rf"{EXPERTS}: .*experts\.1\.gate_proj is not quantized: .* vLLM's gpt-oss"):
        experts_of(config, EXPERTS, activation="swigluoai")
    assert isinstance(experts_of(config, "model.layers.1.mlp.experts", activation="swigluoai"), W4A8QuarkGptOssMethod)
    assert experts_of(config, EXPERTS) is None  # of another model
    monkeypatch.setenv("W4A8_VLLM_W4A16", "0")
    assert experts_of(config, EXPERTS, activation="swigluoai") is None


def test_what_quark_leaves_to_vllm(monkeypatch):
    """FP8 layers of layer_quant_config; gpt-oss's experts on ranks of theirs; all, where the plugin is told so."""
    config = quark(layer_quant_config={"*self_attn*": FP8, "*.layers.5.*experts*": FP8})
    assert linear_of(config, "model.layers.0.self_attn.qkv_proj") is None
    assert isinstance(linear_of(config, "model.layers.0.mlp.down_proj"), W4A8LinearMethod)
    assert experts_of(config, "model.layers.5.mlp.experts") is None
    assert isinstance(experts_of(config, EXPERTS), W4A8MoEMethod)
    assert isinstance(experts_of(config, EXPERTS, activation="swigluoai"), W4A8QuarkGptOssMethod)
    assert experts_of(config, EXPERTS, activation="swigluoai", use_ep=True) is None
    assert isinstance(experts_of(config, EXPERTS, use_ep=True), W4A8MoEMethod)
    fake = {"kv_cache_group": [], "weight_format": "fake_quantized"}
    rotated = [{"name": "rotation", "r4": True}]
    for changes in ({"global_quant_config": FP8}, {"export": fake}, {"algo_config": rotated}):
        assert linear_of(quark(**changes), "a.o_proj") is None
    monkeypatch.setenv("W4A8_VLLM_W4A16", "0")
    assert experts_of(config, EXPERTS) is None


def test_names_that_vllm_changes():
    """Those of the configuration are changed with them."""
    config = quark(exclude=["model.language_model.layers.0.self_attn.o_proj"])
    name = "language_model.model.layers.0.self_attn.o_proj"
    assert_taken(config, {name: True})
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"model.language_model.": "language_model.model."}))
    assert_taken(config, {name: False})
