"""The operators of linear attention beside their formulas in float64, and what changes none of their bits."""

import re

import pytest
import torch
from common import DTYPES, assert_same_bits
from gated_delta_data import CUTS, off, same_bits_of_kernels_and_threads, same_bits_when_cut, same_bits_with_guesses
from state_space_data import LAYERS, make


def check(layer, tokens, **before):
    """A float32 that is multiplied a few hundred times is off by some 1e-6 of the largest."""
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


@pytest.mark.parametrize("name", ["Qwen3.5", "KDA", "delta, width 8", "Nemotron-3", "width 8", "LFM2"])
@pytest.mark.parametrize("cut", CUTS)
def test_cuts_change_no_bit(name, cut):
    same_bits_when_cut(make(name), cut)


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("name", LAYERS)
def test_guessed_tokens_change_no_bit(name, drafts):
    same_bits_with_guesses(make(name), drafts, torch.bfloat16 if drafts == 3 else None)


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
@pytest.mark.parametrize("name", ["Qwen3.5", "KDA", "Nemotron-3"])
def test_types(dtype, state_dtype, name):
    """Numbers of a narrower type are exact in the wider one: the same, rounded once more."""
    narrow = make(name, dtype=dtype)
    inputs, states = narrow.inputs(20), narrow.states(1, state_dtype, seed=3)
    wide = {key: part.float() for key, part in inputs.items()}
    rows = next(iter(wide))  # which the convolution takes
    wide[rows] = wide[rows].to(state_dtype).float()
    wide_states = {key: part.float().clone() for key, part in states.items()}
    out = narrow.call(inputs, states, [20])
    assert out.dtype == dtype
    assert_same_bits(out, narrow.call(wide, wide_states, [20]).to(dtype))
    assert_same_bits(states["state"], wide_states["state"])
    assert_same_bits(states["conv_state"], wide_states["conv_state"].to(state_dtype))


@pytest.mark.parametrize("name", ["Qwen3.5", "Nemotron-3", "LFM2"])
def test_nothing_to_do(name):
    layer = make(name)
    states = layer.states(2, seed=1)
    before = {key: part.clone() for key, part in states.items()}
    # The slots of sequences without tokens are not looked at.
    assert len(layer.call(layer.inputs(0), states, [0, 0], slots=[-1, 7], fresh=[True, False])) == 0
    assert len(layer.call(layer.inputs(0), states, [])) == 0
    for key, part in states.items():
        assert_same_bits(part, before[key])


READ = {"Qwen3.5": ("qkv", "norm", "state"), "Nemotron-3": ("xbc", "d"), "LFM2": ("bcx",)}


@pytest.mark.parametrize(("name", "argument"), [(name, each) for name, found in READ.items() for each in found])
def test_refuses_gradients(name, argument):
    layer = make(name)
    given = layer.arguments(layer.inputs(5), layer.states(1), [5], fresh=True)
    given[argument] = given[argument].clone().requires_grad_()
    message = f"{argument} requires gradients, which a state does not keep, expected torch.no_grad()"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        layer.operator(**given)
    with torch.no_grad():
        assert not layer.operator(**given).requires_grad
