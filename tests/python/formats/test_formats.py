"""Every reader of a format beside an independent reading of the tensors (tool_formats.py), bit for bit; refusals."""

from dataclasses import replace

import pytest
import torch
from format_checkpoints import numbers_of
from tool_formats import E2M1 as E2M1_SIZES
from tool_formats import E4M3, least_zero, multiplied_out, store, store_mxfp4, store_nvfp4

import w4a8
from w4a8.core.float8_scales import e4m3_values
from w4a8.formats import (
    E2M1,
    Matrix,
    from_auto_round,
    from_awq,
    from_gptq,
    from_int_quantized,
    from_mxfp4,
    from_mxfp4_pack_quantized,
    from_nvfp4,
    from_nvfp4_pack_quantized,
    from_pack_quantized,
    from_quark_mxfp4,
)
from w4a8.formats.checks import check_consecutive

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# N, K, g; N in words of 8
IN_WORDS = [(8, 32, 32), (16, 64, 32), (24, 96, -1), (40, 96, 48), (8, 8, -1), (136, 32, 16)]
# any N, even K
ANY = [*IN_WORDS, (1, 2, -1), (7, 32, 32), (13, 66, -1), (5, 90, 30), (11, 4, 2)]


def _round(packing):
    return packing, lambda t, g, symmetric, bits: from_auto_round(t, "a.b", g, symmetric, packing)


# What writes a format, and its reader: of tensors, group, whether symmetric, bits.
INTEGERS = {
    "gptq": ("gptq", lambda t, g, symmetric, bits: from_gptq(t, "a.b", g, symmetric, 1, bits)),
    "gptq2": ("gptq_v2", lambda t, g, symmetric, bits: from_gptq(t, "a.b", g, symmetric, 2, bits)),
    "awq": ("awq", lambda t, g, symmetric, bits: from_awq(t, "a.b", g, symmetric)),
    "auto_gptq": _round("auto_round:auto_gptq"),
    "round gptq": _round("auto_round:gptq"),
    "round": _round("auto_round"),
    "round gptqmodel": _round("auto_round:gptqmodel"),
    "round awq": _round("auto_round:auto_awq"),
    "auto_awq": _round("auto_awq"),
    "int": ("int-quantized", lambda t, g, symmetric, bits: from_int_quantized(t, "a.b", g, symmetric)),
    "pack": ("pack-quantized", lambda t, g, symmetric, bits: from_pack_quantized(t, "a.b", g, symmetric, bits)),
}
FLOATS = {
    "mxfp4": ("mxfp4", from_mxfp4),
    "mxfp4 pack": ("mxfp4-pack-quantized", from_mxfp4_pack_quantized),
    "mxfp4 quark": ("quark", from_quark_mxfp4),
    "nvfp4": ("modelopt-nvfp4", from_nvfp4),
    "nvfp4 pack": ("nvfp4-pack-quantized", from_nvfp4_pack_quantized),
}
# One of each reader for what is refused.
EACH_INTEGER = ("gptq", "gptq2", "awq", "int", "pack")
EACH = (*EACH_INTEGER, *FLOATS)


def random_integers(form, n, k, group, symmetric, dtype=torch.float16, bits=4):
    """Codes, zero points and scales, every code and zero point among them where there is room."""
    g, most = 1 if group == -1 else k // group, (1 << bits) - 1
    zeros = torch.full((n, g), most // 2 + 1) if symmetric else torch.randint(least_zero(form), most + 1, (n, g))
    if not symmetric:
        zeros[0, 0] = most
    return torch.randint(most + 1, (n, k)), zeros, (torch.rand(n, g) / 16 - 1 / 64).to(dtype)


def nvfp4_scales(n, k):
    """Bits of float8_e4m3fn, all numbers without a sign among them where there is room."""
    count = n * k // 16
    return torch.arange(127).repeat(-(-count // 127))[torch.randperm(-(-count // 127) * 127)][:count].reshape(n, -1)


def check(found, tensors, form, symmetric, bits=4):
    """The matrix; and what it was packed of, where the operators have its groups."""
    expected = multiplied_out(tensors, form, bits)
    n, k = expected.shape
    assert (found.kind, found.rows, found.columns) == (f"int{bits}", n, k)
    assert found.codes.shape == (n, k * bits // 8) and found.matrix().codes.is_contiguous()
    scales = tensors.get("scales", tensors.get("weight_scale"))
    assert found.scales.dtype == scales.dtype and found.scales.is_contiguous()
    assert (found.zero_points is None) == symmetric
    if not symmetric:
        assert found.zero_points.dtype == torch.uint8 and found.zero_points.is_contiguous()
    assert torch.equal(numbers_of(found), expected)
    if found.group in (16, k) or found.group % 32 == 0:
        codes, scales, zeros, _, values, *_ = w4a8.dyn_quant_unpack_any_4bit_weight(found.pack(), found.group, k, n)
        again = Matrix(codes, scales, zeros if zeros.numel() > 0 else None, values)
        assert values == f"int{bits}" and torch.equal(numbers_of(again), expected)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("reader", INTEGERS)
def test_integers(reader, symmetric):
    form, read = INTEGERS[reader]
    for n, k, group in IN_WORDS if "quantized" not in form else ANY:
        for dtype in DTYPES:
            codes, zeros, scales = random_integers(form, n, k, group, symmetric, dtype)
            tensors = store(form, codes, zeros, scales)
            check(read(tensors, group, symmetric, 4), tensors, form, symmetric)
            if symmetric:  # some files have zero points although they are symmetric, others do not
                tensors = store(form, codes, None, scales)
                check(read(tensors, group, symmetric, 4), tensors, form, symmetric)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("reader", ["gptq", "gptq2", "pack"])
def test_8_bits(reader, symmetric):
    form, read = INTEGERS[reader]
    for n, k, group in [*IN_WORDS, (4, 36, -1), (20, 4, -1)] if reader != "pack" else ANY:
        for dtype in DTYPES:
            codes, zeros, scales = random_integers(form, n, k, group, symmetric, dtype, 8)
            tensors = store(form, codes, None if symmetric and reader == "pack" else zeros, scales, 8)
            check(read(tensors, group, symmetric, 8), tensors, form, symmetric, 8)


def test_what_8_bits_cannot_be():
    tensors = store("gptq", *random_integers("gptq", 16, 64, 32, True, bits=8), 8)
    with pytest.raises(ValueError, match=r"layer\.qzeros: zero points in \[\d+, 256\], but \[0, 255\] is expected"):
        from_gptq({**tensors, "qzeros": torch.full_like(tensors["qzeros"], -1)}, "layer", 32, False, 1, 8)
    with pytest.raises(ValueError, match=r"zero points in \[127, 127\], but the configuration says symmetric, .* 128"):
        from_gptq(tensors, "layer", 32, True, 2, 8)
    with pytest.raises(ValueError, match=r"layer\.qzeros: 18 output features are not whole words of 4"):
        from_gptq({**tensors, "qweight": tensors["qweight"][:, [*range(16), 0, 1]],
                   "scales": tensors["scales"][:, [*range(16), 0, 1]]}, "layer", 32, True, 1, 8)  # fmt: skip
    with pytest.raises(ValueError, match=r"layer: codes of 3 bits, but 4 or 8 are expected"):
        from_gptq(tensors, "layer", 32, True, 1, 3)
    with pytest.raises(RuntimeError, match=r"block_size.* 65538 \(channelwise\), expected at most 65536 for int8"):
        Matrix(torch.zeros(1, 65538, dtype=torch.uint8), torch.ones(1, 1), None, "int8").pack()


@pytest.mark.parametrize("reader", ["mxfp4", "mxfp4 pack", "mxfp4 quark"])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (7, 64), (16, 96), (3, 2880)])
def test_mxfp4(reader, n, k):
    form, read = FLOATS[reader]
    exponents = torch.randint(90, 140, (n, k // 32))
    exponents.view(-1)[0], exponents.view(-1)[-1] = (0, 254) if exponents.numel() > 1 else (254, 254)
    tensors = store_mxfp4(form, torch.randint(16, (n, k)), exponents)
    found = read(tensors, "layer")
    assert found.kind == "e2m1" and found.zero_points is None and found.scales.dtype == torch.float32
    assert found.codes.is_contiguous()
    assert torch.equal(numbers_of(found), multiplied_out(tensors, form))


@pytest.mark.parametrize("reader", ["nvfp4", "nvfp4 pack"])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (7, 32), (16, 48), (5, 976), (3, 2880)])
def test_nvfp4(reader, n, k):
    form, read = FLOATS[reader]
    for of_all in (1.0, 2688.0 / 5.0, 1.7e-4, -3e30, 1e-37):
        tensors = store_nvfp4(form, torch.randint(16, (n, k)), nvfp4_scales(n, k), of_all)
        found = read(tensors, "layer")
        assert found.kind == "e2m1" and found.zero_points is None and found.group == 16
        assert found.codes.is_contiguous() and found.scales.is_contiguous()
        assert found.scales.dtype == torch.uint8 and found.channel_scales.dtype == torch.float32
        assert torch.equal(numbers_of(found), multiplied_out(tensors, form))
        # One number is one number, with a dimension or without.
        name = "weight_global_scale" if reader == "nvfp4 pack" else "weight_scale_2"
        other = read({**tensors, name: tensors[name].reshape([] if reader == "nvfp4 pack" else [1])}, "layer")
        assert torch.equal(other.channel_scales, found.channel_scales)
        bits = read({**tensors, "weight_scale": tensors["weight_scale"].view(torch.uint8)}, "layer")
        assert torch.equal(bits.scales, found.scales)


def test_parts_of_a_matrix_with_channel_scales():
    tensors = store_nvfp4("modelopt-nvfp4", torch.randint(16, (12, 96)), nvfp4_scales(12, 96), 0.37)
    whole = from_nvfp4(tensors, "layer")
    for matrix in (whole, replace(whole, channel_scales=torch.rand(12))):  # of joined matrices every row has its own
        meant = numbers_of(matrix)
        assert torch.equal(numbers_of(matrix.with_rows(slice(1, 9, 2))), meant[1:9:2])
        assert torch.equal(numbers_of(matrix.with_columns(32, 80)), meant[:, 32:80])
        assert torch.equal(numbers_of(matrix.with_columns(16, 32).with_rows(slice(3, 5))), meant[3:5, 16:32])
    with pytest.raises(ValueError, match=r"columns \[8, 24\) of 96 cut groups of 16"):
        whole.with_columns(8, 24)


def test_e4m3_values():
    """Those of the product, of the tests, and of torch where it has the type."""
    found = e4m3_values()
    assert found.dtype == torch.float32 and found.shape == (256,)
    others = [E4M3]
    if hasattr(torch, "float8_e4m3fn"):
        others.append(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float())
    for other in others:
        assert torch.equal(other.view(torch.int32)[~other.isnan()], found.view(torch.int32)[~found.isnan()])
        assert torch.equal(other.isnan(), found.isnan())


@pytest.mark.skipif(not hasattr(torch.device, "__enter__"), reason="this torch has no default device")
def test_e4m3_values_where_a_model_is_made():
    """They are kept, and the device of the first call is not theirs."""
    e4m3_values.cache_clear()
    with torch.device("meta"):
        assert e4m3_values().device.type == "cpu"


def test_e2m1_values():
    """One bit of sign, two of exponent (bias 1, denormals), one of mantissa."""
    for code, value in enumerate(E2M1):
        exponent, mantissa = code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        assert abs(value) == size == E2M1_SIZES[code & 7]
        assert torch.signbit(torch.tensor(value)) == (code >= 8)


# --- what is refused, beside the table of test_broken.py ---------------------------------------------------------

needs_meta = pytest.mark.skipif(not hasattr(torch, "func"), reason="torch 1 has no shifts on the meta device")


def make(reader, symmetric=False):
    """Tensors of a format and how they are read, N 16, K 64, g 32 (NVFP4 16)."""
    if reader in INTEGERS:
        form, read = INTEGERS[reader]
        tensors = store(form, *random_integers(form, 16, 64, 32, symmetric))
        return tensors, lambda t, g=32: read(t, g, symmetric, 4)
    form, read = FLOATS[reader]
    codes = torch.randint(16, (16, 64))
    if "nvfp4" in form:
        return store_nvfp4(form, codes, nvfp4_scales(16, 64), 0.3), lambda t: read(t, "a.b")
    return store_mxfp4(form, codes, torch.full((16, 2), 127)), lambda t: read(t, "a.b")


@pytest.mark.parametrize("reader", EACH)
def test_bias(reader):
    tensors, read = make(reader)
    assert read(tensors).bias is None
    bias = torch.randn(16, dtype=torch.float16)
    assert torch.equal(read({**tensors, "bias": bias}).bias, bias)
    for broken in (bias[:15], bias[None], torch.arange(16)):
        with pytest.raises(ValueError, match=r"^a\.b\.bias: "):
            read({**tensors, "bias": broken})


@pytest.mark.parametrize("device", ["cpu", pytest.param("meta", marks=needs_meta)])
@pytest.mark.parametrize("reader", EACH)
def test_every_tensor_is_named_when_it_is_missing_truncated_or_of_another_type(reader, device):
    """On the meta device too: of a file on the Hub `w4a8 inspect` reads the header alone."""
    tensors, read = make(reader)
    before = {suffix: tensor.clone() for suffix, tensor in tensors.items()}
    read(tensors)
    assert all(torch.equal(tensors[suffix], tensor) for suffix, tensor in before.items())
    tensors = {suffix: tensor.to(device) for suffix, tensor in tensors.items()}
    read(tensors)
    for suffix, tensor in tensors.items():
        if suffix != "g_idx":
            with pytest.raises(ValueError, match=rf"^a\.b\.{suffix} is missing$"):
                read({key: value for key, value in tensors.items() if key != suffix})
        with pytest.raises(ValueError, match=rf"^a\.b\.{suffix}: dtype torch.complex64, but "):
            read({**tensors, suffix: tensor.float().to(torch.complex64)})
        what = "one number is" if tensor.numel() == 1 else r"\d dimensions are"
        with pytest.raises(ValueError, match=rf"^a\.b\.{suffix}: shape .* {what} expected"):
            read({**tensors, suffix: tensor[None] if tensor.dim() > 0 else tensor[None, None]})
        for dim in range(tensor.dim()):
            # Which of two tensors is too short cannot be known; one of them is named.
            with pytest.raises(ValueError, match=r"^a\.b\.\w+: "):
                read({**tensors, suffix: tensor.narrow(dim, 0, tensor.shape[dim] - 1)})


@pytest.mark.parametrize("reader", ["gptq", "gptq2", "awq", "pack"])
def test_truncated_zero_points(reader):
    tensors, read = make(reader)
    suffix = "weight_zero_point" if reader == "pack" else "qzeros"
    for dim in (0, 1):
        with pytest.raises(ValueError, match=rf"^a\.b\.{suffix}: shape .* make \("):
            read({**tensors, suffix: tensors[suffix].narrow(dim, 0, 1)})


@pytest.mark.parametrize("reader", EACH_INTEGER)
@pytest.mark.parametrize("group", [16, 64, -1, 48, 0, -2])
def test_wrong_group(reader, group):
    tensors, read = make(reader)
    with pytest.raises(ValueError, match=r"^a\.b\.(scales|weight_scale|qweight|weight|weight_shape): "):
        read(tensors, group)


@pytest.mark.parametrize("version", [1, 2])
def test_gptq_of_the_other_version(version):
    form = "gptq" if version == 1 else "gptq_v2"
    tensors = store(form, *random_integers(form, 16, 64, 32, True))
    with pytest.raises(ValueError, match=r"^a\.b\.qzeros: .* the configuration says symmetric"):
        from_gptq(tensors, "a.b", 32, True, 3 - version)
    with pytest.raises(ValueError, match="version 3"):
        from_gptq(tensors, "a.b", 32, True, 3)


@pytest.mark.parametrize("reader", ["gptq", "int", "pack"])
def test_activation_order(reader):
    tensors, read = make(reader)
    suffix = "g_idx" if reader == "gptq" else "weight_g_idx"
    identity = torch.arange(64, dtype=torch.int32) // 32
    read({**tensors, suffix: identity})
    one_wrong = identity.clone()
    one_wrong[5] = -1
    for broken in (identity.flip(0), torch.zeros(64, dtype=torch.int32), one_wrong):
        with pytest.raises(ValueError, match=rf"^a\.b\.{suffix}: groups are not consecutive"):
            read({**tensors, suffix: broken})
    check_consecutive(torch.arange(65) // 22, "a.g_idx")  # the last group is shorter
    for width in (32, None):
        with pytest.raises(ValueError, match=r"^a\.g_idx: shape \(0,\), which holds nothing"):
            check_consecutive(identity[:0], "a.g_idx", width)


@pytest.mark.parametrize("reader", ["nvfp4", "nvfp4 pack"])
def test_scales_of_nvfp4_that_are_no_numbers(reader):
    tensors, read = make(reader)
    for byte in (0x7F, 0xFF, 0x80, 0xB8):
        scales = tensors["weight_scale"].clone()
        scales.view(torch.uint8)[3, 1] = byte
        with pytest.raises(ValueError, match=r"^a\.b\.weight_scale: not all scales are numbers without a sign"):
            read({**tensors, "weight_scale": scales})
    name = "weight_scale_2" if reader == "nvfp4" else "weight_global_scale"
    for value in (float("nan"), float("inf"), *((0.0, 1e-40) if reader == "nvfp4 pack" else ())):
        with pytest.raises(ValueError, match=rf"^a\.b\.{name} is .*, of which no finite scales can be made"):
            read({**tensors, name: torch.tensor(value)})


def test_width_of_nvfp4():
    tensors, read = make("nvfp4")
    with pytest.raises(ValueError, match=r"^a\.b\.weight: 40 input features are not groups of 16"):
        read({**tensors, "weight": tensors["weight"][:, :20]})


def test_unknown_packing():
    with pytest.raises(ValueError, match=r"^a\.b: packing_format 'auto_round:marlin'"):
        from_auto_round(make("awq")[0], "a.b", 32, False, "auto_round:marlin")
