"""Building blocks of the tests."""

import os
import random
from dataclasses import dataclass

import numpy as np
import reference
import torch

import w4a8
from w4a8.core.activation_groups import DEFAULT_ACTIVATION_GROUP

KERNELS = [kernel["name"] for kernel in w4a8.kernels() if kernel["supported"]]
# Of hypothesis: another one in each run (of each worker of xdist), unless it is given.
FUZZ_SEED = int(os.environ.get("W4A8_TEST_SEED") or random.SystemRandom().randrange(1, 2**32))
KINDS = ["int4", "zeros", "e2m1"]  # the kinds of weights; zeros: int4 with zero points
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

    def pack(self):
        return w4a8.dyn_quant_pack_4bit_weight(
            self.weights,
            self.scales,
            self.bias,
            self.group,
            self.k,
            self.n,
            zero_points=self.zero_points,
            values=self.values,
            activation_group=self.activation_group,
        )

    def arrays(self, expert=None):
        """(weights, scales, bias) for reference.py, of one expert if this is a stack."""
        parts = [self.weights, self.scales.float(), None if self.bias is None else self.bias.float(), self.zero_points]
        parts = [None if p is None else (p if expert is None else p[expert]).numpy() for p in parts]
        weights, scales, bias, zero_points = parts
        if zero_points is None and self.values == "int4":
            return weights, scales, bias
        half = np.float32(0.5 if self.values == "e2m1" else 1)
        return reference.integers(weights, zero_points, self.values), scales * half, bias


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
    lead = [] if experts is None else [experts]
    weights = torch.randint(0, 256, [*lead, n, k if kind == "int8" else k // 2], dtype=torch.uint8)
    # Scales such that outputs are of order 1 for inputs of order 1.
    scales = ((torch.rand([*lead, n, k // group]) + 0.5) / ((64 if kind == "int8" else 4) * k**0.5)).to(scale_dtype)
    bias = torch.randn([*lead, n]).to(bias_dtype) if bias else None
    zero_points = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if kind == "zeros" else None
    if kind == "int8":
        zero_points = torch.randint(0, 256, scales.shape, dtype=torch.uint8)
    values = kind if kind in ("e2m1", "int8") else "int4"
    return Matrix(weights, scales, bias, n, k, group, zero_points, values, activation_group)


def matmul(x, matrix, packed):
    return w4a8.dyn_quant_matmul_4bit(x, packed, matrix.group, matrix.k, matrix.n)


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

    def __call__(self, x, ids, router, kind=0, weight_on_input=False):
        sizes = (self.hidden, self.intermediate, self.w13_rows, self.group_size)
        return w4a8.dynamic_4bit_int_moe(x, ids, router, self.w13_packed, self.w2_packed, *sizes, weight_on_input, kind)


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
    group = [hidden, intermediate] if group_size == -1 else [group_size, group_size]
    rows = intermediate * (2 if gated else 1)
    how = [{"kind": kind, "activation_group": size} for kind, size in zip(kinds, activation_groups)]
    w13 = make_matrix(rows, hidden, group[0], scale_dtype, bias, experts, **how[0])
    w2 = make_matrix(hidden, intermediate, group[1], scale_dtype, bias, experts, **how[1])
    return Layer(w13, w2, hidden, intermediate, gated, group_size)


def route(tokens, top_k, experts, dtype=torch.int64):
    """Distinct random experts per token (repeated ones if top_k > experts) and normalized weights."""
    if top_k <= experts:
        ids = torch.rand(tokens, experts).argsort(1)[:, :top_k].contiguous()
    else:
        ids = torch.randint(0, experts, (tokens, top_k))
    return ids.to(dtype), torch.softmax(torch.randn(tokens, top_k), 1)
