"""Codes of 8 bits: bits, bytes, headers, errors; beside other kinds."""

import numpy as np
import pytest
import reference
import torch
from common import (
    DTYPES,
    KINDS,
    TORCH_VERSION,
    assert_same_bits,
    assert_within,
    make_layer,
    make_matrix,
    matmul,
    route,
)
from test_ops import check

import w4a8

compiles = pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason=f"torch {TORCH_VERSION} has no opcheck")
# rows, N, K, group
SHAPES = [
    (1, 1, 2, 2),
    (1, 1, 16, 16),
    (9, 5, 38, 38),
    (3, 17, 32, 32),
    (7, 33, 80, 16),
    (5, 16, 96, 96),
    (4, 31, 96, 32),
    (2, 50, 160, 160),
    (13, 16, 320, 64),
    (6, 65, 1024, 128),
    (29, 40, 480, 96),
    (12, 257, 64, 32),
]


def int8(*arguments, **more):
    return make_matrix(*arguments, **more, kind="int8")


def unpack(matrix):
    return w4a8.dyn_quant_unpack_any_4bit_weight(matrix.pack(), matrix.group, matrix.k, matrix.n)


@pytest.mark.parametrize(
    "scale_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["s_f32", "s_bf16", "s_f16"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_matmul_bits(kernel, shape, scale_dtype):
    m, n, k, group = shape
    for dtype in DTYPES:
        check(torch.randn(m, k).to(dtype), int8(n, k, group, scale_dtype, n % 2 == 0))


@pytest.mark.sweep
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 23, 24, 25, 47, 70])
def test_numbers_of_rows(kernel, m):
    check(torch.randn(m, 96), int8(37, 96, 32))
    check(torch.randn(m, 96), int8(37, 96, 96, torch.bfloat16, True))


@pytest.mark.parametrize("with_zeros", [True, False], ids=["zeros", "128"])
def test_values(with_zeros):
    """Against float64: no reference decides what a code is."""
    matrix = int8(33, 256, 32)
    zeros = matrix.zero_points.double() if with_zeros else torch.full(matrix.scales.shape, 128.0).double()
    matrix.zero_points = matrix.zero_points if with_zeros else None
    real = matrix.weights.double() - zeros.repeat_interleave(32, 1)
    real = real * matrix.scales.double().repeat_interleave(32, 1)
    x = torch.randint(-127, 128, (9, 256)).float()  # its own quantization: a range of 255 steps of 1
    x[:, 0], x[:, 1] = -128, 127
    y = matmul(x, matrix, matrix.pack()).double()
    # Of 8 groups of 32. x is its own quantization: its scale is 1 and its zero point 0.
    size = 255 * matrix.scales.double().repeat_interleave(32, 1)
    terms = (x.double().abs() @ size.T).numpy()
    assert_within(y.numpy(), (x.double() @ real.T).numpy(), reference.rounding_bound(terms, 8))


@pytest.mark.parametrize("value", [0x00, 0xFF, 0x0F, 0xF0], ids=hex)
@pytest.mark.parametrize("group", [32, 256, 4096])
def test_extreme_values(kernel, value, group):
    matrix = int8(18, 4096, group)
    matrix.weights.fill_(value)
    matrix.zero_points[::2], matrix.zero_points[1::2] = 0, 255
    x = torch.zeros(4, 4096)
    x[0], x[1] = 1.0, -1.0
    x[2] = torch.tensor([255.0, 0.0]).repeat(2048)
    x[3] = torch.tensor([-128.0, 127.0]).repeat(2048)
    check(x, matrix)


def test_no_zero_points_are_128():
    """The same weights as with 128 everywhere, in less room."""
    matrix = int8(33, 96, 32, torch.bfloat16, True)
    with_zeros = matrix.pack()
    matrix.zero_points = torch.full(matrix.scales.shape, 128, dtype=torch.uint8)
    x = torch.randn(5, 96)
    want = matmul(x, matrix, matrix.pack())
    matrix.zero_points = None
    packed = matrix.pack()
    # 3 panels; 3 groups of 32 bytes of scales in 2 lines, with 16 bytes of zero points in 3.
    assert packed.numel() == with_zeros.numel() - 3 * 64
    assert_same_bits(matmul(x, matrix, packed), want)
    assert unpack(matrix)[2].shape == (0,)


@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("experts", [None, 3], ids=["matrix", "stack"])
def test_unpack_is_the_inverse(bias, experts):
    for _, n, k, group in SHAPES:
        for scale_dtype in (torch.float32, torch.bfloat16):
            matrix = int8(n, k, group, scale_dtype, bias, experts)
            weights, scales, zero_points, bias_out, values, channels = unpack(matrix)
            assert values == "int8" and channels.shape == (0,)
            assert_same_bits(weights, matrix.weights)
            assert_same_bits(scales, matrix.scales)
            assert_same_bits(zero_points, matrix.zero_points)
            assert_same_bits(bias_out, matrix.bias if bias else torch.zeros(0))


def test_strides():
    matrix = int8(24, 64, 32, bias=True)
    want = matrix.pack()
    for name in ("weights", "zero_points", "scales"):
        setattr(matrix, name, getattr(matrix, name).repeat_interleave(2, 1)[:, ::2])
        assert not getattr(matrix, name).is_contiguous()
    assert_same_bits(matrix.pack(), want)


def test_header():
    matrix = int8(33, 96, 32, torch.bfloat16)
    packed = matrix.pack()
    header = w4a8.read_header(packed)
    assert (header["version"], header["n"], header["k"], header["group"]) == (5, 33, 96, 32)
    assert (header["values"], header["has_zero_points"], header["has_bias"]) == ("int8", True, False)
    assert header["bytes"] == packed.numel()
    # Three panels: one record of three groups with 16 * (2 + 1) bytes each in 3 lines, 12 steps; sums and bias.
    assert packed.numel() == 64 + 3 * (3 * 64 + 12 * 128 + 64 + 64)


def test_bytes():
    """docs/packed_layout.md: a step is the codes of k0..k0+3 of all columns, then those of k0+4..k0+7."""
    matrix = int8(33, 96, 32, torch.bfloat16, True)
    panels = matrix.pack()[64:].view(3, -1)
    steps = panels[:, 3 * 64 : 3 * 64 + 12 * 128].reshape(3, 12, 2, 16, 4)
    codes = steps.permute(0, 3, 1, 2, 4).reshape(48, 96)
    assert_same_bits(codes[:33], matrix.weights)
    assert (codes[33:] == 0).all()  # their zero points are 0
    assert_same_bits(panels[:, : 3 * 32].reshape(3, 3, 32)[0].view(torch.bfloat16).T, matrix.scales[:16])
    zeros = panels[:, 3 * 32 : 3 * 48].reshape(3, 3, 16).permute(0, 2, 1).reshape(48, 3)
    assert_same_bits(zeros[:33], matrix.zero_points)


@pytest.mark.parametrize("kinds", [*((kind, "int8") for kind in KINDS), *(("int8", kind) for kind in [*KINDS, "int8"])])
def test_moe_of_mixed_kinds(kernel, kinds):
    for hidden, inner, group in [(64, 32, 32), (128, 96, 32), (80, 48, 16), (34, 18, -1)]:
        layer = make_layer(4, hidden, inner, group, bias=True, kinds=kinds)
        x = torch.randn(9, hidden)
        ids, router = route(9, 2, 4)
        ids[3, 1] = -1
        for on_input in (False, True):
            options = (inner, True, on_input, 0)
            want, explained = reference.moe(x.numpy(), ids.numpy(), router.numpy(), *layer.arrays(), *options)
            y = layer(x, ids, router, weight_on_input=on_input)
            assert_within(y.numpy(), want, explained, f"{kinds} {hidden} {inner} {group}")


def test_every_kernel_and_batch(supported_kernels):
    """A token's bits depend on that token alone."""
    for group in (32, -1):
        layer = make_layer(3, 96, 64, group, bias=True, kinds=("int8", "int8"))
        x, (ids, router) = torch.randn(40, 96).bfloat16(), route(40, 2, 3)
        want = layer(x, ids, router)
        for name in supported_kernels:
            with w4a8.use_kernel(name):
                assert_same_bits(layer(x, ids, router), want, name)
                for token in (0, 17):
                    part = slice(token, token + 1)
                    assert_same_bits(layer(x[part], ids[part], router[part]), want[part], name)


# --- what is refused -------------------------------------------------------------------------------------------------


def full(*shape, value=1.0, dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype)


LEVELS = {"scales_zeros": full(24, 4, dtype=torch.uint8), "block_size": 16, "channel_scales": full(24)}
PACK = {
    "nibbles": (
        {"weights": full(24, 32, dtype=torch.uint8)},
        r"weights has shape \[24, 32\], expected \[24, 64\] or \[E, 24, 64\] for .*'int8'",
    ),
    "signed": (
        {"weights": full(24, 64, dtype=torch.int8)},
        r"weights has dtype (Char|signed char|int8), expected uint8",
    ),
    "zero points": (
        {"zero_points": full(24, 1, dtype=torch.uint8)},
        r"zero_points has shape \[24, 1\], expected that of scales_zeros, \[24, 2\]",
    ),
    "two levels": (LEVELS, r"channel_scales is given, expected none for values = 'int8'"),
    "e8m0": (
        {"scales_zeros": full(24, 2, dtype=torch.uint8)},
        "scale type is e8m0, expected a float type for int8",
    ),
    "a long sum": (
        {
            "weights": full(1, 2**16 + 2, dtype=torch.uint8),
            "scales_zeros": full(1, 1),
            "out_features": 1,
            "in_features": 2**16 + 2,
            "block_size": 2**16 + 2,
        },
        r"group \(block_size\) is 65538 \(channelwise\), expected at most 65536 for int8",
    ),
}


@pytest.mark.parametrize("name", PACK)
def test_pack_errors(name):
    changes, message = PACK[name]
    arguments = {
        "weights": full(24, 64, dtype=torch.uint8), "scales_zeros": full(24, 2), "bias": None,
        "block_size": 32, "in_features": 64, "out_features": 24, "values": "int8",
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=r"^w4a8::dyn_quant_pack_4bit_weight: .*" + message):
        w4a8.dyn_quant_pack_4bit_weight(**{**arguments, **changes})


def test_unpack_of_three_results_refuses():
    packed = int8(24, 64, 32).pack()
    with pytest.raises(
        RuntimeError,
        match=r"packed_weights holds int8 with zero points, expected int4: .*_any_4bit_weight unpacks every",
    ):
        w4a8.dyn_quant_unpack_4bit_weight(packed, 32, 64, 24)


def test_hostile_headers():
    good = int8(24, 64, 32).pack()
    for at, value, message in [
        (8, 4, "version is 4: packed before w4a8 0.1, pack the weights again"),
        (8, 6, "version is 6, this library reads version 5"),
        (12, 1, "values are e2m1 with zero points"),
        (12, 3, r"values are 3, expected 0 \(int4\), 1 \(e2m1\) or 2 \(int8\)"),
        (13, 4, "scale type is e8m0"),
        (14, 4, r"flags are 4, expected 4 \(channel scales\) not among them"),
        (48, 1, "reserved bytes of the header are not zero"),
    ]:
        bad = good.clone()
        bad[at] = value
        with pytest.raises(RuntimeError, match=rf"packed_weights: .*{message}"):
            w4a8.dyn_quant_matmul_4bit(torch.randn(3, 64), bad, 32, 64, 24)
        with pytest.raises(ValueError, match=message):
            w4a8.read_header(bad)
    with pytest.raises(RuntimeError, match=r"size is \d+ bytes, its header .* needs"):
        w4a8.dyn_quant_matmul_4bit(torch.randn(3, 64), good[:-1], 32, 64, 24)


# --- Meta and compile ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [None, 3], ids=["matrix", "stack"])
def test_meta(experts):
    matrix = int8(24, 64, 32, bias=True, experts=experts)
    packed = matrix.pack()
    for name in ("weights", "scales", "bias", "zero_points"):
        setattr(matrix, name, getattr(matrix, name).to("meta"))
    assert matrix.pack().shape == packed.shape and matrix.pack().is_meta
    matrix.zero_points = None
    without = int8(24, 64, 32, bias=True, experts=experts)
    without.zero_points = None
    assert matrix.pack().shape == without.pack().shape != packed.shape


@compiles
def test_compile():
    matrix = int8(24, 64, 32, bias=True)

    def pack_and_multiply(x, weights, scales, bias, zeros):
        packed = w4a8.dyn_quant_pack_4bit_weight(weights, scales, bias, 32, 64, 24, zero_points=zeros, values="int8")
        return w4a8.dyn_quant_matmul_4bit(x, packed, 32, 64, 24)

    x = torch.randn(5, 64)
    compiled = torch.compile(pack_and_multiply, fullgraph=True)
    found = compiled(x, matrix.weights, matrix.scales, matrix.bias, matrix.zero_points)
    assert_same_bits(found, matmul(x, matrix, matrix.pack()))


def test_committed_bytes():
    """Byte for byte."""
    codes = torch.tensor([[(7 * k + 3 * n) % 256 for k in range(32)] for n in range(2)], dtype=torch.uint8)
    zeros = torch.tensor([[0x9C], [0x05]], dtype=torch.uint8)
    scales = torch.tensor([[1.0], [-0.5]])
    more = {"zero_points": zeros, "values": "int8"}
    packed = w4a8.dyn_quant_pack_4bit_weight(codes, scales, None, 32, 32, 2, **more).numpy()
    header = b"W4A8PACK" + np.array([5], "<u4").tobytes() + bytes([2, 0, 2, 0])  # int8, float32, zero points
    header += np.array([2, 32, 32, -1], "<i8").tobytes() + bytes(16)
    assert packed[:64].tobytes() == header
    panel, c = packed[64:], codes.numpy()
    assert panel[:64].view("<f4").tolist() == [1, -0.5] + [0] * 14
    assert panel[64:128].tolist() == [0x9C, 5] + [0] * 62
    for step in range(4):
        for column in range(2):
            values, at = c[column, 8 * step : 8 * step + 8], 128 + 128 * step + 4 * column
            assert (panel[at : at + 4] == values[:4]).all() and (panel[at + 64 : at + 68] == values[4:]).all()
    # One group is one scale for the column: the sums are integers.
    sums = [int((c[0].astype(int) - 0x9C).sum()), int((c[1].astype(int) - 5).sum())]
    assert panel[128 + 512 :][:8].view("<i4").tolist() == sums
    assert len(panel) == 128 + 512 + 64 + 64
