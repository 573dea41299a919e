"""Linear attention of 32,768 tokens beside its formulas in float64: rounding errors of a state do not grow with a text.

In chunks and then token by token, as one call of all layers runs it (tests/python/test_decoder_linear.py: the same
bits).
"""

from itertools import pairwise

import pytest
import torch
from gated_delta_data import Layer, part_of
from state_space_data import StateSpace

TOKENS, CHUNK, DECODED = 32768, 4096, 64
# The slowest head multiplies its state by about 1 - 1 / REMEMBERED for each token, as real models' do.
REMEMBERED = 8192
LAYERS = {
    "Qwen3.5": lambda: Layer(key_heads=2, value_heads=4, key_size=16, value_size=16),
    "KDA": lambda: Layer(key_heads=2, value_heads=2, key_size=16, value_size=16, of_channels=True, gate="sigmoid"),
    "Mamba-2": lambda: StateSpace(heads=4, channels=16, groups=2, state_size=16),
}
# A token rounds the decay, its product with the state and the sum, each by 2^-24 of the number at most. Roundings of
# different tokens are independent, so their squares add up, and those of a token fade by the square of each decay
# behind it: half as many as are remembered count.
BOUND = 2**-24 * (3 * REMEMBERED / 2) ** 0.5
# What the operator rounds behind the state: as of 200 tokens in test_linear_attention.py.
BEHIND = 3e-6


def off(x, exact):
    """The error of the whole, as roots of sums of squares."""
    return ((x.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_no_drift(name):
    layer = LAYERS[name]()
    layer.weights["dt_bias"] = torch.full_like(layer.weights["dt_bias"], -2)
    # The softplus of inputs of deviation 1 less 2 is 0.19 on average.
    layer.weights["a"] = 6 / REMEMBERED * 8.0 ** torch.arange(len(layer.weights["a"]))
    inputs, states = layer.inputs(TOKENS), layer.states(1)
    expected, rows, state = layer.reference(inputs)
    cuts = [*range(0, TOKENS - DECODED, CHUNK), *range(TOKENS - DECODED, TOKENS + 1)]
    parts = [part_of(inputs, begin, end) for begin, end in pairwise(cuts)]
    outs = [layer.call(part, states, [len(part["z"])], fresh=i == 0) for i, part in enumerate(parts)]
    for head, exact in zip(states["state"][0], state):
        assert off(head, exact) < BOUND
    assert off(torch.cat(outs[-DECODED:]), expected[-DECODED:]) < BOUND + BEHIND
    assert torch.equal(states["conv_state"][0].double(), rows)
