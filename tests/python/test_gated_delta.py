"""gated_delta: slots, types, strides, extreme numbers, refusals. Formulas and more are in test_linear_attention.py."""

import math

import pytest
import torch
from common import KERNELS, assert_same_bits
from gated_delta_data import Layer, assert_refused, off
from state_space_data import make

import w4a8


def test_neighbours_and_slots_change_no_bit():
    """Sequences in any order, in any slots, with others of any length."""
    layer = Layer(value_heads=6)
    alone, lengths = [], [1, 70, 3, 64, 1]
    for b, count in enumerate(lengths):
        states = layer.states(1, seed=b)
        alone.append([layer.call(layer.inputs(count, seed=b), states, [count], fresh=b == 1), states])
    for order, slots in (([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]), ([3, 1, 4, 0, 2], [7, 0, 5, 2, 1]), ([1], [6])):
        states = layer.states(8)
        for b, slot in zip(order, slots):
            for key, part in layer.states(1, seed=b).items():
                states[key][slot] = part[0]
        before = {key: part.clone() for key, part in states.items()}
        parts = [layer.inputs(lengths[b], seed=b) for b in order]
        inputs = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        out = layer.call(inputs, states, [lengths[b] for b in order], slots, [b == 1 for b in order])
        for part, b, slot in zip(out.split([lengths[b] for b in order]), order, slots):
            assert_same_bits(part, alone[b][0])
            for key, state in states.items():
                assert_same_bits(state[slot], alone[b][1][key][0], key)
        others = [slot for slot in range(8) if slot not in slots]
        for key, state in states.items():
            assert_same_bits(state[others], before[key][others], key)


def test_types_of_inputs_may_differ():
    layer = Layer()
    inputs = layer.inputs(9)
    expected = layer.call({**inputs, "z": inputs["z"].half().float()}, layer.states(1), [9], fresh=True)
    assert_same_bits(layer.call({**inputs, "z": inputs["z"].half()}, layer.states(1), [9], fresh=True), expected)


@pytest.mark.parametrize("name", ["Qwen3.5", "KDA"])
def test_strides(name):
    """Parts of one projection, pages of a server, and the cache of transformers, whose rows are one longer."""
    layer = make(name)
    plain, before = layer.inputs(30), layer.states(3, seed=2)
    expected_states = {key: part.clone() for key, part in before.items()}
    expected = layer.call(plain, expected_states, [10, 20], slots=[2, 0])
    joined = torch.cat([part.flatten(1) for part in plain.values()], 1)
    parts = joined.split([part.flatten(1).shape[1] for part in plain.values()], 1)
    inputs = {key: part.view(plain[key].shape) for key, part in zip(plain, parts)}
    pages = torch.full((3, before["state"][0].numel() + before["conv_state"][0].numel() + 11), 7.0)
    cache = torch.full((3, layer.channels, layer.width), 7.0)
    spread = torch.full((3, layer.value_heads, layer.key_size, 2 * layer.value_size), 7.0)
    count = before["state"][0].numel()
    for conv, state in (
        (pages[:, count : count + before["conv_state"][0].numel()], pages[:, :count]),
        (cache[..., 1:].transpose(1, 2), spread[..., : layer.value_size]),
    ):
        states = {"conv_state": conv.view(before["conv_state"].shape) if conv.dim() == 2 else conv}
        states["state"] = state.view(before["state"].shape) if state.dim() == 2 else state
        for key, part in states.items():
            part.copy_(before[key])
        assert_same_bits(layer.call(inputs, states, [10, 20], slots=[2, 0]), expected)
        for key, part in states.items():
            assert_same_bits(part, expected_states[key], key)
    assert (pages[:, -11:] == 7).all()
    assert (cache[..., 0] == 7).all()
    assert (spread[..., layer.value_size :] == 7).all()
    turned = layer.weights["conv_weight"].t().contiguous().t()
    every_other = torch.stack([plain["z"], plain["z"]], -1)[..., 0]
    states = {key: part.clone() for key, part in before.items()}
    arguments = layer.arguments({**plain, "z": every_other}, states, [10, 20], slots=[2, 0])
    assert_same_bits(w4a8.gated_delta(**{**arguments, "conv_weight": turned}), expected)


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("decay", [0.0, 1.0, -100.0])
@pytest.mark.parametrize("of_channels", [False, True])
def test_extreme_gates(beta, decay, of_channels):
    """Nothing is written (beta 0) or an old value is replaced (1); a state is forgotten, stays, or all but vanishes."""
    layer = Layer(of_channels=of_channels, value_heads=2)
    inputs, states = layer.inputs(60), layer.states(1, seed=1)
    inputs["ba"][:, :2] = 200 * beta - 100
    (inputs["decay"] if of_channels else inputs["ba"][:, 2:]).fill_({0.0: 1000, 1.0: -1000, -100.0: 0}[decay])
    layer.weights["dt_bias"].zero_()
    layer.weights["a"].fill_(100 / math.log(2))
    before = states["state"][0].clone()
    expected, _, state = layer.reference(inputs, states["conv_state"][0], before)
    out = layer.call(inputs, states, [60])
    if beta == 0 and decay == 1.0:
        assert_same_bits(states["state"][0], before)
    if beta == 0 and decay != 1.0:  # the reference's state becomes denormal, and its norm something else
        assert not states["state"].any()
        assert not out.any()
    else:
        assert off(out, expected) < 1e-5
        assert off(states["state"][0], state) < 1e-5


def test_large_gates_are_no_infinity():
    """softplus(x) is x from 20 on."""
    layer = Layer(key_heads=1, value_heads=1)
    inputs, states = layer.inputs(3), layer.states(1)
    inputs["ba"][:, 1] = torch.tensor([19.5, 1e30, 25.0])
    layer.weights["a"].fill_(0.01)
    layer.weights["dt_bias"].zero_()
    expected, _, state = layer.reference(inputs)
    assert off(layer.call(inputs, states, [3], fresh=True), expected) < 3e-6
    assert off(states["state"][0], state) < 3e-6


@pytest.mark.parametrize(
    "name, channel, heads, end",
    [("qkv", 3, [0, 1], 9), ("qkv", 67, [0, 1], 12), ("qkv", 128, [0], 12), ("z", 3, [0], 6), ("ba", 3, [3], 12)],
    ids=["queries", "keys", "values", "z", "ba"],
)
def test_not_finite(name, channel, heads, end):
    """A NaN stays in its sequence and in its heads: as long as the convolution sees it, or in the state for good."""
    layer = Layer(key_heads=2, value_heads=4)
    expected = layer.call(layer.inputs(20), layer.states(2), [12, 8], fresh=True).view(20, 4, -1)
    for kernel in KERNELS:
        inputs, states = layer.inputs(20), layer.states(2)
        inputs[name][5, channel] = math.nan
        with w4a8.use_kernel(kernel):
            out = layer.call(inputs, states, [12, 8], fresh=True).view(20, 4, -1)
        seen = torch.zeros(20, 4, dtype=torch.bool)
        seen[5:end, heads] = True
        assert torch.equal(out.isnan().any(-1), seen)
        assert_same_bits(out[~seen], expected[~seen], kernel)


ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)  # noqa: E731
SLOTS = torch.arange(6, dtype=torch.int32).view(2, 3)


def guessed(out_slots, **change):
    """Two sequences with two guesses each."""
    states = {"conv_state": torch.zeros(6, 5, 256), "state": torch.zeros(6, 4, 32, 32)}
    return {"out_slots": out_slots, "accepted": ints(3, 1), **states, **change}


REFUSED = [
    ({"qkv": torch.zeros(5, 256, dtype=torch.float64)}, "qkv has dtype Double, expected float32, bfloat16 or float16"),
    ({"qkv": torch.zeros(5, 2, 128)}, "qkv has shape [5, 2, 128], expected [tokens, channels]"),
    ({"qkv": torch.zeros(5, 255)}, "qkv has 255 channels, expected 256: 2 * key_heads * 32 + value_heads * 32"),
    ({"z": torch.zeros(5, 127)}, "z has shape [5, 127], expected [5, 128]"),
    ({"z": torch.zeros(4, 128)}, "z has shape [4, 128], expected [5, 128]"),
    ({"z": torch.zeros(5, 128, dtype=torch.int8)}, "z has dtype Char, expected float32, bfloat16 or float16"),
    ({"ba": torch.zeros(5, 4)}, "ba has shape [5, 4], expected [5, 8]"),
    ({"conv_weight": torch.zeros(256, 9)}, "conv_weight has shape [256, 9], expected [channels, width], width 2..8"),
    ({"conv_weight": torch.zeros(256, 1)}, "conv_weight has shape [256, 1], expected [channels, width], width 2..8"),
    ({"conv_weight": torch.zeros(4, 4)}, "conv_weight has shape [4, 4], expected [256, 4]"),
    ({"conv_weight": torch.zeros(256, 1, 4)}, "conv_weight has shape [256, 1, 4], expected [channels, width]"),
    ({"conv_weight": torch.zeros(256, 4).int()}, "conv_weight has dtype Int, expected a floating point type"),
    ({"a": torch.zeros(2)}, "a has shape [2], expected [4]"),
    ({"dt_bias": torch.zeros(4, 32)}, "dt_bias has shape [4, 32], expected [value_heads]"),
    ({"norm": torch.zeros(31)}, "norm has shape [31], expected [32]"),
    ({"conv_state": torch.zeros(3, 4, 256)}, "conv_state has shape [3, 4, 256], expected [3, 3, 256]"),
    ({"conv_state": torch.zeros(2, 3, 256)}, "conv_state has shape [2, 3, 256], expected [3, 3, 256]"),
    ({"conv_state": torch.zeros(3, 256, 3)}, "conv_state has shape [3, 256, 3], expected [3, 3, 256]"),
    ({"conv_state": torch.zeros(1, 3, 256).expand(3, -1, -1)}, "conv_state has stride 0 in dimension 0, expected at l"),
    ({"state": torch.zeros(3, 4, 32, 32).bfloat16()}, "state has dtype BFloat16, expected float32"),
    (
        {"state": torch.zeros(3, 2, 32, 32)},
        "state has shape [3, 2, 32, 32], expected [slots, 4, K, V], K and V multiples of 16 in 16..256",
    ),
    ({"state": torch.zeros(3, 4, 24, 32)}, "state has shape [3, 4, 24, 32], expected [slots, 4, K, V], K and V mult"),
    ({"state": torch.zeros(3, 4, 32, 272)}, "state has shape [3, 4, 32, 272], expected [slots, 4, K, V], K and V mu"),
    ({"state": torch.zeros(3, 4, 32, 32).transpose(2, 3)}, "state has stride 32 in its last dimension, expected 1"),
    ({"state": torch.zeros(1, 4, 32, 32).expand(3, -1, -1, -1)}, "state has stride 0 in dimension 0, expected at leas"),
    ({"slots": torch.tensor([0, 1])}, "slots has dtype Long, expected int32"),
    ({"slots": ints(0, 3)}, "slots of sequence 1 is 3, expected 0..2, the slots of conv_state"),
    ({"slots": ints(-1, 1)}, "slots of sequence 0 is -1, expected 0..2, the slots of conv_state"),
    ({"slots": ints(1, 1)}, "slots has 1 twice, expected a slot of its own for each sequence"),
    ({"slots": ints(0)}, "query_start_loc has shape [3], expected [2]"),
    ({"out_slots": ints(0, 1)[:, None]}, "accepted is not given, expected both out_slots and accepted or neither"),
    ({"accepted": ints(1, 1)}, "out_slots is not given, expected both out_slots and accepted or neither"),
    (guessed(torch.zeros(2, 3).long()), "out_slots has dtype Long, expected int32"),
    (guessed(ints(0, 1)), "out_slots has 1 dimensions, expected 2"),
    (guessed(torch.zeros(3, 3).int()), "out_slots has shape [3, 3], expected [2, 1 + drafts]"),
    (guessed(torch.zeros(2, 0).int()), "out_slots has shape [2, 0], expected [2, 1 + drafts]"),
    (guessed(SLOTS, accepted=ints(1)), "accepted has shape [1], expected [2]"),
    (guessed(SLOTS, conv_state=torch.zeros(6, 3, 256)), "conv_state has shape [6, 3, 256], expected [6, 5, 256]"),
    (guessed(SLOTS, accepted=ints(1, 4)), "accepted of sequence 1 is 4, expected 0..3, the slots of a sequence in out"),
    (guessed(SLOTS, accepted=ints(-1, 1)), "accepted of sequence 0 is -1, expected 0..3, the slots of a sequence in o"),
    (
        guessed(SLOTS[:, :2], accepted=ints(2, 1), conv_state=torch.zeros(6, 4, 256)),
        "query_start_loc has 3 tokens of sequence 1, expected at most 2, its slots in out_slots",
    ),
    (guessed(SLOTS + 1), "out_slots of sequence 1 is 6, expected 0..5, the slots of conv_state"),
    (guessed(SLOTS % 5), "slots and out_slots have 0 twice, expected a slot of its own for each sequence and token"),
    (
        guessed(SLOTS, accepted=ints(0, 1), slots=ints(4, 0)),
        "slots and out_slots have 4 twice, expected a slot of its own for each sequence and token",
    ),
    ({"query_start_loc": ints(1, 2, 5)}, "query_start_loc begins with 1, expected 0"),
    ({"query_start_loc": ints(0, 2, 4)}, "query_start_loc ends with 4, expected 5, the number of tokens"),
    ({"query_start_loc": ints(0, 6, 5)}, "query_start_loc falls from 6 to 5 at sequence 1, expected ascending numbers"),
    ({"fresh": ints(0, 1)}, "fresh has dtype Int, expected bool"),
    ({"fresh": torch.zeros(3, dtype=torch.bool)}, "fresh has shape [3], expected [2]"),
    ({"key_heads": 3}, "key_heads is 3, expected a divisor of value_heads, 4"),
    ({"key_heads": 0}, "key_heads is 0, expected a divisor of value_heads, 4"),
    ({"key_heads": 2**63 - 1}, "key_heads is 9223372036854775807, expected a divisor of value_heads, 4"),
    ({"value_heads": 2**62}, "value_heads is 4611686018427387904, expected 1..65536"),
    ({"norm_eps": math.nan}, "norm_eps is nan, expected a finite number of float32"),
    ({"norm_eps": 0.0}, "norm_eps is 0, expected a positive number of float32"),
    ({"beta_scale": 0.0}, "beta_scale is 0, expected a positive number of float32"),
    ({"beta_scale": math.inf}, "beta_scale is inf, expected a finite number of float32"),
    ({"gate": "gelu"}, "gate is 'gelu', expected 'silu' or 'sigmoid'"),
    ({"decay": torch.zeros(5, 4, 32)}, "dt_bias has shape [4], expected [value_heads, K] with decay"),
    (
        {"decay": torch.zeros(5, 4, 16), "dt_bias": torch.zeros(4, 32), "ba": torch.zeros(5, 4)},
        "decay has shape [5, 4, 16], expected [5, 4, 32]",
    ),
]


@pytest.mark.parametrize("change, message", REFUSED)
def test_refuses(change, message):
    assert_refused(Layer(), change, message)


@pytest.mark.parametrize("name", ["slots", "query_start_loc", "fresh", "out_slots", "accepted"])
def test_numbers_in_the_memory_that_is_written(name):
    layer = Layer()
    guesses = {"out_slots": SLOTS, "accepted": ints(3, 1)}
    given = layer.arguments(layer.inputs(5), layer.states(6, seed=1, drafts=2), [2, 3], **guesses)
    memory = given["state"].view(-1)[:8].view(given[name].dtype)
    given[name] = memory[: given[name].numel()].copy_(given[name].flatten()).view(given[name].shape)
    with pytest.raises(RuntimeError, match=f"{name} lies in the memory of state, which is written, expected other mem"):
        w4a8.gated_delta(**given)


def test_inputs_are_only_read():
    """A lazy clone shares its memory until somebody may write to it: only the states are written."""
    if not hasattr(torch._C, "_is_cow_tensor"):
        pytest.skip("this torch has no copy-on-write tensors")
    layer = Layer()
    given = layer.arguments(layer.inputs(5), layer.states(1), [5], fresh=True)
    lazy = {n: torch._lazy_clone(a.clone()) if isinstance(a, torch.Tensor) else a for n, a in given.items()}
    w4a8.gated_delta(**lazy)
    shared = {n for n, a in lazy.items() if isinstance(a, torch.Tensor) and torch._C._is_cow_tensor(a)}
    assert {n for n, a in given.items() if isinstance(a, torch.Tensor)} - shared == {"conv_state", "state"}


@pytest.mark.skipif(not hasattr(torch.library, "opcheck"), reason="this torch has no opcheck")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(dynamic):
    layer = Layer()

    def model(inputs, states):
        inputs = {key: part * 2 for key, part in inputs.items()}
        return layer.call(inputs, states, [len(inputs["z"])], fresh=True) + 1

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 1, 16):
        states, expected_states = layer.states(1), layer.states(1)
        expected = model(layer.inputs(tokens), expected_states)
        assert_same_bits(compiled(layer.inputs(tokens), states), expected)
        for key, part in states.items():
            assert_same_bits(part, expected_states[key])
