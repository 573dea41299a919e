"""Layers and sequences for state_space and short_conv, and what they compute, in float64."""

from dataclasses import dataclass, field

import torch
from gated_delta_data import sequence_arguments, states_of

import w4a8


def convolved(rows, before, weight, bias, activate):
    """[T, C] of rows [T, C] behind the rows `before` [width - 1, C]; and the rows that are left."""
    tokens, width = len(rows), weight.shape[1]
    rows = torch.cat([before.double(), rows])
    x = sum(weight[:, w].double() * rows[w : w + tokens] for w in range(width))
    x = x if bias is None else x + bias.double()
    return x * torch.sigmoid(x) if activate else x, rows[len(rows) - (width - 1) :]


@dataclass
class StateSpace:
    """A layer of Mamba-2: sizes small, in Nemotron-3's proportions unless said otherwise."""

    heads: int = 8
    channels: int = 32
    groups: int = 2
    state_size: int = 64
    width: int = 4
    bias: bool = True
    norm_groups: int = 2
    norm_first: bool = False
    gated: bool = True
    normed: bool = True
    dtype: torch.dtype = torch.float32
    norm_eps: float = 1e-5
    weights: dict = field(init=False)

    def __post_init__(self):
        g = torch.Generator().manual_seed(0)
        self.rows = self.heads * self.channels + 2 * self.groups * self.state_size
        self.weights = {
            "conv_weight": torch.randn(self.rows, self.width, generator=g) * 0.5,
            "conv_bias": torch.randn(self.rows, generator=g) * 0.3 if self.bias else None,
            "a": torch.rand(self.heads, generator=g) * 15 + 1,
            "dt_bias": torch.randn(self.heads, generator=g) - 3,
            "d": torch.randn(self.heads, generator=g),
            "norm": 1 + torch.randn(self.heads * self.channels, generator=g) * 0.1 if self.normed else None,
        }

    def inputs(self, tokens, seed=1):
        g = torch.Generator().manual_seed(seed)
        sizes = {"xbc": self.rows, "z": self.heads * self.channels, "dt": self.heads}
        inputs = {name: torch.randn(tokens, size, generator=g).to(self.dtype) for name, size in sizes.items()}
        return inputs if self.gated else {**inputs, "z": None}

    def states(self, slots, dtype=None, seed=None, drafts=0):
        state = slots, self.heads, self.channels, self.state_size
        return states_of((slots, self.width - 1 + drafts, self.rows), state, dtype or self.dtype, seed)

    def arguments(self, inputs, states, lengths, slots=None, fresh=False, **guesses):
        return {
            **inputs,
            **self.weights,
            **states,
            **sequence_arguments(lengths, slots, fresh),
            "groups": self.groups,
            "norm_eps": self.norm_eps,
            "norm_groups": self.norm_groups,
            "norm_first": self.norm_first,
            **guesses,
        }

    def call(self, *args, **kwargs):
        return w4a8.state_space(**self.arguments(*args, **kwargs))

    def reference(self, inputs, conv=None, state=None):
        """Of one sequence: output, rows and state that are left, in float64. conv, state: what was before."""
        h, p, g, n = self.heads, self.channels, self.groups, self.state_size
        weights = {name: None if part is None else part.double() for name, part in self.weights.items()}
        before = torch.zeros(self.width - 1, self.rows) if conv is None else conv
        tokens = len(inputs["xbc"])
        x, rows = convolved(inputs["xbc"].double(), before, weights["conv_weight"], weights["conv_bias"], True)
        x, b, c = x.split([h * p, g * n, g * n], 1)
        x = x.reshape(tokens, h, p)
        b, c = (part.reshape(tokens, g, n).repeat_interleave(h // g, 1) for part in (b, c))
        step = torch.logaddexp(inputs["dt"].double() + weights["dt_bias"], torch.zeros(()).double())
        s = torch.zeros(h, p, n).double() if state is None else state.double()
        out = torch.empty(tokens, h, p).double()
        for t in range(tokens):
            s = s * torch.exp(-weights["a"] * step[t])[:, None, None]
            s = s + (step[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
            out[t] = (s * c[t][:, None, :]).sum(-1) + weights["d"][:, None] * x[t]
        out = out.reshape(tokens, h * p)

        def normed(y):
            if not self.normed:
                return y
            parts = y.reshape(tokens, self.norm_groups, -1)
            parts = parts * torch.rsqrt((parts * parts).mean(-1, keepdim=True) + self.norm_eps)
            return parts.reshape(tokens, -1) * weights["norm"]

        z = inputs["z"]
        gate = 1 if z is None else z.double() * torch.sigmoid(z.double())
        return normed(out) * gate if self.norm_first else normed(out * gate), rows, s


@dataclass
class ShortConv:
    """A layer of LFM2."""

    channels: int = 48
    width: int = 3
    bias: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        g = torch.Generator().manual_seed(0)
        self.weights = {
            "conv_weight": torch.randn(self.channels, self.width, generator=g),
            "conv_bias": torch.randn(self.channels, generator=g) if self.bias else None,
        }

    def inputs(self, tokens, seed=1):
        g = torch.Generator().manual_seed(seed)
        return {"bcx": torch.randn(tokens, 3 * self.channels, generator=g).to(self.dtype)}

    def states(self, slots, dtype=None, seed=None, drafts=0):
        """Of NaN, which fresh sequences must not see; random ones with a seed."""
        conv = torch.full((slots, self.width - 1 + drafts, self.channels), torch.nan)
        if seed is not None:
            conv = torch.randn(conv.shape, generator=torch.Generator().manual_seed(seed))
        return {"conv_state": conv.to(dtype or self.dtype)}

    def arguments(self, inputs, states, lengths, slots=None, fresh=False, **guesses):
        return {**inputs, **self.weights, **states, **sequence_arguments(lengths, slots, fresh), **guesses}

    def call(self, *args, **kwargs):
        return w4a8.short_conv(**self.arguments(*args, **kwargs))

    def reference(self, inputs, conv=None):
        """Of one sequence: output and rows that are left, in float64."""
        b, c, x = inputs["bcx"].double().chunk(3, 1)
        before = torch.zeros(self.width - 1, self.channels) if conv is None else conv
        # A product of float32 is rounded to the type of the state.
        product = (b.to(self.dtype) * x.to(self.dtype)).double()
        y, rows = convolved(product, before, self.weights["conv_weight"], self.weights["conv_bias"], False)
        return c * y, rows
