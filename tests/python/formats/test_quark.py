"""MXFP4 checkpoints of AMD Quark: what its configuration says, load, load_linear and W4A8Linear; broken files."""

import copy
import re
from pathlib import Path

import pytest
import torch
from format_checkpoints import LAYER, Checkpoint, gpt_oss_checkpoint, model_config, random_mxfp4
from format_writers import dequantized_mxfp4
from test_load_formats import assert_meant, assert_read, meaning

import w4a8
from w4a8.checkpoint import CheckpointError, load, load_linear
from w4a8.formats import LeftOut, Stored, rules_of, stored_as
from w4a8.nn import W4A8Linear

TOOL_WRITTEN = Path(__file__).parents[2] / "tool_written"
QUERY, UP = "model.layers.0.self_attn.q_proj", f"{LAYER}.1.up_proj"
WEIGHT = {
    "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1,
    "is_dynamic": False, "symmetric": None, "scale_type": "float",
}  # fmt: skip
MXFP4 = {"weight": WEIGHT, "input_tensors": {**WEIGHT, "is_dynamic": True}, "output_tensors": None, "bias": None}
FP8 = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}}
QUARK = {
    "quant_method": "quark", "global_quant_config": MXFP4, "exclude": ["lm_head", "*.mlp.gate"],
    "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    "layer_quant_config": {}, "layer_type_quant_config": {},
}  # fmt: skip


def stored(where="global_quant_config"):
    return Stored("quark-mxfp4", 32, True, weight_only=f"quantization_config.{where}.input_tensors is not int8")


def tensors_of(made):
    """The bytes of a matrix in gpt-oss's form, with Quark's names."""
    return {"weight": made["blocks"].flatten(1), "weight_scale": made["scales"]}


def add(made, name, n, k, bias=False):
    matrix = random_mxfp4(n, k)
    made.meant[name] = dequantized_mxfp4(matrix)
    tensors = tensors_of(matrix)
    if bias:
        tensors["bias"] = made.biases[name] = torch.randn(n).to(torch.bfloat16)
    made.tensors.update({f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()})


def experts_of(hidden, inter, names=("gate_proj", "up_proj", "down_proj"), bias=False, config=QUARK):
    made = Checkpoint(config=model_config(config, hidden, inter, 3))
    for expert in range(3):
        for name in names:
            rows, columns = (hidden, inter) if name == names[-1] else (inter * (4 - len(names)), hidden)
            add(made, f"{LAYER}.{expert}.{name}", rows, columns, bias)
    return made


# What the configuration says.


@pytest.mark.parametrize("inputs", [None, MXFP4["input_tensors"], {"dtype": "fp8_e4m3", "is_dynamic": False}])
def test_all_modules(inputs):
    """Whatever the inputs are."""
    rules = rules_of({**QUARK, "global_quant_config": {**MXFP4, "input_tensors": inputs}})
    assert rules.of(UP) == rules.of(QUERY) == rules.default == stored()


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
    assert rules_of({**QUARK, "global_quant_config": {**MXFP4, "weight": [WEIGHT]}}).of(UP) == stored()
    for changes, reason in (
        ({"weight": [WEIGHT, FP8["weight"]]}, "weight has 2 stages, but one is expected: MXFP4"),
        ({"output_tensors": FP8["weight"]}, "output_tensors is set: only weights are quantized here"),
        ({"bias": FP8["weight"]}, "bias is set: only weights are quantized here"),
    ):
        found = rules_of({**QUARK, "global_quant_config": {**MXFP4, **changes}}).of(UP)
        assert found == LeftOut(f"{UP}: quantization_config.global_quant_config.{reason}", quantized=True)


def test_algorithms():
    """Those that are merged into the weights are no matter; old files have one that is no list."""
    merged = [{"name": "rotation", "r1": True, "r2": True, "r4": False, "online_r1_rotation": None}, {"name": "gptq"}]
    for algorithms in (None, [], merged, merged[0]):
        assert rules_of({**QUARK, "algo_config": algorithms}).of(UP) == stored()
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
        assert rules.of(module) == stored(f"layer_quant_config['*{name}_proj']")
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
        assert rules.of(name) == LeftOut(expected, quantized=False)
        # Files decide.
        assert rules.of(name) == stored_as(rules, name, ["weight"])
        assert stored_as(rules, name, ["weight", "weight_scale"]) == stored()
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.1.mlp.experts.2.down_proj", "model.layers.44.up_proj"):
        assert rules.of(name) == stored()
    assert not stored_as(rules, UP, ["weight"]).quantized


def test_single_layers_and_types():
    """The first entry of layer_quant_config that matches; then linear layers; then all."""
    layers = {"*.experts.*": MXFP4, "*self_attn*": FP8, "*.q_proj": MXFP4, "*.shared_expert.*": {"weight": None}}
    rules = rules_of({**QUARK, "global_quant_config": None, "layer_quant_config": layers})
    assert rules.of(UP) == stored("layer_quant_config['*.experts.*']")
    found = rules.of(QUERY)
    assert found.quantized and "layer_quant_config['*self_attn*'].weight.dtype is 'fp8_e4m3'" in found.reason
    for name, where in (
        ("model.layers.0.mlp.shared_expert.up_proj", "layer_quant_config['*.shared_expert.*']"),
        ("model.layers.0.mlp.up_proj", "global_quant_config"),
    ):
        expected = f"{name}: quantization_config.{where}.weight is missing: not quantized"
        assert rules.of(name) == LeftOut(expected, quantized=False)
    for first, other in ((MXFP4, FP8), (FP8, MXFP4)):
        for name, pattern in ((UP, "*"), ("*.up_proj", UP), ("*.up_proj", "*")):
            found = rules_of({**QUARK, "layer_quant_config": {name: first, pattern: other}}).of(UP)
            assert found == stored(f"layer_quant_config[{name!r}]") if first is MXFP4 else found.quantized
    types = {"Conv2d": FP8, "Linear": MXFP4}
    rules = rules_of({**QUARK, "global_quant_config": FP8, "layer_type_quant_config": types})
    assert rules.of(UP) == stored("layer_type_quant_config['Linear']")


# Files.

safetensors_torch = pytest.importorskip("safetensors.torch", reason="the safetensors package is not installed")


@pytest.mark.parametrize(("hidden", "inter"), [(64, 32), (96, 64), (32, 96)])
def test_experts(hidden, inter, tmp_path):
    made = experts_of(hidden, inter)
    layer = load(made.write(tmp_path), quantize_w4a16=True)[LAYER]
    assert_meant(layer, made)
    header = w4a8.read_header(layer.w2_packed[1])
    assert (header["values"], header["group"]) == ("e2m1", 32)
    assert torch.isfinite(layer(torch.randn(5, hidden), torch.randn(5, 3))).all()


def test_biases_and_shards_and_names(tmp_path):
    made = experts_of(64, 32, ("w1", "w3", "w2"), bias=True)
    path = made.write(tmp_path / "shards", files=4)
    assert_meant(load(path, quantize_w4a16=True)[LAYER], made, names=("w1", "w3", "w2"))
    made = experts_of(64, 32, ("gate_up_proj", "down_proj"))
    layer = load(made.write(tmp_path / "fused"), quantize_w4a16=True)[LAYER]
    assert_meant(layer, made, names=("gate_up_proj", "down_proj"))


def test_tensor_parallel(tmp_path):
    path = (made := experts_of(64, 64)).write(tmp_path)
    for rank in range(2):
        layer = load(path, tp_rank=rank, tp_size=2, quantize_w4a16=True)[LAYER]
        assert_meant(layer, made, rows=slice(32 * rank, 32 * (rank + 1)))


def test_gpt_oss(tmp_path):
    """The same bytes expert by expert make the same layer as stacked; gate and up alternate in both."""
    stacked = gpt_oss_checkpoint(64, 32)
    (want,) = load(stacked.write(tmp_path / "stacked"), quantize_w4a16=True).values()
    each = Checkpoint(config={**stacked.config, "quantization_config": QUARK})
    names = {"blocks": "weight", "scales": "weight_scale", "bias": "bias"}
    for key, tensor in stacked.tensors.items():
        prefix, _, leaf = key.rpartition(".")
        if not prefix.endswith("experts"):
            continue
        projection, _, what = leaf.rpartition("_")
        for expert, part in enumerate(tensor.flatten(2) if what == "blocks" else tensor):
            each.tensors[f"{prefix}.{expert}.{projection}.{names[what]}"] = part.clone()
    (layer,) = load(each.write(tmp_path / "each"), quantize_w4a16=True).values()
    for name in ("w13_packed", "w2_packed"):
        assert torch.equal(getattr(layer, name), getattr(want, name))
    assert layer.activation == want.activation


def test_linear_beside_fp8(tmp_path, caplog):
    """Any N; a head that is quantized though it is excluded; FP8 of layer_quant_config is left out and named."""
    config = {**QUARK, "layer_quant_config": {"*k_proj": FP8}}
    made = Checkpoint(config=model_config(config, 64, 32, 3))
    add(made, QUERY, 13, 160, bias=True)
    add(made, "lm_head", 40, 64)
    add(made, f"{LAYER}.0.up_proj", 32, 64)
    keys = QUERY.replace("q_proj", "k_proj")
    made.tensors[f"{keys}.weight"] = torch.zeros(16, 64).to(getattr(torch, "float8_e4m3fn", torch.int8))
    made.tensors.update({f"{keys}.{name}_scale": torch.tensor(1.0).bfloat16() for name in ("weight", "input")})
    made.tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(8, 64)
    with pytest.raises(CheckpointError, match=r"global_quant_config\.input_tensors is not int8: "):
        load_linear(made.write(tmp_path), quantize_w4a16=False)
    with caplog.at_level("WARNING", logger="w4a8.checkpoint"):
        layers = load_linear(tmp_path, quantize_w4a16=True)
    assert sorted(layers) == ["lm_head", QUERY]
    for name, layer in layers.items():
        found, bias = meaning(layer.packed)
        assert torch.equal(found, made.meant[name])
        assert (bias is None) == (name not in made.biases)
    assert f"{keys} is left out: " in caplog.text
    assert "layer_quant_config['*k_proj'].weight.dtype is 'fp8_e4m3', but 'fp4' (MXFP4) is" in caplog.text


def test_fp8_experts_are_refused_by_name(tmp_path):
    made = experts_of(64, 32, config={**QUARK, "global_quant_config": FP8})
    with pytest.raises(CheckpointError, match=re.escape("global_quant_config.weight.dtype is 'fp8_e4m3', but 'fp4'")):
        load(made.write(tmp_path), quantize_w4a16=True)


def test_from_mxfp4():
    made = random_mxfp4(21, 96)
    layer = W4A8Linear.from_mxfp4({**tensors_of(made), "bias": torch.ones(21)})
    assert torch.equal(meaning(layer.packed)[0], dequantized_mxfp4(made))
    packed = {"weight_packed": made["blocks"].flatten(1), "weight_scale": made["scales"]}
    assert torch.equal(meaning(W4A8Linear.from_mxfp4(packed).packed)[0], dequantized_mxfp4(made))
    with pytest.raises(ValueError, match=r"the layer\.weight is missing"):
        W4A8Linear.from_mxfp4({"weight_scale": made["scales"]}, name="the layer")


@pytest.mark.parametrize("folder", ["mxfp4_quark", "mxfp4_quark_gpt_oss"])
def test_files_of_the_tool(folder):
    path = TOOL_WRITTEN / folder
    tensors = safetensors_torch.load_file(path / "model.safetensors")

    def meant(name):
        blocks = tensors[f"{name}.weight"].unflatten(1, (-1, 16))
        return dequantized_mxfp4({"blocks": blocks, "scales": tensors[f"{name}.weight_scale"]})

    with pytest.raises(CheckpointError, match=r"global_quant_config\.input_tensors is not int8"):
        load(path, quantize_w4a16=False)
    if folder == "mxfp4_quark":
        assert_read(path, meant)
        return
    (layer,) = load(path, quantize_w4a16=True).values()
    for expert in range(4):
        w13 = meant(f"{LAYER}.{expert}.gate_up_proj")
        assert torch.equal(meaning(layer.w13_packed[expert])[0], torch.cat([w13[::2], w13[1::2]]))
        assert torch.equal(meaning(layer.w2_packed[expert])[0], meant(f"{LAYER}.{expert}.down_proj"))


@pytest.fixture(scope="module")
def good():
    return experts_of(64, 64)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("weight", None, "is missing"),
        ("weight", lambda t: t[:, :16].contiguous(), "which is (64, 32), but (64, 64) is expected"),
        ("weight", lambda t: t.to(torch.int32), "dtype torch.int32, but uint8 is expected"),
        ("weight_scale", None, "is missing"),
        ("weight_scale", lambda t: t[:, :1].contiguous(), "shape (64, 1), but 64 x 64 features in blocks of 32 make"),
        ("weight_scale", lambda t: t[:7].contiguous(), "shape (7, 2), but"),
        ("weight_scale", lambda t: t.float(), "dtype torch.float32, but uint8 is expected"),
        ("weight_scale", lambda t: t | 255, "255, which is not a number"),
    ],
)
def test_broken_files(good, suffix, change, message, tmp_path):
    key, other = f"{UP}.{suffix}", copy.copy(good)
    other.tensors = {name: part for name, part in good.tensors.items() if name != key}
    if change is not None:
        other.tensors[key] = change(good.tensors[key])
    with pytest.raises(CheckpointError) as caught:
        load(other.write(tmp_path), quantize_w4a16=True)
    assert key in str(caught.value) and message in str(caught.value)


def test_rotated_inputs(good, tmp_path):
    """What an online rotation leaves beside the weights: inputs are to be multiplied by it."""
    made = copy.copy(good)
    made.tensors = {**good.tensors, f"{UP}.input_rotation": torch.ones(64, 64, dtype=torch.int8)}
    add(made, QUERY, 16, 64)
    made.tensors[f"{QUERY}.input_rotation"] = torch.ones(32, 32).double()
    path = made.write(tmp_path)
    for read in (load, load_linear):
        with pytest.raises(CheckpointError, match=r"_proj\.input_rotation: inputs that are rotated"):
            read(path, quantize_w4a16=True)
