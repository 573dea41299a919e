"""state_space and short_conv: types, strides, NaN, refusals. Formulas and more are in test_linear_attention.py."""

import math

import pytest
import torch
from common import DTYPES, assert_same_bits
from gated_delta_data import assert_refused, part_of
from state_space_data import ShortConv, StateSpace, make


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", DTYPES)
def test_types_of_short_convolutions(dtype, state_dtype):
    """A product that the convolution takes is rounded to the type of the state."""
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
    assert_refused(make(name), change, message)
