"""w4a8.load: every way a checkpoint can be wrong, each with its message."""

import json
import logging

import moe_checkpoint
import pytest
import torch
from moe_build import assert_packed

import w4a8
from w4a8.checkpoint import CheckpointError, load

LAYER = moe_checkpoint.FIRST
FORMATS = ["int-quantized", "pack-quantized"]
safetensors = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("safetensors") is None,
    reason="the safetensors package is not installed",
)


def spoil_missing(c):
    del c.tensors[f"{LAYER}.3.up_proj.weight"]


def spoil_missing_scale(c):
    del c.tensors[f"{LAYER}.7.down_proj.weight_scale"]


def spoil_missing_bias(c):
    c.tensors[f"{LAYER}.0.up_proj.bias"] = torch.zeros(256)


def spoil_missing_expert(c):
    for key in [key for key in c.tensors if key.startswith(f"{LAYER}.5.")]:
        del c.tensors[key]


def spoil_rows(c):
    c.tensors[f"{LAYER}.3.up_proj.weight"] = torch.zeros(255, 128, dtype=torch.int8)


def spoil_columns(c):
    c.tensors[f"{LAYER}.0.down_proj.weight"] = torch.zeros(128, 128, dtype=torch.int8)


def spoil_rank(c):
    c.tensors[f"{LAYER}.0.down_proj.weight"] = torch.zeros(128, dtype=torch.int8)


def spoil_scale_shape(c):
    c.tensors[f"{LAYER}.2.gate_proj.weight_scale"] = torch.ones(256, 1)


def spoil_scale_value(c):
    c.tensors[f"{LAYER}.2.gate_proj.weight_scale"][3, 1] = float("nan")


def spoil_scale_dtype(c):
    c.tensors[f"{LAYER}.2.gate_proj.weight_scale"] = torch.ones(256, 4, dtype=torch.int8)


def spoil_range(c):
    c.tensors[f"{LAYER}.1.gate_proj.weight"][5, 7] = 8


def spoil_dtype(c):
    c.tensors[f"{LAYER}.1.gate_proj.weight"] = torch.zeros(256, 128)


def spoil_order(c):
    c.tensors[f"{LAYER}.1.gate_proj.weight_g_idx"] = torch.arange(128)


def spoil_zero_point(c):
    c.tensors[f"{LAYER}.1.gate_proj.weight_zero_point"] = torch.ones(256, 4, dtype=torch.int8)


def spoil_extra_expert(c):
    c.tensors[f"{LAYER}.8.gate_proj.weight"] = torch.zeros(256, 128, dtype=torch.int8)


def key(name):
    return f"tensor '{LAYER}.{name}'"


def at(name):
    return f"tensor {LAYER}.{name}"


WRONG_TENSORS = [
    (spoil_missing, f"{key('3.up_proj.weight')} is missing"),
    (spoil_missing_scale, f"{key('7.down_proj.weight_scale')} is missing"),
    (spoil_missing_bias, f"{key('0.gate_proj.bias')} is missing"),
    (spoil_missing_expert, f"{key('5.gate_proj.weight')} is missing"),
    (spoil_rows, f"{key('3.up_proj.weight')} has shape (255, 128), but (256, 128) is expected"),
    (spoil_columns, f"{key('0.down_proj.weight')} has shape (128, 128), but (128, 256) is expected"),
    (spoil_rank, f"{at('0.down_proj.weight')}: shape (128,), but 2 dimensions are expected"),
    (
        spoil_scale_shape,
        f"{at('2.gate_proj.weight_scale')}: shape (256, 1), but 128 x 256 features in groups of 32 make (256, 4)",
    ),
    (spoil_scale_value, f"{at('2.gate_proj.weight_scale')}: not all scales are finite"),
    (
        spoil_scale_dtype,
        f"{at('2.gate_proj.weight_scale')}: dtype torch.int8, but float16 or",
    ),
    (spoil_range, f"{at('1.gate_proj.weight')} holds values in [-8, 8], but int4 values are in [-8, 7]"),
    (spoil_dtype, f"{at('1.gate_proj.weight')}: dtype torch.float32, but int8 is expected"),
    (spoil_order, f"{at('1.gate_proj.weight_g_idx')}: groups are not consecutive input features"),
    (
        spoil_zero_point,
        f"{at('1.gate_proj.weight_zero_point')}: zero points in [9, 9], but the configuration",
    ),
    (spoil_extra_expert, f"{LAYER} has an expert 8, but config.json says 8 experts"),
]


@safetensors
@pytest.mark.parametrize(("spoil", "message"), WRONG_TENSORS, ids=lambda v: getattr(v, "__name__", ""))
def test_wrong_tensor(checkpoint, spoil, message):
    spoil(checkpoint)
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint.write())
    assert message in str(caught.value)


@safetensors
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "weight_packed",
            torch.zeros(256, 15, dtype=torch.int32),
            "(256, 15), but 256 x 128 features make (256, 16)",
        ),
        ("weight_packed", torch.zeros(256, 16, dtype=torch.int64), "dtype torch.int64, but int32 is expected"),
        ("weight_shape", torch.tensor([256, 120]), "says [256, 120], but [256, 128] is expected"),
        ("weight_shape", None, "is missing"),
        ("weight_packed", None, "is missing"),
    ],
)
def test_wrong_packed_tensor(checkpoint, name, tensor, message):
    checkpoint.reset("pack-quantized")
    full = f"{LAYER}.4.up_proj.{name}"
    if tensor is None:
        del checkpoint.tensors[full]
    else:
        checkpoint.tensors[full] = tensor
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint.write())
    assert full in str(caught.value) and message in str(caught.value)


WEIGHTS = "quantization_config.config_groups.group_0.weights"
INPUT = "quantization_config.config_groups.group_0.input_activations"
WRONG_SCHEMES = [
    ("weights", {"symmetric": False}, f"{key('0.gate_proj.weight_zero_point')} is missing"),
    ("weights", {"symmetric": "no"}, f"{WEIGHTS}.symmetric is 'no', but true or false is expected"),
    ("weights", {"num_bits": 8}, f"{WEIGHTS}.num_bits is 8, but 4 is expected"),
    ("weights", {"type": "float"}, f"{WEIGHTS}.type is 'float', but 'int' is expected"),
    ("weights", {"strategy": "tensor"}, f"{WEIGHTS}.strategy is 'tensor', but 'group' or 'channel' is expected"),
    ("weights", {"group_size": 48}, f"{WEIGHTS}.group_size is 48, but 16 or a multiple of 32 is expected"),
    ("weights", {"dynamic": True}, f"{WEIGHTS}.dynamic is True, but false is expected"),
    ("weights", {"actorder": "group"}, f"{WEIGHTS}.actorder is 'group': reordered input features"),
    ("input_activations", {"num_bits": 4}, f"{INPUT}.num_bits is 4, but 8 is expected"),
    ("input_activations", {"type": "float"}, f"{INPUT}.type is 'float', but 'int' is expected"),
    ("input_activations", {"strategy": "tensor"}, f"{INPUT}.strategy is 'tensor', but 'token' is expected"),
    ("input_activations", {"dynamic": False}, f"{INPUT}.dynamic is False, but true is expected"),
]


@safetensors
@pytest.mark.parametrize(("part", "changes", "message"), WRONG_SCHEMES)
def test_wrong_scheme(checkpoint, part, changes, message):
    checkpoint.group[part].update(changes)
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint.write())
    assert message in str(caught.value)


@safetensors
def test_wrong_quantization_config(checkpoint):
    def message_of(change):
        checkpoint.reset()
        change(checkpoint.config, checkpoint.group)
        with pytest.raises(CheckpointError) as caught:
            load(checkpoint.write())
        return str(caught.value)

    def no_quantization(config, group):
        del config["quantization_config"]

    def other_method(config, group):
        config["quantization_config"]["quant_method"] = "fp8"

    def other_format(config, group):
        group["format"] = "marlin-24"

    def no_weights(config, group):
        group["weights"] = None

    def ignored(config, group):
        config["quantization_config"]["ignore"].append("re:.*experts.3.*")

    def untargeted(config, group):
        group["targets"] = ["re:.*self_attn.*"]

    def outputs(config, group):
        group["output_activations"] = {"num_bits": 8}

    def rotated(config, group):
        config["quantization_config"]["transform_config"] = {"config_groups": {"u": {}}}

    def sparse(config, group):
        config["quantization_config"]["sparsity_config"] = {"format": "sparse-24-bitmask"}

    def mixed(config, group):
        other = json.loads(json.dumps(group))
        other["targets"], other["weights"]["group_size"] = ["re:.*experts.3.up_proj"], 64
        config["quantization_config"]["config_groups"]["group_1"] = other

    assert message_of(no_quantization) == "config.json has no quantization_config: this is not a quantized checkpoint"
    methods = "compressed-tensors, gptq, awq, auto-round, mxfp4, modelopt, quark"
    assert f"quant_method is 'fp8', but one of {methods} is expected" in message_of(other_method)
    assert "group_0 is 'marlin-24', but one of 'int-quantized', 'pack-quantized', " in message_of(other_format)
    assert "group_0.weights is missing" in message_of(no_weights)
    not_quantized = "is not quantized: no target matches it, or it is ignored"
    assert message_of(ignored) == f"{LAYER}.3.gate_proj {not_quantized}"
    assert message_of(untargeted) == f"{LAYER}.0.gate_proj {not_quantized}"
    assert "group_0.output_activations is set" in message_of(outputs)
    assert "quantization_config.transform_config is set: rotated weights are not supported" in message_of(rotated)
    assert "quantization_config.sparsity_config is set: sparse weights are not supported" in message_of(sparse)
    assert message_of(mixed) == f"{LAYER}.3.up_proj is quantized differently from {LAYER}.0.gate_proj"


@safetensors
def test_scheme_found_by_name_beats_the_class(checkpoint):
    """Attention in W8A8 and experts in W4A8, whichever comes first."""
    quantization = checkpoint.config["quantization_config"]
    eight = json.loads(json.dumps(checkpoint.group))
    eight["weights"].update(num_bits=8)
    checkpoint.group["targets"] = ["re:.*experts.*"]
    quantization["config_groups"] = {"group_a": eight, "group_0": checkpoint.group}
    assert_packed(load(checkpoint.write())[LAYER], checkpoint.w13, checkpoint.w2)


@safetensors
def test_weight_only(checkpoint, caplog):
    """It runs, and the log says with what; or it is refused."""
    checkpoint.reset("pack-quantized")
    checkpoint.group["input_activations"] = None
    path = checkpoint.write()
    with pytest.raises(CheckpointError) as caught:
        load(path, quantize_w4a16=False)
    assert str(caught.value) == (
        f"quantization_config.config_groups.group_0.input_activations is missing: {LAYER} is W4A16; pass "
        "quantize_w4a16=True to run it with activations quantized to int8"
    )
    caplog.set_level(logging.INFO, "w4a8")
    assert_packed(load(path, activation_group=-1)[LAYER], checkpoint.w13, checkpoint.w2)
    default = load(path)[LAYER]
    assert {w4a8.read_header(packed)["activation_group"] for packed in default.w13_packed} == {32}
    said = [message.split("rounded to int8 ")[1] for message in caplog.messages if "rounded to int8" in message]
    assert said == ["per token (activation_group)", "in groups of 32 (activation_group)"]


@safetensors
def test_nothing_is_said_of_what_asks_for_int8(checkpoint, caplog):
    caplog.set_level(logging.INFO, "w4a8")
    load(checkpoint.write())
    assert not any("rounded to int8" in message for message in caplog.messages)


@safetensors
def test_wrong_files(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"config.json cannot be read"):
        load(tmp_path / "file")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config.json is not a JSON object"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    with pytest.raises(CheckpointError, match=r"holds no \*.safetensors file"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        load(tmp_path)

    path = checkpoint.write(files=2)
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], f"{LAYER}.0.up_proj.weight": "../other"}}))
    with pytest.raises(CheckpointError, match=r"names '../other', which is no file of"):
        load(path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load(path)
    swapped = dict(good["weight_map"])
    names = sorted(set(swapped.values()))
    swapped[f"{LAYER}.0.up_proj.weight"] = names[1 - names.index(swapped[f"{LAYER}.0.up_proj.weight"])]
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(CheckpointError, match=f"tensor '{LAYER}.0.up_proj.weight' cannot be read from"):
        load(path)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"holds 2 \*.safetensors files, but no model.safetensors.index.json"):
        load(path)


@safetensors
def test_no_experts(checkpoint):
    checkpoint.tensors = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match="three-dimensional experts must be linearized before they are quantized"):
        load(checkpoint.write())


def test_either_cut_or_distributed(tmp_path):
    with pytest.raises(ValueError, match=r"experts are either cut \(tp_size\) or distributed \(ep_size\), not both"):
        load(tmp_path, tp_size=2, ep_size=2)


@safetensors
def test_groups_that_tensor_parallelism_cuts(checkpoint):
    checkpoint.reset(group_size=128)
    message = (
        "kernel does not support intermediate size per partition 64, which is not a multiple of the group size 128"
    )
    with pytest.raises(NotImplementedError, match=f"{LAYER}: {message}"):
        load(checkpoint.write(), tp_size=4)
