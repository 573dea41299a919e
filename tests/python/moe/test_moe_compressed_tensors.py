"""From checkpoints of the real compressed-tensors package to outputs: through the weight loader, and through load."""

import dataclasses

import moe_build
import moe_checkpoint
import pytest
import tool_formats
import torch
from moe_build import GROUP_SIZES, assert_packed, config_of, logits_for, make_config, op_moe

import w4a8.checkpoint
from w4a8.mirror import CompressedTensorsW4A8Int8MoEMethod, RoutedExperts, RoutingMethodType, route

pytest.importorskip("safetensors", reason="the safetensors package is not installed")
pytest.importorskip("compressed_tensors", reason="the compressed-tensors package is not installed")

LAYER = moe_checkpoint.FIRST
FORMATS = ["int-quantized", "pack-quantized"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Writes each checkpoint once: (path, decompressed weights)."""
    written = {}

    def get(group_size, format_="int-quantized", bias=False, gated=True, weight_only=False, layers=1):
        key = (group_size, format_, bias, gated, weight_only, layers)
        if key not in written:
            path = tmp_path_factory.mktemp("checkpoint")
            written[key] = path, moe_checkpoint.write_with_compressed_tensors(path, *key)
        return written[key]

    return get


def load_through_weight_loader(path, moe, group_size):
    """What a model's load_weights does: each tensor of the file to the parameter its name says."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
    from safetensors import safe_open

    # The package's own arguments, not this project's stand-ins.
    channel = group_size == -1
    weights = QuantizationArgs(
        num_bits=4,
        strategy=QuantizationStrategy.CHANNEL if channel else QuantizationStrategy.GROUP,
        group_size=None if channel else group_size,
    )
    tokens = QuantizationArgs(num_bits=8, strategy=QuantizationStrategy.TOKEN, dynamic=True, symmetric=False)
    layer = RoutedExperts(moe, CompressedTensorsW4A8Int8MoEMethod(weights, tokens, moe))
    shards = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    if not moe.is_act_and_mul:
        shards["up_proj"] = "w1"
    with safe_open(str(path / "model.safetensors"), framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (no mapping)
            if not key.startswith(LAYER) or key.endswith("weight_shape"):
                continue
            expert, projection, tensor = key[len(LAYER) + 1 :].split(".")
            suffix = tensor.replace("weight_packed", "weight")
            name = f"{'w2' if projection == 'down_proj' else 'w13'}_{suffix}"
            parameter = getattr(layer, name)
            parameter.weight_loader(parameter, file.get_tensor(key), key, shards[projection], int(expert))
    layer.process_weights_after_loading()
    return layer


def check(layer, path, group_size):
    """Same bits as the op called by hand."""
    moe = config_of(layer)
    w13, w2 = moe_checkpoint.read_stacks(path, group_size, gated=moe.is_act_and_mul)
    x, logits = torch.randn(7, 128), logits_for(7)
    routing = {"e_score_correction_bias": layer.e_score_correction_bias}
    weights, ids = route(moe.routing_method, x, logits, moe.experts_per_token, **routing)
    on_input = layer.apply_router_weight_on_input
    out = layer(x, logits)
    assert torch.equal(out, op_moe(moe, group_size, x, ids, weights, w13, w2, on_input))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_through_the_weight_loader(checkpoints, activation, group_size, bias):
    """Each activation and routing method of a layer: test_moe_method.py."""
    moe = make_config(activation=activation, has_bias=bias)
    path, _ = checkpoints(group_size, bias=bias, gated=moe.is_act_and_mul)
    check(load_through_weight_loader(path, moe, group_size), path, group_size)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_stacks_are_what_the_package_means(checkpoints, group_size, format_):
    """The tests' own reading of a checkpoint against the package's decompression."""
    path, decompressed = checkpoints(group_size, format_)
    w13, w2 = moe_checkpoint.read_stacks(path, group_size)
    for expert in range(8):
        module = f"{LAYER}.{expert}"
        gate_up = torch.cat([decompressed[f"{module}.gate_proj"], decompressed[f"{module}.up_proj"]])
        for (values, scales, _), expected in (
            (w13.of(expert), gate_up),
            (w2.of(expert), decompressed[f"{module}.down_proj"]),
        ):
            # int4 * bfloat16 is exact in float32.
            assert torch.equal(tool_formats.integers(values, torch.zeros(scales.shape), scales).float(), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_load(checkpoints, group_size, format_, bias):
    path, _ = checkpoints(group_size, format_, bias, layers=2)
    layers = w4a8.checkpoint.load(path)
    assert list(layers) == [moe_checkpoint.LAYER.format(i) for i in range(2)]
    for name, layer in layers.items():
        w13, w2 = moe_checkpoint.read_stacks(path, group_size, name)
        assert_packed(layer, w13, w2, group_size)
        assert layer.routing_method is RoutingMethodType.Renormalize
    check(layers[LAYER], path, group_size)


def test_load_ungated(checkpoints):
    path, _ = checkpoints(32, gated=False)
    settings = dataclasses.replace(w4a8.checkpoint.read_settings(path), activation=moe_build.MoEActivation.RELU2_NO_MUL)
    check(w4a8.checkpoint.load(path, settings=settings)[LAYER], path, 32)


def test_load_weight_only(checkpoints):
    """Refusal and default: test_moe_checkpoint_errors.py."""
    path, _ = checkpoints(32, "pack-quantized", weight_only=True)
    check(w4a8.checkpoint.load(path, activation_group=-1)[LAYER], path, 32)
