"""Each type of blocks beside the package `gguf`, and packed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import w4a8
from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.core.matrix import Matrix, concat_rows, unpack_codes
from w4a8.formats.gguf_blocks import TYPES

gguf = pytest.importorskip("gguf")
import gguf_files  # noqa: E402

EVERY_TYPE = Path(gguf_files.__file__).parent / "tool_written/gguf/every_type.gguf"
NAMES = sorted(gguf_files.BLOCKS)
BY_NAME = {each.name: each for each in TYPES.values()}
# Bits of a weight, packed, without header, sums and bias. A record of super-scales is filled up to whole lines.
PACKED_BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5,
    "Q4_K": 4.6875,
    "Q5_0": 6.5,
    "Q5_1": 7,
    "Q8_0": 8.5,
    "Q2_K": 5.1875,
    "Q3_K": 4.625,
    "Q5_K": 6.6875,
    "Q6_K": 6.625,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.375,
    "MXFP4": 4.25,
    "NVFP4": 4.5,
}


@pytest.fixture
def generator():
    return np.random.default_rng(0)


def unpacked(packed):
    """The matrix in a packed tensor."""
    header = w4a8.read_header(packed)
    parts = unpack_codes(packed, header["group"], header["k"], header["n"])
    return Matrix(kind=header["values"], **parts)


def test_the_types_are_those_of_the_package():
    assert set(BY_NAME) == set(NAMES)
    for each in TYPES.values():
        kind = gguf.GGMLQuantizationType[each.name]
        assert (each.id, (each.weights, each.bytes)) == (kind.value, gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 256), (5, 512), (19, 768)])
def test_weights(name, shape, generator):
    blocks = gguf_files.random_blocks(name, shape, generator)
    matrix = BY_NAME[name].matrix(torch.from_numpy(blocks))
    assert (matrix.rows, matrix.columns, matrix.group) == (*shape, BY_NAME[name].group)
    assert torch.equal(matrix.floats(), gguf_files.meaning(name, blocks))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_a_few_blocks(name, rows, count, generator):
    shape = (rows, count * gguf_files.BLOCKS[name])
    blocks = gguf_files.random_blocks(name, shape, generator)
    assert torch.equal(BY_NAME[name].matrix(torch.from_numpy(blocks)).floats(), gguf_files.meaning(name, blocks))


@pytest.mark.parametrize("name", NAMES)
def test_packing_keeps_every_weight(name, generator):
    blocks = gguf_files.random_blocks(name, (33, 512), generator)
    packed = BY_NAME[name].matrix(torch.from_numpy(blocks)).pack()
    assert torch.equal(unpacked(packed).floats(), gguf_files.meaning(name, blocks))


@pytest.mark.parametrize("name", NAMES)
def test_packed_bytes(name, generator):
    blocks = gguf_files.random_blocks(name, (16, 8192), generator)
    packed = BY_NAME[name].matrix(torch.from_numpy(blocks)).pack()
    bits = 8 * (packed.numel() - 64 - 128 - 64 * (name == "NVFP4")) / (16 * 8192)
    assert bits == PACKED_BITS[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, 7])
def test_products(name, tokens, generator, kernel):
    """Sums of float32 over groups: each differs from the exact one by the roundings of as many terms."""
    blocks = gguf_files.random_blocks(name, (35, 512), generator)
    matrix = BY_NAME[name].matrix(torch.from_numpy(blocks))
    x = torch.from_numpy(generator.integers(-127, 128, (tokens, 512)).astype(np.float32))
    x[:, 0], x[:, 1] = -128, 127  # then a step is 1 and the zero point 0
    y = w4a8.ops.dyn_quant_matmul_4bit(x, matrix.pack(activation_group=-1), matrix.group, 512, 35)
    weights = gguf_files.meaning(name, blocks).double()
    exact = x.double() @ weights.T
    scaled = weights
    if matrix.minimums is not None:
        scaled = replace(matrix, minimums=torch.zeros_like(matrix.minimums)).floats().double()
    size = scaled.abs() + (scaled - weights).abs()
    bound = (2 * (512 // matrix.group) + 8) * 2.0**-24 * (x.double().abs() @ size.T)
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_ggml_has_written(name):
    """tests/tool_written/write_gguf.py: ggml's own quantizers, and what ggml makes of the blocks."""
    file = GGUFFile(EVERY_TYPE)
    assert file.type_name(name) == name
    expected = file.tensor(f"{name}.as_floats")
    torch.testing.assert_close(file.tensor(name), expected, rtol=2**-23, atol=2**-23 * float(expected.abs().max()))


def random_matrix(name, shape, generator):
    """Of some type, and its weights."""
    blocks = torch.from_numpy(gguf_files.random_blocks(name, shape, generator))
    return BY_NAME[name].matrix(blocks), torch.from_numpy(np.asarray(gguf_files.meaning(name, blocks.numpy())))


@pytest.mark.parametrize("name", NAMES)
def test_runs_of_columns(name, generator):
    """Of half a block of two levels, as heads are that stand in another order."""
    matrix, weights = random_matrix(name, (5, 768), generator)
    order = torch.from_numpy(generator.permutation(6))
    assert torch.equal(matrix.with_runs(order).floats(), weights.unflatten(1, (6, 128))[:, order].flatten(1))
    with pytest.raises(ValueError, match=r"96 runs of the 768 columns cut groups of \d+"):
        matrix.with_runs(torch.arange(96))


@pytest.mark.parametrize("other", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "IQ4_XS"])
@pytest.mark.parametrize("name", NAMES)
def test_concat_rows(name, other, generator):
    """Two types, one below the other: every weight of both, in one matrix that can be packed."""
    (upper, above), (lower, below) = (random_matrix(each, rows, generator) for each, rows in
                                      ((name, (3, 512)), (other, (4, 512))))  # fmt: skip
    whole = concat_rows([upper, lower])
    assert torch.equal(whole.floats(), torch.cat((above, below)))
    assert torch.equal(unpacked(whole.pack(activation_group=None)).floats(), torch.cat((above, below)))
    assert name != other or (whole.kind, whole.group) == (upper.kind, upper.group)
