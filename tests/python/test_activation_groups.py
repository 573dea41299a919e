"""Operators with matrices that want activations in groups: bit for bit what docs/numerics.md defines."""

import re

import numpy as np
import pytest
import reference
import torch
from common import (
    DTYPES,
    assert_same_bits,
    check,
    check_layer,
    from_numpy,
    make_layer,
    make_matrix,
    matmul,
    route,
)
from test_linear_ops import words

import w4a8

SIZES = [32, 64, 128]
# (N, K, group, kind, activation group): the group equal, a part and a multiple; K no multiple of 64; one group; of 16.
MATRICES = [
    (40, 256, 32, "int4", 32),
    (17, 96, 96, "int4", 32),
    (33, 384, 128, "int4", 32),
    (33, 384, 128, "zeros", 64),
    (24, 256, 256, "zeros", 128),
    (20, 320, 160, "e2m1", 32),
    (20, 256, 128, "e2m1", 128),
    (16, 192, 64, "int8", 64),
    (19, 128, 128, "int8", 128),
    (31, 192, 16, "int4", 64),
    (31, 160, 16, "e2m1", 32),
    (12, 256, 16, "int8", 128),
    (20, 128, 16, "e2m1 of two levels", 64),
]


def make_rows(rows, k):
    """An outlier channel, groups of zeros, of numbers too small for a scale, and of large ones."""
    x = torch.randn(rows, k)
    x[:, k // 3] *= 100
    x[0, :64] = 0
    x[1, :32] = 1e-42
    x[2, -32:] *= 1e34
    x[3] = torch.randint(-127, 128, (k,)) / 2.0  # ties, where a group has 127 / 2
    x[3, ::32] = 63.5
    return x


@pytest.mark.parametrize(("n", "k", "group", "kind", "size"), MATRICES)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
def test_matmul(kernel, n, k, group, kind, size, bias):
    for rows in (4, 5, 23):
        matrix = make_matrix(n, k, group, torch.bfloat16, bias, kind=kind, activation_group=size)
        check(make_rows(rows, k), matrix, f"{rows} rows")


def test_an_outlier_costs_less_than_per_token():
    """What groups are for: against float64 with the weights as they are packed."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    x[:, 100] *= 60
    errors = {}
    for size in (-1, 128, 64, 32):
        torch.manual_seed(1)
        matrix = make_matrix(64, 512, 128, activation_group=size)
        weights, scales, *_ = matrix.arrays()
        exact = x.double().numpy() @ reference.dequantize(weights, scales).T
        errors[size] = np.square(matmul(x, matrix, matrix.pack()).double().numpy() - exact).mean()
    assert errors[32] < errors[64] < errors[128]
    assert errors[32] < errors[-1] / 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantizer(kernel, dtype, size):
    x = make_rows(9, 384).to(dtype)
    x[5, 300] = float("nan")
    x[6, 0] = float("inf")  # of float16 another row too
    q, scale, zero = w4a8.dynamic_per_token_int8_quant(x.view(3, 3, 384), True, 8, activation_group=size)
    want_q, want_zero, recip, want_scale = reference.quantize(x.float().numpy(), size)
    want_scale *= recip[:, None]  # NaN, 1, or 2^24
    assert_same_bits(q, from_numpy(want_q.astype(np.int8)).view(3, 3, 384))
    assert_same_bits(scale, from_numpy(want_scale).view(3, 3, 384 // size))
    assert_same_bits(zero, from_numpy(want_zero.astype(np.int32)).view(3, 3, 1))
    assert_same_bits(scale.isnan().any(-1).view(9), ~torch.isfinite(x).all(1))


@pytest.mark.parametrize(("group", "size"), [(32, 32), (128, 32), (128, 128), (256, 64), (16, 64)])
def test_gemm(kernel, group, size):
    """Scales of any bits: the last two count as zeros."""
    matrix = make_matrix(24, 256, group, activation_group=size)
    q = torch.randint(-128, 128, (2, 3, 256), dtype=torch.int8)
    scale = torch.rand(2, 3, 256 // size)
    zero, eight, bias = torch.zeros(2, 3, 1, dtype=torch.int32), torch.tensor([8]), torch.randn(24)
    rows, x_scales = q.reshape(6, 256).numpy().astype(np.int64), reference.cut(scale.reshape(6, -1).numpy())
    ones = np.ones(6, np.float32)
    y = reference.matmul_quantized(rows, 0 * ones, ones, *matrix.arrays()[:2], None, x_scales=x_scales)
    want = from_numpy(y + bias.numpy(), torch.bfloat16).view(2, 3, 24)
    scales = matrix.scales.t()
    for weight in (words(matrix), matrix.pack()):
        out = w4a8.int4_gemm_w4a8(q, scale, zero, weight, scales, eight, group, None, bias, torch.bfloat16)
        assert_same_bits(out, want)


def test_large_scales(kernel):
    """Above 2^104 a row counts in larger units (docs/numerics.md, section 1); float32 holds all these products."""
    matrix = make_matrix(24, 64, 32, activation_group=32)
    q = torch.randint(-128, 128, (5, 64), dtype=torch.int8)
    scale = torch.full((5, 2), 2.0**104)
    scale[1, 1], scale[2, 0], scale[3, 0], scale[4] = 2.0**104 * 1.5, -(2.0**105), 2.0**-140, torch.tensor([1e36, 1e-7])
    eight, zero = torch.tensor([8]), torch.zeros(5, 1, dtype=torch.int32)
    out = w4a8.int4_gemm_w4a8(q, scale, zero, matrix.pack(), torch.empty(0, 24), eight, 32, None, None, torch.float32)
    ones = np.ones(5, np.float32)
    x_scales, recip = reference.limit_scales(reference.cut(scale.numpy()), ones)
    assert recip.tolist() == [1, 2**24, 2**24, 1, 2**24]
    rows = q.numpy().astype(np.int64)
    want = reference.matmul_quantized(rows, 0 * ones, recip, *matrix.arrays()[:2], None, x_scales=x_scales)
    assert_same_bits(out, from_numpy(want))
    assert out.isfinite().all()
    scale[:3, 1] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    out = w4a8.int4_gemm_w4a8(q, scale, zero, matrix.pack(), torch.empty(0, 24), eight, 32, None, None, torch.float32)
    assert out[:3].isnan().all()
    assert_same_bits(out[3:], from_numpy(want[3:]))


def test_gemm_is_the_matmul(kernel):
    matrix = make_matrix(24, 256, 64, activation_group=32)
    packed, x = matrix.pack(), make_rows(5, 256)
    x[4, 3] = float("nan")
    rows = w4a8.dynamic_per_token_int8_quant(x, True, 8, activation_group=32)
    eight = torch.tensor([8])
    out = w4a8.int4_gemm_w4a8(*rows, packed, torch.empty(0, 24), eight, 64, None, None, torch.float32)
    assert_same_bits(out, matmul(x, matrix, packed))


@pytest.mark.parametrize("groups", [(32, 32), (64, 32), (128, 128), (-1, 32), (32, -1)], ids=str)
@pytest.mark.parametrize("weight_on_input", [False, True], ids=["weight_on_output", "weight_on_input"])
@pytest.mark.parametrize("group_size", [128, -1], ids=["groups", "channelwise"])
def test_moe(kernel, groups, weight_on_input, group_size):
    layer = make_layer(4, 256, 128, group_size, bias=True, activation_groups=groups)
    for dtype in DTYPES:
        x, (ids, router) = torch.randn(11, 256).to(dtype), route(11, 2, 4)
        check_layer(layer, x, ids, router, 0, weight_on_input, most=0.01)


def test_moe_of_several_activation_groups():
    """Of w13 and w2 they may differ, within a stack not: a token is quantized once."""
    layer = make_layer(3, 128, 64, 64, activation_groups=(32, 64))
    other = make_layer(3, 128, 64, 64, activation_groups=(64, 64))
    x, ids, good = torch.randn(2, 128), torch.tensor([[0, 2], [2, 1]]), layer.w13_packed.clone()
    layer.w13_packed[2] = other.w13_packed[2]
    with pytest.raises(RuntimeError, match=r"w13_packed: activation group is 64, expected that of expert 0, 32"):
        layer(x, ids, torch.ones(2, 2))
    layer.w13_packed = good
    layer.w2_packed[2] = make_layer(3, 128, 64, 64, activation_groups=(32, 32)).w2_packed[2]
    with pytest.raises(RuntimeError, match=r"w2_packed: activation group is 32, expected that of expert 0, 64"):
        layer(x, ids, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("group", "k", "size"), [(32, 128, 64), (96, 192, 64), (-1, 66, 32), (16, 48, 32), (32, 64, 16)]
)
def test_pack_refuses(group, k, size):
    matrix = make_matrix(8, k, k if group == -1 else group, activation_group=size)
    unit = f"k = {k}" if group == 16 else "group = "
    message = f"activation_group is {size}, expected -1 (whole rows), or 32, 64 or 128"
    message += "" if size == 16 else f" that divides {unit}"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        matrix.pack()


def test_errors_of_the_quantizer():
    x = torch.randn(2, 96)
    quantize = w4a8.dynamic_per_token_int8_quant
    for given, message in [
        ((False, 8, 32), "use_sym_quant is False, expected True for activation_group = 32"),
        ((True, 4, 32), "bits is 4, expected 8 for activation_group = 32"),
        ((True, 8, 64), "activation_group is 64, expected -1, or 32, 64 or 128 that divides K = 96"),
        ((True, 8, 48), "activation_group is 48, expected -1, or 32, 64 or 128 that divides K = 96"),
        ((True, 8, 0), "activation_group is 0, expected -1, or 32, 64 or 128 that divides K = 96"),
    ]:
        symmetric, bits, size = given
        for device in ("cpu", "meta"):
            with pytest.raises(RuntimeError, match=re.escape(message)):
                quantize(x.to(device), symmetric, bits, activation_group=size)


def test_errors_of_gemm():
    packed = make_matrix(24, 256, 64, activation_group=32).pack()
    q, scale, zero = w4a8.dynamic_per_token_int8_quant(torch.randn(3, 256), True, 8, activation_group=32)

    def call(**changes):
        given = {"quant_x": q, "x_scale": scale, "x_zero": zero, "weight": packed, **changes}
        eight = torch.tensor([8])
        w4a8.int4_gemm_w4a8(
            **given, weight_scale=torch.empty(0, 24), weight_zero_point=eight, group_size=64, g_idx=None, bias=None
        )

    call()
    wants = "for activations in groups of 32"
    for changes, message in [
        ({"quant_x": q.view(torch.uint8)}, f"quant_x has dtype Byte, expected int8 {wants}"),
        ({"x_scale": scale[:, :1]}, f"x_scale has shape [3, 1], expected [3, 8] {wants}"),
        ({"x_scale": scale[:, :4]}, f"x_scale has shape [3, 4], expected [3, 8] {wants}"),
        ({"x_zero": zero + 5}, f"x_zero is 5, expected 0 {wants}"),
        ({"weight": make_matrix(24, 256, 64).pack()}, "x_scale has shape [3, 8], expected [3, 1]"),
    ]:
        with pytest.raises(RuntimeError, match=re.escape(message)):
            call(**changes)
