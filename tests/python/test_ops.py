"""Every kind of weights: pack, unpack and matmul give the bits of reference.py, whatever the kernel, shape, strides and
threads; int4_gemm_w4a8 too. What one kind alone has is in test_kinds.py.
"""

import itertools

import numpy as np
import pytest
import reference
import torch
from common import (
    ALL_KINDS,
    DTYPES,
    EVERY_KIND,
    KINDS,
    SUPERS,
    TWO_LEVELS,
    activation_groups,
    assert_same_bits,
    assert_within,
    check,
    expected,
    from_numpy,
    grouped,
    has,
    make_matrix,
    matmul,
    packed_size,
    unpack,
)
from test_linear_ops import expected as gemm_expected
from test_linear_ops import gemm, make_x, words

import w4a8

every_kind = pytest.mark.parametrize("kind", EVERY_KIND)
all_kinds = pytest.mark.parametrize("kind", ALL_KINDS)

# m, n, k, group: below, at and beyond one panel (16 columns), odd counts of groups, k that is no multiple of 8.
SHAPES = [
    (1, 1, 2, 2),
    (1, 1, 16, 16),
    (3, 17, 6, 6),
    (9, 5, 38, 38),
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
    (1, 17, 48, 16),
    (7, 33, 80, 16),
    (5, 16, 256, 16),
    (40, 40, 208, 16),
    (13, 19, 512, 256),
    # Whole blocks of 256, which super-scales need.
    (1, 1, 256, 16),
    (3, 17, 256, 32),
    (9, 33, 512, 64),
    (17, 40, 768, 128),
    (70, 16, 256, 16),
    (2, 50, 1280, 32),
]


@pytest.mark.parametrize(
    ("shape", "kind"),
    [(shape, kind) for shape in SHAPES for kind in ALL_KINDS if has(kind, *shape[:1:-1])],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value)),
)
def test_matmul_bits(kernel, shape, kind):
    """Types of scales and inputs, and activations per token and in groups."""
    m, n, k, group = shape
    types = itertools.product(DTYPES[:1] if kind in TWO_LEVELS else DTYPES, DTYPES)
    sizes = activation_groups(group, k)[1:]
    for i, (scale_dtype, dtype) in enumerate(types if kind in EVERY_KIND else zip(DTYPES, DTYPES[1:] + DTYPES[:1])):
        for size in (-1, sizes[i % len(sizes)]) if sizes else (-1,):
            matrix = make_matrix(n, k, group, scale_dtype, i % 2 == 1, kind=kind, activation_group=size)
            check(torch.randn(m, k).to(dtype), matrix, f"{scale_dtype} scales, {dtype}, activations in {size}")


@all_kinds
@pytest.mark.sweep
def test_every_number_of_rows(kernel, kind):
    """More than one tile of rows of every kernel, with a last tile of every size."""
    k = 256 if kind in SUPERS else 96
    matrices = [make_matrix(37, k, grouped(kind), kind=kind, activation_group=size) for size in (-1, 32)]
    if has(kind, 100, 100):
        matrices.append(make_matrix(37, 100, 100, torch.bfloat16, True, kind=kind))
    for matrix in matrices:
        for m in (*range(1, 30), 47, 70):
            check(torch.randn(m, matrix.k), matrix, f"{m} rows of {matrix.k}, activations in {matrix.activation_group}")


@pytest.mark.sweep
def test_every_number_of_columns_and_k(kernel):
    for n in range(1, 50):
        check(torch.randn(3, 46), make_matrix(n, 46, 46), f"{n} columns")
    for k in range(2, 70, 2):
        check(torch.randn(7, k), make_matrix(18, k, k, bias=True), f"k = {k}")


@every_kind
def test_values(kind):
    """Against float64, with the values of docs/numerics.md's tables: no reference decides what a code is."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    group = grouped(kind)
    matrix = make_matrix(33, 256, group, kind=kind)
    codes = matrix.weights if kind == "int8" else torch.stack([matrix.weights & 15, matrix.weights >> 4], -1).flatten(1)
    if matrix.values == "e2m1":
        real = table[codes.long()]
    else:
        zeros = torch.full_like(matrix.scales, 8) if matrix.zero_points is None else matrix.zero_points
        real = codes.double() - zeros.double().repeat_interleave(group, 1)
    scales = matrix.scales.double()
    if matrix.channels is not None:
        scales = torch.from_numpy(reference.e4m3fn(matrix.scales)).double() * matrix.channels.double()[:, None]
    x = torch.randint(-127, 128, (9, 256)).float()
    x[:, 0], x[:, 1] = -128, 127
    y = matmul(x, matrix, matrix.pack()).double()
    # x is its own quantization: its scale is 1 and its zero point 0. So nothing but products is added up, in groups.
    real = real * scales.repeat_interleave(group, 1)
    terms = (x.double().abs() @ real.abs().T).numpy()
    bound = reference.rounding_bound(terms, 256 // group, products=kind in TWO_LEVELS)
    assert_within(y.numpy(), (x.double() @ real.T).numpy(), bound)
    assert np.median(bound) < 1e-4 * np.median(y.abs())


@all_kinds
def test_rows_of_zeros_give_the_bias_exactly(kernel, kind):
    """Zeros, of both signs, and what is too small for a scale: padding, masked tokens, dead units."""
    x = torch.zeros(20, 4096)
    x[1] = -0.0
    x[2, 7], x[3, 9] = 1e-40, -3e-37
    x[4] = torch.randn(4096)
    for group, bias in ((16, True), (32, False), (256, True)):
        if not has(kind, group, 4096):
            continue
        matrix = make_matrix(18, 4096, group, bias=bias, kind=kind)
        want = torch.zeros(18) if matrix.bias is None else matrix.bias.float()
        for rows in (x, x[:4], x[:1]):
            y = matmul(rows, matrix, matrix.pack())
            dead = torch.arange(len(rows)) != 4
            assert_same_bits(y[dead], want.expand(int(dead.sum()), -1), f"{kind}, groups of {group}")


def test_sums_that_cancel():
    """The bound of docs/numerics.md section 3 where it is needed: rows far from 0, whose sums are subtracted again."""
    matrix = make_matrix(64, 4096, 32)
    x = torch.randn(8, 4096) + torch.tensor([0.0, 5.0, 50.0, -50.0, 500.0, -5.0, 1e3, 0.5])[:, None]
    q, zero, recip = reference.quantize(x.numpy())
    weights, scales, *_ = matrix.arrays()
    real = ((q - zero[:, None]) @ reference.dequantize(weights, scales).T) * recip[:, None].astype(np.float64)
    terms = reference.sum_of_terms(q, zero, recip, weights, scales)
    y = matmul(x, matrix, matrix.pack()).double().numpy()
    assert_within(y, real, reference.rounding_bound(terms, 4096 // 32))
    # The bound is not a share of the output: that much is promised of no output.
    assert np.abs(y - real).max(1).max() > 3e-7 * np.abs(real).max(1).min()


@all_kinds
@pytest.mark.parametrize("value", [0x00, 0xFF, 0x0F, 0xF0, 0x77, 0x88], ids=hex)
def test_extreme_values(kernel, value, kind):
    """Codes at both ends against rows of -128 and 127, the largest sums that integers can reach; scales of int8 too."""
    for group in (16, 128) if kind in SUPERS else (16,) if kind in TWO_LEVELS else (32, 256, 4096):
        if not has(kind, group, 4096):
            continue
        matrix = make_matrix(18, 4096, group, kind=kind)
        matrix.weights.fill_(value & 0x3F if matrix.values == "int6" else value)
        if matrix.zero_points is not None:
            matrix.zero_points[::2], matrix.zero_points[1::2] = 0, 255 if kind == "int8" else 15
        for part in (matrix.scales, matrix.minimums):
            if part is not None and part.dtype == torch.int8:
                part[::2], part[1::2] = -128, 127
        x = torch.zeros(4, 4096)
        x[0], x[1] = 1.0, -1.0
        x[2] = torch.tensor([255.0, 0.0]).repeat(2048)
        x[3] = torch.tensor([-128.0, 127.0]).repeat(2048)
        check(x, matrix, f"groups of {group}")


@all_kinds
@pytest.mark.parametrize("experts", [None, 3], ids=["matrix", "stack"])
def test_unpack_is_the_inverse(kind, experts):
    """The operators that unpack give what was packed; that packs to the same bytes, as many as the header says."""
    types = [(False, torch.float32), (True, torch.bfloat16), (True, torch.float16)]
    for i, (_, n, k, group) in enumerate(shape for shape in SHAPES if has(kind, *shape[:1:-1])):
        for bias, scale_dtype in types if kind in EVERY_KIND else types[i % 3 : i % 3 + 1]:
            sizes = activation_groups(group, k)
            how = {"kind": kind, "activation_group": sizes[i % len(sizes)]}
            matrix = make_matrix(n, k, group, scale_dtype, bias, experts, **how)
            packed, given = matrix.pack(), matrix.arguments()
            found = w4a8.dyn_quant_unpack_any_4bit_weight(packed, group, k, n)._asdict()
            for name, part in found.items():
                if given[name] is None:
                    assert part.numel() == 0, name
                elif torch.is_tensor(part):
                    assert_same_bits(part, given[name], name)
                else:
                    assert part == given[name], name
            again = {name: None if torch.is_tensor(part) and not part.numel() else part for name, part in found.items()}
            assert_same_bits(matrix.pack(**again), packed)
            header = w4a8.read_header(packed if experts is None else packed[1])
            assert header["bytes"] == packed.shape[-1] == packed_size(matrix)
            assert header["activation_group"] == matrix.activation_group
            # Meta tensors cannot tell, and nothing but the header has to: as many bytes as without activation groups.
            assert packed.shape == matrix.pack(activation_group=-1).shape
            if kind == "int4":  # the operator of three results
                three = w4a8.dyn_quant_unpack_4bit_weight(packed, group, k, n)
                for part, name in zip(three, ("weights", "scales_zeros", "bias")):
                    assert_same_bits(part, found[name])


def test_every_code_survives():
    for kind in KINDS:
        matrix = make_matrix(8, 64, 32, kind=kind)
        matrix.weights = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
        assert_same_bits(unpack(matrix)[0], matrix.weights, kind)
    matrix = make_matrix(17, 16 * 24, 16, kind=TWO_LEVELS[-1])
    matrix.scales.view(-1)[:127] = torch.arange(127).to(torch.uint8)
    assert_same_bits(unpack(matrix)[1], matrix.scales)


@all_kinds
def test_stack_is_packed_matrices(kind):
    """Row e of a packed stack is the packed matrix of expert e, byte for byte."""
    stack = make_matrix(25, 256, 16, bias=True, experts=5, kind=kind)
    packed = stack.pack()
    x = torch.randn(3, 256)
    for e in range(5):
        assert_same_bits(packed[e], stack.pack(**{name: part[e] for name, part in _named(stack).items()}))
        y = w4a8.dyn_quant_matmul_4bit(x, packed[e], 16, 256, 25)
        assert_same_bits(y, from_numpy(reference.matmul(x.numpy(), *stack.arrays(e))))


def _named(matrix):
    """The tensors of a matrix by the operator's names."""
    return {name: part for name, part in matrix.arguments().items() if isinstance(part, torch.Tensor)}


def test_empty_stack():
    packed = w4a8.dyn_quant_pack_4bit_weight(
        torch.empty(0, 24, 32, dtype=torch.uint8), torch.empty(0, 24, 2), None, 32, 64, 24
    )
    assert packed.dim() == 2
    assert packed.shape[0] == 0


# --- types, strides, rows ---------------------------------------------------------------------------------------------


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


@all_kinds
def test_strided_weights(kind):
    """Each tensor as every third element of a longer one, and transposed."""
    matrix = make_matrix(24, 256, 16, bias=True, kind=kind)
    want = matrix.pack()
    for name, tensor in _named(matrix).items():
        strided = [tensor.repeat_interleave(3, -1)[..., ::3]]
        if tensor.dim() == 2:
            strided.append(tensor.t().contiguous().t())
        for view in strided:
            assert not view.is_contiguous() or tensor.shape[-1] == 1
            assert_same_bits(matrix.pack(**{name: view}), want, name)


def test_strided_packed_tensor():
    """A packed tensor that is a view with a stride is read as what it says, or refused; never as its neighbours."""
    matrix = make_matrix(24, 64, 32)
    packed = matrix.pack()
    x = torch.randn(3, 64)
    spread = packed.repeat_interleave(2)[::2]
    assert_same_bits(matmul(x, matrix, spread), matmul(x, matrix, packed))


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
        matrix = make_matrix(33, 64, group, bias=True)
        y = matmul(rows, matrix, matrix.pack())
        assert_same_bits(y, expected(rows, matrix))
        assert not y.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("group", "activation_group"), [(32, -1), (128, -1), (64, 32)], ids=["groups", "channelwise", "activation groups"]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_stay_in_their_row(kernel, dtype, group, activation_group, bad):
    matrix = make_matrix(33, 128, group, bias=True, activation_group=activation_group)
    packed = matrix.pack()
    x = torch.randn(9, 128).to(dtype)
    clean = matmul(x, matrix, packed)
    for column in (0, 31, 77, 127):
        spoilt = x.clone()
        spoilt[4, column] = bad
        y = matmul(spoilt, matrix, packed)
        others = [0, 1, 2, 3, 5, 6, 7, 8]
        assert_same_bits(y[others], clean[others])
        assert_same_bits(y[4], torch.full_like(y[4], float("nan")))  # the canonical one


def test_inputs_are_not_written():
    matrix = make_matrix(24, 64, 32, bias=True, kind="zeros")
    packed, x = matrix.pack(), torch.randn(7, 64)
    tensors = [*matrix.tensors().values(), packed, x]
    copies = [tensor.clone() for tensor in tensors]
    matmul(x, matrix, packed)
    matrix.pack()
    for now, before in zip(tensors, copies):
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


@every_kind
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_int4_gemm(kernel, symmetric, kind):
    none = torch.empty(0, dtype=torch.int32)
    for n in (1, 17, 40):
        for group in (16,) if kind in TWO_LEVELS else (32, 96, 192):
            matrix = make_matrix(n, 192, group, kind=kind)
            for m in (1, 2, 13):
                x = make_x(m, 192, symmetric=symmetric)
                want = gemm_expected(x, matrix)
                zero = torch.tensor([8]) if kind == "int4" else none
                packed = gemm(x, matrix, matrix.pack(), scales=torch.empty(0, n), zero=zero)
                assert_same_bits(packed, want, "packed")
                if kind == "zeros":
                    for zeros in (matrix.zero_points.t(), matrix.zero_points.t().long()):
                        assert_same_bits(gemm(x, matrix, words(matrix), zero=zeros), want, f"words, {zeros.dtype}")


def test_int4_gemm_with_one_zero_point(kernel):
    matrix, x = make_matrix(40, 192, 192, kind="zeros"), make_x(13, 192)
    for zero in (0, 5, 15):
        matrix.zero_points.fill_(zero)
        want = gemm_expected(x, matrix)
        for given in (torch.tensor(zero), torch.tensor([zero], dtype=torch.int8)):
            assert_same_bits(gemm(x, matrix, words(matrix), zero=given), want)


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
