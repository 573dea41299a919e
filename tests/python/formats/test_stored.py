"""Matrices one tensor at a time give what their readers give, and refuse what they refuse."""

import format_writers as writers
import numpy as np
import pytest
import torch

from w4a8.formats import Stored
from w4a8.formats.parts import PARTS

ROWS, COLUMNS, GROUP = 16, 128, 32


def how(name: str, symmetric: bool) -> Stored:
    return Stored(name.removesuffix("_v2"), GROUP, symmetric, 2 if name == "gptq_v2" else 1)


def part_of(stored: Stored, kind: str):
    return next(part for part in PARTS[stored.format] if part.kind == kind)


def written(name: str, symmetric: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of one matrix."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 16, (ROWS, COLUMNS))
    groups = COLUMNS // GROUP
    zeros = np.full((ROWS, groups), 8) if symmetric else random.integers(1, 16, (ROWS, groups))
    scales = torch.from_numpy(random.uniform(0.5, 1, (ROWS, groups))).to(torch.float16)
    if name.startswith("gptq"):
        return writers.write_gptq(codes, zeros, scales, 2 if name == "gptq_v2" else 1)
    if name == "awq":
        return writers.write_awq(codes, zeros, scales)
    write = writers.write_int_quantized if name == "int-quantized" else writers.write_pack_quantized
    return write(codes, None if symmetric else zeros, scales)


NAMES = ("gptq", "gptq_v2", "awq", "int-quantized", "pack-quantized")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_pieces_are_what_the_reader_gives(name, symmetric):
    stored, tensors = how(name, symmetric), written(name, symmetric)
    whole = stored.read(tensors, "m")
    pieces = {}
    for part in PARTS[stored.format]:
        if part.kind in ("shape", "g_idx") or part.suffix not in tensors:
            continue
        assert part.shape(ROWS, COLUMNS, COLUMNS // GROUP) == tensors[part.suffix].shape
        pieces[part.kind] = stored.piece(part, tensors[part.suffix], "m")
    assert stored.shape(tensors[stored.weight].shape, "m", tensors.get("weight_shape")) == (ROWS, COLUMNS)
    if name in NAMES[:3]:  # the others are what the packer takes as it is
        assert torch.equal(pieces["weight"], whole.nibbles)
    assert torch.equal(pieces["weight_scale"], whole.scales)
    if symmetric:
        assert pieces.get("zero_points") is None and whole.zero_points is None
    else:
        assert torch.equal(pieces["zero_points"], whole.zero_points)


@pytest.mark.parametrize("name", NAMES)
def test_zero_points_of_8_stay_where_they_are_declared(name):
    stored = how(name, symmetric=False)
    zeros = part_of(stored, "zero_points")
    values = {"gptq": 0x77777777, "int-quantized": 0}.get(name, 0x88888888)
    shape = zeros.shape(ROWS, COLUMNS, COLUMNS // GROUP)
    word = torch.full(shape, values - (1 << 32 if values >= 1 << 31 else 0), dtype=zeros.dtype)
    piece = stored.piece(zeros, word, "m")
    assert piece.shape == (ROWS, COLUMNS // GROUP) and bool((piece == 8).all())


def test_mxfp4():
    random = np.random.default_rng(0)
    made = writers.write_mxfp4(random.integers(0, 16, (ROWS, COLUMNS)), random.integers(100, 140, (ROWS, 4)))
    stored = Stored("mxfp4", 32, True)
    weight, scale = PARTS["mxfp4"]
    assert torch.equal(stored.piece(weight, made["blocks"].flatten(1), "m"), made["blocks"].flatten(1))
    assert torch.equal(stored.piece(scale, made["scales"], "m"), 2.0 ** (made["scales"].float() - 127))
    quark = Stored("quark-mxfp4", 32, True)
    assert quark.values == "e2m1" and quark.required == ("weight", "weight_scale")
    assert quark.shape(made["blocks"].flatten(1).shape, "m") == (ROWS, COLUMNS)
    for part, tensor in zip(quark.parts, (made["blocks"].flatten(1), made["scales"])):
        assert part.shape(ROWS, COLUMNS, COLUMNS // 32) == tensor.shape
        same = part_of(stored, part.kind)
        assert torch.equal(quark.piece(part, tensor, "m"), stored.piece(same, tensor, "m"))
    made["scales"][0, 0] = 255
    with pytest.raises(ValueError, match=r"m.scales: 255, which is not a number"):
        stored.piece(scale, made["scales"], "m")
    with pytest.raises(ValueError, match=r"m.weight_scale: 255, which is not a number"):
        quark.piece(quark.parts[1], made["scales"], "m")


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "nvfp4-pack-quantized"])
def test_nvfp4(name):
    random = np.random.default_rng(0)
    codes, scales = random.integers(0, 16, (ROWS, COLUMNS)), random.integers(1, 127, (ROWS, COLUMNS // 16))
    made = writers.write_nvfp4(codes, scales, 0.3, name == "nvfp4-pack-quantized")
    stored = Stored(name, 16, True)
    assert (
        stored.values == "e2m1"
        and stored.channel_scales
        and stored.shape(made[stored.weight].shape, "m") == (ROWS, COLUMNS)
    )
    whole, pieces = stored.read(made, "m"), {}
    for part in stored.parts:
        if stored.requires(part):
            shape = part.shape(ROWS, COLUMNS, COLUMNS // 16)
            assert shape == (() if part.kind == "global_scale" else made[part.suffix].shape)
            pieces[part.kind] = stored.piece(part, made[part.suffix], "m")
    assert sorted(pieces) == ["global_scale", "weight", "weight_scale"]
    assert torch.equal(pieces["weight"], whole.nibbles)
    assert pieces["weight_scale"].dtype == torch.uint8 and torch.equal(pieces["weight_scale"], whole.scales)
    assert pieces["global_scale"].shape == (1,)
    assert torch.equal(pieces["global_scale"].expand(ROWS), whole.channel_scales)
    of_all, scale = part_of(stored, "global_scale"), part_of(stored, "weight_scale")
    with pytest.raises(ValueError, match=rf"m.{of_all.suffix}: dtype torch.bfloat16, but float32 is expected"):
        stored.piece(of_all, made[of_all.suffix].bfloat16(), "m")
    with pytest.raises(ValueError, match=rf"m.{of_all.suffix} is nan, of which no finite scales can be made"):
        stored.piece(of_all, torch.tensor(float("nan")), "m")
    made["weight_scale"].view(torch.uint8)[0, 0] = 255
    with pytest.raises(ValueError, match=r"m\.weight_scale: not all scales are numbers"):
        stored.piece(scale, made["weight_scale"], "m")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("zero_points", lambda t: torch.full_like(t, -1), r"m.qzeros: zero points in \[16, 16\]"),
        ("zero_points", lambda t: t.float(), "m.qzeros: dtype torch.float32, but int32 is expected"),
        ("weight", lambda t: t.flatten(), "m.qweight: shape .*, but 2 dimensions are expected"),
        ("weight", lambda t: t[:, :0], r"m.qweight: shape \(16, 0\), which holds nothing"),
        ("zero_points", lambda t: t[:, :0], r"m.qzeros: shape \(4, 0\), which holds nothing"),
        ("weight_scale", lambda t: t[:0], r"m.scales: shape \(0, 16\), which holds nothing"),
        ("weight_scale", lambda t: t / 0, "m.scales: not all scales are finite"),
        ("weight_scale", lambda t: t.to(torch.int32), "m.scales: dtype torch.int32, but a float is expected"),
    ],
)
def test_refusals(kind, change, message):
    stored, tensors = how("gptq", False), written("gptq", False)
    part = part_of(stored, kind)
    with pytest.raises(ValueError, match=message):
        stored.piece(part, change(tensors[part.suffix]), "m")


def test_a_zero_point_that_symmetric_does_not_have():
    stored, tensors = how("gptq", True), written("gptq", False)
    with pytest.raises(ValueError, match=r"m.qzeros: zero points in .*, but the configuration says symmetric"):
        stored.piece(part_of(stored, "zero_points"), tensors["qzeros"], "m")


def test_features_that_are_no_whole_words():
    zeros = part_of(how("gptq", True), "zero_points")
    with pytest.raises(ValueError, match=r"20 output features are not whole words of 8 \(qzeros\)"):
        zeros.shape(20, COLUMNS, 4)
