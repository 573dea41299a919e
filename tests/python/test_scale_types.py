"""Which type scales are packed in: every reader keeps each scale exactly, in the fewest bytes that can."""

import itertools

import pytest
import torch
from common import KERNELS, assert_same_bits, least_scales

import w4a8
from w4a8.checkpoint.packed_source import PackedSource
from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix, PackedAs, matrix_of
from w4a8.core.packer import pack_rows
from w4a8.core.scale_types import E8M0, kept_scale_dtypes
from w4a8.core.stack import MatrixStack
from w4a8.core.weight import Cut
from w4a8.formats import from_gptq, from_mxfp4

ANY, BF16, F16, F32 = 0.1, 1 + 2**-7, 1 + 2**-10, 1 + 2**-20
LEAST, MOST, INF, NAN = 2.0**-127, 2.0**127, float("inf"), float("nan")


def matrix(kind, scales, k=None, bias=None):
    """Random codes beside float32 scales [N, G], in groups of 32 if k does not say otherwise."""
    n, groups = scales.shape
    k = 32 * groups if k is None else k
    codes = torch.randint(256, (n, k if kind == "int8" else k // 2), dtype=torch.uint8)
    return Matrix(codes, scales, None, kind, bias)


def scale_type(packed):
    return w4a8.read_header(packed)["scale_dtype"]


@pytest.mark.parametrize("kind", ["int4", "int8", "e2m1"])
@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ([BF16, 0.5], "bfloat16"),
        ([-BF16, 0.0], "bfloat16"),
        ([2.0**-126, MOST * BF16], "bfloat16"),
        ([F16, 0.5], "float16"),
        ([F16, 65504.0], "float16"),
        ([-F16, 2.0**-13], "float16"),
        ([F16, 65536.0], "float32"),
        ([F16, 2.0**-30], "float32"),
        ([F32, 0.5], "float32"),
        ([ANY, 0.5], "float32"),
        ([BF16, INF], "bfloat16"),
        ([F16, INF], "float16"),
    ],
    ids=str,
)
def test_the_least_type_that_holds_all(kind, scales, expected):
    """Beside whatever type they come in, and given back as they were."""
    scales = torch.tensor([scales, [0.5, 0.5]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = scales.to(dtype)
        if not torch.equal(given.float(), scales):
            continue
        packed = matrix(kind, given).pack()
        assert scale_type(packed) == expected
        unpacked = w4a8.dyn_quant_unpack_any_4bit_weight(packed, 32, 64, 2)[1]
        assert_same_bits(unpacked.float(), scales)


@pytest.mark.parametrize(
    ("kind", "scales", "k", "expected"),
    [
        ("e2m1", [[0.25, 2.0]], 64, "e8m0"),
        ("e2m1", [[LEAST, MOST]], 128, "e8m0"),
        ("e2m1", [[0.25, 0.375]], 64, "bfloat16"),
        ("e2m1", [[0.25, -2.0]], 64, "bfloat16"),
        ("e2m1", [[0.25, 0.0]], 64, "bfloat16"),
        ("e2m1", [[0.25, INF]], 64, "bfloat16"),
        ("e2m1", [[0.25, 2.0**-128]], 64, "bfloat16"),
        ("e2m1", [[0.25, NAN]], 64, "float32"),
        ("e2m1", [[0.25]], 32, "bfloat16"),  # channelwise
        ("e2m1", [[0.25, 2.0]], 32, "bfloat16"),  # groups of 16
        ("int4", [[0.25, 2.0]], 64, "bfloat16"),
        ("int8", [[0.25, 2.0]], 64, "bfloat16"),
    ],
    ids=str,
)
def test_powers_of_two(kind, scales, k, expected):
    """A byte for e2m1 in groups that are multiples of 32."""
    scales = torch.tensor(scales)
    packed = matrix(kind, scales, k).pack()
    assert scale_type(packed) == expected
    unpacked = w4a8.dyn_quant_unpack_any_4bit_weight(packed, k // scales.shape[1], k, 1)[1]
    if expected == "e8m0":
        unpacked = torch.pow(2.0, unpacked.double() - 127).float()
    assert_same_bits(unpacked.float(), scales)


def test_halves_that_float16_does_not_have():
    """e2m1 is packed with half of a scale. Of float16 below 2^-13 it may lose the last bit: then float32 is packed."""
    for scale, expected in ((2.0**-13 + 2.0**-23, "float16"), (2.0**-14 + 2.0**-24, "float32")):
        scales = torch.tensor([[F16, scale]]).half()
        packed = matrix("e2m1", scales).pack()
        assert scale_type(packed) == expected
        assert_same_bits(w4a8.dyn_quant_unpack_any_4bit_weight(packed, 32, 64, 1)[1].float(), scales.float())
        assert scale_type(matrix("int4", scales).pack()) == "float16"
    with pytest.raises(RuntimeError, match=r"scales_zeros: element 1 "):  # what no type can hold
        matrix("e2m1", torch.tensor([[F16, 2.0**-149]])).pack()


def test_where_denormals_are_flushed():
    """0 is not 2^-127."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush denormals")
    try:
        found = [next(kept_scale_dtypes(torch.tensor([[0.5, s]]), "e2m1", 32, 64)) for s in (0.0, 2.0**-100)]
    finally:
        torch.set_flush_denormal(False)
    assert found == [torch.bfloat16, E8M0]


def test_float16_that_is_asked_for():
    """Rounded to it; too large for it is an error."""
    scales = torch.tensor([[ANY, 3.0]])
    assert_same_bits(
        w4a8.dyn_quant_unpack_any_4bit_weight(matrix("int4", scales).pack(torch.float16), 32, 64, 1)[1], scales.half()
    )
    with pytest.raises(ValueError, match=r"scale_dtype is torch\.float16, but the largest scale is 65536\.0"):
        matrix("int4", torch.tensor([[ANY, -65536.0]])).pack(torch.float16)


@pytest.mark.parametrize("kind", ["int4", "e2m1"])
def test_a_stack_in_any_order(kind):
    """One type for all of a stack, whatever comes first: the bytes of one call of the operator."""
    rows = {"power": [0.25, 2.0], "bfloat16": [BF16, 0.5], "float16": [F16, 0.5], "small": [BF16 * 2.0**-30, 0.5]}
    rows["float32"] = [F32, 0.5]
    for names in itertools.permutations(rows, 3):
        matrices = [matrix(kind, torch.tensor([rows[name]] * 2)) for name in names]
        stack = MatrixStack(3, 2, 64, 32)
        for expert in (2, 0, 1):
            stack.put(expert, 0, matrices[expert])
        scales = least_scales(torch.stack([each.scales for each in matrices]), kind == "e2m1")
        codes = torch.stack([each.codes for each in matrices])
        assert_same_bits(
            stack.pack(), w4a8.dyn_quant_pack_4bit_weight(codes, scales, None, 32, 64, 2, values=kind), names
        )


@pytest.mark.parametrize(
    ("dtype", "fits", "other", "message"),
    [
        (E8M0, [0.25, 8.0], [0.25, 3.0], "no e8m0 values"),
        (torch.float16, [F16, BF16], [F32, 1.0], "no float16 values"),
        (torch.bfloat16, [0.25, BF16], [F16, 1.0], "no bfloat16 values"),
    ],
    ids=str,
)
def test_other_scales_into_the_same_bytes(dtype, fits, other, message):
    packed_as = PackedAs(Kind.E2M1, dtype)
    stack = MatrixStack(1, 1, 64, 32, packed_as=packed_as)
    given = matrix("e2m1", torch.tensor([fits]))
    stack.put(0, 0, given)
    assert_same_bits(stack.pack()[0], given.pack(dtype))
    with pytest.raises(ValueError, match=f"the scales of expert 0 are {message}, but the stack keeps such"):
        MatrixStack(1, 1, 64, 32, packed_as=packed_as).put(0, 0, matrix("e2m1", torch.tensor([other])))


def test_no_experts_of_each_type():
    for dtype in (E8M0, torch.float16, torch.bfloat16, torch.float32):
        packed_as = PackedAs(Kind.E2M1, dtype)
        one = MatrixStack(1, 16, 64, 32, packed_as=packed_as)
        one.put(0, 0, matrix("e2m1", torch.ones(16, 2)))
        assert MatrixStack(0, 16, 64, 32, packed_as=packed_as).pack().shape == (0, one.pack().shape[1])


def test_rows_of_zeros_beside_exponents():
    """e8m0 has no 0: the padding of a vocabulary has codes of 0."""
    part = matrix("e2m1", torch.tensor([[0.25, 2.0]] * 3), bias=torch.ones(3))
    zeros = part.zeros(2)
    stack = MatrixStack(1, 5, 64, 32, torch.float32)
    stack.put(0, 3, zeros)
    stack.put(0, 0, part)
    packed = stack.pack()[0]
    assert scale_type(packed) == "e8m0"
    assert (w4a8.dyn_quant_matmul_4bit(torch.randn(2, 64), packed, 32, 64, 5)[:, 3:] == 0).all()


@pytest.mark.parametrize("types", [[E8M0, torch.bfloat16], [torch.float16, torch.float32]], ids=str)
def test_rows_of_packed_matrices(types, tmp_path):
    """Below one another, in the smallest type that holds the scales of all."""
    parts = [matrix("e2m1", torch.tensor([[0.25, 2.0**index]] * 7)) for index in range(len(types))]
    packed = {f"{index}.packed": part.pack(dtype) for index, (part, dtype) in enumerate(zip(parts, types))}
    pytest.importorskip("safetensors.torch").save_file(packed, tmp_path / "model.safetensors")
    source = PackedSource([str(tmp_path / "model.safetensors")])
    found = pack_rows([Cut.whole(source.weight(str(index), "packed")) for index in range(len(types))], None).bytes
    assert scale_type(found) == "e8m0"
    whole = matrix_of(found, "whole")
    assert_same_bits(whole.scales.float(), torch.cat([part.scales for part in parts]))
    assert_same_bits(whole.codes, torch.cat([part.codes for part in parts]))


def bits_per_weight(packed, n, k):
    """Without header, sums and biases."""
    panels = (n + 15) // 16
    return 8 * (packed.numel() - 64 - 128 * panels) / (n * k)


def test_bits_of_a_weight():
    """Those of docs/formats.md."""
    n, k = 32, 512
    scales = {g: (torch.rand(k // g, n) / 64).half() for g in (32, 128)}
    words = torch.randint(-(2**31), 2**31 - 1, (k // 8, n), dtype=torch.int32)
    for group, zeros, expected in ((32, 7, 4.5), (128, 7, 4.125), (32, 3, 4.75), (128, 3, 4.1875)):
        qzeros = torch.full((k // group, n // 8), zeros * 0x11111111, dtype=torch.int32)
        tensors = {"qweight": words, "qzeros": qzeros, "scales": scales[group]}
        packed = from_gptq(tensors, "layer", group, zeros == 7).pack()
        assert scale_type(packed) == "float16" and bits_per_weight(packed, n, k) == expected
    blocks = torch.randint(256, (n, k // 32, 16), dtype=torch.uint8)
    exponents = torch.randint(255, (n, k // 32), dtype=torch.uint8)
    packed = from_mxfp4({"blocks": blocks, "scales": exponents}, "layer").pack()
    assert scale_type(packed) == "e8m0" and bits_per_weight(packed, n, k) == 4.25


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["int4", "e2m1", "int8"])
def test_results_do_not_know_the_type(kind, kernel):
    """The same numbers in every type that holds them: the same bits."""
    given = matrix(kind, torch.ldexp(torch.ones(21, 5), torch.randint(-9, 9, (21, 5))))
    types = [torch.float32, torch.bfloat16, torch.float16, *([E8M0] if kind == "e2m1" else [])]
    x = torch.randn(7, 160)
    with w4a8.use_kernel(kernel):
        found = [w4a8.dyn_quant_matmul_4bit(x, given.pack(dtype), 32, 160, 21) for dtype in types]
    for other in found[1:]:
        assert_same_bits(other, found[0])


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.float32, 0x7F7FFFFF), (torch.float32, -0x00800001), (torch.bfloat16, 0x7F00), (torch.float16, 0x7800)],
    ids=str,
)
def test_scales_that_no_packing_writes(dtype, bits):
    """Half of no number: the double is infinite. Infinity itself is packed as it is."""
    scales = torch.tensor([[0.5, INF], [0.25, 1.0]]).to(dtype)
    codes = torch.randint(256, (2, 32), dtype=torch.uint8)
    packed = w4a8.dyn_quant_pack_4bit_weight(codes, scales, None, 32, 64, 2, values="e2m1")
    assert_same_bits(w4a8.dyn_quant_unpack_any_4bit_weight(packed, 32, 64, 2)[1], scales)
    packed[64:].view(torch.int32 if dtype == torch.float32 else torch.int16)[1] = bits
    with pytest.raises(RuntimeError, match=r"scales_zeros: element 2 is packed as the bits \d+, which no scale"):
        w4a8.dyn_quant_unpack_any_4bit_weight(packed, 32, 64, 2)
