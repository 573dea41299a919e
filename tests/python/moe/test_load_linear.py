"""w4a8.checkpoint.load_linear: the linear layers of a checkpoint, beside the experts that w4a8.load reads."""

import moe_checkpoint
import pytest
import torch
from moe_build import random_stack

import w4a8
from w4a8.checkpoint import CheckpointError, load_linear
from w4a8.core.nibbles import to_nibbles

pytest.importorskip("safetensors", reason="the safetensors package is not installed")

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def add_linear(checkpoint, name, n, k, group_size, bias=False):
    """Puts a layer into a checkpoint of the fixture; returns (values, scales, bias)."""
    values, scales, bias = random_stack(1, n, k, group_size, bias, torch.float32).of(0)
    scales = scales.to(torch.bfloat16)
    if checkpoint.config["quantization_config"]["format"] == "pack-quantized":
        words = torch.nn.functional.pad(to_nibbles(values), (0, -(k // 2) % 4)).view(torch.int32)
        checkpoint.tensors[f"{name}.weight_packed"] = words
        checkpoint.tensors[f"{name}.weight_shape"] = torch.tensor([n, k])
    else:
        checkpoint.tensors[f"{name}.weight"] = values
    checkpoint.tensors[f"{name}.weight_scale"] = scales
    if bias is not None:
        checkpoint.tensors[f"{name}.bias"] = bias
    return values, scales, bias


def packed(values, scales, bias, group, **more):
    n, k = values.shape
    return w4a8.dyn_quant_pack_4bit_weight(to_nibbles(values), scales, bias, k if group == -1 else group, k, n, **more)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("format_", ["int-quantized", "pack-quantized"])
@pytest.mark.parametrize("group_size", [-1, 32])
def test_load_linear(checkpoint, group_size, format_, files):
    checkpoint.reset(format_, group_size)
    width = 256 if group_size == 32 else 250  # a row of whole words, or not
    query = add_linear(checkpoint, Q, 64, 128, group_size, bias=True)
    down = add_linear(checkpoint, DOWN, 128, width, group_size)
    checkpoint.tensors["model.norm.weight"] = torch.ones(128)
    checkpoint.tensors["lm_head.weight"] = torch.ones(16, 128)
    path = checkpoint.write(files=files)
    layers = load_linear(path)
    assert sorted(layers) == [Q, DOWN]
    assert torch.equal(layers[Q].packed, packed(*query, group_size))
    assert torch.equal(layers[DOWN].packed, packed(*down, group_size))
    assert (layers[DOWN].in_features, layers[DOWN].out_features) == (width, 128)
    assert layers[Q](torch.randn(2, 3, 128)).shape == (2, 3, 64)
    assert list(load_linear(path, only=lambda name: name == Q)) == [Q]


def test_scales_stay_exact(checkpoint):
    values, scales, _ = add_linear(checkpoint, Q, 64, 128, 32)
    finer = scales.float() * 1.01
    checkpoint.tensors[f"{Q}.weight_scale"] = finer
    assert torch.equal(load_linear(checkpoint.write())[Q].packed, packed(values, finer, None, 32))
    checkpoint.tensors[f"{Q}.weight_scale"] = scales.float()
    assert torch.equal(load_linear(checkpoint.write())[Q].packed, packed(values, scales, None, 32))


def test_nothing_quantized(checkpoint):
    assert load_linear(checkpoint.write()) == {}


@pytest.mark.parametrize("beside", ["words", "another layer"])
def test_errors(checkpoint, beside):
    """A layer without scales is quantized all the same (other damages: formats/test_load_broken.py)."""
    add_linear(checkpoint, Q, 64, 128, 32)
    del checkpoint.tensors[f"{Q}.weight_scale"]
    if beside == "words":
        checkpoint.tensors[f"{Q}.weight_packed"] = torch.zeros(64, 16, dtype=torch.int32)
    else:
        add_linear(checkpoint, DOWN, 64, 128, 32)
    with pytest.raises(CheckpointError, match=f"tensor '{Q}.weight_scale' is missing"):
        load_linear(checkpoint.write(), quantize_w4a16=False)


def test_weight_only_on_demand(checkpoint):
    query = add_linear(checkpoint, Q, 64, 128, 32)
    checkpoint.group["input_activations"] = None
    path = checkpoint.write()
    with pytest.raises(CheckpointError, match=f"{Q} is W4A16; pass quantize_w4a16=True"):
        load_linear(path, quantize_w4a16=False)
    layers = load_linear(path, quantize_w4a16=True)
    assert torch.equal(layers[Q].packed, packed(*query, 32, activation_group=32))


def test_the_real_package(tmp_path):
    """Attention in W8A8 is not for this function: an error, unless ``only`` says which layers are."""
    pytest.importorskip("compressed_tensors", reason="the compressed-tensors package is not installed")
    moe_checkpoint.write_with_compressed_tensors(tmp_path, 32, "pack-quantized")
    with pytest.raises(CheckpointError, match=r"group_0.weights.num_bits is 8, but 4 is expected|group_0 is 'int-quan"):
        load_linear(tmp_path)
    assert load_linear(tmp_path, only=lambda name: "self_attn" not in name) == {}
