"""Single rows of packed matrices, and the embedding and output layer made of them: the bits of the whole matrix."""

import copy
import io

import pytest
import torch
from common import DTYPES, TORCH_VERSION, assert_same_bits

import w4a8
from w4a8.core.matrix import Matrix
from w4a8.nn import W4A8Linear, W8A8Linear
from w4a8.nn.embedding import PackedEmbedding

N, K = 40, 512  # the last panel has 8 rows


def codes(bits, n=N, k=K):
    return torch.randint(0, 256, (n, k if bits == 8 else k // 2), dtype=torch.uint8)


def scales(group=32, n=N, k=K, dtype=torch.float32):
    return (torch.randn(n, k // group) / 64).to(dtype)


def int8s(group):
    return torch.randint(-128, 128, (N, K // group), dtype=torch.int8)


def halves():
    return torch.randn(N, K // 256).half()


def zeros(bits, group=32):
    return torch.randint(0, 1 << bits, (N, K // group), dtype=torch.uint8)


MATRICES = {
    "int4": lambda: Matrix(codes(4), scales()),
    "int4, bfloat16, a bias": lambda: Matrix(codes(4), scales(dtype=torch.bfloat16), bias=torch.randn(N)),
    "int4, channelwise": lambda: Matrix(codes(4, k=66), scales(66, k=66)),
    "int4, zero points": lambda: Matrix(codes(4), scales(16), zeros(4, 16)),
    "int4, minimums": lambda: Matrix(codes(4), scales(), minimums=scales()),
    "int4, super": lambda: Matrix(codes(4), int8s(16), super_scales=halves()),
    "int4, super, minimums": lambda: Matrix(
        codes(4), int8s(32), minimums=int8s(32), super_scales=halves(), super_minimums=halves()
    ),
    "e2m1": lambda: Matrix(codes(4), scales(16), kind="e2m1"),
    "e2m1, powers of two": lambda: Matrix(codes(4), 2.0 ** torch.randint(-20, 20, (N, K // 32)), kind="e2m1"),
    "e2m1, two levels": lambda: Matrix(
        codes(4), torch.randint(0, 127, (N, K // 16), dtype=torch.uint8), kind="e2m1", channel_scales=torch.rand(N)
    ),
    "int8": lambda: Matrix(codes(8), scales(dtype=torch.float16), kind="int8"),
    "int8, zero points": lambda: Matrix(codes(8), scales(), zeros(8), "int8"),
    "int8, minimums": lambda: Matrix(codes(8), scales(), minimums=scales(), kind="int8"),
    "int6": lambda: Matrix(codes(8) & 63, scales(), kind="int6"),
    "int6, super": lambda: Matrix(codes(8) & 63, int8s(16), super_scales=halves(), kind="int6"),
    "int8, super": lambda: Matrix(codes(8), int8s(16), super_scales=halves(), kind="int8"),
}


@pytest.mark.parametrize("name", MATRICES)
def test_rows(name):
    """In any order and as often as wanted, those of the last panel, too; a bias is of the product, not of the rows."""
    matrix = MATRICES[name]()
    packed, sizes = matrix.pack(), (matrix.columns, N)
    which = torch.cat((torch.arange(N), torch.randint(0, N, (30,))))[torch.randperm(N + 30)]
    rows = matrix.floats()[which]
    assert_same_bits(w4a8.dequantize_rows(packed, which, *sizes), rows)
    for dtype in DTYPES:
        found = w4a8.dequantize_rows(packed, which.view(7, -1).int(), *sizes, dtype=dtype)
        assert_same_bits(found.flatten(0, 1), rows.to(dtype))
    assert w4a8.dequantize_rows(packed, which[:0].view(0, 3), *sizes).shape == (0, 3, matrix.columns)


def test_rows_behind_the_matrix():
    """They are zeros, and as many as the caller says."""
    matrix = MATRICES["int8"]()
    rows = w4a8.dequantize_rows(matrix.pack(), torch.tensor([N + 7, 3, N]), K, N + 8)
    assert_same_bits(rows, torch.stack((torch.zeros(K), matrix.floats()[3], torch.zeros(K))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_each_kernel(dtype, kernel):
    """Numbers that are denormal, and some that are too large for float16; where the caller flushes denormals, too."""
    exponents = torch.randint(-127, 20, (N, K // 32)).float()
    matrix, which = Matrix(codes(4), torch.exp2(exponents), kind="e2m1"), torch.randint(0, N, (33,))
    packed, expected = matrix.pack(), matrix.floats()[which].to(dtype)
    for flushes in (False, True):
        torch.set_flush_denormal(flushes)
        try:
            found = w4a8.dequantize_rows(packed, which, K, N, dtype=dtype)
        finally:
            torch.set_flush_denormal(False)
        assert_same_bits(found, expected)


REFUSED = {
    "below": ({"rows": torch.tensor([3, -1])}, r"rows has the number -1, expected 0\.\.39"),
    "behind": ({"rows": torch.tensor([[0], [N]])}, r"rows has the number 40, expected 0\.\.39"),
    "far behind": ({"rows": torch.tensor([1 << 40])}, r"rows has the number 1099511627776, expected 0\.\.39"),
    "a type": ({"rows": torch.zeros(2)}, r"rows has dtype Float, expected int64 or int32"),
    "a stack": ({"packed_weights": torch.zeros(1, 64, dtype=torch.uint8)}, r"packed_weights has shape \[1, 64\]"),
    "no matrix": ({"packed_weights": torch.zeros(64, dtype=torch.uint8)}, "packed_weights: "),
    "K": ({"in_features": K + 2}, "in_features is 514, but packed_weights has k = 512"),
    "N": ({"out_features": N - 1}, "out_features is 39, but packed_weights has n = 40"),
    "no columns": ({"in_features": 0}, r"k \(in_features\) is 0"),
    "numbers": ({"dtype": torch.float64}, "dtype is Double, expected float32, bfloat16 or float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    changed, message = REFUSED[name]
    arguments = {"packed_weights": MATRICES["int4"]().pack(), "rows": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(RuntimeError, match=message):
        w4a8.dequantize_rows(**{**arguments, "in_features": K, "out_features": N, **changed})


def embedding(matrix, dtype=torch.float32, scale=None):
    return PackedEmbedding(matrix.pack(), matrix.rows, matrix.columns, matrix.group, dtype, scale)


@pytest.mark.parametrize("scale", [None, 16.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding(dtype, scale):
    """As torch's of the same weights, and Gemma's."""
    matrix = MATRICES["int8, super"]()
    module, ids = embedding(matrix, dtype, scale), torch.randint(0, N, (2, 5))
    expected = torch.nn.functional.embedding(ids, matrix.floats().to(dtype))
    expected = expected if scale is None else expected * torch.tensor(scale).to(dtype)
    assert_same_bits(module(ids), expected)
    assert_same_bits(embedding(matrix, torch.float32, scale).to(dtype)(ids), expected)
    assert module(ids[:, :0]).shape == (2, 0, K)


@pytest.mark.parametrize("name, kind", [("int8", W8A8Linear), ("int4, super, minimums", W4A8Linear)])
def test_output_layer(name, kind):
    """One matrix in memory, and once in a state dict."""
    matrix = MATRICES[name]()
    module = embedding(matrix)
    output = module.output_layer()
    assert type(output) is kind and output.packed is module.rows_packed
    assert not output.state_dict() and list(module.state_dict()) == ["rows_packed"]
    x = torch.randn(3, K)
    assert_same_bits(output(x), kind(matrix.pack(), K, N, matrix.group)(x))
    both = copy.deepcopy(torch.nn.ModuleList((module, output)))
    assert both[1].packed is both[0].rows_packed
    for options in ({}, {"assign": True}) if TORCH_VERSION >= (2, 1) else ({},):
        module.load_state_dict(embedding(matrix).state_dict(), **options)
        assert output.packed is module.rows_packed


def test_state_dict():
    first, second = (embedding(MATRICES["int8"]()) for _ in range(2))
    file, ids = io.BytesIO(), torch.arange(N)
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    assert_same_bits(second(ids), first(ids))
    other = embedding(Matrix(codes(8, N + 1), scales(n=N + 1), kind="int8"))
    with pytest.raises(RuntimeError, match="n is 40, expected 41"):
        other.load_state_dict(first.state_dict())
    assert repr(first) == "PackedEmbedding(40, 512, group_size=32, int8)"


@pytest.mark.skipif(not hasattr(torch, "compiler"), reason="this torch has no torch.compiler")
def test_compiled():
    """In one graph, for any number of ids."""
    module = embedding(MATRICES["int8"]())
    compiled = torch.compile(lambda ids: module(ids) + 1, backend="aot_eager", dynamic=True, fullgraph=True)
    for count in (N, 3):
        ids = torch.arange(count).view(1, count)
        assert_same_bits(compiled(ids), module(ids) + 1)
