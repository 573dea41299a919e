"""w4a8.load: every way a checkpoint can be wrong, each with its message."""

import json
import logging

import moe_checkpoint
import pytest
import torch
from moe_build import assert_packed
from wrong_checkpoints import PACKED, WRONG_SCHEMES, WRONG_TENSORS

import w4a8
from w4a8.checkpoint import CheckpointError, load

LAYER = moe_checkpoint.FIRST
FORMATS = ["int-quantized", "pack-quantized"]
safetensors = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("safetensors") is None,
    reason="the safetensors package is not installed",
)


@safetensors
@pytest.mark.parametrize(("name", "change", "message"), WRONG_TENSORS)
def test_wrong_tensor(checkpoint, name, change, message):
    if name.rpartition(".")[2] in PACKED:
        checkpoint.reset("pack-quantized")
    full = f"{LAYER}.{name}"
    old = checkpoint.tensors.pop(full, None)
    if change is not None:
        checkpoint.tensors[full] = change(old) if callable(change) else change.clone()
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint.write())
    assert message.format(full) in str(caught.value)


@safetensors
def test_missing_expert(checkpoint):
    for key in [key for key in checkpoint.tensors if key.startswith(f"{LAYER}.5.")]:
        del checkpoint.tensors[key]
    with pytest.raises(CheckpointError, match=rf"tensor '{LAYER}\.5\.gate_proj\.weight' is missing"):
        load(checkpoint.write())


@safetensors
@pytest.mark.parametrize(("part", "changes", "message"), WRONG_SCHEMES)
def test_wrong_scheme(checkpoint, part, changes, message):
    checkpoint.group[part].update(changes)
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint.write())
    assert message in str(caught.value)


def _mixed(config, group):
    other = json.loads(json.dumps(group))
    other["targets"], other["weights"]["group_size"] = ["re:.*experts.3.up_proj"], 64
    config["quantization_config"]["config_groups"]["group_1"] = other


METHODS = "auto-round, awq, compressed-tensors, gptq, modelopt, mxfp4, quark"
NOT_QUANTIZED = "is not quantized: "
NO_TARGET = f"{NOT_QUANTIZED}no target in quantization_config.config_groups matches it"
ROTATED, SPARSE = {"config_groups": {"u": {}}}, {"format": "sparse-24-bitmask"}


@safetensors
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config, group: config.pop("quantization_config"),
            "config.json has no quantization_config: this is not a quantized checkpoint",
        ),
        (
            lambda config, group: config["quantization_config"].update(quant_method="fp8"),
            f"quant_method is 'fp8', but one of {METHODS} is expected",
        ),
        (
            lambda config, group: group.update(format="marlin-24"),
            "group_0 is 'marlin-24', but one of 'int-quantized', 'pack-quantized', ",
        ),
        (lambda config, group: group.update(weights=None), "group_0.weights is missing"),
        (
            lambda config, group: config["quantization_config"]["ignore"].append("re:.*experts.3.*"),
            f"{LAYER}.3.gate_proj {NOT_QUANTIZED}quantization_config.ignore has 're:.*experts.3.*'",
        ),
        (lambda config, group: group.update(targets=["re:.*self_attn.*"]), f"{LAYER}.0.gate_proj {NO_TARGET}"),
        (lambda config, group: group.update(output_activations={"num_bits": 8}), "group_0.output_activations is set"),
        (
            lambda config, group: config["quantization_config"].update(transform_config=ROTATED),
            "quantization_config.transform_config is set: rotated weights are not supported",
        ),
        (
            lambda config, group: config["quantization_config"].update(sparsity_config=SPARSE),
            "quantization_config.sparsity_config is set: sparse weights are not supported",
        ),
        (_mixed, f"{LAYER}.3.up_proj is quantized differently from {LAYER}.0.gate_proj"),
    ],
)
def test_wrong_quantization_config(checkpoint, change, message):
    change(checkpoint.config, checkpoint.group)
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint.write())
    assert message in str(caught.value)


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
