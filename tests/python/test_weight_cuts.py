"""What ranks hold of a weight in files, and weights of some of its rows, beside slices of the whole matrix."""

import pytest
import torch

from w4a8.checkpoint.packed_source import experts_of
from w4a8.core.matrix import Matrix, matrix_of
from w4a8.core.packer import pack_experts, pack_rows
from w4a8.core.weight import Cut, Weight

ROWS, COLUMNS = 96, 128
CODES = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8)
MATRIX = Matrix(CODES, torch.rand(ROWS, COLUMNS // 32).bfloat16(), bias=torch.randn(ROWS))
WEIGHT = Weight(
    "w", (ROWS, COLUMNS), 32, lambda begin, end: iter([(0, MATRIX.with_rows(slice(begin, end)))]), bias=torch.float32
)


def packed(cut):
    return matrix_of(pack_rows([cut], None).bytes, "w")


def test_heads_of_fewer_parts_than_ranks():
    """Two heads for four ranks: neighbours have the same."""
    for rank, rows in enumerate((slice(0, 48), slice(0, 48), slice(48, 96), slice(48, 96))):
        found = packed(Cut.of_rank(WEIGHT, 48, COLUMNS, rank, 4))
        assert torch.equal(found.codes, CODES[rows]) and torch.equal(found.bias, MATRIX.bias[rows])


def test_columns():
    """The first rank alone adds the bias."""
    for rank in (0, 1):
        found = packed(Cut.of_rank(WEIGHT, ROWS, COLUMNS // 2, rank, 2))
        assert torch.equal(found.codes, CODES.chunk(2, 1)[rank])
        assert (found.bias is None) == (rank == 1)


def test_rows_as_a_weight():
    """Also of a weight that is packed in the files as a whole, and cut again."""
    whole = pack_rows([Cut.whole(WEIGHT)], None).bytes
    for weight in (WEIGHT, Weight(**{**vars(WEIGHT), "packed": lambda: whole})):
        part = weight.of_rows(32, 96)
        assert torch.equal(packed(Cut.whole(part)).codes, CODES[32:])
        assert torch.equal(packed(Cut(part, 16, 48, 0, COLUMNS)).codes, CODES[48:80])


def stack_of(rows, columns):
    """Three packed experts as they are in files."""
    scales = torch.ones(rows, columns // 32).bfloat16()
    matrices = [Matrix(torch.full((rows, columns // 2), 17 * e, dtype=torch.uint8), scales) for e in range(3)]
    packed = torch.stack([matrix.pack() for matrix in matrices])
    return Weight("stack", (3, rows, columns), 32, lambda begin, end: iter(()), packed=lambda: packed)


@pytest.mark.parametrize("local", [[0, 1, 2], [2, 0, 1], [2, 0], [1]])
def test_packed_experts_in_any_order(local):
    stacks = {"w13": stack_of(128, 32), "w2": stack_of(32, 64)}
    _, found, _ = pack_experts(experts_of("experts", *stacks.values()), local, None)
    for name, stack in stacks.items():
        assert torch.equal(found[name], stack.packed()[local])
