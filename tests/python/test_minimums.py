"""Minimums, and scales of two levels in K-quants' manner, through every operator: weights as GGUF files have them."""

import pytest
import torch
from common import (
    DTYPES,
    OF_GGUF,
    SUPERS,
    TORCH_VERSION,
    assert_same_bits,
    check,
    check_layer,
    make_layer,
    make_matrix,
    matmul,
    route,
)

import w4a8

of_gguf = pytest.mark.parametrize("kind", OF_GGUF)
compiles = pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason=f"torch {TORCH_VERSION} has no opcheck")
# m, n, k, group
SHAPES = [(1, 1, 256, 16), (3, 17, 256, 32), (9, 33, 512, 64), (17, 40, 768, 128), (70, 16, 256, 16), (2, 50, 1280, 32)]
# Of float scales alone: odd numbers of groups, one group, the largest.
MORE_SHAPES = [(5, 48, 32, 16), (4, 31, 96, 32), (7, 20, 480, 96), (13, 19, 512, 256), (6, 33, 80, 16)]


def activation_groups(group):
    return [-1, *(size for size in (32, 64, 128) if group == 16 or group % size == 0)]


@of_gguf
def test_matmul_bits(kernel, kind):
    for i, (m, n, k, group) in enumerate(SHAPES if kind in SUPERS else SHAPES + MORE_SHAPES):
        for size in activation_groups(group):
            if size != -1 and k % size != 0:
                continue
            matrix = make_matrix(n, k, group, DTYPES[i % 3], i % 2 == 1, kind=kind, activation_group=size)
            check(torch.randn(m, k).to(DTYPES[(i + 1) % 3]), matrix, f"{(m, n, k, group)}, activations in {size}")


@of_gguf
@pytest.mark.sweep
def test_every_number_of_rows(kernel, kind):
    for size in (-1, 32):
        matrix = make_matrix(37, 256, 32, kind=kind, activation_group=size)
        for m in (*range(1, 30), 47, 70):
            check(torch.randn(m, 256), matrix, f"{m} rows, activations in {size}")


@of_gguf
@pytest.mark.parametrize("value", [0x00, 0xFF, 0x0F, 0xF0], ids=hex)
def test_extreme_values(kernel, value, kind):
    """Codes at both ends against rows of -128 and 127, scales and minimums at the ends of int8."""
    for group in (16, 128) if kind in SUPERS else (32, 256):
        matrix = make_matrix(18, 2048, group, kind=kind)
        matrix.weights.fill_(value & 0x3F if matrix.values == "int6" else value)
        for part in (matrix.scales, matrix.minimums):
            if part is not None and part.dtype == torch.int8:
                part[::2], part[1::2] = -128, 127
        x = torch.zeros(4, 2048)
        x[0], x[1] = 1.0, -1.0
        x[2] = torch.tensor([255.0, 0.0]).repeat(1024)
        x[3] = torch.tensor([-128.0, 127.0]).repeat(1024)
        check(x, matrix, f"groups of {group}")


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


@of_gguf
@pytest.mark.parametrize("experts", [None, 3], ids=["matrix", "stack"])
def test_unpack_is_the_inverse(kind, experts):
    for i, (_, n, k, group) in enumerate(SHAPES if kind in SUPERS else SHAPES + MORE_SHAPES):
        matrix = make_matrix(n, k, group, DTYPES[i % 3], i % 2 == 1, experts, kind=kind)
        packed = matrix.pack()
        found = w4a8.dyn_quant_unpack_any_4bit_weight(packed, group, k, n)
        expected = {
            "weights": matrix.weights,
            "scales_zeros": matrix.scales,
            "bias": matrix.bias,
            "minimums": matrix.minimums,
            "super_scales": matrix.supers,
            "super_minimums": matrix.minimum_supers,
            "zero_points": None,
            "channel_scales": None,
        }
        assert found.values == matrix.values
        for name, part in expected.items():
            if part is None:
                assert getattr(found, name).numel() == 0, name
            else:
                assert_same_bits(getattr(found, name), part, name)
        one = packed if experts is None else packed[1]
        header = w4a8.read_header(one)
        assert header["has_minimums"] == ("minimums" in kind)
        scale_type = "super" if kind in SUPERS else str(matrix.scales.dtype).removeprefix("torch.")
        assert header["scale_dtype"] == scale_type and header["bytes"] == one.numel() == packed_size(matrix)


def packed_size(matrix):
    """Bytes as docs/packed_layout.md says."""

    def lines(count):
        return -(-count // 64) * 64

    groups, size = matrix.k // matrix.group, matrix.scales.element_size()
    supers = matrix.supers is not None
    record = 256 // matrix.group if supers else next((m for m in range(1, groups) if m * 16 * size % 64 == 0), groups)
    head = lines(record * 16 * size + (32 if supers else 0))
    minimums = lines(groups * 16 * size + (matrix.k // 256 * 32 if supers else 0))
    steps = -(-matrix.k // 8) * (128 if matrix.values == "int8" else 64)
    if matrix.values == "int6":
        steps = -(-matrix.k // 16) * 192
    panel = -(-groups // record) * head + steps + 2 * 64
    return 64 + -(-matrix.n // 16) * (panel + (minimums if matrix.minimums is not None else 0))


@pytest.mark.parametrize("groups", [(-1, -1), (32, 32)], ids=["per token", "groups of 32"])
@pytest.mark.parametrize(
    ("kinds", "group"),
    [
        *(((kind, kind), 32) for kind in OF_GGUF),
        (("int4 minimums supers", "int6 supers"), (32, 16)),  # Q4_K beside Q6_K
        (("int4", "int4 minimums"), 32),
        (("int4", "int8"), (128, 32)),
    ],
    ids=str,
)
def test_fused_operator(kernel, kinds, group, groups):
    layer = make_layer(3, 256, 256, group, bias=True, kinds=kinds, activation_groups=groups)
    for tokens in (1, 5, 40):
        ids, router = route(tokens, 2, 3)
        ids[0, 0] = -1
        check_layer(layer, torch.randn(tokens, 256), ids, router, what=f"{tokens} tokens", most=0.1)


@compiles
@of_gguf
def test_meta_and_compile(kind):
    matrix = make_matrix(20, 256, 32, kind=kind, experts=2)
    arguments = matrix.arguments()
    values = [
        arguments.pop(name) for name in ("weights", "scales_zeros", "bias", "block_size", "in_features", "out_features")
    ]
    torch.library.opcheck(torch.ops.w4a8.dyn_quant_pack_4bit_weight.default, tuple(values), arguments)
    packed = matrix.pack()[0]
    torch._dynamo.reset()  # there are more kinds than variants of one function that torch keeps
    compiled = torch.compile(lambda x: torch.ops.w4a8.dyn_quant_matmul_4bit(x, packed, 32, 256, 20), fullgraph=True)
    x = torch.randn(3, 256)
    assert_same_bits(compiled(x), torch.ops.w4a8.dyn_quant_matmul_4bit(x, packed, 32, 256, 20))


HALVES = torch.ones(24, 1, dtype=torch.float16)
# Kind of [24, 256] in groups of 32: what is changed, and the message.
ERRORS = {
    "shape": (
        "int4 minimums",
        {"minimums": torch.ones(24, 7)},
        r"minimums has shape \[24, 7\], expected that of scales_zeros, \[24, 8\]",
    ),
    "type": ("int4 minimums", {"minimums": torch.ones(24, 8).half()}, r"minimums has dtype .*, expected float32"),
    "e2m1": ("int4 minimums", {"values": "e2m1"}, "minimums beside e2m1, expected them beside int4, int8 or int6"),
    "zero points": (
        "int4 minimums",
        {"zero_points": torch.ones(24, 8, dtype=torch.uint8)},
        "minimums beside int4 with zero points, expected them beside int4, int8 or int6 without zero points",
    ),
    "channelwise": (
        "int4 minimums",
        {"block_size": 256, "scales_zeros": torch.ones(24, 1), "minimums": torch.ones(24, 1)},
        r"minimums in groups of 256 \(channelwise\), expected groups of at most 256",
    ),
    "meta": ("int4 minimums", {"minimums": torch.ones(24, 8, device="meta")}, "minimums is on device meta"),
    "float scales beside super-scales": (
        "int4 supers",
        {"scales_zeros": torch.ones(24, 8)},
        r"scales_zeros has dtype (Float|float), expected int8 beside super_scales",
    ),
    "no super-scales": (
        "int4 supers",
        {"super_scales": None},
        r"scales_zeros has dtype (Char|signed char|int8), expected",
    ),
    "type of super-scales": (
        "int4 supers",
        {"super_scales": HALVES.float()},
        r"super_scales has dtype (Float|float), expected float16",
    ),
    "shape of super-scales": (
        "int4 supers",
        {"super_scales": HALVES[:, :0]},
        r"super_scales has shape \[24, 0\], expected",
    ),
    "no super-minimums": (
        "int4 minimums supers",
        {"super_minimums": None},
        "super_minimums is not given, expected it beside minimums and super_scales",
    ),
    "super-minimums alone": (
        "int4 supers",
        {"super_minimums": HALVES},
        "super_minimums is given, expected none without minimums and super_scales",
    ),
    "both levels": (
        "int4 supers",
        {"block_size": 16, "scales_zeros": torch.ones(24, 16, dtype=torch.int8), "channel_scales": torch.ones(24)},
        "super_scales is given beside channel_scales, expected one of both",
    ),
    "super-scales of groups of 256": (
        "int4 supers",
        {"block_size": 256, "scales_zeros": torch.ones(24, 1, dtype=torch.int8)},
        "scale type is super, expected a float type for k = 256 and group = 256",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    kind, changes, message = ERRORS[case]
    with pytest.raises(RuntimeError, match=r"^w4a8::dyn_quant_pack_4bit_weight: .*" + message):
        make_matrix(24, 256, 32, kind=kind).pack(**changes)


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


def test_old_operators_refuse_minimums():
    packed = make_matrix(24, 256, 32, kind="int4 minimums").pack()
    with pytest.raises(RuntimeError, match="packed_weights holds int4 with minimums, expected int4"):
        w4a8.dyn_quant_unpack_4bit_weight(packed, 32, 256, 24)


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
