"""Layers and sequences for state_space and short_conv, what they compute, in float64, and LAYERS of all operators."""

from dataclasses import dataclass, field

import torch
from gated_delta_data import Layer, convolved, sequence_arguments, states_of

import w4a8


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
    operator = staticmethod(w4a8.state_space)

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
        return self.operator(**self.arguments(*args, **kwargs))

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
    operator = staticmethod(w4a8.short_conv)

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
        return self.operator(**self.arguments(*args, **kwargs))

    def reference(self, inputs, conv=None):
        """Of one sequence: output and rows that are left, in float64."""
        b, c, x = inputs["bcx"].double().chunk(3, 1)
        before = torch.zeros(self.width - 1, self.channels) if conv is None else conv
        # A product of float32 is rounded to the type of the state.
        product = (b.to(self.dtype) * x.to(self.dtype)).double()
        y, rows = convolved(product, before, self.weights["conv_weight"], self.weights["conv_bias"], False)
        return c * y, rows


LAYERS = {
    "Qwen3.5": (Layer, {}),
    "of real size": (Layer, {"key_heads": 1, "value_heads": 2, "key_size": 128, "value_size": 128}),
    "three value heads": (Layer, {"value_heads": 6}),
    "one value head": (Layer, {"key_heads": 1, "value_heads": 1, "key_size": 16, "value_size": 16}),
    "other values": (Layer, {"key_size": 48, "value_size": 80}),
    "few values": (Layer, {"key_size": 256, "value_size": 16}),
    "delta, width 2": (Layer, {"width": 2}),
    "delta, width 3": (Layer, {"width": 3}),
    "delta, width 8": (Layer, {"width": 8}),
    "sigmoid": (Layer, {"gate": "sigmoid"}),
    "OLMo-Hybrid": (Layer, {"beta_scale": 2.0, "key_size": 48, "value_size": 96}),
    "KDA": (Layer, {"of_channels": True, "gate": "sigmoid", "key_heads": 2, "value_heads": 2, "value_size": 48}),
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
    """A layer of this name; more: fields."""
    kind, fields = LAYERS[name]
    return kind(**{**fields, **more})
