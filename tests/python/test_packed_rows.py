"""Single rows of packed matrices, and the embedding and output layer made of them: the bits of the whole matrix."""

import copy
import dataclasses
import io

import pytest
import torch
from common import DTYPES, TORCH_VERSION, assert_same_bits

import w4a8
from w4a8.core import matrix as matrices
from w4a8.core.matrix import Matrix, floats_of_rows
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
    """In any order and as often as wanted, those of the last panel, too."""
    matrix = MATRICES[name]()
    packed = matrix.pack()
    which = torch.cat((torch.arange(N), torch.randint(0, N, (30,))))[torch.randperm(N + 30)]
    assert_same_bits(floats_of_rows(packed, which), matrix.floats()[which])
    assert_same_bits(floats_of_rows(packed, which[:1].int(), torch.bfloat16), matrix.floats()[which[:1]].bfloat16())
    assert floats_of_rows(packed, which[:0]).shape == (0, matrix.columns)
    none = w4a8.dyn_quant_unpack_any_4bit_weight(packed, matrix.group, matrix.columns, N, which[:0])
    assert none.weights.shape[0] == none.scales_zeros.shape[0] == 0


@pytest.mark.parametrize("name", MATRICES)
def test_parts_of_rows(name):
    """The operator's tensors are those of all rows, at these indices; a bias, too."""
    matrix = MATRICES[name]()
    packed, which = dataclasses.replace(matrix, bias=torch.randn(N)).pack(), torch.tensor([3, 39, 3, 17, 0])
    sizes = matrix.group, matrix.columns, N
    some, every = (w4a8.dyn_quant_unpack_any_4bit_weight(packed, *sizes, rows=rows) for rows in (which, None))
    for part, whole in zip(some, every):
        if isinstance(part, torch.Tensor) and whole.numel():
            assert_same_bits(part, whole[which])
        else:
            assert torch.equal(part, whole) if isinstance(part, torch.Tensor) else part == whole


def test_in_pieces(monkeypatch):
    """Few rows at a time."""
    matrix, which = MATRICES["int8"](), torch.tensor([3, 39, 3, 17, 0])
    monkeypatch.setattr(matrices, "_AT_ONCE", 2 * K)
    assert_same_bits(floats_of_rows(matrix.pack(), which), matrix.floats()[which])


@pytest.mark.parametrize("which", [[-1], [0, N], [N + 7], [1 << 40]])
def test_rows_that_are_not_there(which):
    """Those of the last panel that are padding, too."""
    packed = MATRICES["int4"]().pack()
    with pytest.raises(IndexError, match=r"^which has rows .*, but the matrix has rows 0\.\.39$"):
        floats_of_rows(packed, torch.tensor(which))
    with pytest.raises(RuntimeError, match=rf"rows\[{len(which) - 1}\] is {which[-1]}, expected 0..39"):
        w4a8.dyn_quant_unpack_any_4bit_weight(packed, 32, K, N, torch.tensor(which))


def test_rows_of_another_kind():
    """Of another type, or of a stack."""
    packed = MATRICES["int4"]().pack()
    with pytest.raises(RuntimeError, match="rows has dtype Int and 1 dimensions, expected int64 and 1"):
        w4a8.dyn_quant_unpack_any_4bit_weight(packed, 32, K, N, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="expected one matrix"):
        w4a8.dyn_quant_unpack_any_4bit_weight(packed[None], 32, K, N, torch.zeros(2, dtype=torch.int64))


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
    """The lookup stays outside of the graph; what is around it is compiled."""
    module, ids = embedding(MATRICES["int8"]()), torch.arange(N)
    compiled = torch.compile(lambda ids: module(ids) + 1, backend="eager")
    assert_same_bits(compiled(ids), module(ids) + 1)
