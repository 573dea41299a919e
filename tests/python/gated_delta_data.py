"""Layers and sequences for gated_delta, and what it computes, in float64."""

from dataclasses import dataclass, field

import pytest
import torch
from common import KERNELS, assert_same_bits

import w4a8


def sequence_arguments(lengths, slots, fresh):
    """Of sequences of so many tokens each. fresh: of all, or of each."""
    return {
        "slots": torch.tensor(list(range(len(lengths)) if slots is None else slots), dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *lengths]).cumsum(0).int(),
        "fresh": torch.tensor([fresh] * len(lengths) if isinstance(fresh, bool) else fresh, dtype=torch.bool),
    }


def off(x, exact):
    """The largest error, of the largest number."""
    return ((x.double() - exact).abs().max() / exact.abs().max()).item()


def convolved(rows, before, weight, bias, activate):
    """[T, C] of rows [T, C] behind the rows `before` [width - 1, C]; and the rows that are left."""
    tokens, width = len(rows), weight.shape[1]
    rows = torch.cat([before.double(), rows])
    x = sum(weight[:, w].double() * rows[w : w + tokens] for w in range(width))
    x = x if bias is None else x + bias.double()
    return x * torch.sigmoid(x) if activate else x, rows[len(rows) - (width - 1) :]


def states_of(conv_size, state_size, dtype, seed):
    """Of NaN, which fresh sequences must not see; random ones with a seed."""
    conv, state = torch.full(conv_size, torch.nan), torch.full(state_size, torch.nan)
    if seed is not None:
        g = torch.Generator().manual_seed(seed)
        conv, state = (torch.randn(part.shape, generator=g) * 0.3 for part in (conv, state))
    return {"conv_state": conv.to(dtype), "state": state}


def same_bits_of_kernels_and_threads(layer, inputs):
    """The output and both states for 90 tokens, of which one is a sequence; asserts the bits."""
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            for kernel in KERNELS:
                with w4a8.use_kernel(kernel):
                    states = layer.states(2, seed=5)
                    out = layer.call(inputs, states, [1, 89], fresh=[False, True])
                results.append((f"{kernel} on {threads}", [out, *states.values()]))
    finally:
        torch.set_num_threads(before)
    for what, tensors in results[1:]:
        for tensor, expected in zip(tensors, results[0][1]):
            assert_same_bits(tensor, expected, what)
    return results[0][1]


def assert_refused(layer, change, message):
    """Other arguments are refused, and the states stay as they are."""
    states = layer.states(3, seed=1)
    before = {key: part.clone() for key, part in states.items()}
    with pytest.raises(RuntimeError) as caught:
        layer.operator(**{**layer.arguments(layer.inputs(5), states, [2, 3]), **change})
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"w4a8::{layer.operator.__name__}: ")
    for key, part in states.items():
        assert_same_bits(part, before[key])


def part_of(inputs, begin, end):
    """Some tokens."""
    return {key: None if part is None else part[begin:end] for key, part in inputs.items()}


def joined(*parts):
    """Tokens one after another."""
    return {key: None if parts[0][key] is None else torch.cat([part[key] for part in parts]) for key in parts[0]}


# Of 150 tokens.
CUTS = [[1] * 150, [13] * 11 + [7], [64, 64, 22], [65, 85], [0, 1, 2, 0, 147], [149, 1]]


def same_bits_when_cut(layer, cut):
    """A sequence in calls of so many tokens each has the bits and the states of one call."""
    inputs = layer.inputs(150)
    whole, parts = layer.states(1, torch.bfloat16), layer.states(1, torch.bfloat16)
    expected = layer.call(inputs, whole, [150], fresh=True)
    begin, outs = 0, []
    for count in cut:
        outs.append(layer.call(part_of(inputs, begin, begin + count), parts, [count], fresh=begin == 0))
        begin += count
    assert_same_bits(torch.cat(outs), expected)
    for key, part in parts.items():
        assert_same_bits(part, whole[key], key)


def same_bits_with_guesses(layer, drafts, dtype=None):
    """Guessed tokens that are taken back leave nothing behind: asserts the bits of the right ones and of the states.

    Beside them a sequence without guesses goes on token by token.
    """
    tokens, prompt = 40, 6
    right, wrong, others = layer.inputs(tokens), layer.inputs(drafts, seed=8), layer.inputs(tokens, seed=9)
    plain, beside = layer.states(1, dtype), layer.states(1, dtype)
    expected, expected_others = (layer.call(given, states, [tokens], fresh=True) for given, states in
                                 ((right, plain), (others, beside)))  # fmt: skip
    states = layer.states(drafts + 3, dtype, drafts=drafts)
    out_slots = torch.arange(1, drafts + 2, dtype=torch.int32).flip(0).repeat(2, 1)  # of the second ones not looked at
    where = {"slots": [drafts + 1, drafts + 2], "out_slots": out_slots}
    given = joined(part_of(right, 0, prompt), part_of(others, 0, 1))
    first = {"fresh": True, "accepted": torch.zeros(2, dtype=torch.int32)}
    outs = [layer.call(given, states, [prompt, 1], **first, **where)[:prompt]]
    generator, at, accepted, steps = torch.Generator().manual_seed(0), prompt, 1, 1
    while at < tokens:
        most = min(drafts + 1, tokens - at)
        take = torch.randint(1, most + 1, (), generator=generator).item()
        guesses = torch.randint(0, drafts + 2 - take, (), generator=generator).item()
        given = joined(part_of(right, at, at + take), part_of(wrong, 0, guesses), part_of(others, steps, steps + 1))
        given_to = {"accepted": torch.tensor([accepted, 0], dtype=torch.int32), **where}
        out = layer.call(given, states, [take + guesses, 1], **given_to)
        outs.append(out[:take])
        assert_same_bits(out[-1], expected_others[steps])
        at, accepted, steps = at + take, take, steps + 1
    assert_same_bits(torch.cat(outs), expected)
    rows = states["conv_state"][drafts + 1]
    assert_same_bits(rows[accepted - 1 : accepted - 1 + layer.width - 1], plain["conv_state"][0])
    if "state" in states:
        assert_same_bits(states["state"][out_slots[0, accepted - 1]], plain["state"][0])
    for part in states.values():
        assert part[0].isnan().all()


@dataclass
class Layer:
    """Weights of a layer: sizes small, in Qwen3.5's proportions unless said otherwise."""

    key_heads: int = 2
    value_heads: int = 4
    key_size: int = 32
    value_size: int = 32
    width: int = 4
    gate: str = "silu"
    beta_scale: float = 1.0
    of_channels: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0
    norm_eps: float = 1e-6
    weights: dict = field(init=False)
    operator = staticmethod(w4a8.gated_delta)

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)
        self.channels = 2 * self.key_heads * self.key_size + self.value_heads * self.value_size
        bias = (self.value_heads, self.key_size) if self.of_channels else (self.value_heads,)
        self.weights = {
            "conv_weight": torch.randn(self.channels, self.width, generator=g) * 0.5,
            "a": torch.rand(self.value_heads, generator=g) * 15.9 + 0.1,
            "dt_bias": torch.randn(bias, generator=g) - 2,
            "norm": 1 + torch.randn(self.value_size, generator=g) * 0.1,
        }

    def inputs(self, tokens, seed=1):
        g = torch.Generator().manual_seed(seed)
        sizes = {"qkv": (self.channels,), "z": (self.value_heads * self.value_size,)}
        sizes["ba"] = (self.value_heads * (1 if self.of_channels else 2),)
        if self.of_channels:
            sizes["decay"] = (self.value_heads, self.key_size)
        return {name: torch.randn(tokens, *size, generator=g).to(self.dtype) for name, size in sizes.items()}

    def states(self, slots, dtype=None, seed=None, drafts=0):
        state = slots, self.value_heads, self.key_size, self.value_size
        return states_of((slots, self.width - 1 + drafts, self.channels), state, dtype or self.dtype, seed)

    def arguments(self, inputs, states, lengths, slots=None, fresh=False, **guesses):
        return {
            **inputs,
            **self.weights,
            **states,
            **sequence_arguments(lengths, slots, fresh),
            "key_heads": self.key_heads,
            "value_heads": self.value_heads,
            "norm_eps": self.norm_eps,
            "gate": self.gate,
            "beta_scale": self.beta_scale,
            **guesses,
        }

    def call(self, *args, **kwargs):
        return self.operator(**self.arguments(*args, **kwargs))

    def reference(self, inputs, conv=None, state=None):
        """Of one sequence: output [T, value_heads * V], rows [width - 1, C] and state that are left, in float64.

        conv, state: what was before, None: zeros.
        """
        hk, hv, k_, v_ = self.key_heads, self.value_heads, self.key_size, self.value_size
        tokens = len(inputs["qkv"])
        weights = {name: part.double() for name, part in self.weights.items()}
        qkv, z, ba = (inputs[name].double() for name in ("qkv", "z", "ba"))
        before = torch.zeros(self.width - 1, self.channels) if conv is None else conv
        x, rows = convolved(qkv, before, weights["conv_weight"], None, True)
        q, k, v = x.split([hk * k_, hk * k_, hv * v_], 1)
        q, k, v = q.view(tokens, hk, k_), k.view(tokens, hk, k_), v.view(tokens, hv, v_)
        q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q, k = (y.repeat_interleave(hv // hk, 1) for y in (q / k_**0.5, k))
        given = inputs["decay"].double() if self.of_channels else ba[:, hv:]
        rate = weights["a"][:, None] if self.of_channels else weights["a"]
        decay = torch.exp(-rate * torch.logaddexp(given + weights["dt_bias"], torch.zeros(()).double()))
        decay = decay.view(tokens, hv, -1, 1).expand(tokens, hv, k_, 1)
        beta = self.beta_scale * torch.sigmoid(ba[:, :hv])
        s = torch.zeros(hv, k_, v_).double() if state is None else state.double()
        out = torch.empty(tokens, hv, v_).double()
        for t in range(tokens):
            s = s * decay[t]
            d = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
            s = s + k[t][:, :, None] * d[:, None, :]
            out[t] = torch.einsum("hkv,hk->hv", s, q[t])
        out = out * torch.rsqrt((out * out).mean(-1, keepdim=True) + self.norm_eps) * weights["norm"]
        z = z.view(tokens, hv, v_)
        out = out * torch.sigmoid(z) * (z if self.gate == "silu" else 1)
        return out.reshape(tokens, hv * v_), rows, s
