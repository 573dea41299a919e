"""w4a8.nn.W4A8Linear: made from floats and from checkpoints, saved and loaded."""

import inspect
import io

import pytest
import torch
from common import DTYPES, assert_same_bits, default_activation_group

import w4a8
from w4a8.core.matrix import Matrix
from w4a8.nn import QuantOptions, W4A8Experts, W4A8Linear, W8A8Linear, linear_from_matrix
from w4a8.quantization import DEFAULT_GROUP_SIZE


def unpacked(layer):
    nibbles, scales, bias = w4a8.dyn_quant_unpack_4bit_weight(
        layer.packed, layer.group_size, layer.in_features, layer.out_features
    )
    values = torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(1).double() - 8
    return values, scales.double().repeat_interleave(layer.group_size, 1), bias


@pytest.mark.parametrize("group", [96, 32, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bits(dtype, group):
    """Beside the float product; saved and loaded; a matrix of 4 bits is refused."""
    codes = torch.randint(0, 256, (21, 96), dtype=torch.uint8)
    scales, zeros = torch.rand(21, 96 // group) / 64, torch.randint(0, 256, (21, 96 // group), dtype=torch.uint8)
    matrix = Matrix(codes, scales.half(), zeros, "int8", torch.randn(21))
    layer = linear_from_matrix(matrix)
    assert isinstance(layer, W8A8Linear) and f"out_features=21, group_size={group}, int8" in repr(layer)
    wide = [part.double().repeat_interleave(group, 1) for part in (matrix.zero_points, matrix.scales)]
    weight = (codes.double() - wide[0]) * wide[1]
    x = torch.randn(2, 3, 96).to(dtype)
    y = layer(x)
    assert y.shape == (2, 3, 21) and y.dtype == dtype
    # Inputs are off by half a step, the largest of a group / 127, the result by half a unit of its type.
    size = default_activation_group(group, 96)
    step = x.double().unflatten(-1, (-1, size)).abs().amax(-1).repeat_interleave(size, -1) / 127
    exact = x.double() @ weight.T + matrix.bias.double()
    allowed = 0.5001 * step @ weight.abs().T + torch.finfo(dtype).eps * (exact.abs() + 1)
    assert ((y.double() - exact).abs() <= 1.01 * allowed).all()
    other = W8A8Linear(layer.packed.clone(), 96, 21, group)
    other.packed.zero_()
    other.load_state_dict(layer.state_dict())
    assert_same_bits(other(x), y)
    with pytest.raises(ValueError, match="packed: values is int4, expected int8"):
        W8A8Linear(W4A8Linear.from_float(torch.nn.Linear(96, 21), group).packed, 96, 21, group)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("group", [-1, 32, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_from_float(dtype, group, bias):
    linear = torch.nn.Linear(96, 21, bias=bias).to(dtype)
    layer = W4A8Linear.from_float(linear, group)
    values, scales, packed_bias = unpacked(layer)
    # Nearest, of the 16 values; the product with the scale, and the quotient, round.
    nearest = linear.weight.double() / scales
    assert ((values - nearest.clamp(-8, 7)).abs() <= 0.5 + 1e-5).all()
    assert values.min() == -8
    assert torch.equal(packed_bias, linear.bias.float() if bias else torch.empty(0))
    x = torch.randn(2, 3, 96)
    y = layer(x)
    want = w4a8.dyn_quant_matmul_4bit(x, layer.packed, 96 if group == -1 else group, 96, 21)
    assert y.shape == (2, 3, 21)
    assert_same_bits(y, want)


def test_one_default_group_size():
    """Of everything that quantizes floats; the packed bytes are those of that group, and a layer of them knows it."""
    assert QuantOptions().group_size == 32
    for function in (W4A8Linear, W8A8Linear, W4A8Experts):
        assert inspect.signature(function).parameters["group_size"].default == DEFAULT_GROUP_SIZE == 32, function
    layer = W4A8Linear.from_float(torch.nn.Linear(96, 24))
    assert w4a8.read_header(layer.packed)["group"] == 32
    assert W4A8Linear(layer.packed, 96, 24).group_size == 32
    experts = W4A8Experts.from_float(torch.randn(3, 128, 96), torch.randn(3, 96, 64))
    assert [w4a8.read_header(stack[2])["group"] for stack in (experts.w13_packed, experts.w2_packed)] == [32, 32]
    assert W4A8Experts(experts.w13_packed, experts.w2_packed, 96, 64).group_size == 32


def test_from_float_zeros_and_errors():
    linear = torch.nn.Linear(64, 4, bias=False)
    linear.weight.data[1] = 0
    assert not W4A8Linear.from_float(linear, 32)(torch.randn(3, 64))[:, 1].any()
    with pytest.raises(ValueError, match=r"group .block_size. is 96, expected k = 64 .channelwise."):
        W4A8Linear.from_float(linear, 96)
    linear.weight.data[2, 3] = float("nan")
    with pytest.raises(ValueError, match="the weight has a NaN or an infinite element"):
        W4A8Linear.from_float(linear)


def test_state_dict():
    layer = W4A8Linear.from_float(torch.nn.Linear(64, 24), 32)
    file = io.BytesIO()
    torch.save(torch.nn.Sequential(layer).state_dict(), file)
    file.seek(0)
    other = torch.nn.Sequential(W4A8Linear.from_float(torch.nn.Linear(64, 24, bias=False), 32))
    other.load_state_dict(torch.load(file))
    assert_same_bits(other[0].packed, layer.packed)
    x = torch.randn(3, 64)
    assert_same_bits(other(x), layer(x))


def test_state_dict_of_another_matrix_is_refused():
    state = W4A8Linear.from_float(torch.nn.Linear(64, 24), 32).state_dict()
    for layer, message in [
        (W4A8Linear.from_float(torch.nn.Linear(64, 23), 32), "packed: n is 24, expected 23"),
        (W4A8Linear.from_float(torch.nn.Linear(64, 24), -1), "packed: group is 32, expected 64"),
    ]:
        before = layer.packed.clone()
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(state)
        assert_same_bits(layer.packed, before)
    with pytest.raises(ValueError, match="packed: k is 64, expected 96"):
        W4A8Linear(state["packed"], 96, 24, 32)


def test_repr():
    layer = W4A8Linear.from_float(torch.nn.Linear(64, 24))
    sizes = "W4A8Linear(in_features=64, out_features=24, group_size=32"
    assert repr(layer) == f"{sizes})"
    for options, kind in (({"symmetric": False}, "zero points"), ({"values": "e2m1"}, "e2m1")):
        assert repr(W4A8Linear.from_float(torch.nn.Linear(64, 24), **options)) == f"{sizes}, {kind})"
    linear = torch.nn.Linear(64, 24, device="meta")
    assert repr(W4A8Linear.from_float(linear, symmetric=False)) == f"{sizes})"
    experts = W4A8Experts.from_float(torch.randn(3, 64, 32), torch.randn(3, 32, 32), symmetric=False)
    assert repr(experts).endswith("activation=SILU, zero points)")


@pytest.mark.parametrize("groups", [1, 2])
def test_scales_are_exact_and_as_narrow_as_that_allows(groups):
    codes, scales = torch.randint(256, (5, 32), dtype=torch.uint8), torch.rand(5, groups).to(torch.bfloat16)

    def call(scales, dtype=None):
        return W4A8Linear.from_matrix(Matrix(codes, scales), dtype)

    narrow, wide = call(scales), call(scales.float(), torch.float32)
    assert_same_bits(call(scales.float()).packed, narrow.packed)
    assert w4a8.read_header(narrow.packed)["scale_dtype"] == "bfloat16"
    assert w4a8.read_header(wide.packed)["scale_dtype"] == "float32"
    x = torch.randn(3, 64)
    assert_same_bits(narrow(x), wide(x))
    finer = scales.float() * 1.01
    assert torch.equal(unpacked(call(finer))[1], finer.double().repeat_interleave(64 // groups, 1))
