"""Activations rounded to int8 and back in float32, and packed weights multiplied out: the operators, slowly.

The operators multiply integers and round less often; lab/tests/test_accuracy.py compares both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import w4a8

PER_TOKEN = -1  # as `activation_group` of w4a8.quantize_: one asymmetric scale for a row
Rounding = Callable[[torch.Tensor], torch.Tensor]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def quotient(number: float, x: torch.Tensor) -> torch.Tensor:
    """Rounded once; torch computes `number / x` as a product with the reciprocal."""
    return torch.full_like(x, number) / x


def per_token(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., K], one asymmetric scale for each row (docs/numerics.md, section 1)."""
    most, least = x.amax(-1, keepdim=True).clamp(min=0), x.amin(-1, keepdim=True).clamp(max=0)
    span = most - least
    scale = torch.where(span > 0, quotient(255, span), torch.ones_like(span))
    low, high = -128 - least * scale, 127 - most * scale
    from_low = (-128 + least * scale) + (127 + most * scale) > 0
    zero = torch.where(from_low, low, high).clamp(-128, 127).round()
    return (((x * scale).round() + zero).clamp(-128, 127) - zero) * quotient(1, scale)


def in_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """float32 [..., K], one symmetric scale for `size` values along K, which must be a multiple.

    As the operators do it: the factor that integers are multiplied by again is 1 / scale without the last two bits of
    its mantissa, and a group whose scale overflows is 0.
    """
    parts = x.unflatten(-1, (-1, size))
    scale = quotient(127, parts.abs().amax(-1, keepdim=True))
    scale = torch.where(scale.isinf(), torch.zeros_like(scale), scale)
    factor = (quotient(1, scale).view(torch.int32) & ~3).view(torch.float32)
    factor = torch.where(scale == 0, scale, factor)
    return ((parts * scale).round() * factor).reshape(x.shape)


def rounding(activation_group: int) -> Rounding:
    """PER_TOKEN or the size of a group."""
    return per_token if activation_group == PER_TOKEN else lambda x: in_groups(x, activation_group)


def multiplied_out(layer: w4a8.nn.W4A8Linear | w4a8.nn.W8A8Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The float32 weight [N, K] that a packed layer stands for, and its bias [N] or None."""
    rows, columns = layer.out_features, layer.in_features
    found = w4a8.dyn_quant_unpack_any_4bit_weight(layer.packed, layer.group_size, columns, rows)
    codes, scales, zero_points, bias, values, *_ = found
    if values != "int8":
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    groups = codes.reshape(rows, -1, layer.group_size)
    if values == "e2m1":
        numbers = E2M1[groups.long()]
    elif zero_points.numel() > 0:
        numbers = groups.float() - zero_points.float()[..., None]
    else:
        numbers = groups.float() - (128 if values == "int8" else 8)
    weight = numbers * scales.float().reshape(rows, -1, 1)
    return weight.reshape(rows, columns), bias if bias.numel() > 0 else None


class Emulated(torch.nn.Module):
    """A packed layer in float32; `rounded` is what happens to its inputs, nothing if None."""

    def __init__(self, layer: w4a8.nn.W4A8Linear | w4a8.nn.W8A8Linear, rounded: Rounding | None) -> None:
        super().__init__()
        self.weight, self.bias = multiplied_out(layer)
        self.rounded = rounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float() if self.rounded is None else self.rounded(x.float())
        return torch.nn.functional.linear(x, self.weight, self.bias)


def emulate_(model: torch.nn.Module, rounded: Rounding | None) -> None:
    """Puts an Emulated into the place of each packed layer."""
    kinds = (w4a8.nn.W4A8Linear, w4a8.nn.W8A8Linear)
    for owner in list(model.modules()):
        for name, module in list(owner.named_children()):
            if isinstance(module, kinds):
                setattr(owner, name, Emulated(module, rounded))
