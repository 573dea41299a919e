"""Every 4-bit format, code by code, beside an independent reading of the same tensors; bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from format_writers import (
    dequantized_awq,
    dequantized_gptq,
    dequantized_int,
    dequantized_mxfp4,
    dequantized_nvfp4,
    dequantized_pack,
    e4m3,
    multiplied_out,
    write_awq,
    write_gptq,
    write_int_quantized,
    write_mxfp4,
    write_nvfp4,
    write_pack_quantized,
)

import w4a8
from w4a8.core.float8 import e4m3_values
from w4a8.formats import (
    E2M1,
    Kind,
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

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# N, K, g; N in words of 8
IN_WORDS = [(8, 32, 32), (16, 64, 32), (24, 96, -1), (40, 96, 48), (8, 8, -1), (136, 32, 16)]
# any N, even K
ANY = [*IN_WORDS, (1, 2, -1), (7, 32, 32), (13, 66, -1), (5, 90, 30), (11, 4, 2)]


def matrix(n, k, group, symmetric, dtype, lowest_zero=0, bits=4):
    """Codes, zero points and scales, every code and zero point among them where there is room."""
    g = 1 if group == -1 else k // group
    most = (1 << bits) - 1
    codes = torch.randint(most + 1, (n, k)).numpy()
    zeros = np.full((n, g), most // 2 + 1) if symmetric else torch.randint(lowest_zero, most + 1, (n, g)).numpy()
    if not symmetric:
        zeros[0, 0] = most
    return codes, zeros, (torch.rand(n, g) / 16 - 1 / 64).to(dtype)


def check(found, expected, tensors, symmetric, scales="scales"):
    n, k = expected.shape
    assert found.codes.shape == (n, k // 2) and found.codes.is_contiguous()
    assert found.scales.dtype == tensors[scales].dtype and found.scales.is_contiguous()
    assert (found.zero_points is None) == symmetric
    if not symmetric:
        assert found.zero_points.dtype == torch.uint8 and found.zero_points.is_contiguous()
    assert torch.equal(multiplied_out(found), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("n", "k", "group"), IN_WORDS)
def test_gptq(n, k, group, version, symmetric, dtype):
    # Version 1 cannot write a zero point of 0.
    codes, zeros, scales = matrix(n, k, group, symmetric, dtype, lowest_zero=2 - version)
    tensors = write_gptq(codes, zeros, scales, version)
    found = from_gptq(tensors, "layer", group, symmetric, version)
    check(found, dequantized_gptq(tensors, version), tensors, symmetric)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "group"), IN_WORDS)
def test_awq(n, k, group, symmetric):
    tensors = write_awq(*matrix(n, k, group, symmetric, torch.float16))
    check(from_awq(tensors, "layer", group, symmetric), dequantized_awq(tensors), tensors, symmetric)
    if symmetric:
        del tensors["qzeros"]
        check(from_awq(tensors, "layer", group, symmetric), dequantized_awq(tensors), tensors, symmetric)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "group"), IN_WORDS)
@pytest.mark.parametrize(
    ("packing", "version"),
    [
        ("auto_round:auto_gptq", 1),
        ("auto_round:gptq", 1),
        ("auto_round", 2),  # zero points as they are
        ("auto_round:gptqmodel", 2),
        ("auto_round:auto_awq", None),
        ("auto_awq", None),
    ],
)
def test_auto_round(n, k, group, symmetric, packing, version):
    codes, zeros, scales = matrix(n, k, group, symmetric, torch.float16, lowest_zero=1)
    if version is not None:
        tensors = write_gptq(codes, zeros, scales, version)
        del tensors["g_idx"]
        expected = dequantized_gptq(tensors, version)
    else:
        tensors = write_awq(codes, zeros, scales)
        expected = dequantized_awq(tensors)
    check(from_auto_round(tensors, "layer", group, symmetric, packing), expected, tensors, symmetric)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "group"), ANY)
@pytest.mark.parametrize("format_", ["int", "pack"])
def test_compressed_tensors(format_, n, k, group, symmetric, dtype):
    codes, zeros, scales = matrix(n, k, group, symmetric, dtype)
    write, read, reference = {
        "int": (write_int_quantized, from_int_quantized, dequantized_int),
        "pack": (write_pack_quantized, from_pack_quantized, dequantized_pack),
    }[format_]
    tensors = write(codes, None if symmetric else zeros, scales)
    check(read(tensors, "layer", group, symmetric), reference(tensors), tensors, symmetric, "weight_scale")


def check8(found, expected, symmetric):
    """The matrix; and what it was packed of, where the operators have its groups."""
    n, k = expected.shape
    assert found.kind == Kind.INT8 and found.codes.shape == (found.rows, found.columns) == (n, k)
    assert (found.zero_points is None) == symmetric
    assert torch.equal(multiplied_out(found), expected)
    if found.group in (16, k) or found.group % 32 == 0:
        codes, scales, zeros, _, values, _ = w4a8.dyn_quant_unpack_any_4bit_weight(found.pack(), found.group, k, n)
        zeros = zeros if zeros.numel() > 0 else None
        assert values == "int8" and torch.equal(multiplied_out(Matrix(codes, scales, zeros, "int8")), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("n", "k", "group"), [*IN_WORDS, (4, 36, -1), (20, 4, -1)])
def test_gptq_of_8_bits(n, k, group, version, symmetric, dtype):
    tensors = write_gptq(*matrix(n, k, group, symmetric, dtype, 2 - version, 8), version, 8)
    found = from_gptq(tensors, "layer", group, symmetric, version, 8)
    check8(found, dequantized_gptq(tensors, version, 8), symmetric)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("n", "k", "group"), ANY)
def test_pack_quantized_of_8_bits(n, k, group, symmetric, dtype):
    codes, zeros, scales = matrix(n, k, group, symmetric, dtype, bits=8)
    tensors = write_pack_quantized(codes, None if symmetric else zeros, scales, 8)
    check8(from_pack_quantized(tensors, "layer", group, symmetric, 8), dequantized_pack(tensors, 8), symmetric)


def test_what_8_bits_cannot_be():
    codes, zeros, scales = matrix(16, 64, 32, True, torch.float16, bits=8)
    tensors = write_gptq(codes, zeros, scales, 1, 8)
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


def test_compressed_tensors_with_zero_points_of_nothing():
    """Some files have them although they are symmetric."""
    codes, zeros, scales = matrix(16, 64, 32, True, torch.bfloat16)
    for write, read in ((write_int_quantized, from_int_quantized), (write_pack_quantized, from_pack_quantized)):
        tensors = write(codes, zeros, scales)
        assert read(tensors, "layer", 32, True).zero_points is None


@pytest.mark.parametrize(("n", "k"), [(1, 32), (7, 64), (16, 96), (3, 2880)])
def test_mxfp4(n, k):
    exponents = torch.randint(90, 140, (n, k // 32)).numpy()
    exponents.flat[0], exponents.flat[-1] = (0, 254) if exponents.size > 1 else (254, 254)
    tensors = write_mxfp4(torch.randint(16, (n, k)).numpy(), exponents)
    found = from_mxfp4(tensors, "layer")
    assert found.kind == "e2m1" and found.zero_points is None and found.scales.dtype == torch.float32
    assert torch.equal(multiplied_out(found), dequantized_mxfp4(tensors))
    assert found.codes.is_contiguous()
    other = from_mxfp4_pack_quantized(packed_mxfp4(tensors), "layer")
    assert other.kind == "e2m1" and torch.equal(multiplied_out(other), dequantized_mxfp4(tensors))
    other = from_quark_mxfp4(packed_mxfp4(tensors, "weight"), "layer")
    assert other.kind == "e2m1" and torch.equal(multiplied_out(other), dequantized_mxfp4(tensors))


def packed_mxfp4(tensors, name="weight_packed"):
    """The same bytes with the names and shapes of compressed-tensors, or Quark's."""
    return {name: tensors["blocks"].flatten(1), "weight_scale": tensors["scales"]}


def nvfp4_scales(n, k):
    """Bytes of float8_e4m3fn, all numbers without a sign among them where there is room."""
    numbers = np.arange(127)
    found = np.random.default_rng(n + k).permutation(np.resize(numbers, max(n * k // 16, len(numbers))))
    return found[: n * k // 16].reshape(n, k // 16)


@pytest.mark.parametrize(("n", "k"), [(1, 16), (7, 32), (16, 48), (5, 976), (3, 2880)])
@pytest.mark.parametrize("of_all", [1.0, 2688.0 / 5.0, 1.7e-4, -3e30, 1e-37])
def test_nvfp4(n, k, of_all):
    for reciprocal, read in ((False, from_nvfp4), (True, from_nvfp4_pack_quantized)):
        tensors = write_nvfp4(torch.randint(16, (n, k)).numpy(), nvfp4_scales(n, k), of_all, reciprocal)
        found = read(tensors, "layer")
        assert found.kind == "e2m1" and found.zero_points is None and found.group == 16
        assert found.codes.is_contiguous() and found.scales.is_contiguous()
        assert found.scales.dtype == torch.uint8 and found.channel_scales.dtype == torch.float32
        assert torch.equal(multiplied_out(found), dequantized_nvfp4(tensors))
        # One number is one number, with a dimension or without.
        name = "weight_global_scale" if reciprocal else "weight_scale_2"
        shape = [] if reciprocal else [1]
        other = read({**tensors, name: tensors[name].reshape(shape)}, "layer")
        assert torch.equal(other.channel_scales, found.channel_scales)
        bits = read({**tensors, "weight_scale": tensors["weight_scale"].view(torch.uint8)}, "layer")
        assert torch.equal(bits.scales, found.scales)


def test_parts_of_a_matrix_with_channel_scales():
    tensors = write_nvfp4(torch.randint(16, (12, 96)).numpy(), nvfp4_scales(12, 96), 0.37, False)
    whole, meant = from_nvfp4(tensors, "layer"), dequantized_nvfp4(tensors)
    assert torch.equal(multiplied_out(whole.with_rows(slice(1, 9, 2))), meant[1:9:2])
    assert torch.equal(multiplied_out(whole.with_columns(32, 80)), meant[:, 32:80])
    assert torch.equal(multiplied_out(whole.with_columns(16, 32).with_rows(slice(3, 5))), meant[3:5, 16:32])
    # Of joined matrices every row has its own.
    whole = replace(whole, channel_scales=torch.rand(12))
    meant = multiplied_out(whole)
    assert torch.equal(multiplied_out(whole.with_rows(slice(1, 9, 2))), meant[1:9:2])
    assert torch.equal(multiplied_out(whole.with_columns(16, 32).with_rows(slice(3, 5))), meant[3:5, 16:32])
    with pytest.raises(ValueError, match=r"columns \[8, 24\) of 96 cut groups of 16"):
        whole.with_columns(8, 24)


def test_e4m3_values():
    found = e4m3_values()
    assert found.dtype == torch.float32 and found.shape == (256,)
    for byte in range(256):
        if byte & 127 == 127:
            assert torch.isnan(found[byte])
        else:
            assert float(found[byte]) == e4m3(byte) and bool(torch.signbit(found[byte])) == (byte >= 128)
    if hasattr(torch, "float8_e4m3fn"):
        other = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
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
        assert abs(value) == size and np.signbit(value) == (code >= 8)


def make(format_, symmetric=False):
    """Tensors of a format and how they are read, N 16, K 64, g 32."""
    codes, zeros, scales = matrix(16, 64, 32, symmetric, torch.float16, lowest_zero=1)
    exponents = np.full((16, 2), 127)
    return {
        "gptq": lambda: (write_gptq(codes, zeros, scales, 1), lambda t, g=32: from_gptq(t, "a.b", g, symmetric)),
        "gptq2": lambda: (write_gptq(codes, zeros, scales, 2), lambda t, g=32: from_gptq(t, "a.b", g, symmetric, 2)),
        "awq": lambda: (write_awq(codes, zeros, scales), lambda t, g=32: from_awq(t, "a.b", g, symmetric)),
        "int": lambda: (
            write_int_quantized(codes, zeros, scales),
            lambda t, g=32: from_int_quantized(t, "a.b", g, symmetric),
        ),
        "pack": lambda: (
            write_pack_quantized(codes, zeros, scales),
            lambda t, g=32: from_pack_quantized(t, "a.b", g, symmetric),
        ),
        "mxfp4": lambda: (write_mxfp4(codes, exponents), lambda t: from_mxfp4(t, "a.b")),
        "mxfp4 pack": lambda: (
            packed_mxfp4(write_mxfp4(codes, exponents)),
            lambda t: from_mxfp4_pack_quantized(t, "a.b"),
        ),
        "mxfp4 quark": lambda: (
            packed_mxfp4(write_mxfp4(codes, exponents), "weight"),
            lambda t: from_quark_mxfp4(t, "a.b"),
        ),
        "nvfp4": lambda: (write_nvfp4(codes, nvfp4_scales(16, 64), 0.3, False), lambda t: from_nvfp4(t, "a.b")),
        "nvfp4 pack": lambda: (
            write_nvfp4(codes, nvfp4_scales(16, 64), 0.3, True),
            lambda t: from_nvfp4_pack_quantized(t, "a.b"),
        ),
    }[format_]()


INTEGERS = ("gptq", "gptq2", "awq", "int", "pack")
FORMATS = (*INTEGERS, "mxfp4", "mxfp4 pack", "mxfp4 quark", "nvfp4", "nvfp4 pack")


@pytest.mark.parametrize("format_", FORMATS)
def test_bias(format_):
    tensors, read = make(format_)
    assert read(tensors).bias is None
    bias = torch.randn(16, dtype=torch.float16)
    assert torch.equal(read({**tensors, "bias": bias}).bias, bias)
    for broken in (bias[:15], bias[None], torch.arange(16)):
        with pytest.raises(ValueError, match=r"^a\.b\.bias: "):
            read({**tensors, "bias": broken})


@pytest.mark.parametrize("format_", FORMATS)
def test_every_tensor_is_named_when_it_is_missing_truncated_or_of_another_type(format_):
    tensors, read = make(format_)
    read(tensors)
    for suffix, tensor in tensors.items():
        if suffix != "g_idx":
            with pytest.raises(ValueError, match=rf"^a\.b\.{suffix} is missing$"):
                read({key: value for key, value in tensors.items() if key != suffix})
        with pytest.raises(ValueError, match=rf"^a\.b\.{suffix}: dtype torch.complex64, but "):
            read({**tensors, suffix: tensor.to(torch.complex64)})
        what = "one number is" if tensor.numel() == 1 else r"\d dimensions are"
        with pytest.raises(ValueError, match=rf"^a\.b\.{suffix}: shape .* {what} expected"):
            read({**tensors, suffix: tensor[None] if tensor.dim() > 0 else tensor[None, None]})
        for dim in range(tensor.dim()):
            # Which of two tensors is too short cannot be known; one of them is named.
            with pytest.raises(ValueError, match=r"^a\.b\.\w+: "):
                read({**tensors, suffix: tensor.narrow(dim, 0, tensor.shape[dim] - 1)})


@pytest.mark.parametrize("format_", ["gptq", "gptq2", "awq", "pack"])
def test_truncated_zero_points(format_):
    tensors, read = make(format_)
    suffix = "weight_zero_point" if format_ == "pack" else "qzeros"
    for dim in (0, 1):
        with pytest.raises(ValueError, match=rf"^a\.b\.{suffix}: shape .* make \("):
            read({**tensors, suffix: tensors[suffix].narrow(dim, 0, 1)})


@pytest.mark.parametrize("format_", INTEGERS)
@pytest.mark.parametrize("group", [16, 64, -1, 48, 0, -2])
def test_wrong_group(format_, group):
    tensors, read = make(format_)
    with pytest.raises(ValueError, match=r"^a\.b\.(scales|weight_scale|qweight|weight|weight_shape): "):
        read(tensors, group)


def test_zero_point_of_16():
    """Version 1 stores it as 15; some tools write it where they mean 0, others mean 16."""
    tensors, read = make("gptq")
    tensors["qzeros"][0, 0] |= 15 << 12
    with pytest.raises(ValueError, match=r"^a\.b\.qzeros: zero points in \[\d+, 16\], but \[0, 15\] is expected"):
        read(tensors)


@pytest.mark.parametrize("format_", INTEGERS)
def test_zero_points_of_a_symmetric_matrix(format_):
    """A version 2 file that says it is version 1, for instance."""
    tensors, read = make(format_, symmetric=True)
    read(tensors)
    suffix = "qzeros" if "qzeros" in tensors else "weight_zero_point"
    tensors[suffix][0, 0] ^= 1
    with pytest.raises(ValueError, match=rf"^a\.b\.{suffix}: zero points in .*, but the configuration says symmetric"):
        read(tensors)


@pytest.mark.parametrize("version", [1, 2])
def test_gptq_of_the_other_version(version):
    codes, zeros, scales = matrix(16, 64, 32, True, torch.float16)
    tensors = write_gptq(codes, zeros, scales, version)
    with pytest.raises(ValueError, match=r"^a\.b\.qzeros: .* the configuration says symmetric"):
        from_gptq(tensors, "a.b", 32, True, 3 - version)
    with pytest.raises(ValueError, match="version 3"):
        from_gptq(tensors, "a.b", 32, True, 3)


@pytest.mark.parametrize("format_", ["gptq", "int", "pack"])
def test_activation_order(format_):
    tensors, read = make(format_)
    suffix = "g_idx" if format_ == "gptq" else "weight_g_idx"
    identity = torch.arange(64, dtype=torch.int32) // 32
    read({**tensors, suffix: identity})
    one_wrong = identity.clone()
    one_wrong[5] = -1
    for broken in (identity.flip(0), torch.zeros(64, dtype=torch.int32), one_wrong):
        with pytest.raises(ValueError, match=rf"^a\.b\.{suffix}: groups are not consecutive"):
            read({**tensors, suffix: broken})


@pytest.mark.parametrize("format_", INTEGERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers(format_, value):
    tensors, read = make(format_)
    suffix = "scales" if "scales" in tensors else "weight_scale"
    tensors[suffix][1, 1] = value
    with pytest.raises(ValueError, match=rf"^a\.b\.{suffix}: not all scales are finite"):
        read(tensors)


def test_mxfp4_scale_of_255():
    tensors, read = make("mxfp4")
    tensors["scales"][3, 1] = 255
    with pytest.raises(ValueError, match=r"^a\.b\.scales: 255"):
        read(tensors)


@pytest.mark.parametrize("format_", ["nvfp4", "nvfp4 pack"])
def test_scales_of_nvfp4_that_are_no_numbers(format_):
    tensors, read = make(format_)
    for byte in (0x7F, 0xFF, 0x80, 0xB8):
        scales = tensors["weight_scale"].clone()
        scales.view(torch.uint8)[3, 1] = byte
        with pytest.raises(ValueError, match=r"^a\.b\.weight_scale: not all scales are numbers without a sign"):
            read({**tensors, "weight_scale": scales})
    name = "weight_scale_2" if format_ == "nvfp4" else "weight_global_scale"
    for value in (float("nan"), float("inf"), *((0.0, 1e-40) if format_ == "nvfp4 pack" else ())):
        with pytest.raises(ValueError, match=rf"^a\.b\.{name} is .*, of which no finite scales can be made"):
            read({**tensors, name: torch.tensor(value)})


def test_what_nvfp4_does_not_have():
    tensors, read = make("nvfp4")
    with pytest.raises(
        ValueError, match=r"^a\.b\.weight_scale: shape \(16, 2\), but 64 x 16 features in blocks of 16 make"
    ):
        read({**tensors, "weight_scale": tensors["weight_scale"][:, :2]})
    with pytest.raises(ValueError, match=r"^a\.b\.weight: 40 input features are not groups of 16"):
        read({**tensors, "weight": tensors["weight"][:, :20]})
    with pytest.raises(ValueError, match=r"^a\.b\.weight_scale_2: shape \(16,\), but one number is expected"):
        read({**tensors, "weight_scale_2": torch.ones(16)})
    with pytest.raises(ValueError, match=r"^a\.b\.weight_scale_2: dtype torch\.float16, but float32 is expected"):
        read({**tensors, "weight_scale_2": torch.tensor(0.5, dtype=torch.float16)})
    with pytest.raises(ValueError, match=r"^a\.b\.pre_quant_scale: inputs that are scaled"):
        read({**tensors, "pre_quant_scale": torch.ones(64)})


def test_int_values_outside_int4():
    tensors, read = make("int")
    tensors["weight"][0, 0] = 8
    with pytest.raises(ValueError, match=r"^a\.b\.weight holds values in "):
        read(tensors)


def test_unknown_packing():
    tensors, _ = make("awq")
    with pytest.raises(ValueError, match=r"^a\.b: packing_format 'auto_round:marlin'"):
        from_auto_round(tensors, "a.b", 32, False, "auto_round:marlin")


@pytest.mark.parametrize("format_", FORMATS)
def test_tensors_stay_as_they_were(format_):
    tensors, read = make(format_)
    before = {suffix: tensor.clone() for suffix, tensor in tensors.items()}
    read(tensors)
    assert all(torch.equal(tensors[suffix], tensor) for suffix, tensor in before.items())
