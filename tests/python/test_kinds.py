"""What kinds of weights have: bytes, sizes and headers, what is refused, Meta and compile, scales, minimums."""

import numpy as np
import pytest
import reference
import torch
from common import (
    ALL_KINDS,
    DTYPES,
    OF_GGUF,
    SUPERS,
    TORCH_VERSION,
    TWO_LEVELS,
    assert_same_bits,
    assert_within,
    check,
    check_layer,
    grouped,
    has,
    make_layer,
    make_matrix,
    matmul,
    packed_size,
    route,
    unpack,
)

import w4a8
from w4a8.core.matrix import Matrix

compiles = pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason=f"torch {TORCH_VERSION} has no opcheck")
all_kinds = pytest.mark.parametrize("kind", ALL_KINDS)
NVFP4 = TWO_LEVELS[-1]


# --- bytes and sizes --------------------------------------------------------------------------------------------------


@all_kinds
@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
def test_header(kind, scale_dtype):
    """The size is that of docs/packed_layout.md, for records that fill their lines and that do not."""
    name = "e5m3" if kind in TWO_LEVELS else "super" if kind in SUPERS else str(scale_dtype).removeprefix("torch.")
    shapes = [(33, 96, 32), (16, 256, 32), (17, 34, 34), (48, 320, 64), (31, 80, 16), (5, 1024, 128), (5, 512, 16)]
    for n, k, group in shapes:
        for bias in (False, True) if has(kind, group, k) else ():
            matrix = make_matrix(n, k, group, scale_dtype, bias, kind=kind)
            packed = matrix.pack()
            assert w4a8.read_header(packed) == {
                "version": 5,
                "n": n,
                "k": k,
                "group": group,
                "values": matrix.values,
                "scale_dtype": name,
                "has_bias": bias,
                "has_zero_points": matrix.zero_points is not None,
                "has_minimums": "minimums" in kind,
                "activation_group": -1,
                "bytes": packed.numel(),
            }
            assert packed.numel() == packed_size(matrix)


@pytest.mark.parametrize("kind", ["zeros", "int8"])
@pytest.mark.parametrize("experts", [None, 3], ids=["matrix", "stack"])
def test_the_size_follows_from_shapes_alone(kind, experts):
    """Zero points in the middle mean what none means, and take the room of any others: values decide nothing."""
    matrix = make_matrix(33, 96, 32, torch.bfloat16, True, experts, kind=kind)
    shape = matrix.pack().shape
    matrix.zero_points.fill_(128 if kind == "int8" else 8)
    packed = matrix.pack()
    assert packed.shape == shape
    first = packed if experts is None else packed[0]
    assert w4a8.read_header(first)["has_zero_points"]
    assert_same_bits(unpack(matrix)[2], matrix.zero_points)
    x = torch.randn(5, 96)
    with_zeros = matmul(x, matrix, first)
    matrix.zero_points = None
    without = matrix.pack()
    # 3 panels; 3 groups of 32 bytes of scales in 2 lines, in 3 with 16 bytes of zero points.
    assert without.shape[-1] == shape[-1] - 3 * 64
    assert unpack(matrix)[2].shape == (0,)
    assert_same_bits(with_zeros, matmul(x, matrix, without if experts is None else without[0]))


def test_matrices_leave_out_zero_points_that_say_nothing():
    """Who packs a Matrix of a checkpoint wants the smaller form; the decision is made there, before the operator."""
    plain = make_matrix(33, 96, 32)
    eight = torch.full(plain.scales.shape, 8, dtype=torch.uint8)
    matrix = Matrix(plain.weights, plain.scales, eight)
    assert_same_bits(matrix.pack(torch.float32), plain.pack())
    eight[32, 2] = 7
    assert w4a8.read_header(matrix.pack(torch.float32))["has_zero_points"]


def test_committed_bytes_of_int8():
    codes = torch.tensor([[(7 * k + 3 * n) % 256 for k in range(32)] for n in range(2)], dtype=torch.uint8)
    zeros = torch.tensor([[0x9C], [0x05]], dtype=torch.uint8)
    scales = torch.tensor([[1.0], [-0.5]])
    more = {"zero_points": zeros, "values": "int8"}
    packed = w4a8.dyn_quant_pack_4bit_weight(codes, scales, None, 32, 32, 2, **more).numpy()
    header = b"W4A8PACK" + np.array([5], "<u4").tobytes() + bytes([2, 0, 2, 0])  # int8, float32, zero points
    header += np.array([2, 32, 32, -1], "<i8").tobytes() + bytes(16)
    assert packed[:64].tobytes() == header
    panel, c = packed[64:], codes.numpy()
    assert panel[:64].view("<f4").tolist() == [1, -0.5] + [0] * 14
    assert panel[64:128].tolist() == [0x9C, 5] + [0] * 62
    for step in range(4):
        for column in range(2):
            values, at = c[column, 8 * step : 8 * step + 8], 128 + 128 * step + 4 * column
            assert (panel[at : at + 4] == values[:4]).all() and (panel[at + 64 : at + 68] == values[4:]).all()
    # One group is one scale for the column: the sums are integers.
    sums = [int((c[0].astype(int) - 0x9C).sum()), int((c[1].astype(int) - 5).sum())]
    assert panel[128 + 512 :][:8].view("<i4").tolist() == sums
    assert len(panel) == 128 + 512 + 64 + 64


def test_bytes_of_int8():
    """docs/packed_layout.md: a step is the codes of k0..k0+3 of all columns, then those of k0+4..k0+7."""
    matrix = make_matrix(33, 96, 32, torch.bfloat16, True, kind="int8")
    panels = matrix.pack()[64:].view(3, -1)
    steps = panels[:, 3 * 64 : 3 * 64 + 12 * 128].reshape(3, 12, 2, 16, 4)
    codes = steps.permute(0, 3, 1, 2, 4).reshape(48, 96)
    assert_same_bits(codes[:33], matrix.weights)
    assert (codes[33:] == 0).all()  # their zero points are 0
    assert_same_bits(panels[:, : 3 * 32].reshape(3, 3, 32)[0].view(torch.bfloat16).T, matrix.scales[:16])
    zeros = panels[:, 3 * 32 : 3 * 48].reshape(3, 3, 16).permute(0, 2, 1).reshape(48, 3)
    assert_same_bits(zeros[:33], matrix.zero_points)


@pytest.mark.parametrize(("k", "group"), [(96, 32), (80, 16), (24, 24)])
def test_bytes_of_int6(k, group):
    """docs/packed_layout.md: two steps are two lines of nibbles and one of high bits; K is padded to 16 with codes 32."""
    matrix = make_matrix(33, k, group, kind="int6")
    packed = matrix.pack()
    header = b"W4A8PACK" + np.array([5], "<u4").tobytes() + bytes([4, 0, 0, 0])  # int6, float32
    assert packed[:16].numpy().tobytes() == header
    padded, groups = -(-k // 16) * 16, k // group
    panels = packed[64:].view(3, -1)
    codes = np.full((48, padded), 32)
    codes[:33, :k] = matrix.weights
    blocks = panels[:, : groups * 64 + padded * 12].reshape(3, groups, -1)[:, :, 64:].reshape(3, -1, 3, 16, 4).numpy()
    for at in range(0, padded, 16):
        block = blocks[:, at // 16]  # [3, 3, 16, 4]: panel, line, column, byte
        for i in range(16):
            nibbles = block[:, i // 8, :, i % 4] >> (i % 8 // 4 * 4) & 15
            high = block[:, 2, :, i % 4] >> (i // 4 * 2) & 3
            assert (nibbles.flatten() + 16 * high.flatten() == codes[:, at + i]).all()


# --- scales -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [32, 96, 128])
def test_scales_that_are_powers_of_two(kernel, group):
    """A byte b is 2^(b - 127): the same bits as with these numbers as float32, in less room."""
    for columns in (33, 64):
        matrix = make_matrix(columns, 5 * group, group, bias=True, kind="e2m1")
        exponents = torch.randint(112, 125, matrix.scales.shape, dtype=torch.uint8)
        exponents[0] = 0  # 2^-127, a denormal number, and half of it another
        exponents[1] = 1
        x = torch.randn(7, matrix.k)
        matrix.scales = torch.from_numpy(np.ldexp(np.float32(1), exponents.numpy().astype(np.int32) - 127))
        want, floats = matmul(x, matrix, matrix.pack()), matrix.pack()
        matrix.scales = exponents
        packed = matrix.pack()
        assert w4a8.read_header(packed)["scale_dtype"] == "e8m0"
        assert packed.numel() < floats.numel()
        assert_same_bits(matmul(x, matrix, packed), want)
        assert_same_bits(unpack(matrix)[1], exponents)
        if hasattr(torch, "float8_e8m0fnu"):
            assert_same_bits(matrix.pack(scales_zeros=exponents.view(torch.float8_e8m0fnu)), packed)


def test_mxfp4_scales():
    """Every power of two that e8m0 has, the least one a denormal, in both types."""
    exponents = torch.arange(-127, 128)
    for dtype in (torch.float32, torch.bfloat16):
        matrix = make_matrix(255, 32, 32, kind="e2m1")
        matrix.scales = torch.ldexp(torch.ones(255, dtype=torch.float64), exponents).float().to(dtype).reshape(255, 1)
        assert_same_bits(unpack(matrix)[1], matrix.scales)
        check(torch.randn(3, 32), matrix)


@pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason=f"torch {TORCH_VERSION} has no float8_e4m3fn")
def test_float8_tensors():
    """PyTorch's own type has the same bits and numbers."""
    every = torch.arange(256).to(torch.uint8)
    numbers = every.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(numbers, reference.e4m3fn(every.numpy()), equal_nan=True)
    matrix = make_matrix(33, 80, 16, kind=NVFP4)
    assert_same_bits(matrix.pack(scales_zeros=matrix.scales.view(torch.float8_e4m3fn)), matrix.pack())


def test_matmul_beside_float32_scales():
    """Scales multiplied out round once each; recip * c does as well. Each of the two is as near to the real numbers."""
    matrix = make_matrix(40, 320, 16, bias=True, kind=NVFP4)
    x = torch.randn(9, 320)
    weights, scales, bias, channels, _ = matrix.arrays()
    terms = reference.sum_of_terms(*reference.quantize(x.numpy()), weights, scales, channels)
    allowed = 2 * reference.rounding_bound(terms, 20, bias, products=1)
    products = torch.from_numpy(reference.e4m3fn(matrix.scales)) * matrix.channels[:, None]
    multiplied_out = matrix.pack(scales_zeros=products, channel_scales=None)
    assert_within(matmul(x, matrix, matrix.pack()).numpy(), matmul(x, matrix, multiplied_out).numpy(), allowed)


@pytest.mark.parametrize("kinds", [(NVFP4, NVFP4), (TWO_LEVELS[0], NVFP4)], ids=" and ".join)
@pytest.mark.parametrize("stack", ["w13", "w2"])
@pytest.mark.parametrize("expert", [0, 3])
def test_a_wrong_channel_scale_is_seen(kinds, stack, expert):
    """Of one expert, 0.09 % too large: less than a step of q, and far more than what is granted to a layer."""
    layer = make_layer(4, 80, 48, 16, kinds=kinds)
    x, (ids, router) = torch.randn(40, 80), route(40, 2, 4)
    check_layer(layer, x, ids, router)
    matrix = getattr(layer, stack)
    channels = matrix.channels.clone()
    channels[expert] *= 1.0009
    setattr(layer, f"{stack}_packed", matrix.pack(channel_scales=channels))
    with pytest.raises(AssertionError, match="out of tolerance"):
        check_layer(layer, x, ids, router)


def test_special_numbers(kernel):
    """Infinities and NaN among minimums and super-scales; -0 and denormals."""
    for kind in OF_GGUF:
        matrix = make_matrix(40, 512, 32, kind=kind)
        floats = [part for part in (matrix.minimums, matrix.supers, matrix.minimum_supers) if part is not None]
        for i, value in enumerate((float("inf"), -float("inf"), float("nan"), -0.0, 6e-8, 0.0)):
            for part in floats:
                if part.is_floating_point():
                    part[3 * i + 1, -1] = value
        check(torch.randn(5, 512), matrix, kind)


def test_a_minimum_is_subtracted():
    """Against float64: what the words of docs/numerics.md say, computed by no reference."""
    matrix = make_matrix(20, 256, 32, kind="int4 minimums")
    x = torch.randint(-127, 128, (6, 256)).float()
    x[:, 0], x[:, 1] = -128, 127
    codes = torch.stack([matrix.weights & 15, matrix.weights >> 4], -1).flatten(1).double()
    weights = codes * matrix.scales.double().repeat_interleave(32, 1)
    weights -= matrix.minimums.double().repeat_interleave(32, 1)
    y = matmul(x, matrix, matrix.pack())
    torch.testing.assert_close(y.double(), x.double() @ weights.T, rtol=1e-5, atol=1e-4)


# --- what is refused --------------------------------------------------------------------------------------------------


def full(*shape, value=1, dtype=torch.uint8):
    return torch.full(shape, value, dtype=dtype)


def with_element(tensor, index, value):
    tensor.view(-1)[index] = value
    return tensor


def sizes_of(kind):
    """K and the group of the matrices that are refused and damaged here."""
    return 256 if kind in OF_GGUF and kind not in ("int6", "iq4") else 64, grouped(kind)


LONG = {"in_features": 2**16 + 2, "block_size": 2**16 + 2, "out_features": 1}
HALVES = torch.ones(24, 1, dtype=torch.float16)
ONES8 = torch.ones(24, 16, dtype=torch.int8)
# Kind of [24, 64], with minimums or super-scales [24, 256], in groups of 32 (of two levels 16): what is changed, and the
# message.
PACK = {
    "unknown values": ("int4", {"values": "fp4"}, r"values is 'fp4', expected 'int4', 'e2m1', 'int8', 'iq4' or 'int6'"),
    "zero points of iq4": ("iq4", {"zero_points": full(24, 2)}, r"zero_points is given, expected none for values = 'iq4'"),
    "minimums of iq4": ("iq4", {"minimums": torch.ones(24, 2)}, r"minimums beside iq4, expected them beside int4, int8 or int6"),
    "channel scales of iq4": ("iq4", {"scales_zeros": full(24, 4), "block_size": 16, "channel_scales": torch.ones(24)}, r"scales of type e5m3|channel_scales"),
    "zero points of int6": ("int6", {"zero_points": full(24, 2)}, r"zero_points is given, expected none for values = 'int6'"),
    "channel scales of int6": ("int6", {"scales_zeros": full(24, 4), "block_size": 16, "channel_scales": torch.ones(24)}, r"channel_scales is given, expected none for values = 'int6'"),
    "nibbles for int6": ("int6", {"weights": full(24, 32)}, r"weights has shape \[24, 32\], expected \[24, 64\] or \[E, 24, 64\] for .*'int6'"),
    "64 of int6": ("int6", {"weights": with_element(full(24, 64, value=63), 1027, 64)}, r"weights: element 1027 is 64, expected 0\.\.63"),
    "255 of int6 in a stack": ("int6", {"weights": with_element(full(2, 24, 64), 24 * 64 + 5, 255), "scales_zeros": torch.ones(2, 24, 2)}, r"weights: element 1541 is 255, expected 0\.\.63"),
    "zero points of e2m1": ("e2m1", {"zero_points": full(24, 2)}, r"zero_points is given, expected none for values = 'e2m1'"),
    "signed zero points": ("int4", {"zero_points": full(24, 2, dtype=torch.int8)}, r"zero_points has dtype (Char|signed char|int8), expected uint8"),
    "transposed": ("int4", {"zero_points": full(2, 24)}, r"zero_points has shape \[2, 24\], expected that of scales_zeros, \[24, 2\]"),
    "one per column": ("int4", {"zero_points": full(24, 1)}, r"zero_points has shape \[24, 1\], expected that of scales_zeros"),
    "one per column of int8": ("int8", {"zero_points": full(24, 1)}, r"zero_points has shape \[24, 1\], expected that of scales_zeros, \[24, 2\]"),
    "of a stack": ("int4", {"zero_points": full(3, 24, 2)}, r"zero_points has shape \[3, 24, 2\], expected that of scales_zeros"),
    "16": ("int4", {"zero_points": with_element(full(24, 2, value=8), 7, 16)}, r"zero_points: element 7 is 16, expected 0\.\.15"),
    "255": ("int4", {"zero_points": full(24, 2, value=255)}, r"zero_points: element 0 is 255, expected 0\.\.15"),
    "meta zero points": ("int4", {"zero_points": full(24, 2).to("meta")}, r"zero_points is on device meta"),
    "scale whose half is not exact": ("e2m1", {"scales_zeros": with_element(torch.ones(24, 2), 9, 1e-45)}, r"scales_zeros: element 9 is a number below 2\^-125"),
    "NaN of e8m0": ("e2m1", {"scales_zeros": with_element(full(24, 2, value=127), 7, 255)}, r"scales_zeros: element 7 is 255, the NaN of float8_e8m0fnu, expected 0\.\.254"),
    "nibbles for int8": ("int8", {"weights": full(24, 32)}, r"weights has shape \[24, 32\], expected \[24, 64\] or \[E, 24, 64\] for .*'int8'"),
    "signed int8": ("int8", {"weights": full(24, 64, dtype=torch.int8)}, r"weights has dtype (Char|signed char|int8), expected uint8"),
    "e8m0 of int8": ("int8", {"scales_zeros": full(24, 2)}, "scale type is e8m0, expected a float type for int8"),
    "two levels of int8": ("int8", {"scales_zeros": full(24, 4), "zero_points": None, "block_size": 16, "channel_scales": torch.ones(24)}, "channel_scales is given, expected none for values = 'int8'"),
    "a long sum of int8": ("int8", {"weights": full(1, 2**16 + 2), "scales_zeros": torch.ones(1, 1), "zero_points": None, **LONG}, r"group \(block_size\) is 65538 \(channelwise\), expected at most 65536 for int8"),
    "scales of floats": (NVFP4, {"scales_zeros": torch.zeros(24, 4)}, r"scales_zeros has dtype (Float|float), expected float8_e4m3fn, or its bits as uint8, beside channel_scales"),
    "no channel scales": (NVFP4, {"channel_scales": None}, "scale type is e8m0, expected a float type for group = 16"),
    "channel scales integer": (NVFP4, {"channel_scales": full(24, dtype=torch.int32)}, r"channel_scales has dtype (Int|int), expected a floating point type"),
    "too many channel scales": (NVFP4, {"channel_scales": torch.ones(25)}, r"channel_scales has shape \[25\], expected"),
    "channel scale a number": (NVFP4, {"channel_scales": torch.tensor(1.0)}, r"channel_scales has shape \[\], expected"),
    "two levels channelwise": (NVFP4, {"block_size": 64, "scales_zeros": full(24, 1)}, r"channel_scales is given, expected none for block_size = 64 and in_features = 64: groups of 16 alone"),
    "two levels in groups of 32": (NVFP4, {"block_size": 32, "scales_zeros": full(24, 2)}, r"channel_scales is given, expected none for block_size = 32 and in_features = 64: groups of 16 alone"),
    "NaN of e4m3": (NVFP4, {"scales_zeros": full(24, 4, value=127)}, r"scales_zeros: element 0 is the float8_e4m3fn with bits 127, expected a number without a sign"),
    "shape of minimums": ("int4 minimums", {"minimums": torch.ones(24, 7)}, r"minimums has shape \[24, 7\], expected that of scales_zeros, \[24, 8\]"),
    "type of minimums": ("int4 minimums", {"minimums": torch.ones(24, 8).half()}, r"minimums has dtype .*, expected float32"),
    "minimums of e2m1": ("int4 minimums", {"values": "e2m1"}, "minimums beside e2m1, expected them beside int4, int8 or int6"),
    "minimums and zero points": ("int4 minimums", {"zero_points": full(24, 8)}, "minimums beside int4 with zero points, expected them beside int4, int8 or int6 without zero points"),
    "minimums channelwise": ("int4 minimums", {"block_size": 256, "scales_zeros": torch.ones(24, 1), "minimums": torch.ones(24, 1)}, r"minimums in groups of 256 \(channelwise\), expected groups of at most 256"),
    "meta minimums": ("int4 minimums", {"minimums": torch.ones(24, 8, device="meta")}, "minimums is on device meta"),
    "float scales beside super-scales": ("int4 supers", {"scales_zeros": torch.ones(24, 8)}, r"scales_zeros has dtype (Float|float), expected int8 beside super_scales"),
    "no super-scales": ("int4 supers", {"super_scales": None}, r"scales_zeros has dtype (Char|signed char|int8), expected"),
    "type of super-scales": ("int4 supers", {"super_scales": HALVES.float()}, r"super_scales has dtype (Float|float), expected float16"),
    "shape of super-scales": ("int4 supers", {"super_scales": HALVES[:, :0]}, r"super_scales has shape \[24, 0\], expected"),
    "no super-minimums": ("int4 minimums supers", {"super_minimums": None}, "super_minimums is not given, expected it beside minimums and super_scales"),
    "super-minimums alone": ("int4 supers", {"super_minimums": HALVES}, "super_minimums is given, expected none without minimums and super_scales"),
    "both levels": ("int4 supers", {"block_size": 16, "scales_zeros": ONES8, "channel_scales": torch.ones(24)}, "super_scales is given beside channel_scales, expected one of both"),
    "super-scales of groups of 256": ("int4 supers", {"block_size": 256, "scales_zeros": ONES8[:, :1]}, "scale type is super, expected a float type for k = 256 and group = 256"),
    "a sign of e4m3": (NVFP4, {"scales_zeros": full(24, 4, value=129)}, r"scales_zeros: element 0 is the float8_e4m3fn with bits 129, expected a number without a sign"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "message"), PACK.values(), ids=PACK)
def test_pack_errors(kind, changes, message):
    with pytest.raises(RuntimeError, match=r"^w4a8::dyn_quant_pack_4bit_weight: .*" + message):
        make_matrix(24, *sizes_of(kind), kind=kind).pack(**changes)


@pytest.mark.parametrize("k", [128, 384])
def test_super_scales_need_whole_blocks(k):
    matrix = make_matrix(24, 512, 32, kind="int4 supers")
    weights, scales = matrix.weights[:, : k // 2], matrix.scales[:, : k // 32]
    with pytest.raises(RuntimeError, match=r"it needs k that is a multiple of 256|super_scales has shape"):
        matrix.pack(weights=weights, scales_zeros=scales, in_features=k, super_scales=matrix.supers[:, : k // 256])


@pytest.mark.parametrize(
    ("scale_dtype", "other", "message"),
    [
        (torch.float16, (32, torch.float32), "kind is int4, expected that of expert 0, int4 with minimums"),
        (torch.float32, (16, torch.float32), "group is 16, expected that of expert 0, 32"),
    ],
    ids=["kind", "group"],
)
def test_stacks_whose_experts_differ_are_refused(scale_dtype, other, message):
    """A token is quantized once for all its experts. The other matrix has as many bytes."""
    layer = make_layer(2, 256, 256, (32, 32), scale_dtype=scale_dtype, kinds=("int4", "int4 minimums"))
    layer.w2_packed[1] = make_matrix(256, 256, *other).pack()
    with pytest.raises(RuntimeError, match=f"expert 1, w2_packed: {message}"):
        layer(torch.randn(4, 256), torch.tensor([[0, 1]] * 4), torch.rand(4, 2))


@pytest.mark.parametrize("kind", ["zeros", "e2m1"])
def test_largest_k(kind):
    """255 * 15 * K must fit int32."""
    k = 2**19 + 2
    weights, scales = torch.zeros(1, k // 2, dtype=torch.uint8), torch.ones(1, 1)
    more = {"values": "e2m1"} if kind == "e2m1" else {"zero_points": full(1, 1, value=0)}
    with pytest.raises(RuntimeError, match=r"k \(in_features\) is 524290, expected an even number in 2\.\.524288 for"):
        w4a8.dyn_quant_pack_4bit_weight(weights, scales, None, k, k, 1, **more)


@pytest.mark.parametrize("kind", ALL_KINDS[1:])
def test_unpack_of_three_results_refuses(kind):
    k, group = sizes_of(kind)
    packed = make_matrix(24, k, group, kind=kind).pack()
    names = {
        "zeros": "int4 with zero points",
        "int8": "int8 with zero points",
        "int4 minimums": "int4 with minimums",
        TWO_LEVELS[0]: "int4 with channel scales",
    }
    name = names.get(kind, ".*")
    message = rf"packed_weights holds {name}, expected int4: dyn_quant_unpack_any_4bit_weight unpacks every kind"
    with pytest.raises(RuntimeError, match=message):
        w4a8.dyn_quant_unpack_4bit_weight(packed, group, k, 24)


# Of every kind; then of single ones. Byte of the header, what it becomes, and the message.
HEADERS = [
    (8, 2, "version is 2: packed before w4a8 0.1, pack the weights again"),
    (8, 4, "version is 4: packed before w4a8 0.1, pack the weights again"),
    (8, 6, "version is 6, this library reads version 5"),
    (12, 5, r"values are 5, expected 0 \(int4\), 1 \(e2m1\), 2 \(int8\), 3 \(iq4\) or 4 \(int6\)"),
    (13, 6, "scale type is 6, expected 0"),
    (14, 16, "flags are 16, expected a sum of 1"),
    (15, 1, "reserved bytes of the header are not zero"),
    (48, 1, "reserved bytes of the header are not zero"),
]
MORE_HEADERS = {
    "int4": [(14, 4, r"flags are 4, expected 4 \(channel scales\) not among them")],
    "zeros": [
        (12, 1, "values are e2m1 with zero points"),
        (12, 3, "values are iq4 with zero points"),
        (12, 2, r"size is \d+ bytes, its header .* needs"),
    ],
    "e2m1": [(40, 0, r"activation_group is -256, expected -1 \(whole rows\), or 32, 64 or 128")],
    "int8": [
        (12, 1, "values are e2m1 with zero points"),
        (13, 4, "scale type is e8m0"),
        (14, 4, r"flags are 4, expected 4 \(channel scales\) not among them"),
    ],
    NVFP4: [(14, 0, r"flags are 0, expected 4 \(channel scales\) among them"), (12, 2, "scale type is e5m3")],
}


@all_kinds
def test_hostile_headers(kind):
    k, group = sizes_of(kind)
    good = make_matrix(24, k, group, kind=kind).pack()
    x = torch.randn(3, k)
    for at, value, message in [*HEADERS, *MORE_HEADERS.get(kind, [])]:
        bad = good.clone()
        bad[at] = value
        with pytest.raises(RuntimeError, match=rf"packed_weights: .*{message}"):
            w4a8.dyn_quant_matmul_4bit(x, bad, group, k, 24)
        with pytest.raises(ValueError, match=message):
            w4a8.read_header(bad)
    for bad in (good[:-1], torch.cat([good, good[:1]])):
        with pytest.raises(RuntimeError, match=r"size is \d+ bytes, its header .* needs"):
            w4a8.dyn_quant_matmul_4bit(x, bad, group, k, 24)


def test_hostile_zero_points(supported_kernels):
    """Bytes above 15 where zero points are stored: the low four bits count, and unpacking names them."""
    matrix = make_matrix(16, 64, 32, kind="zeros")
    packed = matrix.pack()
    x = torch.randn(5, 64)
    want = matmul(x, matrix, packed)
    at = 64 + 2 * 16 * 4  # behind the header and the scales of both groups
    assert_same_bits(packed[at : at + 32].view(2, 16).t(), matrix.zero_points)
    packed[at + 3] += 0xA0
    for name in supported_kernels:
        with w4a8.use_kernel(name):
            assert_same_bits(matmul(x, matrix, packed), want, name)
    with pytest.raises(RuntimeError, match=r"unpack_any_4bit_weight: zero_points: element 6 is \d+, expected 0\.\.15"):
        w4a8.dyn_quant_unpack_any_4bit_weight(packed, 32, 64, 16)


# --- Meta and compile -------------------------------------------------------------------------------------------------


@all_kinds
@pytest.mark.parametrize("experts", [None, 3], ids=["matrix", "stack"])
def test_meta(kind, experts):
    matrix = make_matrix(24, *sizes_of(kind), bias=True, experts=experts, kind=kind)
    shape = matrix.pack().shape
    for name, tensor in matrix.tensors().items():
        setattr(matrix, name, tensor.to("meta"))
    assert matrix.pack().is_meta and matrix.pack().shape == shape
    if matrix.zero_points is not None:
        assert matrix.pack(zero_points=None).shape[-1] < shape[-1]


@compiles
def test_zero_points_of_eight_compiled():
    """What is traced has the size that is packed."""
    matrix = make_matrix(24, 64, 32, kind="zeros")
    matrix.zero_points.fill_(8)

    def packed_twice(weights, scales, zeros):
        packed = w4a8.dyn_quant_pack_4bit_weight(weights, scales, None, 32, 64, 24, zero_points=zeros)
        return torch.stack([packed, packed + torch.zeros(packed.shape, dtype=torch.uint8)])

    arguments = matrix.weights, matrix.scales, matrix.zero_points
    compiled = torch.compile(packed_twice, fullgraph=True, backend="aot_eager")(*arguments)
    assert_same_bits(compiled, packed_twice(*arguments))


@compiles
@pytest.mark.parametrize("kind", ["zeros", "e2m1", "int8", NVFP4, *OF_GGUF])
def test_packed_and_multiplied_in_a_graph(kind):
    k, group = sizes_of(kind)
    matrix, stack = (make_matrix(24, k, group, bias=True, experts=experts, kind=kind) for experts in (None, 2))
    names = ("weights", "scales_zeros", "bias", "block_size", "in_features", "out_features")
    named = stack.arguments()
    torch.library.opcheck(
        torch.ops.w4a8.dyn_quant_pack_4bit_weight.default, tuple(named.pop(name) for name in names), named
    )
    others = {name: value for name, value in matrix.arguments().items() if not isinstance(value, torch.Tensor)}
    tensors = {name: value for name, value in matrix.arguments().items() if name not in others}

    def pack_and_multiply(x, tensors):
        packed = w4a8.dyn_quant_pack_4bit_weight(**others, **tensors)
        return w4a8.dyn_quant_matmul_4bit(x, packed, group, k, 24)

    x = torch.randn(5, k)
    torch._dynamo.reset()  # there are more kinds than variants of one function that torch keeps
    compiled = torch.compile(pack_and_multiply, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x, tensors), matmul(x, matrix, matrix.pack()))
