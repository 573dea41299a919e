"""Building blocks of the tests."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import reference
import torch

import w4a8
from w4a8.core.activation_groups import DEFAULT_ACTIVATION_GROUP

KERNELS = [kernel["name"] for kernel in w4a8.kernels() if kernel["supported"]]
# Of hypothesis: another one in each run (of each worker of xdist), unless it is given.
FUZZ_SEED = int(os.environ.get("W4A8_TEST_SEED") or random.SystemRandom().randrange(1, 2**32))
# The kinds of weights. zeros: int4 with zero points; int8 has them too. Of two levels: scales of 8 bits in groups of
# 16, and a number for each output feature; the last one is NVFP4.
KINDS = ["int4", "zeros", "e2m1"]
TWO_LEVELS = ["int4 of two levels", "zeros of two levels", "e2m1 of two levels"]
EVERY_KIND = [*KINDS, "int8", *TWO_LEVELS]
# Those of GGUF, in groups of at most 256; with super-scales in groups that divide 256, as 256 divides k.
INTEGERS = ["int4", "int6", "plain8"]
SUPERS = [*(f"{kind}{more} supers" for more in ("", " minimums") for kind in INTEGERS), "iq4 supers"]
OF_GGUF = [*(f"{kind} minimums" for kind in INTEGERS), "int6", "iq4", *SUPERS]
ALL_KINDS = [*EVERY_KIND, *OF_GGUF]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Relative error of rounding to a type, and what rounding below its normal range may add.
ROUNDING = {torch.float32: (0.0, 0.0), torch.bfloat16: (2.0**-8, 0.0), torch.float16: (2.0**-11, 2.0**-25)}

TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def bits(t):
    """The bits of a tensor as integers: equality of NaN and of signed zeros included."""
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()]).numpy()


def assert_same_bits(actual, expected, what=""):
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    different = np.argwhere(bits(actual) != bits(expected))
    if len(different):
        first = tuple(different[0])
        got, want = actual[first].item(), expected[first].item()
        raise AssertionError(
            f"{what}: {len(different)} of {actual.numel()} differ; {first}: {got!r}, expected {want!r}"
        )


def assert_within(actual, expected, allowed, what=""):
    """|actual - expected| <= allowed element by element, naming the worst one."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    excess = np.abs(actual - expected) - allowed
    bad = ~(excess <= 0)
    if bad.any():
        worst = np.unravel_index(np.nanargmax(np.where(bad, np.nan_to_num(excess, nan=np.inf), -np.inf)), excess.shape)
        raise AssertionError(
            f"{what}: {bad.sum()} of {bad.size} out of tolerance; worst at {worst}: {actual[worst]!r}, expected "
            f"{expected[worst]!r} +- {np.broadcast_to(allowed, bad.shape)[worst]!r}"
        )


def at_once(work, given):
    """The results of calls in a thread for each argument; raises their first error."""
    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(work, given))


def least_scales(scales, exponents=False):
    """Scales in the type of the fewest bytes that holds each of them exactly, which is what readers pack.

    exponents: e8m0 is among the types (e2m1 in groups that are multiples of 32), as uint8. Halves are not looked at.
    """
    wide = scales.double().numpy()
    fraction, exponent = np.frexp(wide)
    if exponents and (fraction == 0.5).all() and (exponent >= -126).all() and (exponent <= 128).all():
        return torch.from_numpy((exponent + 126).astype(np.uint8))
    single = wide.astype(np.float32)
    if not (single.view(np.uint32) & 0xFFFF).any():
        return scales.to(torch.bfloat16)
    with np.errstate(over="ignore"):
        half = single.astype(np.float16)
    return scales.to(torch.float16 if (half == single).all() else torch.float32)


def default_activation_group(group, k):
    """What weights made for float activations are packed with."""
    unit = k if group in (16, -1) else group
    fits = [size for size in (32, 64, 128) if size <= DEFAULT_ACTIVATION_GROUP and unit % size == 0]
    return max(fits, default=-1)


def stated_activation_group(quantization):
    """What a quantization_config asks for: -1 where it says that inputs are int8 per token, else None, the default."""
    scheme = quantization.get("config_groups", {}).get("group_0", {})
    inputs = scheme.get("input_activations") or {}
    per_token = inputs.get("type", "int") == "int" and inputs.get("num_bits", quantization.get("act_bits")) == 8
    return -1 if per_token else None


def exact_rows(rows, k, activation_group):
    """Integers that are their own quantization: nothing is rounded but products and sums."""
    if activation_group == -1:
        x = torch.randint(-128, 128, (rows, k)).float()
        x[:, 0], x[:, 1] = -128, 127
        return x
    x = torch.randint(-127, 128, (rows, k)).float()
    x[:, 3::activation_group] = -127
    return x


def from_numpy(a, dtype=None):
    t = torch.from_numpy(np.ascontiguousarray(a))
    return t if dtype is None else t.to(dtype)


@dataclass
class Matrix:
    """A random matrix, or a stack of them, as the pack operator takes it."""

    weights: torch.Tensor  # uint8 [N, K/2] or [E, N, K/2]; of int8 [..., N, K]
    scales: torch.Tensor  # [N, K/group]
    bias: torch.Tensor | None  # [N]
    n: int
    k: int
    group: int
    zero_points: torch.Tensor | None = None  # uint8 [N, K/group]
    values: str = "int4"
    activation_group: int = -1
    channels: torch.Tensor | None = None  # float32 [N]; scales are bits of float8_e4m3fn then
    minimums: torch.Tensor | None = None  # as the scales
    supers: torch.Tensor | None = None  # float16 [N, K/256]; scales and minimums are int8 then
    minimum_supers: torch.Tensor | None = None

    def arguments(self):
        """Of the pack operator, by name."""
        return {
            "weights": self.weights,
            "scales_zeros": self.scales,
            "bias": self.bias,
            "block_size": self.group,
            "in_features": self.k,
            "out_features": self.n,
            "zero_points": self.zero_points,
            "values": self.values,
            "channel_scales": self.channels,
            "activation_group": self.activation_group,
            "minimums": self.minimums,
            "super_scales": self.supers,
            "super_minimums": self.minimum_supers,
        }

    def pack(self, **changed):
        return w4a8.dyn_quant_pack_4bit_weight(**{**self.arguments(), **changed})

    def tensors(self):
        """Those that there are, by their names here."""
        names = ("weights", "scales", "bias", "zero_points", "channels", "minimums", "supers", "minimum_supers")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def arrays(self, expert=None):
        """(weights, scales, bias, channel scales, minimums) for reference.py, of one expert if it is a stack."""
        parts = {name: (part if expert is None else part[expert]) for name, part in self.tensors().items()}
        scales = (
            reference.e4m3fn(parts["scales"]) if "channels" in parts else floats(parts["scales"], parts.get("supers"))
        )
        minimums = floats(parts["minimums"], parts.get("minimum_supers")) if "minimums" in parts else None
        arrays = {name: part.float().numpy() for name, part in parts.items() if name in ("bias", "channels")}
        weights, zero_points = parts["weights"].numpy(), parts.get("zero_points")
        if zero_points is not None or self.values != "int4":
            zero_points = None if zero_points is None else zero_points.numpy()
            weights = reference.integers(weights, zero_points, self.values)
        if self.values == "e2m1":
            scales = scales * np.float32(0.5)
        elif minimums is not None and self.values == "int4":
            weights = reference.integers(weights, np.zeros(scales.shape, np.uint8), self.values)
        return weights, scales, arrays.get("bias"), arrays.get("channels"), minimums


def floats(numbers, supers):
    """float32 [N, G] of scales or minimums and their second level."""
    if supers is not None:
        numbers = numbers.float() * supers.float().repeat_interleave(numbers.shape[-1] // supers.shape[-1], -1)
    return numbers.float().numpy()


def has(kind, group, k):
    """Whether there are matrices of a kind in such groups."""
    if kind in TWO_LEVELS:
        return group == 16 and k != 16
    if kind in SUPERS:
        return group in (16, 32, 64, 128) and k % 256 == 0
    return "minimums" not in kind or (group < k and group <= 256)


def grouped(kind, group=32):
    """The group, but 16 of those that have no other."""
    return 16 if kind in TWO_LEVELS else group


def activation_groups(group, k):
    """Those that matrices in such groups may want: -1, and of 32, 64 and 128."""
    unit = k if group == 16 else group
    return [-1, *(size for size in (32, 64, 128) if unit % size == 0)]


def packed_size(matrix):
    """Bytes of a packed matrix as docs/packed_layout.md says."""

    def lines(count):
        return -(-count // 64) * 64

    groups, blocks = matrix.k // matrix.group, 0 if matrix.supers is None else matrix.k // 256
    of_group = 16 * (matrix.scales.element_size() + (matrix.zero_points is not None))
    record = next((m for m in range(1, groups) if m * of_group % 64 == 0), groups)
    if blocks:
        record = 256 // matrix.group
    heads = -(-groups // record) * lines(record * of_group + (32 if blocks else 0))
    of_minimums = 0 if matrix.minimums is None else lines(groups * of_group + blocks * 32)
    steps = -(-matrix.k // 8) * (128 if matrix.values == "int8" else 64)
    if matrix.values == "int6":
        steps = -(-matrix.k // 16) * 192
    more = 2 if matrix.channels is None else 3
    return 64 + -(-matrix.n // 16) * (heads + steps + 64 * more + of_minimums)


def make_matrix(
    n,
    k,
    group,
    scale_dtype=torch.float32,
    bias=False,
    experts=None,
    bias_dtype=torch.float32,
    kind="int4",
    activation_group=-1,
):
    two_levels, supers, has_minimums = kind in TWO_LEVELS, kind in SUPERS, "minimums" in kind
    kind = kind.removesuffix(" of two levels").removesuffix(" supers").removesuffix(" minimums")
    values = {"plain8": "int8"}.get(kind, kind if kind in ("e2m1", "int6", "int8", "iq4") else "int4")
    lead = [] if experts is None else [experts]
    shape = [*lead, n, k if values in ("int6", "int8") else k // 2]
    weights = torch.randint(0, 64 if values == "int6" else 256, shape, dtype=torch.uint8)
    # Scales such that outputs are of order 1 for inputs of order 1; of two levels their root mean square is about 130.
    least = 1 / ({"int6": 16, "int8": 64, "iq4": 64}.get(values, 4) * k**0.5)
    scales = ((torch.rand([*lead, n, k // group]) + 0.5) * least).to(scale_dtype)
    minimums = (8 * least * torch.randn(scales.shape)).to(scale_dtype) if has_minimums else None
    channels = super_scales = super_minimums = None
    if supers:  # scales of 6 bits, as K-quants have them, and of 8
        scales = torch.randint(-128, 128, scales.shape).to(torch.int8) >> 2 * int(values == "int4")
        super_scales = ((torch.rand([*lead, n, k // 256]) - 0.5) * least / 32).half()
        if has_minimums:
            minimums = torch.randint(-128, 128, scales.shape).to(torch.int8)
            super_minimums = ((torch.rand([*lead, n, k // 256]) - 0.5) * least / 16).half()
    if two_levels:
        scales = torch.randint(0, 127, scales.shape, dtype=torch.uint8)
        channels = (torch.rand([*lead, n]) + 0.5) / (500 * k**0.5)
    bias = torch.randn([*lead, n]).to(bias_dtype) if bias else None
    most = {"zeros": 16, "int8": 256}.get(kind)
    zero_points = None if most is None else torch.randint(0, most, scales.shape, dtype=torch.uint8)
    more = (channels, minimums, super_scales, super_minimums)
    return Matrix(weights, scales, bias, n, k, group, zero_points, values, activation_group, *more)


def matmul(x, matrix, packed):
    return w4a8.dyn_quant_matmul_4bit(x, packed, matrix.group, matrix.k, matrix.n)


def unpack(matrix, packed=None):
    """(weights, scales, zero points, bias, values, channel scales)"""
    packed = matrix.pack() if packed is None else packed
    return w4a8.dyn_quant_unpack_any_4bit_weight(packed, matrix.group, matrix.k, matrix.n)[:6]


def expected(x, matrix):
    """reference.matmul on the rows of x, rounded to the type of x by torch."""
    rows = x.reshape(-1, matrix.k).float().numpy()
    y = reference.matmul(rows, *matrix.arrays(), activation_group=matrix.activation_group)
    y[np.isnan(y)] = np.nan  # the canonical one
    return from_numpy(y).to(x.dtype).reshape(*x.shape[:-1], matrix.n)


def check(x, matrix, what=""):
    """The matmul gives the bits of the reference."""
    assert_same_bits(matmul(x, matrix, matrix.pack()), expected(x, matrix), what)


@dataclass
class Layer:
    """A random mixture-of-experts layer."""

    w13: Matrix
    w2: Matrix
    hidden: int
    intermediate: int
    gated: bool
    group_size: int  # as the operator takes it: -1 is channelwise

    def __post_init__(self):
        self.w13_packed, self.w2_packed = self.w13.pack(), self.w2.pack()
        self.experts = len(self.w13_packed)

    @property
    def w13_rows(self):
        return self.intermediate * (2 if self.gated else 1)

    def arrays(self):
        return [[m.arrays(e) for e in range(self.experts)] for m in (self.w13, self.w2)]

    def __call__(self, x, ids, router, kind=0, weight_on_input=False, **numbers):
        sizes = (self.hidden, self.intermediate, self.w13_rows, self.group_size)
        how = (*sizes, weight_on_input, kind)
        return w4a8.dynamic_4bit_int_moe(x, ids, router, self.w13_packed, self.w2_packed, *how, **numbers)


def make_layer(
    experts,
    hidden,
    intermediate,
    group_size=32,
    gated=True,
    bias=False,
    scale_dtype=torch.float32,
    kinds=("int4", "int4"),
    activation_groups=(-1, -1),
):
    """group_size: of both matrices; a pair: of w13 and of w2, which the operator takes as 0."""
    group = [hidden, intermediate] if group_size == -1 else [group_size, group_size]
    if isinstance(group_size, tuple):
        group, group_size = group_size, 0
    rows = intermediate * (2 if gated else 1)
    how = [{"kind": kind, "activation_group": size} for kind, size in zip(kinds, activation_groups)]
    w13 = make_matrix(rows, hidden, group[0], scale_dtype, bias, experts, **how[0])
    w2 = make_matrix(hidden, intermediate, group[1], scale_dtype, bias, experts, **how[1])
    return Layer(w13, w2, hidden, intermediate, gated, group_size)


def check_layer(layer, x, ids, router, kind=0, weight_on_input=False, what="", most=None, **numbers):
    """The fused operator is as near to reference.moe as it must be; returns its output.

    numbers: limit, alpha, beta.
    most: the largest share of the output that may be granted to it, of the medians.
    """
    out = layer(x, ids, router, kind, weight_on_input, **numbers)
    assert out.dtype == x.dtype
    assert out.shape == x.shape
    rows = x.reshape(-1, layer.hidden).float().numpy()
    groups = (layer.w13.activation_group, layer.w2.activation_group)
    options = (layer.intermediate, layer.gated, weight_on_input, int(kind), groups, numbers)
    want, explained = reference.moe(rows, ids.numpy(), router.float().numpy(), *layer.arrays(), *options)
    # Rounding to the output type adds half a unit in the last place of a number that may itself be off by `explained`.
    relative, absolute = ROUNDING[x.dtype]
    allowed = explained + relative * (abs(want) + explained) + absolute
    assert_within(out.reshape(-1, layer.hidden).double().numpy(), want, allowed, what)
    assert most is None or np.median(explained) < most * np.median(abs(want))
    return out


def route(tokens, top_k, experts, dtype=torch.int64):
    """Distinct random experts per token (repeated ones if top_k > experts) and normalized weights."""
    if top_k <= experts:
        ids = torch.rand(tokens, experts).argsort(1)[:, :top_k].contiguous()
    else:
        ids = torch.randint(0, experts, (tokens, top_k))
    return ids.to(dtype), torch.softmax(torch.randn(tokens, top_k), 1)
