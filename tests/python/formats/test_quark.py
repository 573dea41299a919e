"""AMD Quark: what its configuration says of each module, and files with FP8 beside MXFP4."""

import pytest
import torch
from format_checkpoints import (
    ALL_FORMATS,
    LAYER,
    QUARK,
    QUARK_LAYER,
    QUARK_WEIGHT,
    QUERY,
    Checkpoint,
    model_config,
)
from test_read_formats import meaning

from w4a8.checkpoint import CheckpointError, read_layers
from w4a8.formats import NotRead, Scheme, rules_of, scheme_of

UP = f"{LAYER}.1.up_proj"
FORM, WEIGHT, MXFP4 = ALL_FORMATS["MXFP4 Quark"], QUARK_WEIGHT, QUARK_LAYER
FP8 = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}}


def scheme(where="global_quant_config"):
    return Scheme("quark-mxfp4", 32, True, weight_only=f"quantization_config.{where}.input_tensors is not int8")


@pytest.mark.parametrize("inputs", [None, MXFP4["input_tensors"], {"dtype": "fp8_e4m3", "is_dynamic": False}])
def test_all_modules(inputs):
    """Whatever the inputs are."""
    rules = rules_of({**QUARK, "global_quant_config": {**MXFP4, "input_tensors": inputs}})
    assert rules.of(UP) == rules.of(QUERY) == rules.default == scheme()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "fp8_e4m3"}, "dtype is 'fp8_e4m3', but 'fp4' (MXFP4) is expected"),
        ({"dtype": "fp6_e3m2"}, "dtype is 'fp6_e3m2', but 'fp4' (MXFP4) is expected"),
        ({"dtype": "int4"}, "dtype is 'int4', but 'fp4' (MXFP4) is expected"),
        ({"dtype": "int8"}, "dtype is 'int8', but 'fp4' (MXFP4) is expected"),
        ({"group_size": 16}, "group_size is 16, but 32 (MXFP4) is expected"),
        ({"qscheme": "per_channel"}, "qscheme is 'per_channel', but 'per_group' (MXFP4) is expected"),
        ({"scale_format": "e5m3"}, "scale_format is 'e5m3', but 'e8m0' (MXFP4) is expected"),
        ({"scale_format": "float32"}, "scale_format is 'float32', but 'e8m0' (MXFP4) is expected"),
        ({"is_dynamic": True}, "is_dynamic is True, but false is expected"),
        ({"ch_axis": 0}, "ch_axis is 0, but -1 is expected"),
    ],
)
def test_other_weights(changes, reason):
    for weight in ({**WEIGHT, **changes}, [{**WEIGHT, **changes}]):
        found = rules_of({**QUARK, "global_quant_config": {**MXFP4, "weight": weight}}).of(UP)
        assert found.quantized and f"{UP}: quantization_config.global_quant_config.weight.{reason}" in found.reason


def test_stages_and_outputs():
    assert rules_of({**QUARK, "global_quant_config": {**MXFP4, "weight": [WEIGHT]}}).of(UP) == scheme()
    for changes, reason in (
        ({"weight": [WEIGHT, FP8["weight"]]}, "weight has 2 stages, but one is expected: MXFP4"),
        ({"output_tensors": FP8["weight"]}, "output_tensors is set: only weights are quantized here"),
        ({"bias": FP8["weight"]}, "bias is set: only weights are quantized here"),
    ):
        found = rules_of({**QUARK, "global_quant_config": {**MXFP4, **changes}}).of(UP)
        assert found == NotRead(f"{UP}: quantization_config.global_quant_config.{reason}", quantized=True)


def test_algorithms():
    """Those that are merged into the weights are no matter; old files have one that is no list."""
    merged = [{"name": "rotation", "r1": True, "r2": True, "r4": False, "online_r1_rotation": None}, {"name": "gptq"}]
    for algorithms in (None, [], merged, merged[0]):
        assert rules_of({**QUARK, "algo_config": algorithms}).of(UP) == scheme()
    for change, message in (
        ({"name": "rotation", "r1": True, "online_r1_rotation": True}, "has online_r1_rotation: inputs that are rot"),
        ({"name": "rotation", "r4": True}, "has r4: inputs that are rotated are not supported"),
        ({"name": "svdquant"}, "has 'svdquant', whose corrections are not supported"),
    ):
        for algorithms in ([{"name": "awq"}, change], change):
            with pytest.raises(CheckpointError, match=rf"^quantization_config\.algo_config {message}"):
                rules_of({**QUARK, "algo_config": algorithms})


def test_outputs_for_the_kv_cache():
    """Of keys and values, and queries beside them; the cache is not ours."""
    outputs = {**MXFP4, "output_tensors": FP8["weight"]}
    layers = {f"*{name}_proj": outputs for name in "qkvo"}
    export = {"kv_cache_group": ["*k_proj", "*v_proj"]}
    rules = rules_of({**QUARK, "layer_quant_config": layers, "export": export})
    for name in "qkv":
        module = f"model.layers.0.self_attn.{name}_proj"
        assert rules.of(module) == scheme(f"layer_quant_config['*{name}_proj']")
    assert "output_tensors is set" in rules.of("model.layers.0.self_attn.o_proj").reason
    assert "output_tensors is set" in rules_of({**QUARK, "layer_quant_config": layers}).of(QUERY).reason


def test_what_is_left_out():
    """Names, with wildcards or without, of all of a module's name; regular expressions are vLLM's."""
    exclude = ["lm_head", "*.mlp.gate", "model.layers.1.mlp.experts.2.up_proj", "re:model.layers.4[.].*"]
    rules = rules_of({**QUARK, "exclude": exclude})
    for name, entry in (
        ("lm_head", "lm_head"),
        ("model.layers.0.mlp.gate", "*.mlp.gate"),
        ("model.layers.1.mlp.experts.2.up_proj", exclude[2]),
        ("model.layers.4.mlp.experts.0.up_proj", exclude[3]),
    ):
        expected = f"{name} is not quantized: quantization_config.exclude has {entry!r}"
        assert rules.of(name) == NotRead(expected, quantized=False)
        # Files decide.
        assert rules.of(name) == scheme_of(rules, name, ["weight"])
        assert scheme_of(rules, name, ["weight", "weight_scale"]) == scheme()
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.1.mlp.experts.2.down_proj", "model.layers.44.up_proj"):
        assert rules.of(name) == scheme()
    assert not scheme_of(rules, UP, ["weight"]).quantized


def test_single_layers_and_types():
    """The first entry of layer_quant_config that matches; then linear layers; then all."""
    layers = {"*.experts.*": MXFP4, "*self_attn*": FP8, "*.q_proj": MXFP4, "*.shared_expert.*": {"weight": None}}
    rules = rules_of({**QUARK, "global_quant_config": None, "layer_quant_config": layers})
    assert rules.of(UP) == scheme("layer_quant_config['*.experts.*']")
    found = rules.of(QUERY)
    assert found.quantized and "layer_quant_config['*self_attn*'].weight.dtype is 'fp8_e4m3'" in found.reason
    for name, where in (
        ("model.layers.0.mlp.shared_expert.up_proj", "layer_quant_config['*.shared_expert.*']"),
        ("model.layers.0.mlp.up_proj", "global_quant_config"),
    ):
        expected = f"{name}: quantization_config.{where}.weight is missing: not quantized"
        assert rules.of(name) == NotRead(expected, quantized=False)
    for first, other in ((MXFP4, FP8), (FP8, MXFP4)):
        for name, pattern in ((UP, "*"), ("*.up_proj", UP), ("*.up_proj", "*")):
            found = rules_of({**QUARK, "layer_quant_config": {name: first, pattern: other}}).of(UP)
            assert found == scheme(f"layer_quant_config[{name!r}]") if first is MXFP4 else found.quantized
    types = {"Conv2d": FP8, "Linear": MXFP4}
    rules = rules_of({**QUARK, "global_quant_config": FP8, "layer_type_quant_config": types})
    assert rules.of(UP) == scheme("layer_type_quant_config['Linear']")


def test_linear_beside_fp8(tmp_path, caplog):
    """FP8 of layer_quant_config is left out and named."""
    pytest.importorskip("safetensors", reason="the safetensors package is not installed")
    made = Checkpoint(config=model_config({**QUARK, "layer_quant_config": {"*k_proj": FP8}}, 64, 32, 3))
    made.add(QUERY, FORM, 13, 160)
    keys = QUERY.replace("q_proj", "k_proj")
    made.tensors[f"{keys}.weight"] = torch.zeros(16, 64).to(getattr(torch, "float8_e4m3fn", torch.int8))
    made.tensors.update({f"{keys}.{name}_scale": torch.tensor(1.0).bfloat16() for name in ("weight", "input")})
    made.tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(8, 64)
    with caplog.at_level("WARNING", logger="w4a8.checkpoint"):
        layers = read_layers(made.write(tmp_path))
    assert list(layers) == [QUERY] and torch.equal(meaning(layers[QUERY].packed)[0], made.meant[QUERY])
    assert f"{keys} is left out: " in caplog.text
    assert "layer_quant_config['*k_proj'].weight.dtype is 'fp8_e4m3', but 'fp4' (MXFP4) is" in caplog.text
