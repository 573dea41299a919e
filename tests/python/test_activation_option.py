"""``activation_group=``: what each way of packing gives without it, with it, and where it does not fit."""

import re

import pytest
import torch
from torch import nn

import w4a8
from w4a8.core.activation_groups import DEFAULT_ACTIVATION_GROUP, resolve_activation_group
from w4a8.core.stack import MatrixStack
from w4a8.formats import Matrix, rules_of
from w4a8.nn import W4A8Experts, W4A8Linear, linear_from_matrix
from w4a8.quantization import QuantizationError


def group_of(packed):
    found = {w4a8.read_header(matrix)["activation_group"] for matrix in packed.view(-1, packed.shape[-1])}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    ("asked", "group", "k", "expected"),
    [
        (None, 32, 64, 32), (None, 128, 256, 32), (None, 16, 96, 32), (None, 16, 48, -1), (None, 16, 16, -1),
        (None, -1, 66, -1), (None, -1, 96, 32), (None, 96, 192, 32), (-1, 32, 64, -1), (32, 128, 256, 32),
        (64, 64, 128, 64), (64, 16, 128, 64), (128, -1, 384, 128), (128, 256, 512, 128),
    ],
)  # fmt: skip
def test_what_fits(asked, group, k, expected):
    assert DEFAULT_ACTIVATION_GROUP == 32  # otherwise the table is another
    assert resolve_activation_group(asked, group, k) == expected


@pytest.mark.parametrize(
    ("asked", "group", "k", "message"),
    [
        (64, 32, 64, "activation_group is 64, expected -1 (whole rows), or 32, 64 or 128 that divides group = 32"),
        (128, 64, 256, "activation_group is 128, expected -1 (whole rows), or 32, 64 or 128 that divides group = 64"),
        (
            32,
            -1,
            66,
            "activation_group is 32, expected -1 (whole rows), or 32, 64 or 128 that divides group = 66 (channelwise)",
        ),
        (32, 16, 48, "activation_group is 32, expected -1 (whole rows), or 32, 64 or 128 that divides k = 48"),
        (48, 96, 96, "activation_group is 48, expected -1 (whole rows), or 32, 64 or 128"),
        (0, 32, 64, "activation_group is 0, expected -1 (whole rows), or 32, 64 or 128"),
        (True, 32, 64, "activation_group is True, expected None or an int of 64 bits"),
        ("32", 32, 64, "activation_group is '32', expected None or an int of 64 bits"),
        (
            32,
            24,
            48,
            "group (block_size) is 24, expected k = 48 (channelwise), or 16 or a multiple of 32 that divides it",
        ),
    ],
)
def test_what_does_not_fit(asked, group, k, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        resolve_activation_group(asked, group, k)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_linear(device):
    linear = nn.Linear(128, 8, device=device)
    for asked, expected in ((None, 32), (-1, -1), (64, 64), (128, 128)):
        layer = W4A8Linear.from_float(linear, 128, activation_group=asked)
        assert device == "meta" or group_of(layer.packed) == expected
    with pytest.raises(ValueError, match=r"activation_group is 64, expected .* that divides group = 32$"):
        W4A8Linear.from_float(linear, 32, activation_group=64)


def test_experts():
    w13, w2 = torch.randn(2, 96, 64), torch.randn(2, 64, 48)
    experts = W4A8Experts.from_float(w13, w2, 16)
    assert [group_of(experts.w13_packed), group_of(experts.w2_packed)] == [32, -1]
    assert group_of(W4A8Experts.from_float(w13, w2, 16, activation_group=-1).w13_packed) == -1
    with pytest.raises(ValueError, match=r"w2: activation_group is 64, expected .* that divides k = 48$"):
        W4A8Experts.from_float(w13, w2, 16, activation_group=64)


def test_quantize():
    def model():
        return nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32))

    for asked, expected in ((None, 32), (-1, -1), (64, 64)):
        made = model()
        w4a8.quantize_(made, 64, activation_group=asked)
        assert [group_of(layer.packed) for layer in made] == [expected] * 2
    made = model()
    with pytest.raises(ValueError, match=r"activation_group is 128, expected .* that divides group = 64$"):
        w4a8.quantize_(made, 64, activation_group=128)
    assert all(type(layer) is nn.Linear for layer in made)
    with pytest.raises(QuantizationError, match=r"^1: activation_group is 128, .* that divides group = 64 "):
        w4a8.quantize_(made, -1, activation_group=128)


@pytest.mark.parametrize("bits", [4, 8])
def test_matrices_of_formats(bits):
    codes, scales = torch.zeros(8, 128 * bits // 8, dtype=torch.uint8), torch.ones(8, 2)
    matrix = Matrix(codes, scales, None, f"int{bits}")
    assert group_of(matrix.pack()) == -1
    for asked, expected in ((None, 32), (-1, -1), (64, 64)):
        assert group_of(linear_from_matrix(matrix, asked).packed) == expected


def test_a_stack_that_is_packed_again_keeps_it():
    """Here since its second matrix has a zero point that is not 8."""
    codes, scales = torch.zeros(8, 32, dtype=torch.uint8), torch.ones(8, 2)
    stack = MatrixStack(2, 8, 64, 32, activation_group=32)
    stack.put(0, 0, Matrix(codes, scales, None, "int4"))
    stack.put(1, 0, Matrix(codes, scales, torch.full((8, 2), 3, dtype=torch.uint8), "int4"))
    assert group_of(stack.pack()) == 32


INT4 = {"bits": 4, "group_size": 32}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}


def compressed(inputs):
    scheme = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": scheme}}


@pytest.mark.parametrize(
    ("config", "module", "expected"),
    [
        ({"quant_method": "gptq", **INT4}, "a", None),
        ({"quant_method": "awq", **INT4}, "a", None),
        ({"quant_method": "auto-round", **INT4}, "a", None),
        ({"quant_method": "auto-round", **INT4, "act_bits": 8}, "a", -1),
        (compressed(None), "a", None),
        (compressed(TOKENS), "a", -1),
        ({"quant_method": "mxfp4"}, "a.experts", None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "a", None),
    ],
    ids=str,
)
def test_what_checkpoints_say(config, module, expected):
    """None is the default; what is asked for comes first."""
    scheme = rules_of(config).of(module)
    assert scheme.wanted_activation_group(None) == expected
    assert scheme.wanted_activation_group(64) == 64


def test_config_of_transformers():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from w4a8.integrations.transformers import W4A8Config

    for asked in (None, -1, 64):
        config = W4A8Config(64, activation_group=asked)
        assert config.quant_options().activation_group == asked
        assert W4A8Config(**config.to_dict()).activation_group == asked
    old = {name: value for name, value in W4A8Config().to_dict().items() if name != "activation_group"}
    assert W4A8Config(**old).activation_group is None
    # Checkpoints of others have groups of their own.
    with pytest.raises(ValueError, match=r"activation_group is 64, expected .* that divides group = 32$"):
        W4A8Config(activation_group=64).quant_options()
    with pytest.raises(ValueError, match=r"activation_group is 16, expected -1 \(whole rows\), or 32, 64 or 128$"):
        W4A8Config(activation_group=16)
