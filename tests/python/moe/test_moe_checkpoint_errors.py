"""w4a8.load: files that are no checkpoint, and what it says of W4A16 (damaged tensors: formats/test_load_broken.py)."""

import json
import logging

import moe_checkpoint
import pytest
import torch
from moe_build import assert_packed

from w4a8.checkpoint import CheckpointError, load

LAYER = moe_checkpoint.FIRST


def test_scheme_found_by_name_beats_the_class(checkpoint):
    """Attention in W8A8 and experts in W4A8, whichever comes first."""
    quantization = checkpoint.config["quantization_config"]
    eight = json.loads(json.dumps(checkpoint.group))
    eight["weights"].update(num_bits=8)
    checkpoint.group["targets"] = ["re:.*experts.*"]
    quantization["config_groups"] = {"group_a": eight, "group_0": checkpoint.group}
    assert_packed(load(checkpoint.write())[LAYER], checkpoint.w13, checkpoint.w2)


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
    stacks = (checkpoint.w13, checkpoint.w2)
    assert_packed(load(path, activation_group=-1)[LAYER], *stacks)
    assert_packed(load(path)[LAYER], *stacks, activation_group=32)
    said = [message.split("rounded to int8 ")[1] for message in caplog.messages if "rounded to int8" in message]
    assert said == ["per token (activation_group)", "in groups of 32 (activation_group)"]
    assert_packed(load(path, quantize_w4a16=True)[LAYER], *stacks, activation_group=32)


def test_nothing_is_said_of_what_asks_for_int8(checkpoint, caplog):
    caplog.set_level(logging.INFO, "w4a8")
    load(checkpoint.write())
    assert not any("rounded to int8" in message for message in caplog.messages)


def test_wrong_files(checkpoint, tmp_path):
    def refused(message, path=tmp_path):
        with pytest.raises(CheckpointError, match=message):
            load(path)

    pytest.importorskip("safetensors", reason="the safetensors package is not installed")
    config = tmp_path / "config.json"
    refused("config.json is missing")
    (tmp_path / "file").write_text("")
    refused("config.json cannot be read", tmp_path / "file")
    for text, message in (("{", "is not valid JSON"), ("[]", "is not a JSON object")):
        config.write_text(text)
        refused(f"config.json {message}")
    config.write_text(json.dumps(checkpoint.config))
    refused(r"holds no \*.safetensors file")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    refused("model.safetensors cannot be read")

    path = checkpoint.write(files=2)
    index, key = path / "model.safetensors.index.json", f"{LAYER}.0.up_proj.weight"
    good = json.loads(index.read_text())["weight_map"]
    (other,) = {*good.values()} - {good[key]}
    for text, message in (
        ({"weight_map": {**good, key: "../other"}}, r"names '../other', which is no file of"),
        ({}, "has no weight_map"),
        ({"weight_map": {**good, key: other}}, f"tensor '{key}' cannot be read from"),
    ):
        index.write_text(json.dumps(text))
        refused(message, path)
    index.unlink()
    refused(r"holds 2 \*.safetensors files, but no model.safetensors.index.json", path)


def test_no_experts(checkpoint):
    checkpoint.tensors = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match="three-dimensional experts must be linearized before they are quantized"):
        load(checkpoint.write())


def test_either_cut_or_distributed(tmp_path):
    with pytest.raises(ValueError, match="tp_size is 2 and ep_size is 2, but one of them must be 1"):
        load(tmp_path, tp_size=2, ep_size=2)


def test_groups_that_tensor_parallelism_cuts(checkpoint):
    checkpoint.reset(group_size=128)
    message = "kernel does not support intermediate size per partition 64: group .block_size. is 128, expected k = 64 "
    with pytest.raises(NotImplementedError, match=f"{LAYER}: {message}"):
        load(checkpoint.write(), tp_size=4)
