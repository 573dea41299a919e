"""pack_words: the bytes that the readers of GPTQ and AWQ and the pack operator give together."""

import pytest
import torch

from w4a8.core.matrix import Matrix
from w4a8.core.nibbles import word_bytes
from w4a8.formats.awq import output_nibbles


def words_of(order, bits, rows, columns):
    shape = (columns, rows // 8) if order == "awq" else (columns * bits // 32, rows)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def case(order, bits, rows, columns, group, zeros=False, bias=False, dtype=torch.float16):
    """Words, and the matrix of the readers."""
    words, most = words_of(order, bits, rows, columns), 1 << bits
    codes = output_nibbles(words) if order == "awq" else word_bytes(words.T)
    scales = torch.rand(rows, columns // group).to(dtype)
    zero_points = torch.randint(0, most, scales.shape, dtype=torch.uint8) if zeros else None
    kind = "int8" if bits == 8 else "int4"
    return words, Matrix(codes, scales, zero_points, kind, torch.randn(rows).to(dtype) if bias else None)


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
