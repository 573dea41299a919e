"""Scales of two levels, as NVFP4 has them: float8_e4m3fn for each group, and one number for each output feature."""

import numpy as np
import pytest
import reference
import torch
from common import DTYPES, KINDS, TORCH_VERSION, assert_same_bits, assert_within, make_matrix, route

import w4a8

compiles = pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason=f"torch {TORCH_VERSION} has no opcheck")


def e4m3fn(bits):
    """The numbers of the type: a sign, four bits of exponent (bias 7), three of mantissa."""
    bits = np.asarray(bits).astype(int)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    size = np.where((exponent == 15) & (mantissa == 7), np.nan, size)
    return np.where(bits & 128, -size, size).astype(np.float32)


class TwoLevels:
    """A random matrix, or a stack of `experts`."""

    def __init__(self, n, k, group, kind="e2m1", bias=False, experts=None):
        self.plain = make_matrix(n, k, group, torch.float32, bias, experts, kind=kind)
        shape = self.plain.scales.shape
        self.scales = torch.randint(0, 127, shape, dtype=torch.uint8)
        # Outputs of order 1: the scales' root mean square is about 130.
        self.channels = (torch.rand(shape[:-1]) + 0.5) / (500 * k**0.5)

    def pack(self, **changed):
        plain = self.plain
        arguments = {
            "weights": plain.weights,
            "scales_zeros": self.scales,
            "bias": plain.bias,
            "block_size": plain.group,
            "in_features": plain.k,
            "out_features": plain.n,
            "zero_points": plain.zero_points,
            "values": plain.values,
            "channel_scales": self.channels,
        }
        return w4a8.dyn_quant_pack_4bit_weight(**{**arguments, **changed})

    def multiplied_out(self):
        """The same with float32 scales: one rounding more for each."""
        scales = torch.from_numpy(e4m3fn(self.scales.numpy())) * self.channels[..., None]
        return self.pack(scales_zeros=scales, channel_scales=None)

    def arrays(self, expert=None):
        """(weights, scales, bias, channel scales) for reference.py, of one expert if this is a stack."""
        weights, _, bias = self.plain.arrays(expert)
        scales, channels = (t if expert is None else t[expert] for t in (self.scales, self.channels))
        half = np.float32(0.5) if self.plain.values == "e2m1" else np.float32(1)
        return weights, e4m3fn(scales.numpy()) * half, bias, channels.numpy()

    def expected(self, x):
        out = reference.matmul_quantized(*reference.quantize(x.float().numpy()), *self.arrays())
        return torch.from_numpy(out).to(x.dtype)

    def matmul(self, x, packed=None):
        plain = self.plain
        return w4a8.dyn_quant_matmul_4bit(x, self.pack() if packed is None else packed, plain.group, plain.k, plain.n)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(17, 48), (33, 208), (40, 96), (16, 256)], ids=str)
def test_matmul_bits(kernel, shape, kind):
    matrix = TwoLevels(*shape, 16, kind, bias=shape[0] % 2 == 1)
    for dtype in DTYPES:
        for m in (1, 5, 40):
            x = torch.randn(m, shape[1]).to(dtype)
            assert_same_bits(matrix.matmul(x), matrix.expected(x))


@pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason=f"torch {TORCH_VERSION} has no float8_e4m3fn")
def test_float8_tensors():
    """PyTorch's own type has the same bits and numbers."""
    every = torch.arange(256).to(torch.uint8)
    assert np.array_equal(every.view(torch.float8_e4m3fn).float().numpy(), e4m3fn(every.numpy()), equal_nan=True)
    matrix = TwoLevels(33, 80, 16)
    assert torch.equal(matrix.pack(scales_zeros=matrix.scales.view(torch.float8_e4m3fn)), matrix.pack())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("experts", [None, 3], ids=["matrix", "stack"])
def test_unpack_is_the_inverse(kind, experts):
    matrix = TwoLevels(17, 16 * 24, 16, kind, bias=True, experts=experts)
    matrix.scales.view(-1)[:127] = torch.arange(127).to(torch.uint8)
    packed = matrix.pack()
    weights, scales, zeros, bias, values, channels = w4a8.dyn_quant_unpack_any_4bit_weight(packed, 16, 384, 17)
    assert_same_bits(weights, matrix.plain.weights)
    assert_same_bits(scales, matrix.scales)
    assert_same_bits(channels, matrix.channels)
    assert_same_bits(bias, matrix.plain.bias)
    assert values == matrix.plain.values and (zeros.numel() != 0) == (kind == "zeros")


def test_header_and_size():
    matrix = TwoLevels(20, 96, 16)
    header = w4a8.read_header(matrix.pack())
    assert (header["version"], header["scale_dtype"], header["values"]) == (5, "e5m3", "e2m1")
    # 12 steps, 2 lines with the scales of 6 groups of 16 bytes, sums, bias, channel scales.
    assert header["bytes"] == 64 + 2 * 64 * (12 + 2 + 3)


class Fused:
    """A layer of experts of two levels, its input, and what the reference makes of it."""

    def __init__(self, kinds, bias=False, gated=True, weight_on_input=False, tokens=40):
        experts, hidden, inner = 4, 80, 48
        rows = 2 * inner if gated else inner
        self.w13 = TwoLevels(rows, hidden, 16, kinds[0], bias, experts)
        self.w2 = TwoLevels(hidden, inner, 16, kinds[1], bias, experts)
        self.x, (self.ids, self.router) = torch.randn(tokens, hidden), route(tokens, 2, experts)
        self.sizes = (hidden, inner, rows, 16, weight_on_input, 0)

    def __call__(self, w13=None, w2=None):
        w13, w2 = (self.w13.pack() if w13 is None else w13), (self.w2.pack() if w2 is None else w2)
        return w4a8.dynamic_4bit_int_moe(self.x, self.ids, self.router, w13, w2, *self.sizes).numpy()

    def expected(self):
        """The output, and how far the errors granted to exp may bring it from there."""
        stacks = [[stack.arrays(expert) for expert in range(4)] for stack in (self.w13, self.w2)]
        _, inner, rows, _, weight_on_input, kind = self.sizes
        arguments = (self.x.numpy(), self.ids.numpy(), self.router.numpy(), *stacks, inner, rows == 2 * inner)
        return reference.moe(*arguments, weight_on_input, kind)


FUSED = pytest.mark.parametrize("kinds", [("e2m1", "e2m1"), ("int4", "e2m1"), ("zeros", "int4")], ids="-".join)


@FUSED
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
def test_fused_op(kernel, kinds, bias, gated):
    layer = Fused(kinds, bias, gated, weight_on_input=bias)
    assert_within(layer(), *layer.expected())


@FUSED
@pytest.mark.parametrize("stack", ["w13", "w2"])
@pytest.mark.parametrize("expert", [0, 3])
def test_a_wrong_channel_scale_is_seen(kinds, stack, expert):
    """Of one expert, 0.09 % too large: less than a step of q, and far more than what is granted above."""
    layer = Fused(kinds)
    matrix = getattr(layer, stack)
    channels = matrix.channels.clone()
    channels[expert] *= 1.0009
    wrong = layer(**{stack: matrix.pack(channel_scales=channels)})
    with pytest.raises(AssertionError, match="out of tolerance"):
        assert_within(wrong, *layer.expected())


def test_matmul_beside_float32_scales():
    """Scales multiplied out round once each; recip * c does as well. Each of the two is as near to the real numbers."""
    matrix = TwoLevels(40, 320, 16, bias=True)
    x = torch.randn(9, 320)
    weights, scales, bias, channels = matrix.arrays()
    terms = reference.sum_of_terms(*reference.quantize(x.numpy()), weights, scales, channels)
    allowed = 2 * reference.rounding_bound(terms, 20, bias, products=1)
    assert_within(matrix.matmul(x).numpy(), matrix.matmul(x, matrix.multiplied_out()).numpy(), allowed)


def test_quantized_activations():
    """int4_gemm_w4a8 with a packed matrix of this kind."""
    matrix = TwoLevels(24, 96, 16)
    q, scale, zero = w4a8.dynamic_per_token_int8_quant(torch.randn(5, 96), True, 8)
    none = torch.zeros(0)
    out = w4a8.int4_gemm_w4a8(q, scale, zero, matrix.pack(), none, none.int(), 16, None, None, torch.float32)
    weights = matrix.plain.arrays()[0]
    half_scales = e4m3fn(matrix.scales.numpy()) / 2
    recip, zp = scale.numpy()[:, 0], zero.numpy()[:, 0]
    want = reference.matmul_quantized(
        q.numpy(), zp, recip, weights, half_scales, np.zeros(24, np.float32), matrix.channels.numpy()
    )
    assert_same_bits(out, torch.from_numpy(want))


ERRORS = {
    "scales of floats": (
        {"scales_zeros": torch.zeros(24, 4)},
        r"scales_zeros has dtype (Float|float), expected float8_e4m3fn, or its bits as uint8, beside channel_scales",
    ),
    "no channel scales": (
        {"channel_scales": None},
        "scale type is e8m0, expected a float type for group = 16",
    ),
    "channel scales integer": (
        {"channel_scales": torch.ones(24, dtype=torch.int32)},
        r"channel_scales has dtype (Int|int), expected a floating point type",
    ),
    "too many channel scales": ({"channel_scales": torch.ones(25)}, r"channel_scales has shape \[25\], expected"),
    "channel scale a number": ({"channel_scales": torch.tensor(1.0)}, r"channel_scales has shape \[\], expected"),
    "channelwise": (
        {"block_size": 64, "scales_zeros": torch.zeros(24, 1, dtype=torch.uint8)},
        r"channel_scales is given, expected none for block_size = 64 and in_features = 64: groups of 16 alone",
    ),
    "groups of 32": (
        {"block_size": 32, "scales_zeros": torch.zeros(24, 2, dtype=torch.uint8)},
        r"channel_scales is given, expected none for block_size = 32 and in_features = 64: groups of 16 alone",
    ),
    "a NaN": (
        {"scales_zeros": torch.full((24, 4), 127, dtype=torch.uint8)},
        r"scales_zeros: element 0 is the float8_e4m3fn with bits 127, expected a number without a sign",
    ),
    "a sign": (
        {"scales_zeros": torch.full((24, 4), 129, dtype=torch.uint8)},
        r"scales_zeros: element 0 is the float8_e4m3fn with bits 129, expected a number without a sign",
    ),
}


@pytest.mark.parametrize("changed, message", ERRORS.values(), ids=ERRORS)
def test_errors(changed, message):
    with pytest.raises(RuntimeError, match="dyn_quant_pack_4bit_weight: " + message):
        TwoLevels(24, 64, 16).pack(**changed)


def test_unpack_of_three_results_refuses():
    packed = TwoLevels(24, 64, 16, "int4").pack()
    with pytest.raises(RuntimeError, match="packed_weights holds int4 with channel scales, expected int4: dyn_quant"):
        w4a8.dyn_quant_unpack_4bit_weight(packed, 16, 64, 24)


@compiles
def test_opcheck_and_meta():
    matrix = TwoLevels(24, 64, 16)
    arguments = (matrix.plain.weights, matrix.scales, None, 16, 64, 24)
    more = {"values": "e2m1", "channel_scales": matrix.channels}
    torch.library.opcheck(torch.ops.w4a8.dyn_quant_pack_4bit_weight.default, arguments, more)
    meta = matrix.pack(
        weights=matrix.plain.weights.to("meta"),
        scales_zeros=matrix.scales.to("meta"),
        channel_scales=matrix.channels.to("meta"),
    )
    assert meta.shape == matrix.pack().shape
