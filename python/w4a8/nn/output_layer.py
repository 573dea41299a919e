"""Output layers that stay floats in a model whose parameters need no gradients."""

from __future__ import annotations

from typing import Any

import torch


def multiply_once(layer: torch.nn.Module | None) -> None:
    """Lets a linear layer whose weight needs no gradient multiply part of a longer tensor without copying the weight.

    Generating multiplies x[:, -1:] of [B, T, K], the last tokens of prompts. From the strides of x torch does not see
    that these rows are one matrix, and copies the weight B times. A copy of x, of few rows, is one matrix
    (``contiguous()`` does not copy for B = 1).

    Args:
        layer: a ``torch.nn.Linear``; anything else is left alone.
    """
    if type(layer) is torch.nn.Linear and own_strides not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(own_strides)


def own_strides(layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The hook: an input of three or more dimensions gets the strides of a tensor of its own."""
    if not args or args[0].dim() < 3:
        return None
    x, *others = args
    usual = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride())):
        if stride != usual:
            return (x.clone(memory_format=torch.contiguous_format), *others)
        usual *= size
    return None
