"""The kinds of 4-bit weights beside plain int4: zero points and e2m1 (MXFP4). Bits, bytes, headers, errors."""

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
from test_linear_ops import expected as gemm_expected
from test_linear_ops import gemm, make_x, words
from test_ops import SHAPES, check

import w4a8
from w4a8.core.matrix import Matrix

compiles = pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason=f"torch {TORCH_VERSION} has no opcheck")
new_kinds = pytest.mark.parametrize("kind", ["zeros", "e2m1"])


def unpack(matrix):
    return w4a8.dyn_quant_unpack_any_4bit_weight(matrix.pack(), matrix.group, matrix.k, matrix.n)


@new_kinds
@pytest.mark.parametrize(
    "scale_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["s_f32", "s_bf16", "s_f16"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_matmul_bits(kernel, shape, scale_dtype, kind):
    m, n, k, group = shape
    for dtype in DTYPES:
        check(torch.randn(m, k).to(dtype), make_matrix(n, k, group, scale_dtype, n % 2 == 0, kind=kind))


@new_kinds
@pytest.mark.sweep
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 23, 24, 25, 47, 70])
def test_numbers_of_rows(kernel, m, kind):
    check(torch.randn(m, 96), make_matrix(37, 96, 32, kind=kind))
    check(torch.randn(m, 100), make_matrix(37, 100, 100, torch.bfloat16, True, kind=kind))


@new_kinds
def test_values(kind):
    """Against float64, with the values of the issue's table: no reference decides what a nibble is."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    matrix = make_matrix(33, 256, 32, kind=kind)
    nibbles = torch.stack([matrix.weights & 15, matrix.weights >> 4], -1).reshape(33, 256)
    if kind == "e2m1":
        real = table[nibbles.long()]
    else:
        real = nibbles.double() - matrix.zero_points.double().repeat_interleave(32, 1)
    real = real * matrix.scales.double().repeat_interleave(32, 1)
    x = torch.randint(-127, 128, (9, 256)).float()  # its own quantization: a range of 255 steps of 1
    x[:, 0], x[:, 1] = -128, 127
    y = matmul(x, matrix, matrix.pack()).double()
    # Its scale is 1 and its zero point 0: nothing but what x is multiplied by is added up, in 8 groups.
    terms = (x.double().abs() @ real.abs().T).numpy()
    assert_within(y.numpy(), (x.double() @ real.T).numpy(), reference.rounding_bound(terms, 8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0x00, 0xFF, 0x0F, 0x77], ids=hex)
@pytest.mark.parametrize("group", [32, 256, 4096])
def test_extreme_values(kernel, value, group, kind):
    matrix = make_matrix(18, 4096, group, kind=kind)
    matrix.weights.fill_(value)
    if kind == "zeros":
        matrix.zero_points[::2], matrix.zero_points[1::2] = 0, 15
    x = torch.zeros(4, 4096)
    x[0], x[1] = 1.0, -1.0
    x[2] = torch.tensor([255.0, 0.0]).repeat(2048)
    x[3] = torch.tensor([-128.0, 127.0]).repeat(2048)
    check(x, matrix)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("experts", [None, 3], ids=["matrix", "stack"])
def test_unpack_is_the_inverse(kind, bias, experts):
    for n, k, group in [(17, 34, 34), (33, 96, 32), (33, 80, 16), (16, 256, 128)]:
        for scale_dtype in (torch.float32, torch.bfloat16):
            matrix = make_matrix(n, k, group, scale_dtype, bias, experts, kind=kind)
            weights, scales, zero_points, bias_out, values, channels = unpack(matrix)
            assert channels.shape == (0,)
            assert_same_bits(weights, matrix.weights)
            assert_same_bits(scales, matrix.scales)
            assert values == ("e2m1" if kind == "e2m1" else "int4")
            assert_same_bits(zero_points, matrix.zero_points if kind == "zeros" else torch.zeros(0, dtype=torch.uint8))
            assert_same_bits(bias_out, matrix.bias if bias else torch.zeros(0))


@pytest.mark.parametrize("experts", [None, 3], ids=["matrix", "stack"])
def test_the_size_follows_from_shapes_alone(experts):
    """Zero points of 8 everywhere mean what none means, and take the room of any others: values decide nothing."""
    matrix = make_matrix(33, 96, 32, torch.bfloat16, True, experts, kind="zeros")
    shape = matrix.pack().shape
    matrix.zero_points.fill_(8)
    packed = matrix.pack()
    assert packed.shape == shape
    first = packed if experts is None else packed[0]
    assert (w4a8.read_header(first)["version"], w4a8.read_header(first)["has_zero_points"]) == (5, True)
    assert_same_bits(unpack(matrix)[2], matrix.zero_points)
    x = torch.randn(5, 96)
    with_zeros = matmul(x, matrix, first)
    matrix.zero_points = None
    without = matrix.pack()
    # 3 panels; 3 groups of 32 bytes of scales in 2 lines, in 3 with 16 bytes of zero points.
    assert without.shape[-1] == shape[-1] - 3 * 64
    assert_same_bits(with_zeros, matmul(x, matrix, without if experts is None else without[0]))


@pytest.mark.parametrize("group", [32, 96, 128])
def test_scales_that_are_powers_of_two(kernel, group):
    """A byte b is 2^(b - 127): the same bits as with these numbers as float32, in less room."""
    for columns in (33, 64):
        matrix = make_matrix(columns, 5 * group, group, bias=True, kind="e2m1")
        exponents = torch.randint(112, 125, matrix.scales.shape, dtype=torch.uint8)
        exponents[0] = 0  # 2^-127, a denormal number, and half of it another
        exponents[1] = 1
        x = torch.randn(7, matrix.k)
        matrix.scales = torch.from_numpy(np.ldexp(np.float32(1), exponents.numpy().astype(np.int32) - 127))
        want, floats = matmul(x, matrix, matrix.pack()), matrix.pack()
        matrix.scales = exponents
        packed = matrix.pack()
        assert w4a8.read_header(packed)["scale_dtype"] == "e8m0"
        assert packed.numel() < floats.numel()
        assert_same_bits(matmul(x, matrix, packed), want)
        assert_same_bits(unpack(matrix)[1], exponents)
        if hasattr(torch, "float8_e8m0fnu"):
            matrix.scales = exponents.view(torch.float8_e8m0fnu)
            assert_same_bits(matrix.pack(), packed)


def test_no_number_among_the_powers_of_two():
    matrix = make_matrix(20, 64, 32, kind="e2m1")
    matrix.scales = torch.full(matrix.scales.shape, 127, dtype=torch.uint8)
    matrix.scales[3, 1] = 255
    with pytest.raises(
        RuntimeError, match=r"scales_zeros: element 7 is 255, the NaN of float8_e8m0fnu, expected 0\.\.254"
    ):
        matrix.pack()


def test_matrices_leave_out_zero_points_that_say_nothing():
    """Who packs a Matrix of a checkpoint wants the smaller form; the decision is made there, before the operator."""
    plain = make_matrix(33, 96, 32)
    eight = torch.full(plain.scales.shape, 8, dtype=torch.uint8)
    matrix = Matrix(plain.weights, plain.scales, eight, "int4")
    assert_same_bits(matrix.pack(torch.float32), plain.pack())
    eight[32, 2] = 7
    assert w4a8.read_header(matrix.pack(torch.float32))["has_zero_points"]


def packed_size(n, k, group, scale_bytes, zero_points, step=64):
    """Bytes of a packed matrix as docs/packed_layout.md says."""
    groups = k // group
    of_group = 16 * (scale_bytes + zero_points)
    record = next((m for m in range(1, groups) if m * of_group % 64 == 0), groups)
    head = -(-record * of_group // 64) * 64
    return 64 + -(-n // 16) * (-(-groups // record) * head + -(-k // 8) * step + 64 + 64)


@pytest.mark.parametrize(
    "scale_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["s_f32", "s_bf16", "s_f16"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_header(kind, scale_dtype):
    """The size is that of docs/packed_layout.md, for records that fill their lines and that do not."""
    for n, k, group in [(33, 96, 32), (16, 256, 32), (17, 34, 34), (48, 320, 64), (31, 80, 16), (5, 1024, 128)]:
        for bias in (False, True):
            matrix = make_matrix(n, k, group, scale_dtype, bias, kind=kind)
            packed = matrix.pack()
            header = w4a8.read_header(packed)
            assert header["version"] == 5
            assert header["values"] == ("e2m1" if kind == "e2m1" else "int4")
            assert header["has_zero_points"] == (kind == "zeros")
            assert header["has_bias"] == bias
            size = packed_size(n, k, group, matrix.scales.element_size(), kind == "zeros")
            assert header["bytes"] == packed.numel() == size


def test_strided_zero_points():
    matrix = make_matrix(24, 64, 32, kind="zeros")
    want = matrix.pack()
    matrix.zero_points = matrix.zero_points.repeat_interleave(2, 1)[:, ::2]
    assert not matrix.zero_points.is_contiguous()
    assert_same_bits(matrix.pack(), want)


@pytest.mark.parametrize("kinds", [(a, b) for a in KINDS for b in KINDS if (a, b) != ("int4", "int4")], ids=str)
def test_moe_of_mixed_kinds(kernel, kinds):
    for hidden, inner, group in [(64, 32, 32), (128, 96, 32), (80, 48, 16), (34, 18, -1)]:
        layer = make_layer(4, hidden, inner, group, bias=True, kinds=kinds)
        x = torch.randn(9, hidden)
        ids, router = route(9, 2, 4)
        want, explained = reference.moe(x.numpy(), ids.numpy(), router.numpy(), *layer.arrays(), inner, True, False, 0)
        assert_within(layer(x, ids, router).numpy(), want, explained, f"{kinds} {hidden} {inner} {group}")


def test_experts_of_different_kinds():
    """A stack's rows are matrices of their own; only their number of bytes must be the same."""
    parts = [make_matrix(64, 64, 64, kind=kind) for kind in ("int4", "e2m1", "int4")]
    w2 = make_matrix(64, 32, 32, experts=3)
    stack = torch.stack([part.pack() for part in parts])
    x = torch.randn(6, 64)
    ids, router = route(6, 2, 3)
    arrays = [[part.arrays() for part in parts], [w2.arrays(e) for e in range(3)]]
    want, explained = reference.moe(x.numpy(), ids.numpy(), router.numpy(), *arrays, 32, True, False, 0)
    y = w4a8.dynamic_4bit_int_moe(x, ids, router, stack, w2.pack(), 64, 32, 64, -1, False, 0)
    assert_within(y.numpy(), want, explained)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_int4_gemm(kernel, symmetric):
    for n in (1, 17, 40):
        for group in (32, 96, 192):
            matrix = make_matrix(n, 192, group, kind="zeros")
            none = torch.empty(0, dtype=torch.int32)
            for m in (1, 2, 13):
                x = make_x(m, 192, symmetric=symmetric)
                want = gemm_expected(x, matrix)
                assert_same_bits(gemm(x, matrix, words(matrix), zero=matrix.zero_points.t()), want, "words")
                assert_same_bits(gemm(x, matrix, words(matrix), zero=matrix.zero_points.t().long()), want, "int64")
                got = gemm(x, matrix, matrix.pack(), scales=torch.empty(0, n), zero=none)
                assert_same_bits(got, want, "packed")
    for zero in (0, 5, 15):
        matrix.zero_points = torch.full((40, 1), zero, dtype=torch.uint8)
        want = gemm_expected(x, matrix)
        for given in (torch.tensor(zero), torch.tensor([zero], dtype=torch.int8)):
            assert_same_bits(gemm(x, matrix, words(matrix), zero=given), want, "one zero point for all")
    matrix = make_matrix(24, 64, 32, kind="e2m1")
    x = make_x(3, 64, symmetric=symmetric)
    got = gemm(x, matrix, matrix.pack(), scales=torch.empty(0, 24), zero=none)
    assert_same_bits(got, gemm_expected(x, matrix), "e2m1")


def test_mxfp4_scales():
    """Every power of two that e8m0 has, the least one a denormal, in both types."""
    exponents = torch.arange(-127, 128)
    for dtype in (torch.float32, torch.bfloat16):
        scales = torch.ldexp(torch.ones(255, dtype=torch.float64), exponents).float().to(dtype).reshape(255, 1)
        matrix = make_matrix(255, 32, 32, kind="e2m1")
        matrix.scales = scales
        assert_same_bits(unpack(matrix)[1], scales)
        check(torch.randn(3, 32), matrix)


# --- what is refused -------------------------------------------------------------------------------------------------


def zero_points(*shape, value=8):
    return torch.full(shape, value, dtype=torch.uint8)


def with_element(tensor, index, value):
    tensor.view(-1)[index] = value
    return tensor


PACK = {
    "unknown values": ({"values": "fp4"}, r"values is 'fp4', expected 'int4', 'e2m1' or 'int8'"),
    "zero points of e2m1": ({"values": "e2m1", "zero_points": zero_points(24, 2)}, r"zero_points is given, expected none for values = 'e2m1'"),
    "int8": ({"zero_points": zero_points(24, 2).to(torch.int8)}, r"zero_points has dtype (Char|signed char|int8), expected uint8"),
    "transposed": ({"zero_points": zero_points(2, 24)}, r"zero_points has shape \[2, 24\], expected that of scales_zeros, \[24, 2\]"),
    "one per column": ({"zero_points": zero_points(24, 1)}, r"zero_points has shape \[24, 1\], expected that of scales_zeros"),
    "of a stack": ({"zero_points": zero_points(3, 24, 2)}, r"zero_points has shape \[3, 24, 2\], expected that of scales_zeros"),
    "16": ({"zero_points": with_element(zero_points(24, 2), 7, 16)}, r"zero_points: element 7 is 16, expected 0\.\.15"),
    "255": ({"zero_points": zero_points(24, 2, value=255)}, r"zero_points: element 0 is 255, expected 0\.\.15"),
    "scale whose half is not exact": ({"values": "e2m1", "scales_zeros": with_element(torch.ones(24, 2), 9, 1e-45)}, r"scales_zeros: element 9 is a number below 2\^-125"),
    "meta zero points": ({"zero_points": zero_points(24, 2).to("meta")}, r"zero_points is on device meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", PACK)
def test_pack_errors(name):
    changes, message = PACK[name]
    plain = make_matrix(24, 64, 32)
    arguments = {
        "weights": plain.weights, "scales_zeros": plain.scales, "bias": None,
        "block_size": 32, "in_features": 64, "out_features": 24,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=r"^w4a8::dyn_quant_pack_4bit_weight: .*" + message):
        w4a8.dyn_quant_pack_4bit_weight(**{**arguments, **changes})


@new_kinds
def test_largest_k(kind):
    """255 * 15 * K must fit int32."""
    k = 2**19 + 2
    weights, scales = torch.zeros(1, k // 2, dtype=torch.uint8), torch.ones(1, 1)
    more = {"values": "e2m1"} if kind == "e2m1" else {"zero_points": zero_points(1, 1, value=0)}
    with pytest.raises(RuntimeError, match=r"k \(in_features\) is 524290, expected an even number in 2\.\.524288 for"):
        w4a8.dyn_quant_pack_4bit_weight(weights, scales, None, k, k, 1, **more)


@new_kinds
def test_unpack_of_three_results_refuses(kind):
    packed = make_matrix(24, 64, 32, kind=kind).pack()
    name = "int4 with zero points" if kind == "zeros" else "e2m1"
    message = rf"packed_weights holds {name}, expected int4: dyn_quant_unpack_any_4bit_weight unpacks every kind"
    with pytest.raises(RuntimeError, match=message):
        w4a8.dyn_quant_unpack_4bit_weight(packed, 32, 64, 24)


@new_kinds
def test_hostile_headers(kind):
    good = make_matrix(24, 64, 32, kind=kind).pack()
    x = torch.randn(3, 64)
    for at, value, message in [
        (8, 2, "version is 2: packed before w4a8 0.1, pack the weights again"),
        (8, 6, "version is 6, this library reads version 5"),
        (12, 3, r"values are 3, expected 0 \(int4\), 1 \(e2m1\) or 2 \(int8\)"),
        (13, 5, "scale type is 5, expected 0"),
        (14, 8, "flags are 8, expected a sum of 1"),
        (15, 1, "reserved bytes of the header are not zero"),
        (40, 0, r"activation group is -256, expected -1 \(whole rows\), or 32, 64 or 128 that divides group = 32"),
        (48, 1, "reserved bytes of the header are not zero"),
    ]:
        bad = good.clone()
        bad[at] = value
        with pytest.raises(RuntimeError, match=rf"packed_weights: {message}"):
            w4a8.dyn_quant_matmul_4bit(x, bad, 32, 64, 24)
        with pytest.raises(ValueError, match=message):
            w4a8.read_header(bad)
    bad = good.clone()
    bad[12] = 2  # int8: another size
    with pytest.raises(RuntimeError, match=r"size is \d+ bytes, its header .* needs"):
        w4a8.dyn_quant_matmul_4bit(x, bad, 32, 64, 24)


def test_hostile_zero_points(supported_kernels):
    """Bytes above 15 where zero points are stored: the low four bits count, and unpacking names them."""
    matrix = make_matrix(16, 64, 32, kind="zeros")
    packed = matrix.pack()
    x = torch.randn(5, 64)
    want = matmul(x, matrix, packed)
    at = 64 + 2 * 16 * 4  # behind the header and the scales of both groups
    assert_same_bits(packed[at : at + 32].view(2, 16).t(), matrix.zero_points)
    packed[at + 3] += 0xA0
    for name in supported_kernels:
        with w4a8.use_kernel(name):
            assert_same_bits(matmul(x, matrix, packed), want, name)
    with pytest.raises(RuntimeError, match=r"unpack_any_4bit_weight: zero_points: element 6 is \d+, expected 0\.\.15"):
        w4a8.dyn_quant_unpack_any_4bit_weight(packed, 32, 64, 16)


# --- Meta and compile ------------------------------------------------------------------------------------------------


@new_kinds
@pytest.mark.parametrize("experts", [None, 3], ids=["matrix", "stack"])
def test_meta(kind, experts):
    matrix = make_matrix(24, 64, 32, bias=True, experts=experts, kind=kind)
    packed = matrix.pack()
    for name in ("weights", "scales", "bias", "zero_points"):
        value = getattr(matrix, name)
        setattr(matrix, name, value if value is None else value.to("meta"))
    assert matrix.pack().shape == packed.shape
    assert matrix.pack().is_meta


@compiles
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_zero_points_of_eight_compiled(backend):
    """What is traced has the size that is packed."""
    matrix = make_matrix(24, 64, 32, kind="zeros")
    matrix.zero_points.fill_(8)

    def packed_twice(weights, scales, zeros):
        packed = w4a8.dyn_quant_pack_4bit_weight(weights, scales, None, 32, 64, 24, zero_points=zeros)
        return torch.stack([packed, packed + torch.zeros(packed.shape, dtype=torch.uint8)])

    arguments = matrix.weights, matrix.scales, matrix.zero_points
    compiled = torch.compile(packed_twice, fullgraph=True, backend=backend)(*arguments)
    assert_same_bits(compiled, packed_twice(*arguments))


@compiles
@new_kinds
def test_opcheck_and_compile(kind):
    matrix = make_matrix(24, 64, 32, bias=True, kind=kind)
    arguments = (matrix.weights, matrix.scales, matrix.bias, 32, 64, 24)
    more = {"zero_points": matrix.zero_points, "values": matrix.values}
    torch.library.opcheck(torch.ops.w4a8.dyn_quant_pack_4bit_weight.default, arguments, more)
    checks = ("test_schema", "test_autograd_registration")
    unpack_op = torch.ops.w4a8.dyn_quant_unpack_any_4bit_weight.default
    torch.library.opcheck(unpack_op, (matrix.pack(), 32, 64, 24), test_utils=checks)

    def pack_and_multiply(x, weights, scales, bias, zeros):
        packed = w4a8.dyn_quant_pack_4bit_weight(
            weights, scales, bias, 32, 64, 24, zero_points=zeros, values=matrix.values
        )
        return w4a8.dyn_quant_matmul_4bit(x, packed, 32, 64, 24)

    x = torch.randn(5, 64)
    inputs = (x, matrix.weights, matrix.scales, matrix.bias, matrix.zero_points)
    compiled = torch.compile(pack_and_multiply, fullgraph=True)
    assert_same_bits(compiled(*inputs), matmul(x, matrix, matrix.pack()))


def test_committed_bytes():
    """Byte for byte, the example of docs/packed_layout.md."""
    weights = torch.tensor([[(5 * k + 3 * n) % 16 | (5 * (k + 1) + 3 * n) % 16 << 4 for k in range(0, 64, 2)]
                            for n in range(2)], dtype=torch.uint8)  # fmt: skip
    scales = torch.tensor([[1.0, 2.0], [-3.0, 0.5]])
    packed = w4a8.dyn_quant_pack_4bit_weight(weights, scales, torch.tensor([1.0, -2.0]), 32, 64, 2).numpy()
    header = b"W4A8PACK" + np.array([5], "<u4").tobytes() + bytes([0, 0, 1, 0])  # int4, float32, bias
    header += np.array([2, 64, 32, -1], "<i8").tobytes() + bytes(16)
    assert packed[:64].tobytes() == header
    panel = packed[64:]
    for step in range(8):
        even = bytes([0x40, 0x95, 0xEA, 0x3F, 0x73, 0xC8, 0x1D, 0x62])
        odd = bytes([0xC8, 0x1D, 0x62, 0xB7, 0xFB, 0x40, 0x95, 0xEA])
        at = 64 * (1 + step + step // 4)  # behind the scales of its group
        assert panel[at : at + 64].tobytes() == (odd if step % 2 else even) + b"\x88" * 56
    for at, pair in [(0, [1, -3]), (320, [2, 0.5]), (640, [-48, 40]), (704, [1, -2])]:
        assert panel[at : at + 64].view("<f4").tolist() == pair + [0] * 14
