"""State dicts of RoutedExperts: what was packed loads into a layer that is new, and is checked."""

import inspect
import io

import pytest
import torch
from moe_build import TOKEN_INT8, fill, make_config, make_layer, make_stacks, weight_args

from w4a8.moe import CompressedTensorsW4A8Int8MoEMethod, MoEActivation, RoutedExperts, RoutingMethodType
from w4a8.moe import method_v0_17 as v0_17

NAMES = ("w13_weight_packed", "w2_weight_packed")


def fresh(moe, group_size, method_cls=CompressedTensorsW4A8Int8MoEMethod, **options):
    """A layer as its constructor leaves it."""
    return RoutedExperts(moe, method_cls(weight_args(group_size), TOKEN_INT8, moe), **options)


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


@pytest.mark.parametrize("method_cls", [CompressedTensorsW4A8Int8MoEMethod, v0_17.CompressedTensorsW4A8Int8MoEMethod])
@pytest.mark.parametrize("group_size", [-1, 32])
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("activation", [MoEActivation.SILU, MoEActivation.RELU2_NO_MUL], ids=lambda a: a.value)
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


def test_a_correction_bias_is_part_of_it():
    options = {"num_expert_group": 2, "topk_group": 1, "routed_scaling_factor": 2.0}
    moe = make_config(routing_method=RoutingMethodType.DeepSeekV3)
    layer, _, _ = make_layer(moe, 32, e_score_correction_bias=torch.randn(8), **options)
    other = fresh(moe, 32, e_score_correction_bias=torch.zeros(8), **options)
    other.load_state_dict(saved(layer))
    assert_same(layer, other)


def test_of_a_rank():
    """Of expert parallelism: as many experts as this rank has."""
    expert_map = torch.tensor([-1, -1, -1, 0, 1, 2, -1, -1], dtype=torch.int32)
    moe = make_config(num_local_experts=3)
    layer, _, _ = make_layer(moe, 32, expert_map=expert_map)
    other = fresh(moe, 32, expert_map=expert_map)
    other.load_state_dict(saved(layer))
    assert_same(layer, other)


def test_unpacked_into_fresh():
    """What is to be packed still."""
    moe = make_config(has_bias=True)
    w13, w2 = make_stacks(moe, 32)
    layer, other = fresh(moe, 32), fresh(moe, 32)
    fill(layer, w13, w2)
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


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("packed", [False, True], ids=["fresh", "packed"])
def test_refused(name, packed):
    """In words, and the layer is what it was."""
    change, message = WRONG[name]
    moe = make_config()
    state = saved(make_layer(moe, 32)[0])
    change(state, moe)
    layer = make_layer(moe, 32)[0] if packed else fresh(moe, 32)
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)
    after = layer.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
