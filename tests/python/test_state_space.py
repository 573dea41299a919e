"""state_space and short_conv beside their formulas in float64, what their bits depend on, and what they refuse. What
they share with gated_delta is in test_gated_delta.py."""

import math
import re

import pytest
import torch
from common import DTYPES, assert_same_bits
from gated_delta_data import CUTS, part_of, same_bits_of_kernels_and_threads, same_bits_when_cut, same_bits_with_guesses
from state_space_data import ShortConv, StateSpace

import w4a8

LAYERS = {
    "Nemotron-3": (StateSpace, {}),
    "Granite 4": (StateSpace, {"groups": 1, "norm_groups": 1}),
    "Falcon-H1": (StateSpace, {"groups": 1, "normed": False, "state_size": 256, "channels": 16, "norm_groups": 1}),
    "norm first": (StateSpace, {"norm_first": True, "norm_groups": 1}),
    "no gate": (StateSpace, {"gated": False}),
    "nothing behind": (StateSpace, {"gated": False, "normed": False}),
    "width 2": (StateSpace, {"width": 2, "bias": False}),
    "width 8": (StateSpace, {"width": 8}),
    "one head": (StateSpace, {"heads": 1, "groups": 1, "norm_groups": 1, "channels": 16, "state_size": 16}),
    "odd sizes": (StateSpace, {"heads": 6, "groups": 3, "norm_groups": 2, "channels": 80, "state_size": 48}),
    "real size": (StateSpace, {"heads": 2, "groups": 1, "norm_groups": 1, "channels": 64, "state_size": 128}),
    "LFM2": (ShortConv, {}),
    "LFM2 with bias": (ShortConv, {"bias": True, "width": 4}),
    "LFM2, many channels": (ShortConv, {"channels": 272}),
}


def make(name, **more):
    kind, fields = LAYERS[name]
    return kind(**{**fields, **more})


def off(x, exact):
    """The largest error, of the largest number."""
    return ((x.double() - exact).abs().max() / exact.abs().max()).item()


def check(layer, tokens, **before):
    inputs, states = layer.inputs(tokens), layer.states(3, **before)
    given = {key: part[2].clone() for key, part in states.items()} if before else {}
    out = layer.call(inputs, states, [tokens], slots=[2], fresh=not before)
    expected, rows, *state = layer.reference(inputs, *given.values())
    assert out.shape == expected.shape
    assert off(out, expected) < 3e-6
    assert torch.equal(states["conv_state"][2].double(), rows)
    for left in state:
        assert off(states["state"][2], left) < 3e-6
    return states


@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 200])
@pytest.mark.parametrize("name", LAYERS)
def test_is_near_its_formulas(name, tokens):
    states = check(make(name), tokens)
    for part in states.values():
        assert part[:2].isnan().all()


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("name", LAYERS)
def test_goes_on_where_a_sequence_was(name, tokens):
    check(make(name), tokens, seed=3)


@pytest.mark.parametrize("name", ["Nemotron-3", "width 8", "LFM2"])
@pytest.mark.parametrize("cut", CUTS)
def test_cuts_change_no_bit(name, cut):
    same_bits_when_cut(make(name), cut)


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("name", LAYERS)
def test_guessed_tokens_change_no_bit(name, drafts):
    same_bits_with_guesses(make(name), drafts, torch.bfloat16 if drafts == 3 else None)


def test_a_call_that_is_cut():
    """What waits for a norm is bounded: of more tokens some run after the others."""
    layer = StateSpace(heads=64, channels=64, state_size=16)
    tokens = 1100
    inputs, whole, parts = layer.inputs(tokens), layer.states(2), layer.states(2)
    out = layer.call(inputs, whole, [30, tokens - 30], fresh=True)
    first = layer.call(part_of(inputs, 0, 30), parts, [30], fresh=True)
    rest = [
        layer.call(part_of(inputs, begin, begin + 107), parts, [107], slots=[1], fresh=begin == 30)
        for begin in range(30, tokens, 107)
    ]
    assert_same_bits(torch.cat([first, *rest]), out)
    for key, part in parts.items():
        assert_same_bits(part, whole[key], key)


@pytest.mark.parametrize("name", LAYERS)
def test_kernels_threads_and_neighbours_change_no_bit(name):
    layer = make(name)
    inputs = layer.inputs(90)
    expected_out, *expected_states = same_bits_of_kernels_and_threads(layer, inputs)
    states = layer.states(4)
    for key, part in layer.states(2, seed=5).items():
        states[key][3] = part[0]
    turned = {key: None if part is None else torch.cat([part[1:], part[:1]]) for key, part in inputs.items()}
    out = layer.call(turned, states, [89, 1], slots=[1, 3], fresh=[True, False])
    assert_same_bits(torch.cat([out[89:], out[:89]]), expected_out)
    for (key, part), expected in zip(states.items(), expected_states):
        assert_same_bits(part[[3, 1]], expected, key)
        assert part[[0, 2]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_types(dtype, state_dtype):
    """Numbers of a narrower type are exact in the wider one: the same, rounded once more."""
    narrow = StateSpace(dtype=dtype)
    inputs, states = narrow.inputs(20), narrow.states(1, state_dtype, seed=3)
    wide = {key: part.float() for key, part in inputs.items()}
    wide["xbc"] = wide["xbc"].to(state_dtype).float()
    wide_states = {key: part.float().clone() for key, part in states.items()}
    out = narrow.call(inputs, states, [20])
    assert out.dtype == dtype
    assert_same_bits(out, narrow.call(wide, wide_states, [20]).to(dtype))
    assert_same_bits(states["state"], wide_states["state"])
    short = ShortConv(dtype=dtype)
    bcx = short.inputs(20)["bcx"]
    out = short.call({"bcx": bcx}, short.states(1, state_dtype), [20], fresh=True)
    b, c, x = bcx.float().chunk(3, 1)
    rounded = torch.cat([(b * x).to(state_dtype).float(), c, torch.ones_like(x)], 1)
    assert_same_bits(out, short.call({"bcx": rounded}, short.states(1, torch.float32), [20], fresh=True).to(dtype))


def test_strides():
    layer = StateSpace()
    plain, before = layer.inputs(30), layer.states(3, seed=2)
    expected_states = {key: part.clone() for key, part in before.items()}
    expected = layer.call(plain, expected_states, [10, 20], slots=[2, 0])
    inputs = dict(zip(plain, torch.cat(list(plain.values()), 1).split([part.shape[1] for part in plain.values()], 1)))
    cache = torch.full((3, layer.rows, layer.width), 7.0)
    spread = torch.full((3, 2 * layer.heads, layer.channels, 2 * layer.state_size), 7.0)
    states = {
        "conv_state": cache[..., 1:].transpose(1, 2).copy_(before["conv_state"]),
        "state": spread[:, ::2, :, : layer.state_size].copy_(before["state"]),
    }
    assert_same_bits(layer.call(inputs, states, [10, 20], slots=[2, 0]), expected)
    for key, part in states.items():
        assert_same_bits(part, expected_states[key], key)
    assert (cache[..., 0] == 7).all()
    assert (spread[:, 1::2] == 7).all()
    assert (spread[..., layer.state_size :] == 7).all()


def test_not_finite():
    """A NaN stays in its sequence; norms spread it over their part of the row."""
    layer = StateSpace()
    expected = layer.call(layer.inputs(20), layer.states(2), [12, 8], fresh=True)
    inputs = layer.inputs(20)
    inputs["xbc"][5, 33] = math.nan  # head 1, part 0
    out = layer.call(inputs, layer.states(2), [12, 8], fresh=True)
    seen = torch.zeros(20, 256, dtype=torch.bool)
    seen[5:12, :128] = True
    assert torch.equal(out.isnan(), seen)
    assert_same_bits(out[~seen], expected[~seen])


def test_nothing_to_do():
    for name in ("Nemotron-3", "LFM2"):
        layer = make(name)
        states = layer.states(2, seed=1)
        before = {key: part.clone() for key, part in states.items()}
        out = layer.call(layer.inputs(0), states, [0, 0], slots=[-1, 7], fresh=[True, False])
        assert len(out) == 0
        for key, part in states.items():
            assert_same_bits(part, before[key])


REFUSED = [
    ("Nemotron-3", {"xbc": torch.zeros(5, 500)}, "xbc has 500 channels, expected 512: heads * 32 + 2 * groups * 64"),
    ("Nemotron-3", {"xbc": torch.zeros(5, 512).int()}, "xbc has dtype Int, expected float32, bfloat16 or float16"),
    ("Nemotron-3", {"z": torch.zeros(5, 128)}, "z has shape [5, 128], expected [5, 256]"),
    ("Nemotron-3", {"dt": torch.zeros(5, 4)}, "dt has shape [5, 4], expected [5, 8]"),
    ("Nemotron-3", {"conv_weight": torch.zeros(512, 9)}, "conv_weight has shape [512, 9], expected [channels, width],"),
    ("Nemotron-3", {"conv_bias": torch.zeros(8)}, "conv_bias has shape [8], expected [512]"),
    ("Nemotron-3", {"a": torch.zeros(4)}, "a has shape [4], expected [8]"),
    ("Nemotron-3", {"d": torch.zeros(8).int()}, "d has dtype Int, expected a floating point type"),
    ("Nemotron-3", {"dt_bias": torch.zeros(4)}, "dt_bias has shape [4], expected [8]"),
    ("Nemotron-3", {"norm": torch.zeros(32)}, "norm has shape [32], expected [256]"),
    ("Nemotron-3", {"conv_state": torch.zeros(3, 4, 512)}, "conv_state has shape [3, 4, 512], expected [3, 3, 512]"),
    (
        "Nemotron-3",
        {"state": torch.zeros(3, 8, 32, 60)},
        "state has shape [3, 8, 32, 60], expected [slots, heads, P, N",
    ),
    ("Nemotron-3", {"state": torch.zeros(3, 8, 32, 64).half()}, "state has dtype Half, expected float32"),
    ("Nemotron-3", {"state": torch.zeros(3, 8, 64, 32).transpose(2, 3)}, "state has stride 32 in its last dimension"),
    ("Nemotron-3", {"groups": 3}, "groups is 3, expected a divisor of 8, the heads of state"),
    ("Nemotron-3", {"norm_groups": 0}, "norm_groups is 0, expected a divisor of 8, the heads of state"),
    ("Nemotron-3", {"norm_eps": 0.0}, "norm_eps is 0, expected a positive number of float32"),
    ("Nemotron-3", {"slots": torch.tensor([1, 1], dtype=torch.int32)}, "slots has 1 twice, expected a slot of its own"),
    ("LFM2", {"bcx": torch.zeros(5, 100)}, "bcx has shape [5, 100], expected [tokens, 3 * 48]"),
    ("LFM2", {"conv_weight": torch.zeros(40, 3)}, "conv_weight has 40 channels, expected a multiple of 16"),
    ("LFM2", {"conv_weight": torch.zeros(48, 1)}, "conv_weight has shape [48, 1], expected [channels, width], width 2"),
    ("LFM2", {"conv_bias": torch.zeros(8)}, "conv_bias has shape [8], expected [48]"),
    ("LFM2", {"conv_state": torch.zeros(3, 3, 48)}, "conv_state has shape [3, 3, 48], expected [3, 2, 48]"),
    (
        "LFM2",
        {"conv_state": torch.zeros(1, 2, 48).expand(3, -1, -1)},
        "conv_state has stride 0 in dimension 0, expecte",
    ),
    (
        "LFM2",
        {"out_slots": torch.zeros(2, 1).int(), "accepted": torch.zeros(2)},
        "accepted has dtype Float, expected int32",
    ),
    ("Nemotron-3", {"accepted": torch.zeros(2).int()}, "out_slots is not given, expected both out_slots and accepted"),
    ("LFM2", {"fresh": torch.zeros(2)}, "fresh has dtype Float, expected bool"),
]


@pytest.mark.parametrize("name, change, message", REFUSED)
def test_refuses(name, change, message):
    layer = make(name)
    states = layer.states(3, seed=1)
    before = {key: part.clone() for key, part in states.items()}
    operator = w4a8.state_space if isinstance(layer, StateSpace) else w4a8.short_conv
    with pytest.raises(RuntimeError) as caught:
        operator(**{**layer.arguments(layer.inputs(5), states, [2, 3]), **change})
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"w4a8::{operator.__name__}: ")
    for key, part in states.items():
        assert_same_bits(part, before[key])


@pytest.mark.parametrize(("name", "argument"), [("Nemotron-3", "xbc"), ("Nemotron-3", "d"), ("LFM2", "bcx")])
def test_refuses_gradients(name, argument):
    layer = make(name)
    operator = w4a8.state_space if isinstance(layer, StateSpace) else w4a8.short_conv
    given = layer.arguments(layer.inputs(5), layer.states(1), [5], fresh=True)
    given[argument] = given[argument].clone().requires_grad_()
    message = f"{argument} requires gradients, which a state does not keep, expected torch.no_grad()"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        operator(**given)
    with torch.no_grad():
        assert not operator(**given).requires_grad


@pytest.mark.sweep
def test_a_long_text_does_not_drift():
    layer = StateSpace(heads=2, groups=1, norm_groups=1)
    inputs, states = layer.inputs(32768), layer.states(1)
    out = layer.call(inputs, states, [32768], fresh=True)
    expected, _, state = layer.reference(inputs)
    assert off(out[-1000:], expected[-1000:]) < 1e-5
    assert off(states["state"][0], state) < 1e-5
