"""The fused mixture-of-experts operator against reference.moe, and its bits against themselves."""

import functools

import pytest
import reference
import torch
from common import (
    DTYPES,
    EVERY_KIND,
    OF_GGUF,
    TWO_LEVELS,
    assert_same_bits,
    assert_within,
    from_numpy,
    make_layer,
    make_matrix,
    route,
)
from common import check_layer as check

import w4a8

KINDS = list(w4a8.Activation)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("group_size", [32, -1], ids=["groups", "channelwise"])
def test_kinds(kernel, kind, gated, group_size):
    layer = make_layer(4, 64, 96, group_size, gated, bias=True)
    check(layer, 2 * torch.randn(11, 64), *route(11, 2, 4), kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kinds_far_from_zero(kernel, kind):
    """Inputs large enough for every clamp and for the flat ends of exp and erfc."""
    layer = make_layer(2, 64, 64, 32, bias=True)
    check(layer, 40 * torch.randn(9, 64), *route(9, 2, 2), kind)


# Limits that bite, slopes of both signs and 0, an up half that something is added to or nothing.
NUMBERS = [
    (w4a8.Activation.SILU, {"limit": 10.0}),
    (w4a8.Activation.SILU, {"limit": 0.25}),
    (w4a8.Activation.SILU, {"limit": 1.5, "alpha": 1.702, "beta": 1.0}),
    (w4a8.Activation.SILU, {"alpha": 0.0, "beta": -2.0}),
    (w4a8.Activation.SILU_UP_GATE, {"limit": 0.75, "alpha": -0.7, "beta": 0.5}),
    (w4a8.Activation.SWIGLU_OAI, {"limit": 3.0}),
    (w4a8.Activation.SWIGLU_OAI, {"limit": float("inf"), "alpha": 1.3, "beta": 0.0}),
    (w4a8.Activation.SWIGLU_STEP, {"limit": 0.5}),
    (w4a8.Activation.SWIGLU_STEP, {"limit": 16.0}),
    (w4a8.Activation.XIELU, {"alpha": 0.25, "beta": 1.5}),
]


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize(("kind", "numbers"), NUMBERS, ids=str)
def test_numbers(kernel, kind, numbers, gated):
    for sizes, size in (((18, 6, -1), 4), ((64, 96, 32), 20)):
        layer = make_layer(3, *sizes, gated, bias=True)
        x, chosen = size * torch.randn(9, sizes[0]), route(9, 2, 3)
        out = check(layer, x, *chosen, kind, **numbers)
        assert not torch.equal(out, layer(x, *chosen, kind)) or numbers == {"alpha": 1.0}


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
def test_numbers_of_kinds(kernel, gated):
    """Kinds are points of the numbers, with the bits of each other, and so are numbers that are given as they are."""
    layer = make_layer(3, 64, 96, 32, gated)
    x, chosen = 20 * torch.randn(9, 64), route(9, 2, 3)
    kinds, inf = w4a8.Activation, float("inf")
    silu, oai, step = (layer(x, *chosen, kind) for kind in (kinds.SILU, kinds.SWIGLU_OAI, kinds.SWIGLU_STEP))
    assert_same_bits(layer(x, *chosen, kinds.SILU, limit=7, alpha=1.702, beta=1), oai)
    assert_same_bits(layer(x, *chosen, kinds.SWIGLU_OAI, limit=inf, alpha=1, beta=0), silu)
    assert_same_bits(layer(x, *chosen, kinds.SWIGLU_STEP, limit=inf), silu)
    assert_same_bits(layer(x, *chosen, kinds.SILU, limit=inf, alpha=1, beta=0), silu)
    assert_same_bits(layer(x, *chosen, kinds.SWIGLU_STEP, limit=7), step)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
def test_numbers_by_torch(kernel, gated):
    """The formula in float64 by torch, near what the layer gives: w2 is the unit matrix, what is left is int8."""
    layer = make_layer(1, 64, 64, 32, gated)
    layer.w2_packed = make_unit(64)
    x, ids, router = 8 * torch.randn(33, 64), torch.zeros(33, 1, dtype=torch.int64), torch.ones(33, 1)
    rows = w4a8.dyn_quant_matmul_4bit(x, layer.w13_packed[0], 32, 64, layer.w13_rows).double()
    g, u = rows[:, :64], rows[:, 64:] if gated else torch.full((), 1.0, dtype=torch.double)
    for limit in (0.5, 2.0, 10.0):
        c = g.clamp(max=limit)
        up = u.clamp(-limit, limit) if gated else u
        clamped = c * torch.sigmoid(1.3 * c) * (up + 0.75 if gated else 1)
        step = torch.nn.functional.silu(g).clamp(max=limit) * up
        for kind, numbers, h in (
            (w4a8.Activation.SILU, {"limit": limit, "alpha": 1.3, "beta": 0.75}, clamped),
            (w4a8.Activation.SWIGLU_STEP, {"limit": limit}, step),
        ):
            out = layer(x, ids, router, kind, **numbers).double()
            # A row is rounded to 255 steps of its range, zero included.
            steps = (h.clamp(min=0).amax(1) - h.clamp(max=0).amin(1)) / 255
            assert ((out - h).abs() <= 0.51 * steps[:, None] + 1e-5 * h.abs()).all(), (kind, numbers)


def make_unit(size):
    """uint8 [1, bytes]: a packed unit matrix."""
    codes = (torch.eye(size, dtype=torch.int64) + 8).to(torch.uint8)
    nibbles = codes[:, ::2] | codes[:, 1::2] << 4
    return w4a8.dyn_quant_pack_4bit_weight(nibbles, torch.ones(size, size // 32), None, 32, size, size)[None]


def test_kind_2_is_kind_0():
    layer = make_layer(4, 64, 64)
    x, (ids, router) = torch.randn(5, 64), route(5, 2, 4)
    assert_same_bits(layer(x, ids, router, 2), layer(x, ids, router, 0))


def test_kind_1_swaps_the_halves():
    layer = make_layer(4, 64, 64)
    swapped = make_layer(4, 64, 64)
    x, (ids, router) = torch.randn(5, 64), route(5, 2, 4)
    order = torch.cat([torch.arange(64, 128), torch.arange(64)])
    swapped.w13.weights, swapped.w13.scales = layer.w13.weights[:, order], layer.w13.scales[:, order]
    swapped.w13_packed, swapped.w2_packed = swapped.w13.pack(), layer.w2_packed
    assert_same_bits(layer(x, ids, router, 1), swapped(x, ids, router, 0))


@pytest.mark.parametrize("weight_on_input", [False, True], ids=["weight_on_output", "weight_on_input"])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_dtypes_bias_and_where_the_weight_goes(kernel, dtype, bias, weight_on_input, group_size):
    layer = make_layer(5, 128, 64, group_size, bias=bias, scale_dtype=torch.bfloat16)
    check(layer, torch.randn(13, 128).to(dtype), *route(13, 3, 5), weight_on_input=weight_on_input)


@pytest.mark.parametrize(("hidden", "intermediate"), [(2, 2), (18, 6), (40, 24), (50, 34), (100, 20)])
def test_odd_channelwise_sizes(kernel, hidden, intermediate):
    for gated in (True, False):
        layer = make_layer(3, hidden, intermediate, -1, gated, bias=True)
        check(layer, torch.randn(7, hidden), *route(7, 2, 3))


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 4096])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_tokens(kernel, tokens, top_k):
    layer = make_layer(8, 64, 32)
    check(layer, torch.randn(tokens, 64), *route(tokens, top_k, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tokens(kernel, dtype):
    layer = make_layer(3, 64, 32)
    ids, router = route(0, 2, 3)
    out = layer(torch.empty(0, 64, dtype=dtype), ids, router)
    assert out.shape == (0, 64)
    assert out.dtype == dtype


def test_no_slots(kernel):
    layer = make_layer(3, 64, 32)
    out = layer(torch.randn(4, 64), torch.empty(4, 0, dtype=torch.int64), torch.empty(4, 0))
    assert_same_bits(out, torch.zeros(4, 64))


@pytest.mark.parametrize("lead", [(6,), (2, 3), (1, 6, 1)], ids=str)
def test_leading_dimensions(lead):
    check(make_layer(3, 64, 32), torch.randn(*lead, 64), *route(6, 2, 3))


def test_all_tokens_on_one_expert(kernel):
    layer = make_layer(6, 64, 64, bias=True)
    check(layer, torch.randn(65, 64), torch.full((65, 1), 4), torch.rand(65, 1))


def test_empty_experts(kernel):
    layer = make_layer(64, 64, 32)
    ids = torch.tensor([[0, 63], [63, 0], [31, 31]])
    check(layer, torch.randn(3, 64), ids, torch.rand(3, 2))


def test_top_k_above_the_number_of_experts(kernel):
    """More slots than experts: some experts appear twice in a token, each slot counts."""
    layer = make_layer(3, 64, 32)
    check(layer, torch.randn(9, 64), *route(9, 7, 3))


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("weight_dtype", [*DTYPES, torch.float64], ids=str)
def test_routing_dtypes(id_dtype, weight_dtype):
    layer = make_layer(4, 64, 32)
    ids, router = route(5, 2, 4, id_dtype)
    check(layer, torch.randn(5, 64), ids, router.to(weight_dtype))


def test_strided_arguments(kernel):
    layer = make_layer(4, 64, 32)
    x, (ids, router) = torch.randn(6, 64), route(6, 2, 4)
    want = layer(x, ids, router)
    assert_same_bits(layer(x.t().contiguous().t(), ids, router), want, "x")
    assert_same_bits(layer(x, ids.t().contiguous().t(), router), want, "topk_ids")
    assert_same_bits(layer(x, ids, router.repeat_interleave(2, 1)[:, ::2]), want, "topk_weights")
    for name in ("w13_packed", "w2_packed"):
        packed = getattr(layer, name)
        setattr(layer, name, packed.repeat_interleave(2, 1)[:, ::2])
        assert_same_bits(layer(x, ids, router), want, name)
        setattr(layer, name, packed)


@pytest.mark.parametrize("weight_on_input", [False, True], ids=["weight_on_output", "weight_on_input"])
def test_missing_slots(kernel, weight_on_input):
    """-1 contributes nothing: the token is as if it had not had the slot; without any slot it is zero."""
    layer = make_layer(4, 64, 32, bias=True)
    x, (ids, router) = torch.randn(8, 64), route(8, 3, 4)
    ids[1, 0] = ids[2, 1] = ids[3, 2] = -1
    ids[4] = -1
    ids[5, :2] = -1
    router[4, 0] = float("nan")  # the weight of a missing slot is not read
    out = check(layer, x, ids, router.nan_to_num(), weight_on_input=weight_on_input)
    assert_same_bits(layer(x, ids, router, weight_on_input=weight_on_input), out)
    assert_same_bits(out[4], torch.zeros(64))
    for token, kept in ((1, [1, 2]), (2, [0, 2]), (3, [0, 1]), (5, [2])):
        row = slice(token, token + 1)
        alone = layer(x[row], ids[row][:, kept], router[row][:, kept], weight_on_input=weight_on_input)
        assert_same_bits(out[row], alone, f"token {token}")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_stay_in_their_token(kernel, bad, dtype):
    layer = make_layer(3, 64, 32)
    x, (ids, router) = torch.randn(7, 64).to(dtype), route(7, 2, 3)
    clean = layer(x, ids, router)
    x[3, 17] = bad
    out = layer(x, ids, router)
    assert_same_bits(out[3], torch.full_like(out[3], float("nan")))
    others = [0, 1, 2, 4, 5, 6]
    assert_same_bits(out[others], clean[others])


@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ten_arguments_are_the_gated_eleven(dtype, group_size):
    layer = make_layer(4, 64, 32, group_size)
    x, (ids, router) = torch.randn(5, 64).to(dtype), route(5, 2, 4)
    packed = (layer.w13_packed, layer.w2_packed)
    op = torch.ops.w4a8.dynamic_4bit_int_moe
    want = op(x, ids, router, *packed, 64, 32, 64, group_size, False, 1)
    assert_same_bits(op(x, ids, router, *packed, 64, 32, group_size, False, 1), want)
    assert_same_bits(op.gated(x, ids, router, *packed, 64, 32, group_size, False, 1), want)
    assert_same_bits(op.default(x, ids, router, *packed, 64, 32, 64, group_size, False, 1), want)
    numbers = {"limit": 0.5, "alpha": 1.5, "beta": 0.5}
    want = op(x, ids, router, *packed, 64, 32, 64, group_size, False, 1, **numbers)
    assert_same_bits(op(x, ids, router, *packed, 64, 32, group_size, False, 1, **numbers), want)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("group_size", [64, -1], ids=["groups", "channelwise"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_over_kernels_threads_and_batches(supported_kernels, set_threads, dtype, group_size, gated):
    layer = make_layer(8, 192, 128, group_size, gated, bias=True)
    x, (ids, router) = torch.randn(43, 192).to(dtype), route(43, 3, 8)
    ids[7, 1] = -1
    for kind, numbers in [(kind, {}) for kind in KINDS] + NUMBERS:
        layer_of = functools.partial(layer, kind=kind, **numbers)
        with w4a8.use_kernel("scalar"):
            want = layer_of(x, ids, router)
        for name in supported_kernels:
            with w4a8.use_kernel(name):
                for threads in (1, 2, 3):
                    set_threads(threads)
                    out = layer_of(x, ids, router)
                    assert_same_bits(out, want, f"{kind.name} {numbers}, {name}, {threads} threads")
                batches = ([0], [7], [42, 1], list(range(9, 31)), torch.randperm(43).tolist(), [5] * 20)
                for rows in batches:
                    out = layer_of(x[rows], ids[rows], router[rows])
                    assert_same_bits(out, want[rows], f"{kind.name} {numbers}, {name}, tokens {rows}")


def test_it_is_the_definition_step_by_step(kernel):
    """Slot by slot through the public matmul: the same layer written with three separate operators."""
    layer = make_layer(4, 64, 32, bias=True)
    x, (ids, router) = torch.randn(6, 64), route(6, 2, 4)
    out = layer(x, ids, router, w4a8.Activation.RELU2)
    total = torch.zeros(6, 64)
    for token in range(6):
        for slot in range(2):
            e = int(ids[token, slot])
            gu = w4a8.dyn_quant_matmul_4bit(x[token : token + 1], layer.w13_packed[e], 32, 64, 64)
            # ReLU squared has no exp: max, multiply, multiply are exact to the bit in torch too.
            h = torch.relu(gu[:, :32]) * torch.relu(gu[:, :32]) * gu[:, 32:]
            y = w4a8.dyn_quant_matmul_4bit(h, layer.w2_packed[e], 32, 32, 64)
            weight = router[token, slot].numpy()
            total[token] = from_numpy(reference.fma32(weight, y[0].numpy(), total[token].numpy()))
    assert_same_bits(out, total)


def test_tokens_of_zeros_give_zeros(kernel):
    """Both products have rows of zeros: no noise of sums that cancel."""
    layer = make_layer(4, 512, 256)
    x = torch.randn(6, 512)
    x[1], x[4] = 0.0, -0.0
    out = layer(x, *route(6, 2, 4))
    assert_same_bits(out[[1, 4]], torch.zeros(2, 512))
    assert (out[0] != 0).any()


def test_arguments_are_not_written(kernel):
    layer = make_layer(4, 64, 32)
    x, (ids, router) = torch.randn(5, 64), route(5, 2, 4)
    arguments = [x, ids, router, layer.w13_packed, layer.w2_packed]
    before = [t.clone() for t in arguments]
    layer(x, ids, router, weight_on_input=True)
    for now, then in zip(arguments, before):
        assert torch.equal(now, then)


@pytest.mark.parametrize(
    "kinds",
    [
        *((w13, w2) for w13 in EVERY_KIND[:4] for w2 in EVERY_KIND[:4] if (w13, w2) != ("int4", "int4")),
        (TWO_LEVELS[2], TWO_LEVELS[2]),
        (TWO_LEVELS[0], TWO_LEVELS[2]),
        (TWO_LEVELS[1], TWO_LEVELS[0]),
        (TWO_LEVELS[2], "int8"),
    ],
    ids=" and ".join,
)
def test_moe_of_mixed_kinds(kernel, kinds):
    sizes = [(80, 48, 16)] if kinds[0] in TWO_LEVELS else [(64, 32, 32), (128, 96, 32), (80, 48, 16), (34, 18, -1)]
    for hidden, inner, group in sizes:
        for gated, weight_on_input in ((True, False), (True, True), (False, False)):
            layer = make_layer(4, hidden, inner, group, gated, bias=not weight_on_input, kinds=kinds)
            x, (ids, router) = torch.randn(9, hidden), route(9, 2, 4)
            ids[3, 1] = -1
            what = f"{hidden}, {inner}, groups of {group}"
            check(layer, x, ids, router, 0, weight_on_input, what)


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
def test_moe_of_gguf(kernel, kinds, group, groups):
    layer = make_layer(3, 256, 256, group, bias=True, kinds=kinds, activation_groups=groups)
    for tokens in (1, 5, 40):
        ids, router = route(tokens, 2, 3)
        ids[0, 0] = -1
        check(layer, torch.randn(tokens, 256), ids, router, what=f"{tokens} tokens", most=0.1)


@pytest.mark.parametrize("size", [-1, 32])
def test_experts_of_different_kinds(kernel, size):
    """A stack's rows are matrices of their own; only their number of bytes must be the same."""
    stacks = [
        [make_matrix(64, k, 32, kind=kind, activation_group=size) for kind in kinds]
        for k, kinds in ((64, ("int4", "e2m1", "iq4")), (32, ("iq4", "int4", "e2m1")))
    ]
    packed = [torch.stack([part.pack() for part in parts]) for parts in stacks]
    x = torch.randn(6, 64)
    ids, router = route(6, 2, 3)
    arrays = [[part.arrays() for part in parts] for parts in stacks]
    rest = (32, True, False, 0)
    want, explained = reference.moe(x.numpy(), ids.numpy(), router.numpy(), *arrays, *rest, (size, size))
    y = w4a8.dynamic_4bit_int_moe(x, ids, router, *packed, 64, 32, 64, 32, False, 0)
    assert_within(y.numpy(), want, explained)


@pytest.mark.parametrize("kinds", [("int8", "int8"), (TWO_LEVELS[2], TWO_LEVELS[2])], ids=" and ".join)
def test_every_kernel_and_batch(supported_kernels, kinds):
    """A token's bits depend on that token alone."""
    for group in (16,) if kinds[0] in TWO_LEVELS else (32, -1):
        layer = make_layer(3, 96, 64, group, bias=True, kinds=kinds)
        x, (ids, router) = torch.randn(40, 96).bfloat16(), route(40, 2, 3)
        want = layer(x, ids, router)
        for name in supported_kernels:
            with w4a8.use_kernel(name):
                assert_same_bits(layer(x, ids, router), want, name)
                for token in (0, 17):
                    part = slice(token, token + 1)
                    assert_same_bits(layer(x[part], ids[part], router[part]), want[part], name)
