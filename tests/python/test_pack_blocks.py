"""pack_blocks: the bytes that the readers of gguf_blocks.py and the pack operator give together."""

from dataclasses import replace

import pytest
import torch

from w4a8.core.blocks import Blocks
from w4a8.core.matrix import PackedAs
from w4a8.core.stack import MatrixStack
from w4a8.formats.gguf_blocks import TYPES

BY_NAME = {each.name: each for each in TYPES.values() if each.name != "NVFP4"}


def blocks_of(name, rows, columns, seed=0):
    """Random blocks, uint8 [rows, bytes]: scales are any float16; e8m0 of MXFP4 any but the NaN."""
    kind = BY_NAME[name]
    random = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, columns // kind.weights * kind.bytes), dtype=torch.uint8, generator=random)
    if name == "MXFP4":
        blocks[:, :: kind.bytes] %= 255
    return blocks


def expected(name, blocks, bias=None, scale_dtype=torch.float16, activation_group=-1):
    matrix = replace(BY_NAME[name].matrix(blocks), bias=bias)
    return matrix.pack(torch.uint8 if name == "MXFP4" else scale_dtype, activation_group=activation_group)


def pack(to, blocks, name, columns, rows=None, first=0, bias=None, **more):
    torch.ops.w4a8.pack_blocks(to, blocks, bias, name, first, columns, len(blocks) if rows is None else rows, **more)
    return to


@pytest.mark.parametrize("name", BY_NAME)
def test_same_bytes(name):
    cases = [(1, 2, -1, False), (16, 4, 32, True), (33, 2, -1, True), (70, 3, 32, False), (48, 9, -1, False)]
    if BY_NAME[name].weights == 256 or name in ("Q4_0", "Q8_0", "IQ4_NL"):  # one group has no minimums and no e8m0
        cases += [(17, 1, -1, True), (15, 1, 32, False)]
    for rows, times, group, has_bias in cases:
        columns = BY_NAME[name].weights * times
        blocks, bias = blocks_of(name, rows, columns, rows), torch.randn(rows) if has_bias else None
        want = expected(name, blocks, bias, activation_group=group)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            got = pack(torch.full_like(want, 77), blocks, name, columns, bias=bias, activation_group=group)
            assert torch.equal(got, want), (rows, columns, group, threads)


@pytest.mark.parametrize("name", BY_NAME)
def test_parts(name):
    """Rows at any distance, in several calls, in any order; bias of other types."""
    columns, rows = 2 * BY_NAME[name].weights, 41
    wide = blocks_of(name, rows, 3 * columns)
    blocks = wide[:, wide.shape[1] // 3 : 2 * wide.shape[1] // 3]
    bias = torch.randn(rows).bfloat16()
    want = expected(name, blocks, bias)
    got = torch.full_like(want, 77)
    for first, last in ((32, 41), (0, 16), (16, 32)):
        pack(got, blocks[first:last], name, columns, rows, first, bias[first:last])
    assert torch.equal(got, want)
    with_steps = blocks.repeat_interleave(2, 1)[:, ::2]
    assert not with_steps.is_contiguous()
    assert torch.equal(pack(torch.empty_like(want), with_steps, name, columns, bias=bias), want)


@pytest.mark.parametrize("name", ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"))
def test_bfloat16(name):
    """Scales that bfloat16 holds, denormal ones and infinities among them; others are refused by name."""
    kind = BY_NAME[name]
    blocks = blocks_of(name, 20, 96).view(20, 3, kind.bytes)
    halves = torch.tensor([1.5, -0.0078125, 2.0**-24, 96 * 2.0**-24, float("inf"), -240.0]).half()
    for at in (0, 2) if name in ("Q4_1", "Q5_1") else (0,):
        blocks[..., at : at + 2] = halves[torch.randint(0, 6, (20, 3))].view(torch.uint8).view(20, 3, 2)
    want = expected(name, blocks.flatten(1), scale_dtype=torch.bfloat16)
    got = pack(torch.empty_like(want), blocks.flatten(1), name, 96, scale_dtype=torch.bfloat16)
    assert torch.equal(got, want)
    blocks[18, 1, :2] = torch.tensor([1.001]).half().view(torch.uint8)
    with pytest.raises(
        RuntimeError, match="pack_blocks: blocks: the scale or minimum of block 1 of row 18 is no bfloat"
    ):
        pack(got, blocks.flatten(1), name, 96, scale_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "Q4_2"}, "type is 'Q4_2', expected one of Q4_0, "),
        ({"in_features": 128}, r"blocks has shape \[48, 36\], expected \[rows, in_features / 32 \* 18\]"),
        ({"in_features": 40}, "group .block_size. is 32"),
        ({"out_features": 0}, "n .out_features. is 0"),
        ({"out_features": 49}, r"packed has shape"),
        ({"out_features": 47}, "there are 48 rows, expected 1..47"),
        ({"first_row": 16}, "there are 48 rows, expected 1..32"),
        ({"first_row": -16}, "first_row is -16"),
        ({"first_row": 8}, "first_row is 8, expected a multiple of 16"),
        ({"first_row": 48}, "first_row is 48"),
        ({"first_row": 1 << 62}, "first_row is"),
        (
            {"blocks": torch.zeros(24, 36, dtype=torch.uint8)},
            "there are 24 rows, expected 1..48, and a multiple of 16",
        ),
        ({"blocks": torch.zeros(0, 36, dtype=torch.uint8)}, "there are 0 rows"),
        ({"blocks": torch.zeros(48, 36)}, "blocks has dtype Float, expected uint8"),
        ({"blocks": torch.zeros(48 * 36, dtype=torch.uint8)}, "blocks has shape"),
        ({"packed": torch.zeros(100, dtype=torch.uint8)}, r"packed has shape \[100\]"),
        ({"packed": torch.zeros(1, 100, dtype=torch.uint8)}, "packed has shape"),
        ({"packed": torch.zeros(100)}, "packed has dtype Float, expected uint8"),
        ({"bias": torch.zeros(47)}, r"bias has shape \[47\], expected \[48\]"),
        ({"bias": torch.zeros(48, dtype=torch.int32)}, "bias has dtype Int"),
        ({"scale_dtype": torch.float32}, "scale_dtype is Float, expected bfloat16, float16 or none for type 'Q4_0'"),
        ({"activation_group": 64}, "activation_group is 64"),
    ],
)
def test_refuses(change, message):
    packed = expected("Q4_0", torch.zeros(48, 36, dtype=torch.uint8))
    good = {"packed": packed, "blocks": torch.zeros(48, 36, dtype=torch.uint8), "bias": None, "type": "Q4_0"}
    good |= {"first_row": 0, "in_features": 64, "out_features": 48}
    torch.ops.w4a8.pack_blocks(**good)
    change = dict(change)
    if "bias" in change and change["bias"].shape != (48,):
        good["packed"] = expected("Q4_0", good["blocks"], torch.zeros(48))
    with pytest.raises(RuntimeError, match="w4a8::pack_blocks: .*" + message):
        torch.ops.w4a8.pack_blocks(**{**good, **change})


def test_refuses_values_and_places():
    columns = 64
    blocks = blocks_of("MXFP4", 32, columns)
    want = expected("MXFP4", blocks)
    blocks[20, 17] = 255
    with pytest.raises(RuntimeError, match="block 1 of row 20 is 255, the NaN of float8_e8m0fnu"):
        pack(torch.empty_like(want), blocks, "MXFP4", columns)
    with pytest.raises(RuntimeError, match="scale type is e8m0"):  # one group is channelwise
        pack(torch.empty_like(want), blocks_of("MXFP4", 32, 32), "MXFP4", 32)
    with pytest.raises(RuntimeError, match=r"minimums in groups of 32 \(channelwise\)"):
        pack(torch.empty_like(want), blocks_of("Q4_1", 32, 32), "Q4_1", 32)
    with pytest.raises(RuntimeError, match="scale_dtype is Half, expected none for type 'Q4_K'"):
        pack(torch.empty_like(want), blocks_of("Q4_K", 32, 256), "Q4_K", 256, scale_dtype=torch.float16)
    spread = torch.zeros(2 * want.numel(), dtype=torch.uint8)[::2]
    with pytest.raises(RuntimeError, match="and stride 2, expected"):
        pack(spread, blocks_of("MXFP4", 32, columns), "MXFP4", columns)
    shared = torch.zeros(4096, dtype=torch.uint8)
    packed = shared[: want.numel()]
    with pytest.raises(RuntimeError, match="blocks lies in the memory of packed"):
        pack(packed, shared[64 : 64 + 32 * 34].view(32, 34), "MXFP4", columns)


def stack_of(parts, rows, columns, group, blocks, bias=False, experts=1, **more):
    """A stack of matrices: (expert, row, Blocks) as they come, or decoded first."""
    stack = MatrixStack(experts, rows, columns, group, torch.float32 if bias else None, **more)
    for expert, row, each in parts:
        stack.put(expert, row, each if blocks else each.matrix())
    return stack.pack(), stack.packed_as


@pytest.fixture
def decoded(monkeypatch):
    """How many matrices were decoded."""
    count, own = [], Blocks.matrix
    monkeypatch.setattr(Blocks, "matrix", lambda self: count.append(1) or own(self))
    return count


def whole(name, rows, columns, seed=0, bias=False):
    found = Blocks(blocks_of(name, rows, columns, seed), BY_NAME[name])
    for at in range(1, 2 * found.type.halves, 2):  # no NaN: where rows are decoded and wait, such scales become float32
        found.data[:, at :: found.type.bytes] &= 0xBF
    return replace(found, bias=torch.randn(rows)) if bias else found


def same_stack(parts, *sizes, decoded, times, **more):
    want = stack_of(parts, *sizes, False, **more)
    decoded.clear()
    got = stack_of(parts, *sizes, True, **more)
    assert len(decoded) == times
    assert torch.equal(got[0], want[0])
    assert got[1] == want[1]


@pytest.mark.parametrize("name", BY_NAME)
def test_stacks(name, decoded):
    """Parts in any order, biases, experts in any order, each as if decoded first, and never decoded."""
    columns, group = 512, BY_NAME[name].group
    first, last = (whole(name, rows, columns, rows, bias=True) for rows in (32, 23))
    for activation_group in (32, -1):
        parts = [(2, 0, first), (0, 32, last), (1, 32, last), (0, 0, first), (2, 32, last), (1, 0, first)]
        how = {"bias": True, "experts": 3, "activation_group": activation_group}
        same_stack(parts, 55, columns, group, decoded=decoded, times=0, **how)


@pytest.mark.parametrize("name", ("Q4_0", "Q4_1", "MXFP4", "Q4_K"))
def test_cuts(name, decoded):
    """Rows in another order, and columns of a rank."""
    part = whole(name, 48, 1024).with_rows(torch.randperm(48)).with_columns(256, 768)
    same_stack([(0, 0, part)], 48, 512, 32, decoded=decoded, times=0)
    wrong = whole(name, 16, 512).with_rows(slice(4, 16)), whole(name, 36, 512)  # no whole panels
    same_stack([(0, 0, wrong[0]), (0, 12, wrong[1])], 48, 512, 32, decoded=decoded, times=2)
    part = whole(name, 48, 512)
    stack = MatrixStack(1, 48, 512, 32)
    stack.put(0, 0, part.with_rows(slice(0, 32)))
    stack.put(0, 32, part.matrix().with_rows(slice(32, 48)))  # the rest comes decoded
    assert torch.equal(stack.pack()[0], stack_of([(0, 0, part)], 48, 512, 32, False)[0][0])
    with pytest.raises(ValueError, match=r"has \(columns, groups\) \(256, 8\), but \(512, 16\)"):
        MatrixStack(1, 48, 512, 32).put(0, 0, whole(name, 48, 256))


@pytest.mark.parametrize("name", ("Q4_0", "Q5_1", "Q8_0"))
def test_scales_decide(name, decoded):
    """bfloat16 until a scale needs float16; what has been packed is packed again."""
    kind = BY_NAME[name]

    def scaled(*values):
        found = whole(name, 32, 128, len(values))
        blocks = found.data.unflatten(1, (-1, kind.bytes))
        halves = torch.tensor(values).half()[torch.randint(0, len(values), (*blocks.shape[:2], 2))]
        blocks[..., : 2 * kind.halves] = halves.view(torch.uint8)[..., : 2 * kind.halves]
        return found

    fits, needs = scaled(0.5, 1.25, -3), scaled(0.5, 1.001, 0.25, 2)
    late = replace(fits, data=fits.data.clone())  # in the last row alone
    late.data[-1, :2] = torch.tensor([1.001]).half().view(torch.uint8)
    for order in (
        (fits, fits, fits),
        (fits, needs, fits),
        (needs, fits, fits),
        (fits, fits, needs),
        (fits, late, fits),
    ):
        parts = [(expert, 0, each) for expert, each in enumerate(order)]
        same_stack(parts, 32, 128, 32, decoded=decoded, times=0, experts=3)
    halves = [(0, 16, fits.with_rows(slice(0, 16))), (0, 0, needs.with_rows(slice(16, 32)))]
    same_stack(halves, 32, 128, 32, decoded=decoded, times=0)
    for dtype, times in ((torch.float16, 0), (torch.bfloat16, 0), (torch.float32, 1)):
        form = PackedAs(fits.form.kind, dtype, minimums=kind.halves == 2)
        same_stack([(0, 0, fits)], 32, 128, 32, decoded=decoded, times=times, packed_as=form)
    form = PackedAs(fits.form.kind, torch.bfloat16, minimums=kind.halves == 2)
    with pytest.raises(ValueError, match="the scales of expert 0 are no bfloat16 values, but the stack keeps such"):
        stack_of([(0, 0, needs)], 32, 128, 32, True, packed_as=form)


def test_a_nan_of_mxfp4_is_decoded(decoded):
    good, bad = whole("MXFP4", 32, 128), whole("MXFP4", 32, 128, 1)
    bad.data[5, 17] = 255
    for order, times in (((good, bad), 1), ((bad, good), 2)):
        parts = [(expert, 0, each) for expert, each in enumerate(order)]
        same_stack(parts, 32, 128, 32, decoded=decoded, times=times, experts=2)


def test_mxfp4_of_one_group_is_decoded(decoded):
    same_stack([(0, 0, whole("MXFP4", 16, 32))], 16, 32, 32, decoded=decoded, times=1)


def test_an_unfinished_matrix():
    stack = MatrixStack(2, 48, 512, 32)
    assert stack.is_empty
    stack.put(0, 16, whole("Q4_K", 32, 512))
    assert not stack.is_empty
    with pytest.raises(ValueError, match="the matrix of expert 0 is incomplete"):
        stack.pack()
    with pytest.raises(ValueError, match="codes have shape"):
        stack.put(0, 32, whole("Q4_K", 32, 512))
    with pytest.raises(ValueError, match="the matrix has no minimums, unlike those before"):
        stack.put(0, 0, whole("Q6_K", 16, 512))
