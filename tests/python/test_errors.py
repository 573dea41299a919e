"""Every bad argument is refused with a message that says which one, what it was, and what was expected."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from common import assert_same_bits, make_layer, make_matrix, route
from op_samples import op_samples

import w4a8


def refuse(call, message):
    with pytest.raises(RuntimeError, match=message) as error:
        call()
    assert not isinstance(error.value, NotImplementedError)


# --- pack: weights [24, 32] (K = 64), scales [24, 2], bias [24] ---------------------------------------------------------


def pack_arguments(experts=None):
    m = make_matrix(24, 64, 32, bias=True, experts=experts)
    return {
        "weights": m.weights, "scales_zeros": m.scales, "bias": m.bias,
        "block_size": 32, "in_features": 64, "out_features": 24,
    }  # fmt: skip


PACK = {
    "weights int8": ({"weights": torch.zeros(24, 32, dtype=torch.int8)}, r"weights has dtype (Char|signed char|int8), expected uint8"),
    "weights float": ({"weights": torch.zeros(24, 32)}, r"weights has dtype (Float|float), expected uint8"),
    "weights 1-D": ({"weights": torch.zeros(768, dtype=torch.uint8)}, r"weights has shape \[768\], expected \[24, 32\] or \[E, 24, 32\]"),
    "weights 4-D": ({"weights": torch.zeros(1, 1, 24, 32, dtype=torch.uint8)}, r"weights has shape \[1, 1, 24, 32\], expected"),
    "weights unpacked": ({"weights": torch.zeros(24, 64, dtype=torch.uint8)}, r"weights has shape \[24, 64\], expected \[24, 32\]"),
    "weights transposed": ({"weights": torch.zeros(32, 24, dtype=torch.uint8)}, r"weights has shape \[32, 24\], expected \[24, 32\]"),
    "scales uint8": ({"scales_zeros": torch.zeros(24, 2, dtype=torch.uint8)}, "scale type is e8m0, expected a float type for int4"),
    "scales float64": ({"scales_zeros": torch.zeros(24, 2).double()}, r"scales_zeros has dtype (Double|double), expected float32, bfloat16, float16"),
    "scales 1-D": ({"scales_zeros": torch.zeros(48)}, r"scales_zeros has shape \[48\], expected \[24, 2\] for block_size = 32"),
    "scales of another group": ({"scales_zeros": torch.zeros(24, 1)}, r"scales_zeros has shape \[24, 1\], expected \[24, 2\]"),
    "scales of other rows": ({"scales_zeros": torch.zeros(23, 2)}, r"scales_zeros has shape \[23, 2\], expected \[24, 2\]"),
    "scales of a stack": ({"scales_zeros": torch.zeros(3, 24, 2)}, r"scales_zeros has shape \[3, 24, 2\], expected \[24, 2\]"),
    "bias integer": ({"bias": torch.zeros(24, dtype=torch.int32)}, r"bias has dtype (Int|int), expected a floating point type"),
    "bias too long": ({"bias": torch.zeros(25)}, r"bias has shape \[25\], expected \[24\]"),
    "bias 2-D": ({"bias": torch.zeros(24, 1)}, r"bias has shape \[24, 1\], expected \[24\]"),
    "group 8": ({"block_size": 8}, r"group \(block_size\) is 8, expected k = 64 \(channelwise\), or 16 or a multiple of 32"),
    "group 48": ({"block_size": 48}, r"group \(block_size\) is 48, expected"),
    "group does not divide": ({"block_size": 96}, r"group \(block_size\) is 96, expected k = 64"),
    "group 0": ({"block_size": 0}, r"group \(block_size\) is 0, expected"),
    "group -1": ({"block_size": -1}, r"group \(block_size\) is -1, expected"),
    "K odd": ({"in_features": 63, "block_size": 63}, r"k \(in_features\) is 63, expected an even number"),
    "K zero": ({"in_features": 0, "block_size": 0}, r"k \(in_features\) is 0, expected an even number in 2\.\.1048576"),
    "K negative": ({"in_features": -64}, r"k \(in_features\) is -64, expected"),
    "K too large": ({"in_features": 2**20 + 32}, r"k \(in_features\) is 1048608, expected"),
    "N zero": ({"out_features": 0}, r"n \(out_features\) is 0, expected"),
    "N of other weights": ({"out_features": 25}, r"weights has shape \[24, 32\], expected \[25, 32\]"),
}  # fmt: skip


PACK_STACK = {
    "scales without E": ({"scales_zeros": torch.zeros(24, 2)}, r"scales_zeros has shape \[24, 2\], expected \[3, 24, 2\]"),
    "scales of other E": ({"scales_zeros": torch.zeros(2, 24, 2)}, r"scales_zeros has shape \[2, 24, 2\], expected \[3, 24, 2\]"),
    "bias without E": ({"bias": torch.zeros(24)}, r"bias has shape \[24\], expected \[3, 24\]"),
    "bias of other E": ({"bias": torch.zeros(4, 24)}, r"bias has shape \[4, 24\], expected \[3, 24\]"),
}  # fmt: skip


# --- matmul ---------------------------------------------------------------------------------------------------------------


def matmul_arguments():
    m = make_matrix(24, 64, 32, bias=True)
    return {
        "inp": torch.randn(3, 64), "packed_weights": m.pack(),
        "block_size": 32, "in_features": 64, "out_features": 24,
    }  # fmt: skip


MATMUL = {
    "inp double": ({"inp": torch.zeros(3, 64).double()}, r"inp has dtype (Double|double), expected float32, bfloat16 or float16"),
    "inp int8": ({"inp": torch.zeros(3, 64, dtype=torch.int8)}, r"inp has dtype (Char|signed char|int8), expected float32"),
    "inp 0-D": ({"inp": torch.tensor(1.0)}, r"inp has shape \[\], expected \[\.\.\., 64\] for in_features = 64"),
    "inp of other K": ({"inp": torch.zeros(3, 62)}, r"inp has shape \[3, 62\], expected \[\.\.\., 64\] for in_features = 64"),
    "inp of other K, no rows": ({"inp": torch.zeros(0, 62)}, r"inp has shape \[0, 62\], expected \[\.\.\., 64\]"),
    "packed float": ({"packed_weights": torch.zeros(1000)}, r"packed_weights has dtype (Float|float), expected uint8"),
    "packed 2-D": ({"packed_weights": torch.zeros(2, 500, dtype=torch.uint8)}, r"packed_weights has shape \[2, 500\], expected \[bytes\]"),
    "other group": ({"block_size": 64}, r"dyn_quant_matmul_4bit: packed_weights: group is 32, expected 64 \(channelwise\)"),
    "other N": ({"out_features": 25}, r"packed_weights: n \(out_features\) is 24, expected 25"),
    "other K": ({"inp": torch.zeros(3, 96), "in_features": 96}, r"packed_weights: k \(in_features\) is 64, expected 96"),
    "group 48": ({"block_size": 48}, r"dyn_quant_matmul_4bit: group \(block_size\) is 48, expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["other group", "other N", "other K", "packed float", "group 48"])
def test_unpack(name):
    changes, message = MATMUL[name]
    arguments = {k: v for k, v in {**matmul_arguments(), **changes}.items() if k != "inp"}
    message = message.replace("dyn_quant_matmul_4bit", "dyn_quant_unpack_4bit_weight")
    refuse(lambda: w4a8.dyn_quant_unpack_4bit_weight(**arguments), message)


def test_unpack_shapes():
    for shape in ([], [2, 3, 4]):
        packed = torch.zeros(shape, dtype=torch.uint8)
        refuse(lambda: w4a8.dyn_quant_unpack_4bit_weight(packed, 32, 64, 24), "packed_weights has shape")  # noqa: B023
    packed = torch.zeros(0, 3136, dtype=torch.uint8)
    refuse(lambda: w4a8.dyn_quant_unpack_4bit_weight(packed, 32, 64, 24), "expected at least one expert")
    stack = make_matrix(24, 64, 32, experts=3).pack()
    stack[2, 8] = 6
    refuse(lambda: w4a8.dyn_quant_unpack_4bit_weight(stack, 32, 64, 24), r"packed_weights\[2\]: version is 6")
    plain, biased = (make_matrix(24, 64, 32, bias=bias).pack() for bias in (False, True))
    stack = torch.stack([plain, biased])  # of as many bytes
    refuse(lambda: w4a8.dyn_quant_unpack_4bit_weight(stack, 32, 64, 24), r"packed_weights\[1\] has another kind")


def spoilt(at, value):
    def change(packed):
        packed = packed.clone()
        packed[at] = value
        return packed

    return change


# What happened to the bytes, and the field that the message must name. Offsets: docs/packed_layout.md.
DAMAGE = {
    "magic": (spoilt(0, 0), "magic is not 'W4A8PACK'"),
    "version": (spoilt(8, 6), "version is 6, this library reads version 5"),
    "an early version": (spoilt(8, 4), "version is 4: packed before w4a8 0.1, pack the weights again"),
    "values": (spoilt(12, 5), r"values are 5, expected 0 \(int4\), 1 \(e2m1\), 2 \(int8\), 3 \(iq4\) or 4 \(int6\)"),
    "flags": (
        spoilt(14, 17),
        r"flags are 17, expected a sum of 1 \(bias\), 2 \(zero points\), 4 \(channel scales\) and 8 \(minimums\)",
    ),
    "channel scales": (spoilt(14, 4), r"flags are 4, expected 4 \(channel scales\) not among them"),
    "activation group": (spoilt(40, 0), r"activation_group is -256, expected -1"),
    "n": (spoilt(16, 23), r"(n \(out_features\) is 23, expected 24|size is)"),
    "n negative": (spoilt(slice(16, 24), 0xFF), r"n \(out_features\) is -1, expected 1"),
    "k": (spoilt(24, 63), r"k \(in_features\) is 63, expected an even number"),
    "group": (spoilt(32, 33), r"group \(block_size\) is 33, expected k = 64"),
    "scale type": (spoilt(13, 9), "scale type is 9, expected 0"),
    "scale type of other values": (spoilt(13, 4), "scale type is e8m0, expected a float type for int4"),
    "reserved": (spoilt(60, 1), "reserved bytes of the header are not zero"),
    "truncated": (lambda p: p[:-1], r"size is \d+ bytes, its header .* needs \d+"),
    "only a header": (lambda p: p[:64], r"size is 64 bytes, its header .* needs \d+"),
    "half a header": (lambda p: p[:63], "size is 63 bytes, less than the header"),
    "empty": (lambda p: p[:0], "size is 0 bytes, less than the header"),
    "too long": (lambda p: torch.cat([p, p.new_zeros(1)]), r"size is \d+ bytes, its header .* needs \d+"),
    "two of them": (lambda p: torch.cat([p, p]), r"size is \d+ bytes, its header .* needs \d+"),
    "zeros": (torch.zeros_like, "magic is not"),
    "random": (lambda p: torch.randint(0, 256, p.shape, dtype=torch.uint8), "magic is not"),
    "one byte off": (lambda p: torch.cat([p.new_zeros(1), p])[:-1], "magic is not"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_packed_tensor(name):
    damage, message = DAMAGE[name]
    arguments = matmul_arguments()
    arguments["packed_weights"] = damage(arguments["packed_weights"])
    refuse(lambda: w4a8.dyn_quant_matmul_4bit(**arguments), "packed_weights: " + message)
    del arguments["inp"]
    refuse(lambda: w4a8.dyn_quant_unpack_4bit_weight(**arguments), "packed_weights: " + message)
    if name != "n":
        with pytest.raises(ValueError, match=message):
            w4a8.read_header(arguments["packed_weights"].contiguous())


def documented_bytes(n, k, group):
    """docs/packed_layout.md with float32 scales; None for what is no shape."""
    if not (1 <= n <= 2**31 and 2 <= k <= 2**20 and k % 2 == 0):
        return None
    if group != k and not (group >= 32 and group % 32 == 0 and k % group == 0):
        return None
    panel = 64 * -(-k // 8) + 16 * 4 * (k // group) + 64 + 64
    return 64 + -(-n // 16) * -(-panel // 64) * 64


def test_random_headers_never_get_through():
    """Random n, k and group in a header that is right otherwise: read if the shape has this size, and never computed."""
    generator = np.random.default_rng(0)
    arguments = matmul_arguments()
    good = arguments["packed_weights"]
    # (16, 160, 32) and (17..32, 64, 32), (17..32, 66, 66) ... need as many bytes as there are, or nearly.
    near = ([*range(50), -24, 2**31], [*range(200), -64, 2**20], [*range(-1, 200), 2**20])
    accepted = 0
    for i in range(4000):
        shape = [int(generator.choice(values)) for values in near]
        if i % 2:
            shape[2] = shape[1]  # channelwise
        if i % 5 == 0:
            shape[i % 3] = int(generator.integers(-(2**63), 2**63 - 1))
        packed = good.clone()
        packed[16:40] = torch.from_numpy(np.array(shape, dtype="<i8").view(np.uint8))
        arguments["packed_weights"] = packed
        if shape != [24, 64, 32]:
            refuse(lambda: w4a8.dyn_quant_matmul_4bit(**arguments), "packed_weights: ")
        if documented_bytes(*shape) == good.numel():
            header = w4a8.read_header(packed)
            assert [header["n"], header["k"], header["group"]] == shape
            accepted += 1
        else:
            with pytest.raises(ValueError, match=r"n \(out_features\)|k \(in_features\)|group \(block_size\)|size is"):
                w4a8.read_header(packed)
    assert accepted > 10


def test_read_header_refuses_strided_memory():
    packed = make_matrix(24, 64, 32).pack()
    with pytest.raises(ValueError, match="not contiguous"):
        w4a8.read_header(np.repeat(packed.numpy(), 2)[::2])


# --- MoE: 4 experts, H = 64, I = 32, gated, group 32 --------------------------------------------------------------------------


def moe_arguments():
    layer = make_layer(4, 64, 32)
    ids, router = route(5, 2, 4)
    return {
        "x": torch.randn(5, 64), "topk_ids": ids, "topk_weights": router,
        "w13_packed": layer.w13_packed, "w2_packed": layer.w2_packed,
        "H": 64, "I": 32, "I2": 64, "group_size": 32, "apply_router_weight_on_input": False, "activation_kind": 0,
    }  # fmt: skip


KNOWN_KINDS = r"0 \(SiLU\(g\)\*u\).*1 .*2 .*3 .*4 .*5 .*6 .*7 .*8 "
MOE = {
    "x double": ({"x": torch.zeros(5, 64).double()}, r"x has dtype (Double|double), expected float32, bfloat16 or float16"),
    "x 0-D": ({"x": torch.tensor(0.0)}, r"x has no dimensions, expected \[\.\.\., H\]"),
    "x of other H": ({"x": torch.zeros(5, 32)}, r"x has shape \[5, 32\], expected \[\.\.\., 64\] for H = 64"),
    "ids float": ({"topk_ids": torch.zeros(5, 2)}, r"topk_ids has dtype (Float|float), expected int32 or int64"),
    "ids int16": ({"topk_ids": torch.zeros(5, 2, dtype=torch.int16)}, r"topk_ids has dtype (Short|short), expected int32 or int64"),
    "ids 1-D": ({"topk_ids": torch.zeros(5, dtype=torch.int64)}, r"topk_ids has 1 dimensions, expected \[T, k\]"),
    "ids of other tokens": ({"topk_ids": torch.zeros(4, 2, dtype=torch.int64)}, r"topk_ids has shape \[4, 2\], expected \[5, k\]: x has 5 tokens"),
    "weights integer": ({"topk_weights": torch.zeros(5, 2, dtype=torch.int64)}, r"topk_weights has dtype (Long|long|long int), expected a floating"),
    "weights 1-D": ({"topk_weights": torch.zeros(5)}, r"topk_weights has 1 dimensions, expected \[T, k\]"),
    "weights of other k": ({"topk_weights": torch.zeros(5, 3)}, r"topk_weights has shape \[5, 3\], expected that of topk_ids, \[5, 2\]"),
    "w13 float": ({"w13_packed": torch.zeros(4, 100)}, r"w13_packed has dtype (Float|float), expected uint8"),
    "w2 float": ({"w2_packed": torch.zeros(4, 100)}, r"w2_packed has dtype (Float|float), expected uint8"),
    "w13 1-D": ({"w13_packed": torch.zeros(100, dtype=torch.uint8)}, r"w13_packed has shape \[100\], expected \[E, bytes\]"),
    "w2 3-D": ({"w2_packed": torch.zeros(4, 1, 9, dtype=torch.uint8)}, r"w2_packed has shape \[4, 1, 9\], expected \[E, bytes\]"),
    "H odd": ({"H": 63}, r"H is 63, expected an even number in 2\.\.1048576"),
    "H zero": ({"H": 0}, r"H is 0, expected"),
    "I negative": ({"I": -32}, r"I is -32, expected an even number"),
    "I odd": ({"I": 31, "I2": 62, "group_size": -1}, r"I is 31, expected an even number"),
    "I2 neither": ({"I2": 96}, r"I2 is 96, expected 2 \* I = 64 \(gated\) or I = 32"),
    "group -2": ({"group_size": -2}, r"group_size is -2, expected -1 \(channelwise\), 0 \(as the packed tensors say\), or 16 or a multiple of 32 that divides H = 64"),
    "group 8": ({"group_size": 8}, r"group_size is 8, expected"),
    "group does not divide H": ({"group_size": 96}, r"group_size is 96, expected .* divides H = 64"),
    "group does not divide I": ({"group_size": 64}, r"group_size is 64, expected .* divides I = 32"),
    "kind -1": ({"activation_kind": -1}, r"activation_kind is -1, expected " + KNOWN_KINDS),
    "kind 9": ({"activation_kind": 9}, r"activation_kind is 9, expected " + KNOWN_KINDS),
    "limit NaN": ({"limit": float("nan")}, r"limit is nan, expected a number above 0"),
    "limit 0": ({"limit": 0.0}, r"limit is 0, expected a number above 0"),
    "limit below 0": ({"limit": -7.0, "activation_kind": 4}, r"limit is -7, expected a number above 0"),
    "limit that float32 has not": ({"limit": 1e-60}, r"limit is 1e-60, expected a number above 0"),
    "alpha infinite": ({"alpha": float("inf")}, r"alpha is inf, expected a finite number"),
    "alpha NaN": ({"alpha": float("nan")}, r"alpha is nan, expected a finite number"),
    "alpha that float32 has not": ({"alpha": 1e300}, r"alpha is 1e\+300, expected a finite number"),
    "beta infinite": ({"beta": float("-inf"), "activation_kind": 3}, r"beta is -inf, expected a finite number"),
    "limit of GELU": ({"limit": 7.0, "activation_kind": 5}, r"limit is 7, expected none with activation_kind 5"),
    "limit of xIELU": ({"limit": 7.0, "activation_kind": 8}, r"limit is 7, expected none with activation_kind 8"),
    "limit of ReLU2": ({"limit": 7.0, "activation_kind": 7}, r"limit is 7, expected none with activation_kind 7"),
    "alpha of the step": ({"alpha": 1.0, "activation_kind": 4}, r"alpha is 1, expected none with activation_kind 4"),
    "beta of GELU": ({"beta": 0.0, "activation_kind": 6}, r"beta is 0, expected none with activation_kind 6"),
    "w13 of another shape": ({"I": 64, "I2": 128}, r"expert \d+, w13_packed: n \(out_features\) is 64, expected 128"),
    "w13 of ungated": ({"I2": 32}, r"expert \d+, w13_packed: n \(out_features\) is 64, expected 32"),
    "another group": ({"group_size": -1}, r"expert \d+, w13_packed: group is 32, expected 64 \(channelwise\)"),
}  # fmt: skip


def test_moe_without_i2():
    """It is twice I, which must not overflow before I is looked at."""
    arguments = {**moe_arguments(), "I": 2**62}
    del arguments["I2"]
    refuse(
        lambda: torch.ops.w4a8.dynamic_4bit_int_moe.gated(**arguments), r"I is 4611686018427387904, expected an even"
    )


SMALL_IDS = [4, -2, 100, 2**31 - 1, -(2**31)]
LARGE_IDS = [2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1]  # would be -1, 0, 1 and -1 if cut to 32 bits


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(torch.int32, i) for i in SMALL_IDS] + [(torch.int64, i) for i in SMALL_IDS + LARGE_IDS],
    ids=str,
)
@pytest.mark.parametrize(("token", "slot"), [(0, 0), (3, 1)])
def test_ids_out_of_range_name_the_token(dtype, bad, token, slot):
    arguments = moe_arguments()
    arguments["topk_ids"] = arguments["topk_ids"].to(dtype)
    arguments["topk_ids"][token, slot] = bad
    message = rf"token {token}, slot {slot} has the expert id {bad}, expected -1 \(skip\) or 0\.\.3"
    refuse(lambda: w4a8.dynamic_4bit_int_moe(**arguments), message)


def test_experts_must_be_as_many():
    arguments = moe_arguments()
    arguments["w2_packed"] = arguments["w2_packed"][:3]
    refuse(lambda: w4a8.dynamic_4bit_int_moe(**arguments), "w2_packed has 3 experts, expected as many as w13_packed, 4")


def test_no_experts_at_all():
    arguments = moe_arguments()
    for name in ("w13_packed", "w2_packed"):
        arguments[name] = arguments[name][:0]
    refuse(lambda: w4a8.dynamic_4bit_int_moe(**arguments), "token 0, slot 0 has the expert id")
    arguments["topk_ids"].fill_(-1)
    assert_same_bits(w4a8.dynamic_4bit_int_moe(**arguments), torch.zeros(5, 64))


@pytest.mark.parametrize("which", ["w13_packed", "w2_packed"])
@pytest.mark.parametrize("tokens", [5, 1500])
def test_damaged_expert_is_named(which, tokens):
    """Only experts that a call touches are read; the message says which one is bad."""
    arguments = moe_arguments()
    arguments["x"] = torch.randn(tokens, 64)
    arguments["topk_ids"], arguments["topk_weights"] = route(tokens, 2, 3)
    arguments["topk_ids"][-1, 0] = 3
    damaged = arguments[which].clone()
    damaged[3, 8] = 7
    good = w4a8.dynamic_4bit_int_moe(**arguments)
    arguments[which] = damaged
    message = f"expert 3, {which}: version is 7, this library reads version 5"
    refuse(lambda: w4a8.dynamic_4bit_int_moe(**arguments), message)
    arguments["topk_ids"][-1, 0] = -1
    untouched = w4a8.dynamic_4bit_int_moe(**arguments)
    assert_same_bits(untouched[:-1], good[:-1])


def test_ten_arguments_check_the_same():
    arguments = moe_arguments()
    del arguments["I2"]
    op = torch.ops.w4a8.dynamic_4bit_int_moe.gated
    refuse(lambda: op(**{**arguments, "activation_kind": 9}), "activation_kind is 9, expected " + KNOWN_KINDS)
    refuse(lambda: op(**{**arguments, "I": 64}), r"w13_packed: n \(out_features\) is 64, expected 128")


# --- all of these tables, and the same on Meta tensors: a mistake is found while tracing --------------------------------------

TABLES = {
    "pack": (w4a8.dyn_quant_pack_4bit_weight, pack_arguments, PACK),
    "pack a stack": (w4a8.dyn_quant_pack_4bit_weight, partial(pack_arguments, 3), PACK_STACK),
    "matmul": (w4a8.dyn_quant_matmul_4bit, matmul_arguments, MATMUL),
    "moe": (w4a8.dynamic_4bit_int_moe, moe_arguments, MOE),
}
ROWS = [(op, name) for op, (_, _, table) in TABLES.items() for name in table]
NEEDS_DATA = re.compile(r"packed_weights: |expert |x has 5 tokens|that of topk_ids")


@pytest.mark.parametrize(("op", "name"), ROWS)
def test_arguments(op, name):
    call, arguments, table = TABLES[op]
    changes, message = table[name]
    refuse(lambda: call(**{**arguments(), **changes}), message)


@pytest.mark.parametrize(("op", "name"), [row for row in ROWS if not NEEDS_DATA.search(TABLES[row[0]][2][row[1]][1])])
def test_arguments_on_meta(op, name):
    call, arguments, table = TABLES[op]
    changes, message = table[name]
    if not op.startswith("pack"):
        message = message.split(", expected")[0].replace("shape", ".*").split(r"\[")[0]
    given = {**arguments(), **changes}
    on_meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    refuse(lambda: call(**on_meta), message)


def test_a_refused_call_leaves_the_library_working():
    arguments = moe_arguments()
    want = w4a8.dynamic_4bit_int_moe(**arguments)
    for changes, _ in MOE.values():
        with pytest.raises(RuntimeError):
            w4a8.dynamic_4bit_int_moe(**{**arguments, **changes})
    assert_same_bits(w4a8.dynamic_4bit_int_moe(**arguments), want)


SAMPLES = op_samples()
FLOATS = {
    (sample, argument.name)
    for sample, (op, given) in SAMPLES.items()
    for argument in op._schema.arguments
    if str(argument.type) in ("float", "Optional[float]")
    and (argument.name in given or not argument.has_default_value())
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("sample", "name"), sorted(FLOATS))
def test_numbers_that_float32_has_not(sample, name, device):
    op, given = SAMPLES[sample]
    given = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in given.items()}
    for number in (float("nan"), float("-inf"), *([] if name == "limit" else [float("inf"), 1e300])):
        refuse(
            lambda number=number: op(**{**given, name: number}), rf"{name} is {number}, expected".replace("+", r"\+")
        )
