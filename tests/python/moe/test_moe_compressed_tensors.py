"""From checkpoints of the real compressed-tensors package to outputs: through the weight loader, and `read_layers`."""

import moe_checkpoint
import pytest
import tool_formats
import torch
from moe_build import GROUP_SIZES, logits_for, make_config, op_moe, op_pack

from w4a8.checkpoint import CheckpointError, read_layers
from w4a8.moe import CompressedTensorsW4A8Int8MoEMethod, RoutedExperts, route

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
    moe = layer.moe_config
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
def test_read_layers(checkpoints, group_size, format_, bias):
    """Attention in W8A8 is left out."""
    path, _ = checkpoints(group_size, format_, bias, layers=2)
    layers = read_layers(path)
    assert list(layers) == [moe_checkpoint.LAYER.format(i) for i in range(2)]
    for name, layer in layers.items():
        check_packed(layer, moe_checkpoint.read_stacks(path, group_size, name), group_size)
    with pytest.raises(CheckpointError, match=r"group_0.weights.num_bits is 8, but 4 is expected|group_0 is 'int-quan"):
        read_layers(path, only=lambda name: "self_attn" in name)


def check_packed(layer, stacks, group_size, **options):
    for packed, stack in zip(layer.buffers(), stacks):
        assert torch.equal(packed, op_pack(stack, group_size, **options))


def test_without_a_gate(checkpoints):
    path, _ = checkpoints(32, gated=False)
    check_packed(read_layers(path)[LAYER], moe_checkpoint.read_stacks(path, 32, gated=False), 32)


@pytest.mark.parametrize("asked, found", [(-1, -1), (None, 32)])
def test_weight_only(checkpoints, asked, found):
    path, _ = checkpoints(32, "pack-quantized", weight_only=True)
    layer = read_layers(path, activation_group=asked)[LAYER]
    check_packed(layer, moe_checkpoint.read_stacks(path, 32), 32, activation_group=found)
