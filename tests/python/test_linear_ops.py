"""dynamic_per_token_int8_quant and int4_gemm_w4a8: bit for bit where docs/numerics.md defines the bits."""

import re

import numpy as np
import pytest
import reference
import torch
from common import DTYPES, assert_same_bits, assert_within, from_numpy, make_matrix

import w4a8

F32 = np.float32
EIGHT = torch.tensor([8], dtype=torch.int8)


# --- references ---------------------------------------------------------------------------------------------------------


def token_quant(x, symmetric, bits):
    """docs/numerics.md section 6 in NumPy; torch only rounds to the type of x."""
    values = x.float().numpy()
    levels, half = F32(2**bits - 1), F32(2 ** (bits - 1))
    mn, mx = np.minimum(values.min(-1, keepdims=True), 0), np.maximum(values.max(-1, keepdims=True), 0)
    with np.errstate(all="ignore"):
        if symmetric:
            raw = np.maximum(-mn, mx) / (half - F32(1))
        else:
            raw = np.where(np.isinf(mx - mn), mx / levels - mn / levels, (mx - mn) / levels)
        scale = from_numpy(np.maximum(raw, F32(1e-5)).astype(F32), x.dtype)
        s = scale.float().numpy()
        zero = np.zeros_like(s) if symmetric else np.minimum(np.rint(-mn / s), levels)
        low, high = (-half, half - F32(1)) if symmetric else (F32(0), levels)
        q = np.rint(np.clip(values / s + zero, low, high))
    return from_numpy(q.astype(np.int8 if symmetric else np.uint8)), scale, from_numpy(zero.astype(np.int32))


def words(matrix):
    """The transposed view int32 [K/8, N] of a matrix, built from its values rather than its bytes."""
    values = reference.unpack_nibbles(matrix.weights.numpy()) + 8
    shifted = values.reshape(matrix.n, matrix.k // 8, 8) << np.arange(0, 32, 4)
    return from_numpy(shifted.sum(-1).astype(np.uint32).view(np.int32)).t()


def gemm(x, matrix, weight, bias=None, out_dtype=None, group=None, scales=None, zero=EIGHT):
    scales = matrix.scales.t() if scales is None else scales
    return w4a8.int4_gemm_w4a8(*x, weight, scales, zero, group or matrix.group, None, bias, out_dtype)


def expected(x, matrix, bias=None, out_dtype=torch.float16):
    q, scale, zero = x
    shift = 128 if q.dtype == torch.uint8 else 0
    rows = q.reshape(-1, matrix.k).numpy().astype(np.int64) - shift
    zp = (zero.reshape(-1).numpy().astype(np.int64) - shift).astype(F32)
    weights, scales, _, *channels = matrix.arrays()
    recip = scale.float().reshape(-1).numpy()
    y = reference.matmul_quantized(rows, zp, recip, weights, scales, None, *channels)
    if bias is not None:
        y = y + bias.float().numpy()
    return from_numpy(y, out_dtype).reshape(*q.shape[:-1], matrix.n)


def make_x(*shape, dtype=torch.float32, symmetric=True):
    return w4a8.dynamic_per_token_int8_quant(torch.randn(*shape).to(dtype), symmetric, 8)


# --- the quantizer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantizer(dtype, symmetric, bits):
    for k in (1, 2, 7, 33, 256):
        x = torch.cat(
            [
                torch.randn(9, k),
                torch.rand(3, k) + 5,  # far from zero
                -torch.rand(3, k) - 5,
                torch.zeros(1, k),
                torch.randn(2, k) * 1e-6,  # below the least scale
                torch.randn(2, k) * 1e4,
            ]
        ).to(dtype)
        got = w4a8.dynamic_per_token_int8_quant(x, symmetric, bits)
        for actual, want, what in zip(got, token_quant(x, symmetric, bits), ("q", "scale", "zero_point")):
            assert_same_bits(actual, want, f"{what}, K = {k}")
        assert int(got[2].min()) >= 0
        assert int(got[2].max()) < 2**bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_quantizer_is_close(symmetric, dtype):
    """Against the real numbers: half a step, a step more where the rounded scale clips, and the error of x / scale."""
    x = torch.randn(50, 100).to(dtype)
    q, scale, zero = (t.double() for t in w4a8.dynamic_per_token_int8_quant(x, symmetric, 8))
    steps = {torch.float32: 0.51, torch.float16: 0.7, torch.bfloat16: 1.5}[dtype]  # 255 * 2^-11 and 255 * 2^-8 clipped
    assert_within(((q - zero) * scale).numpy(), x.double().numpy(), steps * scale.numpy())


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantizer_of_every_kernel(dtype, symmetric, kernel):
    for k in (1, 15, 16, 17, 100, 1031):
        x = (torch.randn(11, k) * torch.logspace(-7, 4, 11)[:, None]).to(dtype)
        for got, want in zip(w4a8.dynamic_per_token_int8_quant(x, symmetric, 8), token_quant(x, symmetric, 8)):
            assert_same_bits(got, want, f"K = {k}")


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bad_rows_are_alone(dtype, symmetric):
    x = torch.randn(5, 40).to(dtype)
    clean = w4a8.dynamic_per_token_int8_quant(x, symmetric, 8)
    x[1, 3], x[2, 39], x[4, 0] = float("nan"), float("inf"), -float("inf")
    q, scale, zero = w4a8.dynamic_per_token_int8_quant(x, symmetric, 8)
    for row in (1, 2, 4):
        assert not q[row].any()
        assert not zero[row].any()
        assert torch.isnan(scale[row]).all()
    for row in (0, 3):
        for got, want in zip((q, scale, zero), clean):
            assert_same_bits(got[row], want[row])
    matrix = make_matrix(5, 40, 40)
    y = gemm((q, scale, zero), matrix, words(matrix))
    assert torch.isnan(y).all(1).tolist() == [False, True, True, False, True]
    assert_same_bits(y[::3], gemm(clean, matrix, words(matrix))[::3])


def test_quantizer_shapes(set_threads):
    for shape in ((0, 8), (3, 0, 8), (2, 0), (8,), (2, 3, 8)):
        for symmetric in (True, False):
            q, scale, zero = w4a8.dynamic_per_token_int8_quant(torch.randn(*shape), symmetric, 8)
            assert q.shape == shape
            assert scale.shape == zero.shape == (*shape[:-1], 1)
            assert q.dtype == (torch.int8 if symmetric else torch.uint8)
            assert zero.dtype == torch.int32
    wide = torch.randn(300, 700)
    want = token_quant(wide.t()[::2], False, 8)
    for threads in (1, 2, 3):
        set_threads(threads)
        for got, wanted in zip(w4a8.dynamic_per_token_int8_quant(wide.t()[::2], False, 8), want):
            assert_same_bits(got, wanted)


# --- the product --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group", [32, 96, 192])
@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
def test_product(kernel, scale_dtype, group, symmetric):
    for n in (1, 17, 40):
        matrix = make_matrix(n, 192, group, scale_dtype)
        packable = matrix.scales.float() if scale_dtype == torch.float16 else matrix.scales
        packed = w4a8.dyn_quant_pack_4bit_weight(matrix.weights, packable, None, group, 192, n)
        for m in (1, 2, 13):
            x = make_x(m, 192, dtype=DTYPES[m % 3], symmetric=symmetric)
            for bias in (None, torch.randn(n).to(DTYPES[n % 3])):
                for out_dtype in DTYPES:
                    want = expected(x, matrix, bias, out_dtype)
                    assert_same_bits(gemm(x, matrix, words(matrix), bias, out_dtype), want, "words")
                    empty = torch.empty(0, n)
                    assert_same_bits(gemm(x, matrix, packed, bias, out_dtype, scales=empty), want, "packed")


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_against_float64(symmetric):
    """(q - zp) * scale times the real weights: float32 sums of 8 groups and the rounding to the output."""
    matrix = make_matrix(33, 256, 32)
    bias = torch.randn(33)
    x = make_x(20, 256, symmetric=symmetric)
    q, scale, zero = (t.double().numpy() for t in x)
    weights = reference.dequantize(matrix.weights.numpy(), matrix.scales.numpy())
    exact = ((q - zero) * scale) @ weights.T + bias.double().numpy()
    # Section 3 sums q * w and subtracts zp * W: both parts may be larger than their difference.
    shift = 0 if symmetric else 128
    terms = (np.abs(q - shift) * scale) @ np.abs(weights).T + np.abs(zero - shift) * scale * np.abs(weights).sum(1)
    allowed = reference.rounding_bound(terms, 8)
    allowed += reference.U * (np.abs(exact) + allowed)  # the bias is added last
    assert_within(gemm(x, matrix, words(matrix), bias, torch.float32).numpy(), exact, allowed)


def test_matches_the_matmul_op():
    """One and the same definition: the integers of docs/numerics.md section 1 give dyn_quant_matmul_4bit's bits."""
    for group in (16, 32, 64, 128):
        matrix = make_matrix(24, 128, group)
        x = torch.randn(6, 128)
        q, zp, recip = reference.quantize(x.numpy())
        given = (from_numpy(q, torch.int8), from_numpy(recip[:, None]), from_numpy(zp[:, None], torch.int32))
        want = w4a8.dyn_quant_matmul_4bit(x, matrix.pack(), group, 128, 24)
        assert_same_bits(gemm(given, matrix, words(matrix), out_dtype=torch.float32), want)
        unsigned = (given[0].view(torch.uint8) ^ 128, given[1], given[2] + 128)
        assert_same_bits(gemm(unsigned, matrix, words(matrix), out_dtype=torch.float32), want)


@pytest.mark.parametrize("k", [2, 6, 38, 1000])
def test_packed_weights_of_odd_shapes(kernel, k):
    matrix = make_matrix(19, k, k)
    x = make_x(5, k, symmetric=False)
    packed = matrix.pack()
    for group in (-1, k):
        for scales in (torch.empty(0), torch.empty(0, 19), matrix.scales.t()):
            got = gemm(x, matrix, packed, group=group, scales=scales, zero=torch.empty(0, dtype=torch.int32))
            assert_same_bits(got, expected(x, matrix))


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (0,), (2, 0, 3)], ids=str)
def test_leading_dimensions(lead):
    matrix = make_matrix(24, 64, 32)
    x = make_x(*lead, 64)
    y = gemm(x, matrix, words(matrix))
    assert y.shape == (*lead, 24)
    assert y.dtype == torch.float16
    if y.numel():
        assert_same_bits(y, expected(x, matrix))


def test_kernels_threads_and_batches_agree(supported_kernels, set_threads):
    matrix = make_matrix(600, 512, 128, torch.bfloat16)
    bias = torch.randn(600)
    q, scale, zero = x = make_x(70, 512, symmetric=False)
    want = expected(x, matrix, bias, torch.float32)
    for weight in (words(matrix), matrix.pack()):
        for name in supported_kernels:
            with w4a8.use_kernel(name):
                for threads in (1, 3):
                    set_threads(threads)
                    assert_same_bits(gemm(x, matrix, weight, bias, torch.float32), want, f"{name}, {threads} threads")
                one = (q[7:8], scale[7:8], zero[7:8])
                assert_same_bits(gemm(one, matrix, weight, bias, torch.float32), want[7:8], f"{name}, one row")


def test_types_and_strides():
    matrix = make_matrix(24, 64, 32)
    q, scale, zero = x = make_x(6, 64)
    want = expected(x, matrix)
    weight = words(matrix)
    assert_same_bits(gemm(x, matrix, weight.contiguous(), scales=matrix.scales.t().contiguous()), want)
    strided = (q.t().contiguous().t(), scale.repeat(1, 3)[:, 1:2], zero)
    assert_same_bits(gemm(strided, matrix, weight), want)
    for dtype in (torch.int8, torch.int64):
        assert_same_bits(gemm((q, scale.double(), zero.to(dtype)), matrix, weight), want)
    for zero_point in (torch.tensor(8), torch.full((2, 24), 8, dtype=torch.int32)):
        assert_same_bits(gemm(x, matrix, weight, zero=zero_point), want)


def test_packed_bias():
    matrix = make_matrix(24, 64, 32, bias=True)
    x = make_x(6, 64)
    assert_same_bits(gemm(x, matrix, matrix.pack()), expected(x, matrix, matrix.bias))


# --- errors -------------------------------------------------------------------------------------------------------------


def gemm_arguments():
    matrix = make_matrix(24, 64, 32, bias=True)
    q, scale, zero = make_x(3, 64)
    return {
        "quant_x": q, "x_scale": scale, "x_zero": zero, "weight": words(matrix), "weight_scale": matrix.scales.t(),
        "weight_zero_point": EIGHT, "group_size": 32, "g_idx": None, "bias": matrix.bias, "out_dtype": None,
    }  # fmt: skip


def zeros(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def zero_of(value, row=1):
    zero = zeros(3, 1, dtype=torch.int64)
    zero[row] = value
    return zero


GEMM = {
    "g_idx": ({"g_idx": zeros(64)}, r"g_idx is given, expected none"),
    "quant_x float": ({"quant_x": torch.zeros(3, 64)}, r"quant_x has dtype (Float|float), expected int8 or uint8"),
    "quant_x 0-D": ({"quant_x": zeros(dtype=torch.int8)}, r"quant_x has no dimensions, expected \[\.\.\., K\]"),
    "quant_x of other K": ({"quant_x": zeros(3, 56, dtype=torch.int8)}, r"weight has shape \[8, 24\], expected .* = K = 56"),
    "x_scale integer": ({"x_scale": zeros(3, 1)}, r"x_scale has dtype (Int|int), expected a floating point type"),
    "x_scale of other rows": ({"x_scale": torch.ones(2, 1)}, r"x_scale has shape \[2, 1\], expected \[3, 1\] for quant_x of shape \[3, 64\]"),
    "x_scale 1-D": ({"x_scale": torch.ones(3)}, r"x_scale has shape \[3\], expected \[3, 1\]"),
    "x_zero float": ({"x_zero": torch.zeros(3, 1)}, r"x_zero has dtype (Float|float), expected int32, int8 or int64"),
    "x_zero 1-D": ({"x_zero": zeros(3)}, r"x_zero has shape \[3\], expected \[3, 1\]"),
    "x_zero too large": ({"x_zero": zero_of(128)}, r"the zero point of token 1 is 128, expected -128\.\.127 for int8 activations"),
    "x_zero too small": ({"x_zero": zero_of(-129, 2)}, r"the zero point of token 2 is -129, expected"),
    "x_zero beyond int32": ({"x_zero": zero_of(2**32)}, r"the zero point of token 1 is 4294967296, expected"),
    "x_zero of uint8": ({"quant_x": zeros(3, 64, dtype=torch.uint8), "x_zero": zero_of(-1, 0)}, r"the zero point of token 0 is -1, expected 0\.\.255 for uint8"),
    "weight int8": ({"weight": zeros(8, 24, dtype=torch.int8)}, r"weight has dtype (Char|signed char|int8), expected int32 \[K/8, N\], or uint8"),
    "weight 1-D": ({"weight": zeros(192)}, r"weight has 1 dimensions, expected int32 \[K/8, N\]"),
    "weight not transposed": ({"weight": zeros(24, 8)}, r"weight has shape \[24, 8\], expected int32 \[K/8, N\]"),
    "weight uint8 2-D": ({"weight": zeros(8, 24, dtype=torch.uint8)}, r"weight has shape \[8, 24\], expected \[bytes\]"),
    "weight garbage": ({"weight": zeros(2000, dtype=torch.uint8)}, r"weight: magic"),
    "weight_scale double": ({"weight_scale": torch.ones(2, 24).double()}, r"weight_scale has dtype (Double|double), expected float32, bfloat16 or float16"),
    "weight_scale not transposed": ({"weight_scale": torch.ones(24, 2)}, r"weight_scale has shape \[24, 2\], expected \[2, 24\] for group_size = 32"),
    "weight_scale empty": ({"weight_scale": torch.ones(0)}, r"weight_scale has shape \[0\], expected \[2, 24\]"),
    "zero point of 16": ({"weight_zero_point": zeros(1) + 16}, r"weight_zero_point is 16, expected 0\.\.15"),
    "zero point of -1": ({"weight_zero_point": torch.tensor([[8, 8], [8, -1]])}, r"weight_zero_point is -1, expected 0\.\.15"),
    "zero points of other shape": ({"weight_zero_point": zeros(24, 2)}, r"weight_zero_point has shape \[24, 2\], expected one element or that of weight_scale, \[2, 24\]"),
    "no zero point": ({"weight_zero_point": zeros(0)}, r"weight_zero_point is empty, expected 0\.\.15"),
    "zero point beside packed int4": ({"weight": make_matrix(24, 64, 32).pack(), "bias": None, "weight_zero_point": zeros(1)}, r"weight_zero_point is not 8, but the packed weight is int4 without zero points"),
    "zero point beside packed zero points": ({"weight": make_matrix(24, 64, 32, kind="zeros").pack(), "bias": None}, r"weight_zero_point is given, expected an empty tensor: the packed weight is int4 with zero points"),
    "zero point float": ({"weight_zero_point": torch.tensor(8.0)}, r"weight_zero_point has dtype (Float|float), expected an integer"),
    "group 48": ({"group_size": 48}, r"group \(block_size\) is 48, expected"),
    "group 0": ({"group_size": 0}, r"group_size is 0, expected -1 \(channelwise\), or 16 or a multiple of 32 that divides K"),
    "group 0 of a packed weight": ({"weight": make_matrix(24, 64, 32).pack(), "group_size": 0}, "group_size is 0, expected -1"),
    "group -2": ({"group_size": -2}, "group_size is -2, expected -1"),
    "bias integer": ({"bias": zeros(24)}, r"bias has dtype (Int|int), expected a floating point type"),
    "bias too long": ({"bias": torch.zeros(25)}, r"bias has shape \[25\], expected \[24\]"),
    "out_dtype": ({"out_dtype": torch.float64}, r"out_dtype is (Double|double), expected float32, bfloat16 or float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", GEMM)
def test_gemm_errors(name):
    changes, message = GEMM[name]
    with pytest.raises(RuntimeError, match=r"^w4a8::int4_gemm_w4a8: .*" + message):
        w4a8.int4_gemm_w4a8(**{**gemm_arguments(), **changes})


def test_packed_weight_errors():
    arguments = gemm_arguments()
    plain, biased = make_matrix(24, 64, 32), make_matrix(24, 64, 32, bias=True)
    cases = [
        ({"weight": biased.pack()}, "bias is given, but the packed weight has one already"),
        ({"weight": plain.pack(), "group_size": -1}, "weight: group is 32, expected 64 (channelwise)"),
        (
            {"weight": plain.pack(), "weight_scale": torch.empty(0, 25)},
            "weight_scale has shape [0, 25], expected [K/g, 24]",
        ),
        ({"weight": plain.pack(), "weight_scale": torch.ones(3)}, "weight_scale has shape [3], expected [K/g, 24]"),
        ({"weight": make_matrix(24, 96, 32).pack()}, "weight: k (in_features) is 96, expected 64"),
    ]
    for changes, message in cases:
        with pytest.raises(RuntimeError, match=re.escape(message)):
            w4a8.int4_gemm_w4a8(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("x", "bits", "message"),
    [
        (torch.zeros(2, 8).double(), 8, r"x has dtype (Double|double), expected float32, bfloat16 or float16"),
        (torch.tensor(1.0), 8, r"x has no dimensions, expected \[\.\.\., K\]"),
        (torch.zeros(2, 8), 1, r"bits is 1, expected 2\.\.8"),
        (torch.zeros(2, 8), 9, r"bits is 9, expected 2\.\.8"),
    ],
)
def test_quantizer_errors(x, bits, message):
    with pytest.raises(RuntimeError, match="^w4a8::dynamic_per_token_int8_quant: " + message):
        w4a8.dynamic_per_token_int8_quant(x, True, bits)


# --- Meta tensors -------------------------------------------------------------------------------------------------------


def test_meta():
    matrix = make_matrix(24, 64, 32)
    q, scale, zero = w4a8.dynamic_per_token_int8_quant(
        torch.empty(2, 3, 64, dtype=torch.bfloat16, device="meta"), False, 8
    )
    assert (q.shape, q.dtype) == ((2, 3, 64), torch.uint8)
    assert (scale.shape, scale.dtype) == ((2, 3, 1), torch.bfloat16)
    assert (zero.shape, zero.dtype) == ((2, 3, 1), torch.int32)
    meta = (q, scale, zero)
    weight, packed, scales, eight = (t.to("meta") for t in (words(matrix), matrix.pack(), matrix.scales.t(), EIGHT))
    assert gemm(meta, matrix, weight, scales=scales, zero=eight).shape == (2, 3, 24)
    y = gemm(meta, matrix, packed, out_dtype=torch.float32, scales=torch.empty(0, 24, device="meta"), zero=eight)
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 24), torch.float32, "meta")
    none = torch.empty(0, device="meta")
    assert gemm(meta, matrix, packed, torch.empty(24, device="meta"), scales=none, zero=eight).shape == (2, 3, 24)
    with pytest.raises(RuntimeError, match=r"weight_scale has 1 dimensions: without data, a packed weight needs it as"):
        gemm(meta, matrix, packed, scales=none, zero=eight)
    with pytest.raises(RuntimeError, match=r"quant_x has last dimension 64, expected K = 8 \* 9"):
        gemm(meta, matrix, torch.empty(9, 24, dtype=torch.int32, device="meta"), scales=scales, zero=eight)
