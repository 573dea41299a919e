"""What fills a RoutedExperts: the weight loader, on each rank, and state dicts; and what both refuse."""

import inspect
import io

import pytest
import torch
from common import least_scales
from moe_build import (
    TOKEN_INT8,
    Stack,
    assert_packed,
    assert_raises,
    fill,
    make_config,
    make_layer,
    make_stacks,
    op_moe,
    part_of_rank,
    weight_args,
)

from w4a8.core.nibbles import to_nibbles
from w4a8.moe import (
    CompressedTensorsW4A8Int8MoEMethod,
    FusedMoEParallelConfig,
    MoEWeightLoader,
    RoutedExperts,
    RoutingMethodType,
    method_v0_17,
    route,
)
from w4a8.nn import W4A8Experts

RAW = [f"{name}_{tensor}" for name in ("w13", "w2") for tensor in ("weight", "weight_scale", "bias")]
EVERY_OTHER = torch.arange(512).view(2, 256).t().flatten()  # rows g0 u0 g1 u1 ... of rows g0 g1 ... u0 u1 ...


def fresh(moe, group_size, method_cls=CompressedTensorsW4A8Int8MoEMethod, **options):
    """A layer as its constructor leaves it."""
    return RoutedExperts(moe, method_cls(weight_args(group_size), TOKEN_INT8, moe), **options)


def tensors_of(w13, w2, expert, gated=True):
    """The tensors a checkpoint has for an expert: (parameter, tensor, shard)."""
    halves = {"w1": slice(0, 256), "w3": slice(256, None)} if gated else {"w1": slice(None)}
    for shard, rows in {**halves, "w2": slice(None)}.items():
        stack, name = (w2, "w2") if shard == "w2" else (w13, "w13")
        for suffix, tensor in zip(("weight", "weight_scale", "bias"), stack.of(expert)):
            if tensor is not None:
                yield f"{name}_{suffix}", tensor[rows], shard


def load_all(layer, w13, w2, shards=("w1", "w2", "w3")):
    for expert in range(layer.global_num_experts):
        for name, tensor, shard in tensors_of(w13, w2, expert, layer.moe_config.is_act_and_mul):
            if shard in shards:
                parameter = getattr(layer, name)
                result = parameter.weight_loader(parameter, tensor, f"experts.{expert}.{name}", shard, expert)
                assert result is None


def load_fused(layer, w13, experts, order):
    for expert in experts:
        for name, tensor in zip(RAW[:3], w13.of(expert)):
            layer.weight_loader(getattr(layer, name), tensor[order], name, "w13", expert)


def tp_config(rank, ranks, **changes):
    parallel = FusedMoEParallelConfig(tp_size=ranks, tp_rank=rank)
    return make_config(has_bias=True, moe_parallel_config=parallel, **changes)


# ---- the weight loader ----


@pytest.mark.parametrize("group_size", [-1, 32])
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tensor_parallel(ranks, activation, group_size):
    """Rows of w1 and w3, columns of w2; group scales of w2 with their columns, channel scales whole, its bias once.

    The layer of each rank has the op's bits for its slices.
    """
    whole = make_config(has_bias=True, activation=activation)
    w13, w2 = make_stacks(whole, group_size)
    x, logits = torch.randn(5, 128), torch.randn(5, 8)
    weights, ids = route(whole.routing_method, x, logits, 3)
    for rank in range(ranks):
        moe = tp_config(rank, ranks, activation=activation)
        layer = fresh(moe, group_size)
        load_all(layer, w13, w2)
        parts = part_of_rank(w13, w2, rank, ranks)
        for name, tensor in zip(RAW, (tensor for part in parts for tensor in (part.values, part.scales, part.bias))):
            assert torch.equal(getattr(layer, name).data, tensor), name
        layer.process_weights_after_loading()
        assert torch.equal(layer(x, logits), op_moe(moe, group_size, x, ids, weights, *parts))


def test_expert_parallel_skips_remote_experts():
    expert_map = torch.tensor([-1, -1, 1, 0, -1, -1, -1, -1], dtype=torch.int32)
    w13, w2 = make_stacks(make_config(), 32)
    layer = fresh(make_config(num_local_experts=2), 32, expert_map=expert_map)
    load_all(layer, w13, w2)
    assert torch.equal(layer.w13_weight.data, w13.values[[3, 2]])
    assert torch.equal(layer.w2_weight_scale.data, w2.scales[[3, 2]])
    for expert, held in ((0, False), (2, True)):
        args = (layer.w2_weight, w2.values[expert], "w", "w2", expert)
        assert layer.weight_loader(*args, return_success=True) is held


@pytest.mark.parametrize("group_size", [-1, 32])
@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_w13(ranks, group_size):
    """A fused w13 gives the same packed layer as w1 and w3, interleaved or not, on every rank.

    Only a fused w13 alternates: w1 and w3 are gate and up, and both ways may meet in one layer.
    """
    w13, w2 = make_stacks(make_config(has_bias=True), group_size)
    for rank in range(ranks):
        moe = tp_config(rank, ranks)
        apart = fresh(moe, group_size)
        load_all(apart, w13, w2)
        apart.process_weights_after_loading()
        for interleaved, order in ((False, torch.arange(512)), (True, EVERY_OTHER)):
            fused, mixed = (fresh(moe, group_size, w13_interleaved=interleaved) for _ in range(2))
            load_all(fused, w13, w2, ("w2",))
            load_fused(fused, w13, range(8), order)
            load_all(mixed, w13, w2)
            load_fused(mixed, w13, [3], order)
            for layer in (fused, mixed):
                layer.process_weights_after_loading()
                assert all(torch.equal(*both) for both in zip(packed_stacks(layer), packed_stacks(apart)))


def test_words_and_types_are_converted():
    layer = fresh(make_config(), -1)
    values = torch.randint(-8, 8, (256, 128), dtype=torch.int8)
    words = to_nibbles(values).view(torch.int32)  # little-endian words of eight nibbles
    layer.weight_loader(layer.w13_weight, words, "w", "w1", 2)
    assert torch.equal(layer.w13_weight[2, :256], values)
    scale = torch.rand(256, 1).to(torch.bfloat16)
    layer.weight_loader(layer.w13_weight_scale, scale, "s", "w3", 0)
    assert torch.equal(layer.w13_weight_scale[0, 256:], scale.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scales_that_bfloat16_would_round_are_kept(dtype):
    """One stack in a type that holds one tensor more; the other stays bfloat16."""
    w13, w2 = make_stacks(make_config(), 32)
    layer = fresh(make_config(), 32)
    load_all(layer, w13, w2)
    finer = (w2.scales[5].float() * 1.01).to(dtype)
    layer.weight_loader(layer.w2_weight_scale, finer, "s", "w2", 5)
    layer.process_weights_after_loading()
    scales = w2.scales.float()
    scales[5] = finer.float()
    assert_packed(layer, w13, Stack(w2.values, least_scales(scales), None))


def int8(*shape):
    return torch.zeros(shape, dtype=torch.int8)


RANKS_OF = "but 1 tensor-parallel rank of 256 make 256"
BAD = [
    ("w13_weight", int8(256, 128), "w4", "shard_id must be ['w1','w2','w3','w13'] but got w4."),
    ("w13_weight", int8(255, 128), "w1", f"key: dimension 0 is 255, {RANKS_OF}"),
    ("w13_weight", int8(256, 64), "w1", "key: shape (256, 64), but (256, 128) is expected"),
    ("w13_weight", int8(128), "w1", "key: shape (128,), but 2 dimensions are expected"),
    ("w13_weight", torch.zeros(256, 128), "w1", "key: dtype torch.float32, but int8 or packed int32 is expected"),
    ("w13_weight", int8(256, 15).int(), "w1", "key: shape (256, 15), but 128 columns make 16 words"),
    ("w2_weight", int8(128, 128), "w2", f"key: dimension 1 is 128, {RANKS_OF}"),
    ("w2_weight", int8(64, 256), "w2", "key: shape (64, 256), but (128, 256) is expected"),
    ("w13_weight_scale", int8(256, 4), "w1", "key: dtype torch.int8, but a float is expected"),
    ("w13_weight_scale", torch.zeros(256, 1), "w3", "key: shape (256, 1), but (256, 4) is expected"),
    ("w2_bias", torch.zeros(64), "w2", "key: shape (64,), but (128,) is expected"),
    ("w13_bias", torch.zeros(64), "w1", f"key: dimension 0 is 64, {RANKS_OF}"),
    ("ungated w13_weight", int8(256, 128), "w3", "key: a layer without a gate has w1 and w2, but no w3"),
]


@pytest.mark.parametrize(("name", "tensor", "shard", "message"), BAD)
def test_loader_errors(name, tensor, shard, message):
    *ungated, name = name.split()
    layer = fresh(make_config(has_bias=True, activation="silu_no_mul" if ungated else "silu"), 32)
    parameter = getattr(layer, name)
    before = parameter.clone()
    assert_raises(ValueError, message, layer.weight_loader, parameter, tensor, "key", shard, 0)
    assert torch.equal(parameter, before)


def test_loader_alone():
    """Without a layer, as another framework's parameter attribute."""
    loader = MoEWeightLoader(tp_rank=1, tp_size=2)
    parameter = torch.nn.Parameter(int8(1, 4, 8), requires_grad=False)
    loader(parameter, torch.arange(32, dtype=torch.int8).view(4, 8), "w", "w3", 0)
    assert parameter[0, 2:].flatten().tolist() == list(range(16, 32)) and not parameter[0, :2].any()


# ---- state dicts ----

NAMES = ("w13_weight_packed", "w2_weight_packed")


def saved(layer):
    """Its state dict from a file."""
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def answer(layer):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, layer.moe_config.hidden_dim, generator=generator)
    return layer(x, torch.randn(5, layer.global_num_experts, generator=generator))


def assert_same(layer, other):
    for name in NAMES:
        assert torch.equal(getattr(layer, name), getattr(other, name)), name
        assert getattr(other, name).dtype == torch.uint8
        assert getattr(other, name.replace("_packed", "")).numel() == 0
    assert torch.equal(answer(layer), answer(other))


@pytest.mark.parametrize(
    "method_cls", [CompressedTensorsW4A8Int8MoEMethod, method_v0_17.CompressedTensorsW4A8Int8MoEMethod]
)
@pytest.mark.parametrize("group_size", [-1, 32])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
def test_packed_into_fresh(method_cls, group_size, bias, activation):
    moe = make_config(has_bias=bias, activation=activation)
    layer, _, _ = make_layer(moe, group_size, method_cls=method_cls)
    other = torch.nn.Sequential(fresh(moe, group_size, method_cls))
    loader = other[0].w13_weight_packed.weight_loader
    done = other.load_state_dict(saved(torch.nn.Sequential(layer)))
    assert not done.missing_keys and not done.unexpected_keys
    assert_same(layer, other[0])
    assert isinstance(other[0].w13_weight_packed, torch.nn.Parameter)
    assert other[0].w13_weight_packed.weight_loader == loader
    other.load_state_dict(saved(torch.nn.Sequential(make_layer(moe, group_size, method_cls=method_cls)[0])))
    assert not torch.equal(answer(layer), answer(other[0]))


GROUPS = {"num_expert_group": 2, "topk_group": 1, "routed_scaling_factor": 2.0}
MAP = torch.tensor([-1, -1, -1, 0, 1, 2, -1, -1], dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "options", "other_options"),
    [
        (
            {"routing_method": RoutingMethodType.DeepSeekV3},
            {"e_score_correction_bias": torch.linspace(-1, 1, 8), **GROUPS},
            {"e_score_correction_bias": torch.zeros(8), **GROUPS},
        ),
        ({"num_local_experts": 3}, {"expert_map": MAP}, {"expert_map": MAP}),
    ],
    ids=["correction bias", "experts of a rank"],
)
def test_what_else_a_layer_has(changes, options, other_options):
    moe = make_config(**changes)
    layer, _, _ = make_layer(moe, 32, **options)
    other = fresh(moe, 32, **other_options)
    other.load_state_dict(saved(layer))
    assert_same(layer, other)


def test_unpacked_into_fresh():
    """What is to be packed still."""
    moe = make_config(has_bias=True)
    layer, other = fresh(moe, 32), fresh(moe, 32)
    fill(layer, *make_stacks(moe, 32))
    other.load_state_dict(saved(layer))
    for each in (layer, other):
        each.process_weights_after_loading()
    assert_same(layer, other)


@pytest.mark.skipif("assign" not in inspect.signature(torch.nn.Module.load_state_dict).parameters, reason="torch 2.1")
def test_assigned():
    """Without a copy, into a layer on the meta device too."""
    moe = make_config(has_bias=True)
    layer, _, _ = make_layer(moe, 32)
    state = saved(layer)
    other = fresh(moe, 32)
    with torch.device("meta"):
        meta = fresh(moe, 32)
    for each in (other, meta):
        each.load_state_dict(state, assign=True)
        assert_same(layer, each)
        assert each.w13_weight_packed.data_ptr() == state["w13_weight_packed"].data_ptr()


def spoiled(name, tensor):
    return lambda state, moe: state.update({name: tensor(state[name])})


def with_byte(tensor, at, value):
    tensor = tensor.clone()
    tensor[2, at] = value
    return tensor


WRONG = {
    "garbage": (
        spoiled(NAMES[0], lambda t: torch.randint(256, t.shape, dtype=torch.uint8)),
        "w13_weight_packed: packed matrix: magic is not 'W4A8PACK': these bytes are not a packed matrix",
    ),
    "garbage of one expert": (spoiled(NAMES[1], lambda t: with_byte(t, 0, 0)), "w2_weight_packed: .*magic"),
    "another version": (spoiled(NAMES[1], lambda t: with_byte(t, 8, 9)), "w2_weight_packed: .*version is 9"),
    "another n": (spoiled(NAMES[0], lambda t: with_byte(t, 17, 1)), "w13_weight_packed: .*size is"),
    "cut": (spoiled(NAMES[0], lambda t: t[:, :-64]), "w13_weight_packed: .*size is"),
    "an expert less": (spoiled(NAMES[1], lambda t: t[:7]), r"w2_weight_packed is \[7, \d+\], expected \[8, bytes\]"),
    "one expert": (spoiled(NAMES[0], lambda t: t[0]), r"w13_weight_packed is \[\d+\], expected \[8, bytes\]"),
    "floats": (spoiled(NAMES[0], lambda t: t.float()), "w13_weight_packed is torch.float32, expected uint8"),
    "one alone": (spoiled(NAMES[0], lambda t: t[:0, :0]), r"w13_weight_packed is \[0, 0\], expected \[8, bytes\]"),
    "the other": (
        lambda state, moe: state.update(dict(zip(NAMES, (state[NAMES[1]], state[NAMES[0]])))),
        "w13_weight_packed.*: n is 128, expected 512",
    ),
    "other groups": (
        lambda state, moe: state.update(make_layer(moe, 64)[0].state_dict()),
        "w13_weight_packed.*: group is 64, expected 32",
    ),
}


def packed_stacks(layer):
    return layer.w13_weight_packed, layer.w2_weight_packed


def experts(moe, group):
    """The same experts without a router."""
    return W4A8Experts(*packed_stacks(make_layer(moe, group)[0]), moe.hidden_dim, moe.intermediate_size, group)


LAYERS = {"fresh": fresh, "packed": lambda moe, group: make_layer(moe, group)[0], "experts": experts}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("kind", LAYERS)
def test_refused(name, kind):
    """In words, and the layer is what it was."""
    change, message = WRONG[name]
    moe = make_config()
    state = saved(make_layer(moe, 32)[0])
    change(state, moe)
    layer = LAYERS[kind](moe, 32)
    if kind == "experts":
        state = {key.replace("_weight", ""): state[key] for key in NAMES}
        message = message.replace("_weight", "")
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)
    after = layer.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
