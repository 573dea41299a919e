"""How modules are stored: shapes, what is needed, and what is refused."""

import pytest
import torch
from tool_formats import least_zero, store, store_mxfp4, store_nvfp4

from w4a8.core.weight import Weight, wanted_activation_group
from w4a8.formats import Scheme
from w4a8.formats.format import Part

ROWS, COLUMNS, GROUP = 16, 128, 32


def how(name: str, symmetric: bool) -> Scheme:
    return Scheme(name.removesuffix("_v2"), GROUP, symmetric, 2 if name == "gptq_v2" else 1)


def part_of(scheme: Scheme, kind: str):
    return next(part for part in scheme.parts if part.kind == kind)


def written(name: str, symmetric: bool) -> dict[str, torch.Tensor]:
    """The tensors of one matrix."""
    groups = COLUMNS // GROUP
    zeros = torch.full((ROWS, groups), 8) if symmetric else torch.randint(least_zero(name), 16, (ROWS, groups))
    scales = (torch.rand(ROWS, groups) / 2 + 0.5).half()
    no_zeros = symmetric and name.endswith("-quantized")
    return store(name, torch.randint(16, (ROWS, COLUMNS)), None if no_zeros else zeros, scales)


NAMES = ("gptq", "gptq_v2", "awq", "int-quantized", "pack-quantized")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_shapes(name, symmetric):
    """What a format's parts say of the tensors is what is in the files, and the reader's matrix has that shape."""
    scheme, tensors = how(name, symmetric), written(name, symmetric)
    for part in scheme.parts:
        if part.kind not in ("shape", "g_idx") and part.suffix in tensors:
            assert part.shape(ROWS, COLUMNS, COLUMNS // GROUP) == tensors[part.suffix].shape
            assert part.takes(tensors[part.suffix].dtype)
    assert scheme.shape(tensors[scheme.weight].shape, "m", tensors.get("weight_shape")) == (ROWS, COLUMNS)
    found = scheme.read({name: tensors[name] for name in scheme.required}, "m")
    assert (found.rows, found.columns, found.group, found.kind) == (ROWS, COLUMNS, GROUP, scheme.kind)
    assert (found.zero_points is None) == symmetric


def test_mxfp4():
    codes, exponents = torch.randint(16, (ROWS, COLUMNS)), torch.randint(100, 140, (ROWS, 4))
    made, flat = store_mxfp4("mxfp4", codes, exponents), store_mxfp4("quark", codes, exponents)
    quark = Scheme("quark-mxfp4", 32, True)
    assert quark.kind == "e2m1" and quark.required == ("weight", "weight_scale")
    assert quark.shape(flat["weight"].shape, "m") == (ROWS, COLUMNS)
    for part in quark.parts[:2]:
        assert part.shape(ROWS, COLUMNS, COLUMNS // 32) == flat[part.suffix].shape
    one, other = Scheme("mxfp4", 32, True).read(made, "m"), quark.read(flat, "m")
    for found in (one, other):
        assert torch.equal(found.codes, made["blocks"].flatten(1))
        assert torch.equal(found.scales, 2.0 ** (made["scales"].float() - 127))
    made["scales"][0, 0] = flat["weight_scale"][0, 0] = 255
    with pytest.raises(ValueError, match=r"m.scales: 255, which is not a number"):
        Scheme("mxfp4", 32, True).read(made, "m")
    with pytest.raises(ValueError, match=r"m.weight_scale: 255, which is not a number"):
        quark.read(flat, "m")


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "nvfp4-pack-quantized"])
def test_nvfp4(name):
    scales = torch.randint(1, 127, (ROWS, COLUMNS // 16))
    made = store_nvfp4(name, torch.randint(16, (ROWS, COLUMNS)), scales, 0.3)
    scheme = Scheme(name, 16, True)
    assert scheme.kind == "e2m1" and scheme.channel_scales
    assert scheme.shape(made[scheme.weight].shape, "m") == (ROWS, COLUMNS)
    for part in scheme.parts:
        if scheme.requires(part):
            shape = part.shape(ROWS, COLUMNS, COLUMNS // 16)
            assert shape == (() if part.kind == "global_scale" else made[part.suffix].shape)
    of_all = next(part for part in scheme.parts if part.kind == "global_scale")
    for value, message in (
        (made[of_all.suffix].bfloat16(), "dtype torch.bfloat16, but float32 is expected"),
        (torch.tensor(float("nan")), "is nan, of which no finite scales can be made"),
    ):
        with pytest.raises(ValueError, match=rf"m.{of_all.suffix}:? {message}"):
            scheme.read({**made, of_all.suffix: value}, "m")


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
        ("weight_scale", lambda t: t.to(torch.int32), "m.scales: dtype torch.int32, but float16 or bfloat16 or float"),
    ],
)
def test_refusals(kind, change, message):
    scheme, tensors = how("gptq", False), written("gptq", False)
    part = part_of(scheme, kind)
    with pytest.raises(ValueError, match=message):
        scheme.read({**tensors, part.suffix: change(tensors[part.suffix])}, "m")


@pytest.mark.parametrize(("name", "bits"), [("gptq", 4), ("gptq", 8), ("gptq_v2", 4), ("gptq_v2", 8), ("awq", 4)])
def test_zero_points_that_come_late(name, bits):
    """Of a symmetric format they are only looked at."""
    scheme = Scheme(name.removesuffix("_v2"), GROUP, True, 2 if name == "gptq_v2" else 1, bits=bits)
    middle = (1 << (bits - 1)) - (name == "gptq")
    word = sum(middle << bits * i for i in range(32 // bits))
    words = torch.full((COLUMNS // GROUP, ROWS * bits // 32), word - (1 << 32 if word >= 1 << 31 else 0)).int()
    scheme.check_zero_points(words, "m")
    words[1, 1] += 1
    with pytest.raises(ValueError, match=r"m.qzeros: zero points in .*, but the configuration says symmetric"):
        scheme.check_zero_points(words, "m")
    with pytest.raises(ValueError, match=r"m.qzeros: dtype torch.float32, but int32 is expected"):
        scheme.check_zero_points(words.float(), "m")


def test_features_that_are_no_whole_words():
    zeros = part_of(how("gptq", True), "zero_points")
    with pytest.raises(ValueError, match=r"20 output features are not whole words of 8 \(qzeros\)"):
        zeros.shape(20, COLUMNS, 4)


@pytest.mark.parametrize(("dtype", "codes"), [(torch.uint8, 2), (torch.int16, 4), (torch.int32, 8), (torch.int64, 16)])
def test_codes_in_an_element(dtype, codes):
    part = Part("w", "weight", dtype, ("n", "k"), 1)
    assert part.shape(ROWS, COLUMNS, 4) == (ROWS, COLUMNS // codes)
    assert part.features((ROWS, COLUMNS // codes), "m") == (ROWS, COLUMNS)
    with pytest.raises(ValueError, match=r"m.w: shape \(3,\), but 2 dimensions are expected"):
        part.features((3,), "m")


def test_a_format_that_is_not_known():
    with pytest.raises(ValueError, match="m: the format 'new' has no reader"):
        Scheme("new", GROUP, True).read(written("int-quantized", True), "m")
    with pytest.raises(ValueError, match="the format 'new' is not one of awq, gptq"):
        _ = Scheme("new", GROUP, True).parts


def test_activation_group_of_weights_that_run_together():
    """Per token if one of the files says so; what is asked for goes before, what is packed already before that."""

    def of(activation_group, is_fixed=False):
        how = {"activation_group": activation_group, "is_fixed": is_fixed}
        return Weight("w", (16, 32), 32, lambda begin, end: iter(()), **how)

    for both in ((of(-1), of(None)), (of(None), of(-1))):
        assert wanted_activation_group(both, None) == -1
        assert wanted_activation_group(both, 64) == 64
    assert wanted_activation_group((of(None), of(None)), None) is None
    assert wanted_activation_group((of(32, is_fixed=True),), 64) == 32
