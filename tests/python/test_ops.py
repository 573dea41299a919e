"""Pack, unpack and matmul: every kernel gives the bits of reference.py, whatever the shape, strides and threads."""

import numpy as np
import pytest
import reference
import torch
from common import DTYPES, assert_same_bits, from_numpy, make_matrix, matmul

import w4a8

# m, n, k, group: below, at and beyond one panel (16 columns), odd counts of groups, k that is no multiple of 8.
SHAPES = [
    (1, 1, 2, 2),
    (3, 17, 6, 6),
    (7, 33, 40, 40),
    (5, 16, 52, 52),
    (5, 48, 32, 32),
    (4, 31, 96, 32),
    (13, 16, 320, 64),
    (2, 50, 160, 160),
    (6, 65, 1024, 128),
    (33, 20, 384, 384),
    (29, 40, 480, 96),
    (12, 257, 64, 32),
]


def expected(x, matrix):
    """reference.matmul on the rows of x, rounded to the type of x by torch."""
    rows = x.reshape(-1, matrix.k).float().numpy()
    y = from_numpy(reference.matmul(rows, *matrix.arrays()))
    return y.to(x.dtype).reshape(*x.shape[:-1], matrix.n)


def check(x, matrix, what=""):
    assert_same_bits(matmul(x, matrix, matrix.pack()), expected(x, matrix), what)


@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize(
    "scale_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["s_f32", "s_bf16", "s_f16"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_matmul_bits(kernel, shape, scale_dtype, bias):
    m, n, k, group = shape
    check(torch.randn(m, k), make_matrix(n, k, group, scale_dtype, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 20, 26, 26), (9, 33, 128, 32)], ids=str)
def test_dtypes(kernel, dtype, shape):
    m, n, k, group = shape
    check(torch.randn(m, k).to(dtype), make_matrix(n, k, group, bias=True))


@pytest.mark.sweep
@pytest.mark.parametrize("m", range(1, 30))
def test_every_number_of_rows(kernel, m):
    check(torch.randn(m, 64), make_matrix(37, 64, 32))


@pytest.mark.sweep
@pytest.mark.parametrize("n", range(1, 50))
def test_every_number_of_columns(kernel, n):
    check(torch.randn(3, 46), make_matrix(n, 46, 46))


@pytest.mark.sweep
@pytest.mark.parametrize("k", range(2, 70, 2))
def test_every_channelwise_k(kernel, k):
    check(torch.randn(7, k), make_matrix(18, k, k, bias=True))


@pytest.mark.parametrize("bias_dtype", [*DTYPES, torch.float64], ids=str)
def test_bias_dtypes(bias_dtype):
    check(torch.randn(2, 64), make_matrix(19, 64, 32, bias=True, bias_dtype=bias_dtype))


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 4, 2)], ids=str)
def test_leading_dimensions(lead):
    check(torch.randn(*lead, 64), make_matrix(24, 64, 32))


@pytest.mark.parametrize("lead", [(0,), (0, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows(kernel, lead, dtype):
    matrix = make_matrix(24, 64, 32)
    y = matmul(torch.empty(*lead, 64, dtype=dtype), matrix, matrix.pack())
    assert y.shape == (*lead, 24)
    assert y.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_input(kernel, dtype):
    matrix = make_matrix(24, 64, 32)
    wide = torch.randn(10, 200).to(dtype)
    views = {
        "transposed": torch.randn(64, 9).to(dtype).t(),
        "columns of a wider tensor": wide[:, 3:67],
        "every second element": wide[:, :128:2],
        "every third row": wide[::3, 8:72],
        "one row expanded": wide[:1, :64].expand(5, 64),
        "odd storage offset": wide.flatten()[1 : 1 + 7 * 64].view(7, 64),
        "permuted dimensions": torch.randn(64, 3, 4).to(dtype).permute(2, 1, 0),
    }
    for what, x in views.items():
        check(x, matrix, what)


def test_strided_weights():
    plain = make_matrix(24, 64, 32, bias=True)
    expected_bytes = plain.pack()
    strided = {
        "weights": plain.weights.t().contiguous().t(),
        "scales": plain.scales.repeat_interleave(2, 1)[:, ::2],
        "bias": plain.bias.repeat_interleave(3)[::3],
    }
    for name, value in strided.items():
        assert not value.is_contiguous()
        before = getattr(plain, name)
        setattr(plain, name, value)
        assert_same_bits(plain.pack(), expected_bytes, name)
        setattr(plain, name, before)


def test_strided_packed_tensor():
    """A packed tensor that is a view with a stride is read as what it says, or refused; never as its neighbours."""
    matrix = make_matrix(24, 64, 32)
    packed = matrix.pack()
    x = torch.randn(3, 64)
    spread = packed.repeat_interleave(2)[::2]
    assert_same_bits(matmul(x, matrix, spread), matmul(x, matrix, packed))


@pytest.mark.parametrize("value", [0x00, 0xFF, 0x0F, 0x88], ids=hex)
@pytest.mark.parametrize("group", [32, 4096], ids=["groups", "channelwise"])
def test_extreme_values(kernel, value, group):
    """Weights of -8 and 7 against rows of -128 and 127: the largest sums that integers can reach."""
    matrix = make_matrix(18, 4096, group)
    matrix.weights.fill_(value)
    x = torch.zeros(4, 4096)
    x[0], x[1] = 1.0, -1.0
    x[2] = torch.tensor([255.0, 0.0]).repeat(2048)
    x[3] = torch.tensor([-128.0, 127.0]).repeat(2048)
    check(x, matrix)


def test_unusual_rows(kernel):
    """docs/numerics.md section 1: rows whose scale leaves the range of float, ties, zeros."""
    big, tiny = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
    rows = torch.randn(12, 64)
    rows[0] = 0.0
    rows[1] = -0.0
    rows[2, ::2], rows[2, 1::2] = big, -big
    rows[3] *= tiny
    rows[4] = 2.0**-149
    rows[5] = big
    rows[6] = torch.arange(64) - 31.5
    rows[7] = torch.linspace(-127.5, 127.5, 64)  # scale 1: every value is a tie
    rows[8] = -big
    rows[9, 1:] = 0.0
    rows[10] *= 7.5e-37 / 3
    rows[11] *= big / 8
    for group in (32, 64):
        y = matmul(rows, make := make_matrix(33, 64, group, bias=True), make.pack())
        assert_same_bits(y, expected(rows, make))
        assert not y.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 64], ids=["groups", "channelwise"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_stay_in_their_row(kernel, dtype, group, bad):
    matrix = make_matrix(33, 64, group, bias=True)
    packed = matrix.pack()
    x = torch.randn(9, 64).to(dtype)
    clean = matmul(x, matrix, packed)
    for column in (0, 31, 63):
        spoilt = x.clone()
        spoilt[4, column] = bad
        y = matmul(spoilt, matrix, packed)
        assert y[4].isnan().all()
        others = [0, 1, 2, 3, 5, 6, 7, 8]
        assert_same_bits(y[others], clean[others])
        canonical = torch.full_like(y[4], float("nan"))
        assert_same_bits(y[4], canonical)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize(
    "scale_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["s_f32", "s_bf16", "s_f16"]
)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("experts", [None, 3], ids=["matrix", "stack"])
def test_unpack_is_the_inverse(shape, scale_dtype, bias, experts):
    _, n, k, group = shape
    matrix = make_matrix(n, k, group, scale_dtype, bias, experts)
    weights, scales, bias_out = w4a8.dyn_quant_unpack_4bit_weight(matrix.pack(), group, k, n)
    assert_same_bits(weights, matrix.weights, "weights")
    assert_same_bits(scales, matrix.scales, "scales")
    if bias:
        assert_same_bits(bias_out, matrix.bias, "bias")
    else:
        assert bias_out.numel() == 0


def test_every_nibble_pair_survives():
    weights = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    packed = w4a8.dyn_quant_pack_4bit_weight(weights, torch.rand(8, 2), None, 32, 64, 8)
    assert_same_bits(w4a8.dyn_quant_unpack_4bit_weight(packed, 32, 64, 8)[0], weights)


def test_stack_is_packed_matrices():
    """Row e of a packed stack is the packed matrix of expert e, byte for byte."""
    stack = make_matrix(24, 64, 32, bias=True, experts=5)
    packed = stack.pack()
    x = torch.randn(3, 64)
    for e in range(5):
        one = w4a8.dyn_quant_pack_4bit_weight(stack.weights[e], stack.scales[e], stack.bias[e], 32, 64, 24)
        assert_same_bits(packed[e], one)
        y = w4a8.dyn_quant_matmul_4bit(x, packed[e], 32, 64, 24)
        assert_same_bits(y, from_numpy(reference.matmul(x.numpy(), *stack.arrays(e))))


def test_empty_stack():
    packed = w4a8.dyn_quant_pack_4bit_weight(
        torch.empty(0, 24, 32, dtype=torch.uint8), torch.empty(0, 24, 2), None, 32, 64, 24
    )
    assert packed.dim() == 2
    assert packed.shape[0] == 0


def test_inputs_are_not_written():
    matrix = make_matrix(24, 64, 32, bias=True)
    copies = [t.clone() for t in (matrix.weights, matrix.scales, matrix.bias)]
    packed = matrix.pack()
    packed_before, x = packed.clone(), torch.randn(7, 64)
    x_before = x.clone()
    matmul(x, matrix, packed)
    for now, before in zip((matrix.weights, matrix.scales, matrix.bias, packed, x), (*copies, packed_before, x_before)):
        assert_same_bits(now, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [64, 512], ids=["groups", "channelwise"])
def test_same_bits_over_kernels_threads_and_batches(supported_kernels, set_threads, dtype, group):
    matrix = make_matrix(300, 512, group, bias=True)
    packed = matrix.pack()
    x = torch.randn(67, 512).to(dtype)
    first = expected(x, matrix)
    for name in supported_kernels:
        with w4a8.use_kernel(name):
            for threads in (1, 2, 3):
                set_threads(threads)
                assert_same_bits(matmul(x, matrix, packed), first, f"{name}, {threads} threads")
                assert_same_bits(matrix.pack(), packed, f"pack, {name}, {threads} threads")
            for rows in ([5], [66, 0], list(range(20, 33)), torch.randperm(67).tolist()):
                assert_same_bits(matmul(x[rows], matrix, packed), first[rows], f"{name}, rows {rows}")


def test_reference_fma_rounds_once():
    """The reference's own fma, against exact rational arithmetic."""
    from fractions import Fraction

    generator = np.random.default_rng(0)
    a, b, c = (generator.standard_normal(2000).astype(np.float32) for _ in range(3))
    c[:1000] = -(a[:1000] * b[:1000]) * (1 + generator.integers(-2, 3, 1000).astype(np.float32) * np.float32(2**-23))
    result = reference.fma32(a, b, c)
    for i in range(2000):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        error = abs(Fraction(float(result[i])) - exact)
        for neighbour in (np.nextafter(result[i], np.float32(np.inf)), np.nextafter(result[i], np.float32(-np.inf))):
            assert error <= abs(Fraction(float(neighbour)) - exact)
