"""pack_words: the bytes that the pack operator makes of decoded codes; and stacks of matrices whose codes are words."""

from dataclasses import replace

import pytest
import torch
from tool_formats import AWQ_ORDER, pairs, store
from tool_formats import words as words_of

from w4a8.core.matrix import Matrix, PackedAs
from w4a8.core.nibbles import Words
from w4a8.core.stack import MatrixStack
from w4a8.formats import from_awq, from_gptq

FORMS = (("gptq", 4), ("gptq", 8), ("awq", 4))


def case(order, bits, rows, columns, group, zeros=False, bias=False, dtype=torch.float16):
    """Words, and the matrix of their codes."""
    most = 1 << bits
    codes = torch.randint(0, most, (rows, columns))
    words = words_of(codes.T, AWQ_ORDER) if order == "awq" else words_of(codes, bits=bits).T.contiguous()
    scales = torch.rand(rows, columns // group).to(dtype)
    zero_points = torch.randint(0, most, scales.shape, dtype=torch.uint8) if zeros else None
    given = codes.to(torch.uint8) if bits == 8 else pairs(codes)
    kind = "int8" if bits == 8 else "int4"
    return words, Matrix(given, scales, zero_points, kind, torch.randn(rows).to(dtype) if bias else None)


def pack(to, words, order, matrix, first=0, last=None, activation_group=-1):
    """Rows [first, last) of a matrix, whose words are all given."""
    part = matrix.with_rows(slice(first, matrix.rows if last is None else last))
    words = words[:, first // 8 : last and last // 8] if order == "awq" else words[:, first:last]
    sizes = first, matrix.group, matrix.columns, matrix.rows
    torch.ops.w4a8.pack_words(
        *(to, words, part.scales, part.bias, part.zero_points, order, *sizes),
        values=matrix.kind.value,
        activation_group=activation_group,
    )
    return to


def expected(matrix, activation_group=-1):
    zeros = matrix.zero_points
    return torch.ops.w4a8.dyn_quant_pack_4bit_weight(
        *(matrix.codes, matrix.scales, matrix.bias, matrix.group, matrix.columns, matrix.rows),
        zero_points=zeros,
        values=matrix.kind.value,
        activation_group=activation_group,
    )


@pytest.mark.parametrize(("order", "bits"), [("gptq", 4), ("gptq", 8), ("awq", 4)])
@pytest.mark.parametrize("zeros", (False, True))
def test_same_bytes(order, bits, zeros):
    for rows, columns, group, inputs, dtype in (
        (8, 32, 32, -1, torch.float16),
        (16, 256, 32, 32, torch.bfloat16),
        (40, 192, 96, -1, torch.float32),
        (24, 1024, 128, 64, torch.float16),
        (136, 640, 128, -1, torch.bfloat16),
        (56, 288, 16, 32, torch.float16),
        (72, 1032, 1032, -1, torch.float32),
        (48, 8, 8, -1, torch.float16),
    ):
        words, matrix = case(order, bits, rows, columns, group, zeros, bias=rows > 16, dtype=dtype)
        want = expected(matrix, inputs)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            got = pack(torch.full_like(want, 77), words, order, matrix, activation_group=inputs)
            assert torch.equal(got, want), (rows, columns, group)
        got = torch.full_like(want, 77)
        for first, last in ((16, None), (0, 16)) if rows > 16 else ((0, None),):  # views of the words
            pack(got, words, order, matrix, first, last, inputs)
        assert torch.equal(got, want), (rows, columns, group)


def test_other_rows_than_of_eight():
    words, matrix = case("gptq", 4, 21, 64, 32, zeros=True)
    want = expected(matrix)
    assert torch.equal(pack(torch.empty_like(want), words, "gptq", matrix), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": "marlin"}, "order is 'marlin', expected 'gptq' or 'awq'"),
        ({"values": "e2m1"}, "values is 'e2m1', expected 'int4' or 'int8' for order 'gptq'"),
        ({"order": "awq", "values": "int8"}, "values is 'int8', expected 'int4' for order 'awq'"),
        ({"order": "awq"}, r"words has dtype Int and shape \[8, 32\], expected int32 \[64, rows / 8\]"),
        ({"in_features": 72, "block_size": 72}, "words has dtype Int"),
        ({"in_features": 60, "block_size": 60}, "in_features is 60, expected a multiple of 8"),
        ({"words": torch.zeros(8, 32)}, "words has dtype Float"),
        ({"words": torch.zeros(8, 33, dtype=torch.int32)}, "there are 33 rows, expected 1..32"),
        ({"words": torch.zeros(8, 8, dtype=torch.int32)}, "there are 8 rows"),
        ({"first_row": 16}, "there are 32 rows, expected 1..16"),
        ({"packed": torch.zeros(7, dtype=torch.uint8)}, r"packed has shape \[7\]"),
        ({"scales": torch.zeros(32, 1).half()}, r"scales has shape \[32, 1\], expected \[32, 2\]"),
        ({"scales": torch.zeros(32, 2, dtype=torch.uint8)}, "scales has dtype Byte"),
        ({"zero_points": torch.zeros(32, 1, dtype=torch.uint8)}, "zero_points has shape"),
        ({"zero_points": torch.zeros(32, 2)}, "zero_points has dtype Float, expected uint8"),
        ({"zero_points": torch.full((32, 2), 16, dtype=torch.uint8)}, "zero_points: element 0 is 16, expected 0..15"),
    ],
)
def test_refuses(change, message):
    words, matrix = case("gptq", 4, 32, 64, 32, zeros="zero_points" in change)
    good = {"packed": expected(matrix), "words": words, "scales": matrix.scales, "bias": None, "zero_points": None}
    good |= {"order": "gptq", "first_row": 0, "block_size": 32, "in_features": 64, "out_features": 32}
    with pytest.raises(RuntimeError, match="w4a8::pack_words: .*" + message):
        torch.ops.w4a8.pack_words(**{**good, **change})


def read(order, bits, rows, columns=512, zeros=True, bias=True, scale=lambda values: values.half()):
    """A matrix of a file, in groups of 64."""
    most = 1 << bits
    given = torch.randint(1, most, (rows, columns // 64)) if zeros else None
    scales = scale(torch.rand(rows, columns // 64))
    stored = store(order, torch.randint(0, most, (rows, columns)), given, scales, bits)
    if bias:
        stored["bias"] = torch.randn(rows).half()
    if order == "awq":
        return from_awq(stored, "a", 64, not zeros)
    return from_gptq(stored, "a", 64, not zeros, bits=bits)


def stack_of(parts, rows, columns, bias=True, experts=1, **more):
    """A stack of (expert, row, matrix) as they come."""
    stack = MatrixStack(experts, rows, columns, 64, torch.float32 if bias else None, **more)
    for expert, row, each in parts:
        stack.put(expert, row, each)
    return stack.pack(), stack.packed_as


@pytest.fixture
def decoded(monkeypatch):
    """How many times words were decoded."""
    count, own = [], Words.decoded
    monkeypatch.setattr(Words, "decoded", lambda self: count.append(1) or own(self))
    return count


def same_stack(parts, *sizes, decoded, times, **more):
    """The bytes of the stack that gets decoded matrices."""
    want = stack_of([(expert, row, each.matrix()) for expert, row, each in parts], *sizes, **more)
    decoded.clear()
    got = stack_of(parts, *sizes, **more)
    assert len(decoded) == times
    assert torch.equal(got[0], want[0])
    assert got[1] == want[1]
    return got


@pytest.mark.parametrize(("order", "bits"), FORMS)
@pytest.mark.parametrize("zeros", (False, True))
def test_stacks(order, bits, zeros, decoded):
    """Joined parts in any order, experts in any order, zero points of some parts alone."""
    first, last = (read(order, bits, rows, zeros=zeros) for rows in (32, 24))
    plain = read(order, bits, 24, zeros=False)
    for activation_group in (64, -1):
        parts = [(2, 0, first), (0, 32, last), (1, 32, plain), (0, 0, first), (2, 32, last), (1, 0, first)]
        found = same_stack(parts, 56, 512, decoded=decoded, times=0, experts=3, activation_group=activation_group)
        assert found[1].zero_points == zeros
    for parts in ([(0, 32, plain), (0, 0, first)], [(0, 0, first), (0, 32, plain)], [(0, 32, last), (0, 0, first)]):
        same_stack(parts, 56, 512, decoded=decoded, times=0)


@pytest.mark.parametrize(("order", "bits"), FORMS)
def test_cuts(order, bits, decoded):
    """What a rank has of rows and columns, other orders of rows, and parts that are no whole panels."""
    whole = read(order, bits, 96, 1024)
    for part in (whole.with_rows(slice(32, 64)), whole.with_columns(256, 768).with_rows(slice(48, None))):
        same_stack([(0, 0, part)], part.rows, part.columns, decoded=decoded, times=0)
        assert torch.equal(part.matrix().pack(), part.pack())
    for rows in (slice(0, None, 2), slice(0, 12), slice(4, None), torch.randperm(96)):
        part = whole.with_rows(rows)
        same_stack([(0, 0, part)], part.rows, 1024, decoded=decoded, times=0)
        assert isinstance(part.codes, Words) == (order == "gptq")
    split = [(0, row, whole.with_rows(slice(row, end))) for row, end in ((0, 32), (32, 40), (40, 96))]
    for parts in (split, split[::-1], [split[1], split[2], split[0]]):
        same_stack(parts, 96, 1024, decoded=decoded, times=2 if parts is split else 3)
    stack = MatrixStack(1, 112, 1024, 64, torch.float32)
    stack.put(0, 0, whole)
    stack.put(0, 96, replace(whole.zeros(16), bias=torch.zeros(16)))  # padding
    padded = [(0, 0, whole.matrix()), (0, 96, replace(whole.zeros(16), bias=torch.zeros(16)))]
    assert torch.equal(stack.pack(), stack_of(padded, 112, 1024)[0])


def test_columns_that_are_no_words():
    stored = store("gptq", torch.randint(0, 256, (16, 36)), None, torch.rand(16, 1), 8)
    assert isinstance(from_gptq(stored, "a", -1, True, bits=8).codes, torch.Tensor)
    stored = store("awq", torch.randint(0, 16, (16, 48)), None, torch.rand(16, 1))
    found = from_awq(stored, "a", -1, True)
    assert isinstance(found.with_columns(8, 24).codes, Words)
    for begin, end in ((0, 12), (12, 48)):
        cut = found.with_columns(begin, end)
        assert torch.equal(cut.codes, found.matrix().codes[:, begin // 2 : end // 2])


@pytest.mark.parametrize("order", ("gptq", "awq"))
def test_scales_decide(order, decoded):
    """bfloat16 until a scale needs float16; what has been packed, also of the same matrix, is packed again."""
    fits = read(order, 4, 32, scale=lambda values: values.bfloat16().half(), bias=False)
    needs = read(order, 4, 32, scale=lambda values: values.half() + 0.001, bias=False)
    for of_two in ((fits, needs), (needs, fits)):
        parts = [(0, 32, of_two[0]), (1, 0, fits), (0, 0, of_two[1]), (1, 32, fits)]
        found = same_stack(parts, 64, 512, False, decoded=decoded, times=0, experts=2)
        assert found[1].scale_dtype == torch.float16
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        form = PackedAs(scale_dtype=dtype, zero_points=True)
        same_stack([(0, 0, fits)], 32, 512, False, decoded=decoded, times=0, packed_as=form)
    with pytest.raises(ValueError, match="the scales of expert 0 are no bfloat16 values, but the stack keeps such"):
        stack_of([(0, 0, needs)], 32, 512, False, packed_as=PackedAs(zero_points=True))
    with pytest.raises(ValueError, match="the zero points of expert 0 are not 8, but the stack has no zero points"):
        stack_of([(0, 0, fits)], 32, 512, False, packed_as=PackedAs())
