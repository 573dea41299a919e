"""Stacks of every kind of weights, matrix by matrix, in any order and cut: the bytes of one call of the operator, and
little more memory."""

import random
from dataclasses import replace

import meter
import pytest
import torch
from common import least_scales

import w4a8
from w4a8.core.experts import ExpertSizes
from w4a8.core.float8_scales import e4m3_values
from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix, PackedAs
from w4a8.core.packer import ExpertPacker
from w4a8.core.scale_types import kept_scale_dtypes
from w4a8.core.stack import MatrixStack

EXPERTS, HIDDEN, INTERMEDIATE, GROUP = 3, 128, 64, 16
KINDS = ("int4", "zeros", "e2m1", "levels", "int8", "bytes")  # e2m1 of two levels; int8 with zero points
SHAPES = {"w1": (INTERMEDIATE, HIDDEN), "w3": (INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE)}


def _matrix(rows, columns, kind, group=GROUP, scale_dtype=torch.float16, bias=True):
    groups = 1 if group == -1 else columns // group
    nibbles = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
    channels = None
    if kind == "levels":
        scales = torch.randint(1, 127, (rows, groups), dtype=torch.uint8)
        channels = torch.rand(1).expand(rows)
    elif kind == "e2m1":
        scales = torch.ldexp(torch.ones(rows, groups), torch.randint(-20, 4, (rows, groups)))
    else:
        scales = (torch.rand(rows, groups) / 8).to(scale_dtype)
    zeros = torch.randint(16, (rows, groups), dtype=torch.uint8) if kind == "zeros" else None
    if zeros is not None:
        zeros[0, 0] = 3  # not 8 everywhere
    if kind in ("int8", "bytes"):
        zeros = torch.randint(256, (rows, groups), dtype=torch.uint8) if kind == "bytes" else None
        codes = torch.randint(256, (rows, columns), dtype=torch.uint8)
        return Matrix(codes, scales, zeros, "int8", torch.randn(rows) if bias else None)
    values = "e2m1" if kind in ("e2m1", "levels") else "int4"
    return Matrix(nibbles, scales, zeros, values, torch.randn(rows) if bias else None, channels)


def _scales(matrix, levels):
    """float32, or as they are if the operator takes two levels."""
    if matrix.channel_scales is None:
        return matrix.scales.float()
    return matrix.scales if levels else e4m3_values()[matrix.scales.long()] * matrix.channel_scales[:, None]


def _experts(kind, kind2=None, gated=True, **more):
    """{(expert, shard): matrix}, of w13 with a kind, and of w2 with another one."""
    found = {}
    for expert in range(EXPERTS):
        for shard, shape in SHAPES.items():
            if gated or shard != "w3":
                found[expert, shard] = _matrix(*shape, (kind2 or kind) if shard == "w2" else kind, **more)
    return found


def _one_call(matrices, group):
    """A stack of equal matrices by one call of the operator; each a list of matrices of consecutive rows."""
    whole = []
    columns = matrices[0][0].columns
    levels = matrices[0][0].channel_scales is not None and group == 16 and columns != 16
    for parts in matrices:
        middle = 128 if parts[0].kind == "int8" else 8
        none = [torch.full(part.scales.shape, middle, dtype=torch.uint8) for part in parts]
        zeros = [other if part.zero_points is None else part.zero_points for part, other in zip(parts, none)]
        biases = [part.bias for part in parts]
        whole.append([torch.cat(tensors) for tensors in
                      ([p.codes for p in parts], [_scales(p, levels) for p in parts], zeros)]
                     + [None if biases[0] is None else torch.cat(biases)])  # fmt: skip
    nibbles, scales, zeros = (torch.stack([one[i] for one in whole]) for i in range(3))
    bias = None if whole[0][3] is None else torch.stack([one[3] for one in whole]).to(torch.bfloat16)
    values = matrices[0][0].kind
    has_zeros = any(part.zero_points is not None for parts in matrices for part in parts)
    if not levels:
        scales = least_scales(scales, values == "e2m1" and group % 32 == 0 and group not in (-1, columns))
    channels = torch.stack([torch.cat([p.channel_scales for p in parts]) for parts in matrices]) if levels else None
    return w4a8.dyn_quant_pack_4bit_weight(
        nibbles, scales, bias, columns if group == -1 else group, columns, nibbles.shape[1],
        zero_points=zeros if has_zeros else None, values=values, channel_scales=channels,
    )  # fmt: skip


def _cut(matrix, shard, rank, ranks, group):
    """What a rank has of a matrix, by slices of tensors."""
    part = INTERMEDIATE // ranks
    mine = slice(rank * part, (rank + 1) * part)
    codes, scales, zeros, bias = matrix.codes, matrix.scales, matrix.zero_points, matrix.bias
    channels = matrix.channel_scales
    if shard != "w2":
        zeros, channels, bias = (None if part is None else part[mine] for part in (zeros, channels, bias))
        return Matrix(codes[mine], scales[mine], zeros, matrix.kind, bias, channels)
    groups = slice(None) if group == -1 else slice(mine.start // group, mine.stop // group)
    zeros = None if zeros is None else zeros[:, groups]
    if bias is not None and rank != 0:
        bias = torch.zeros_like(bias)
    per_byte = 1 if matrix.kind == "int8" else 2
    codes = codes[:, mine.start // per_byte : mine.stop // per_byte]
    return Matrix(codes, scales[:, groups], zeros, matrix.kind, bias, channels)


def _expected(matrices, group, rank=0, ranks=1):
    cut = {(expert, shard): _cut(m, shard, rank, ranks, group) for (expert, shard), m in matrices.items()}
    rows = [shard for shard in ("w1", "w3") if (0, shard) in cut]
    return {
        "w13": _one_call([[cut[e, shard] for shard in rows] for e in range(EXPERTS)], group),
        "w2": _one_call([[cut[e, "w2"]] for e in range(EXPERTS)], group),
    }


def _packer(group=GROUP, rank=0, ranks=1, bias=True, interleaved=False, gated=True, **more):
    sizes = ExpertSizes(EXPERTS, HIDDEN, INTERMEDIATE // ranks, group, gated)
    return ExpertPacker(sizes, torch.bfloat16 if bias else None, rank, ranks, interleaved, **more)


def _put(packer, matrices, order=None):
    """All matrices, sorted or in another order."""
    for expert, shard in order or sorted(matrices):
        packer.put(expert, shard, matrices[expert, shard], f"name {shard}")
    return packer


def _packed_as(packer):
    """How the stacks of a packer are packed, which has all matrices."""
    packer.pack()
    return {name: stack.packed_as for name, stack in packer.stacks.items()}


def _same(found, expected):
    return all(torch.equal(found[name], expected[name]) for name in ("w13", "w2"))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("group", [32, 16, -1])
@pytest.mark.parametrize("kinds", [(a, b) for a in KINDS for b in KINDS], ids="-".join)
def test_matrices_in_any_order(kinds, group, bias):
    matrices = _experts(*kinds, group=group, bias=bias)
    for ranks in (1, 2):
        for rank in range(ranks):
            packer = _packer(group, rank, ranks, bias)
            order = list(matrices)
            random.Random(rank).shuffle(order)
            assert _same(_put(packer, matrices, order).pack(), _expected(matrices, group, rank, ranks))
            assert packer.is_empty


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("group", [32, -1])
def test_types_of_scales(group, gated, scale_dtype):
    """With a gate and without; what was given is not needed any more."""
    for ranks in (1, 2):
        matrices = _experts("int4", group=group, gated=gated, scale_dtype=scale_dtype)
        expected = _expected(matrices, group, ranks - 1, ranks)
        packer = _packer(group, ranks - 1, ranks, gated=gated)
        for (expert, shard), matrix in matrices.items():
            packer.put(expert, shard, matrix, "name")
            for tensor in matrix.tensors().values():
                tensor.zero_()
        assert _same(packer.pack(), expected)


def test_separate_gate_and_up_of_an_interleaved_layer():
    """They are not interleaved."""
    matrices = _experts("int4")
    assert _same(_put(_packer(interleaved=True), matrices).pack(), _expected(matrices, GROUP))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_gate_and_up(kind, interleaved):
    matrices = _experts(kind)
    for ranks in (1, 2):
        packer = _packer(rank=ranks - 1, ranks=ranks, interleaved=interleaved)
        for expert in range(EXPERTS):
            gate, up = matrices[expert, "w1"], matrices[expert, "w3"]
            pairs = [
                (getattr(gate, f), getattr(up, f)) for f in ("codes", "scales", "zero_points", "bias", "channel_scales")
            ]
            codes, scales, zeros, bias, channels = (
                None if a is None else (torch.stack((a, b), 1).flatten(0, 1) if interleaved else torch.cat((a, b)))
                for a, b in pairs
            )
            packer.put(expert, "w13", Matrix(codes, scales, zeros, gate.kind, bias, channels), "name")
            packer.put(expert, "w2", matrices[expert, "w2"], "name")
        assert _same(packer.pack(), _expected(matrices, GROUP, ranks - 1, ranks))


@pytest.mark.parametrize("with_zeros", [{(0, "w1")}, {(1, "w3")}, {(2, "w1"), (2, "w2")}, {(1, "w1"), (0, "w2")}])
@pytest.mark.parametrize("reverse", [False, True])
def test_matrices_without_zero_points_beside_others(with_zeros, reverse):
    """They get 8, whenever the first zero point comes, and scales stay what they are."""
    matrices = _experts("int4")
    for key in with_zeros:
        matrices[key] = _matrix(*SHAPES[key[1]], "zeros", scale_dtype=torch.bfloat16)
    packer = _put(_packer(), matrices, sorted(matrices, reverse=reverse))
    assert _same(packer.pack(), _expected(matrices, GROUP))


@pytest.mark.parametrize("with_zeros", [{(0, "w1")}, {(1, "w3"), (2, "w2")}, {(2, "w1"), (0, "w3")}])
@pytest.mark.parametrize("reverse", [False, True])
def test_zero_points_of_some_matrices_of_8_bits(with_zeros, reverse):
    """The others get 128; scales that only float32 holds come last and pack all of it again."""
    kinds = {key: "bytes" if key in with_zeros else "int8" for key in _experts("int4")}
    order = sorted(kinds, reverse=reverse)
    matrices = {
        key: _matrix(*SHAPES[key[1]], kinds[key], scale_dtype=torch.float32 if key in order[-2:] else torch.bfloat16)
        for key in order
    }
    packer = _put(_packer(), matrices, order)
    assert packer.stacks["w13"].packed_as == PackedAs("int8", torch.float32, True)
    assert _same(packer.pack(), _expected(matrices, GROUP))


def test_values_of_8_bits_that_the_operators_do_not_have():
    """Groups whose products would not sum up in int32: of one row, 2^16; with zero points 2^15."""
    for kind, most in (("int8", 1 << 16), ("bytes", 1 << 15)):
        for columns in (most, most + 2):
            packer = ExpertPacker(ExpertSizes(1, columns, 2, -1), None)
            matrix = _matrix(4, columns, kind, -1, bias=False)
            if columns == most:
                packer.put(0, "w13", matrix, "the name")
                continue
            with pytest.raises(ValueError, match=rf"the name: .*\(channelwise\), expected at most {most} for int8"):
                packer.put(0, "w13", matrix, "the name")


def test_zero_points_that_are_all_8():
    """Packed as none, however they come."""
    matrices = _experts("int4")
    packer = _packer()
    for key, matrix in matrices.items():
        eight = torch.full(matrix.scales.shape, 8, dtype=torch.uint8)
        packer.put(*key, replace(matrix, zero_points=eight), "name")
    assert not packer.stacks["w13"].packed_as.zero_points
    assert _same(packer.pack(), _expected(matrices, GROUP))


def _finer(matrix):
    """With a scale that bfloat16 would round."""
    scales = matrix.scales.float()
    scales[5, 1] = 1 / 3
    return replace(matrix, scales=scales)


def _with_zeros(matrix):
    return replace(matrix, zero_points=torch.randint(0, 8, matrix.scales.shape, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("kind", "key", "change", "packed_as"),
    [
        *(("int4", (last, "w1"), _finer, PackedAs("int4", torch.float32)) for last in range(EXPERTS)),
        ("int4", (2, "w3"), lambda matrix: _finer(_with_zeros(matrix)), PackedAs("int4", torch.float32, True)),
        ("levels", (2, "w3"), _with_zeros, PackedAs("int4", zero_points=True, channel_scales=True)),
    ],
)
def test_what_comes_late(kind, key, change, packed_as):
    """Finer scales, zero points: all of the stack becomes that, whatever was packed before, exactly; w2 stays."""
    experts = _experts(kind, scale_dtype=torch.bfloat16)
    matrices = {where: replace(matrix, kind="int4") for where, matrix in experts.items()}
    matrices[key] = change(matrices[key])
    packer = _put(_packer(), matrices)
    assert packer.stacks["w13"].packed_as == packed_as
    assert packer.stacks["w2"].packed_as == replace(packed_as, scale_dtype=torch.bfloat16, zero_points=False)
    assert _same(packer.pack(), _expected(matrices, GROUP))


@pytest.mark.parametrize(
    ("kinds", "middle", "others"),
    [
        (("zeros", "int4"), 8, {"zeros": "zero points of expert 0 are not 8", "e2m1": "codes are e2m1, but int4"}),
        (("bytes", "int8"), 128, {"bytes": "zero points of expert 0 are not 128", "int4": "codes are int4, but int8"}),
    ],
)
def test_again(kinds, middle, others):
    """Into the same bytes: what needs less gets as much, what needs more or is of another kind is refused."""
    first, second = _experts(*kinds), _experts(kinds[1])
    sizes = {name: packed.shape for name, packed in _put(_packer(), first).pack().items()}
    packed_as = _packed_as(_put(_packer(), first))
    packed = _put(_packer(packed_as=packed_as), second).pack()
    assert {name: tensor.shape for name, tensor in packed.items()} == sizes
    for (expert, shard), matrix in second.items():
        if shard != "w2":
            zeros = torch.full(matrix.scales.shape, middle, dtype=torch.uint8)
            second[expert, shard] = replace(matrix, zero_points=zeros)
    assert _same(packed, _expected(second, GROUP))
    for kind, message in others.items():
        with pytest.raises(ValueError, match=f"the name: the {message}"):
            _packer(packed_as=packed_as).put(0, "w2", _matrix(HIDDEN, INTERMEDIATE, kind), "the name")


def test_other_scales_again():
    """Those of w13 fit in float32, whatever they are; those of w2 not in bfloat16."""
    packed_as = {"w13": PackedAs(scale_dtype=torch.float32), "w2": PackedAs(scale_dtype=torch.bfloat16)}
    packer = _put(_packer(packed_as=packed_as), _experts("int4", scale_dtype=torch.bfloat16))
    assert packer.stacks["w13"].packed_as.scale_dtype == torch.float32
    with pytest.raises(ValueError, match=r"name w2: .*are no bfloat16 values"):
        _put(_packer(packed_as=packed_as), _experts("int4", scale_dtype=torch.float32))


def test_incomplete():
    matrices = _experts("int4")
    del matrices[1, "w3"]
    with pytest.raises(ValueError, match="the matrix of expert 1 is incomplete"):
        _put(_packer(), matrices).pack()


@pytest.mark.parametrize("shard", ["w3", "w13"])
def test_no_third_projection_without_a_gate(shard):
    with pytest.raises(ValueError, match=f"name: a layer without a gate has w1 and w2, but no {shard}"):
        _packer(gated=False).put(0, shard, _matrix(*SHAPES["w3"], "int4"), "name")


def test_exactness_is_one_rule():
    """Channelwise too."""
    for scale, dtype in ((1 / 3, torch.float32), (0.25, torch.bfloat16), (1365 / 4096, torch.float16)):
        scales = torch.full((2, 1), scale)
        assert next(kept_scale_dtypes(scales, "int4", -1, 64)) == dtype
        stack = MatrixStack(1, 2, 64, -1)
        stack.put(0, 0, Matrix(torch.zeros(2, 32, dtype=torch.uint8), scales))
        assert stack.packed_as.scale_dtype == dtype


def test_two_levels_again():
    """Into the same bytes; what has one level does not fit."""
    first, second = (_experts("levels", "e2m1") for _ in range(2))
    packed_as = _packed_as(_put(_packer(), first))
    assert packed_as["w13"] == PackedAs("e2m1", channel_scales=True) and not packed_as["w2"].channel_scales
    assert _same(_put(_packer(packed_as=packed_as), second).pack(), _expected(second, GROUP))
    for shard, kind, message in (("w1", "e2m1", "one level, but two"), ("w2", "levels", "two levels, but one")):
        with pytest.raises(ValueError, match=f"the name: scales have {message} {LEVELS}"):
            _packer(packed_as=packed_as).put(0, shard, _matrix(*SHAPES[shard], kind), "the name")
    assert MatrixStack(0, 16, 64, 16, None, packed_as["w13"]).pack().shape[0] == 0


def test_no_experts():
    assert ExpertPacker(ExpertSizes(0, HIDDEN, INTERMEDIATE, 32), None).pack()["w2"].shape[0] == 0
    for kind in ("int4", "e2m1", "int8"):
        packed_as = PackedAs(Kind(kind), torch.float32, kind != "e2m1")
        found = MatrixStack(0, 16, 64, 32, torch.bfloat16, packed_as).pack()
        assert found.shape[0] == 0
        one = MatrixStack(1, 16, 64, 32, torch.bfloat16, packed_as)
        one.put(0, 0, _matrix(16, 64, "bytes" if kind == "int8" else kind, 32))
        assert one.pack().shape[1] == found.shape[1]


LEVELS = "is expected: a stack is of one kind"
WRONG = [
    ("int4", "w1", (64, 64, "int4"), r"is \[64, 64\], but \[64, 128\] is expected"),
    ("int4", "w13", (64, 128, "int4"), r"is \[64, 128\], but \[128, 128\] is expected"),
    ("int4", "w2", (64, 128, "int4"), r"is \[64, 128\], but \[128, 64\] is expected"),
    ("int4", "w3", (64, 128, "e2m1"), "the codes are e2m1, but int4 is expected"),
    ("int4", "w3", (64, 128, "zeros", 64), r"the matrix has \(columns, groups\) \(128, 2\), but \(128, 8\) "),
    ("int4", "w3", (64, 128, "zeros", GROUP, torch.float16, False), "has no bias, unlike the layer"),
    ("e2m1", "w3", (64, 128, "levels"), f"scales have two levels, but one {LEVELS}"),
    ("levels", "w3", (64, 128, "e2m1"), f"scales have one level, but two {LEVELS}"),
]


@pytest.mark.parametrize(("first", "shard", "matrix", "message"), WRONG)
def test_wrong_matrices(first, shard, matrix, message):
    """Behind a first one of some kind."""
    packer = _packer()
    packer.put(0, "w1", _matrix(64, 128, first), "w1")
    with pytest.raises(ValueError, match=f"the name:? {message}"):
        packer.put(0, shard, _matrix(*matrix), "the name")


@pytest.mark.parametrize(("row", "rows"), [(0, 17), (1, 16), (16, 16), (16, 1)])
def test_rows_beyond_the_matrix(row, rows):
    """Also of as many rows as the matrix has."""
    with pytest.raises(ValueError, match=rf"codes have shape \({rows}, 32\), but"):
        MatrixStack(1, 16, 64, GROUP).put(0, row, _matrix(rows, 64, "int4"))


@pytest.mark.parametrize(("group", "begin", "end"), [(32, 16, 64), (32, 0, 48), (-1, 1, 64), (-1, 0, 33)])
def test_cut_inside_a_group(group, begin, end):
    matrix = _matrix(8, 128, "zeros", group)
    with pytest.raises(ValueError, match=rf"columns \[{begin}, {end}\) of 128 cut"):
        matrix.with_columns(begin, end)


def test_the_op_takes_them():
    """Experts of every pair of kinds through the fused operator, beside its answer for each expert alone."""
    for kinds in ((a, b) for a in KINDS for b in KINDS):
        matrices = _experts(*kinds)
        packed = _put(_packer(), matrices).pack()
        x = torch.randn(5, HIDDEN)
        ids = torch.tensor([[0], [1], [2], [2], [0]])
        weights = torch.ones(5, 1)
        sizes = (HIDDEN, INTERMEDIATE, 2 * INTERMEDIATE, GROUP, False, 0)
        found = w4a8.dynamic_4bit_int_moe(x, ids, weights, packed["w13"], packed["w2"], *sizes)
        for row, expert in enumerate(ids[:, 0].tolist()):
            halves = [matrices[expert, "w1"], matrices[expert, "w3"]]
            w13, w2 = _one_call([halves], GROUP), _one_call([[matrices[expert, "w2"]]], GROUP)
            alone = w4a8.dynamic_4bit_int_moe(x[row : row + 1], ids[:1] * 0, weights[:1], w13, w2, *sizes)
            assert torch.equal(found[row], alone[0]), kinds


PEAK = """
import random, torch
from w4a8.core.experts import ExpertSizes
from w4a8.core.matrix import Matrix
from w4a8.core.packer import ExpertPacker

sizes = ExpertSizes(64, 1024, 512, 128)
packer = ExpertPacker(sizes, None)
order = [(e, s) for e in range(64) for s in ("w1", "w3", "w2")]
if sys.argv[1] == "shuffled":
    random.Random(0).shuffle(order)
matrices = {}
for shard in ("w1", "w2"):
    rows, columns = (1024, 512) if shard == "w2" else (512, 1024)
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.rand(rows, columns // 128).to(torch.bfloat16)
    zeros = torch.randint(16, (rows, columns // 128), dtype=torch.uint8) if sys.argv[2] == "zeros" else None
    matrices[shard] = Matrix(codes, scales, zeros)
matrices["w3"] = matrices["w1"]
warm = ExpertPacker(ExpertSizes(1, 1024, 512, 128), None)
for shard, matrix in matrices.items():
    warm.put(0, shard, matrix, "name")
warm.pack()
del warm
before = begin()
for expert, shard in order:
    packer.put(expert, shard, matrices[shard], "name")
packed = packer.pack()
total = sum(p.numel() for p in packed.values())
print(total, memory("VmHWM") - before)
"""


@meter.needs_proc
@pytest.mark.parametrize("order", ["natural", "shuffled"])
@pytest.mark.parametrize("zeros", ["", "zeros"])
def test_peak_memory(order, zeros):
    """What is packed, and a few experts: what waits has not been packed yet, so that both together are never more."""
    total, peak = meter.run(PEAK, order, zeros)
    assert total > 50e6
    few, huge_pages = 5 * total / 64, 2 * (2 << 20)
    groups = 64 * (1024 * 8 + 1024 * 4)
    scales = 2 * groups  # wait as float32, and are packed as bfloat16
    heap = 5 * groups  # scales and zero points are too small for pages of their own: what is freed stays in the heap
    assert peak < total + scales + few + huge_pages + (heap if order == "shuffled" else 0)
