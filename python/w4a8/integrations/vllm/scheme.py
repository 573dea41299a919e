"""Which quantization schemes of a checkpoint are taken over. Reads attributes only, so it needs no package."""

from __future__ import annotations

from typing import Any

import torch


def _is(value: Any, wanted: str) -> bool:
    """Compares what is an enum in compressed-tensors, or its string."""
    return getattr(value, "value", value) == wanted


def _is_int4(weights: Any) -> bool:
    """Symmetric static int4, channelwise or in groups of a multiple of 32 input features."""
    if weights is None or not _is(weights.type, "int") or weights.num_bits != 4:
        return False
    if not weights.symmetric or weights.dynamic:
        return False
    if _is(weights.strategy, "channel"):
        return True
    return _is(weights.strategy, "group") and bool(weights.group_size) and weights.group_size % 32 == 0


def is_w4a8(weights: Any, inputs: Any) -> bool:
    """Whether QuantizationArgs of weights and inputs (or None) are int4 and int8 per token, quantized as it comes.

    Inputs may be declared symmetric or not: the operators choose the zero point of each token, which is never less
    exact than none.
    """
    if not _is_int4(weights) or inputs is None:
        return False
    return bool(_is(inputs.type, "int") and inputs.num_bits == 8 and inputs.dynamic and _is(inputs.strategy, "token"))


def is_w4a16(weights: Any, inputs: Any) -> bool:
    """Whether weights are such int4 weights and the inputs are not quantized."""
    return inputs is None and _is_int4(weights)


def group_size(weights: Any) -> int:
    """Input features per scale; -1 is channelwise."""
    return -1 if _is(weights.strategy, "channel") else weights.group_size


def describe(group: int) -> str:
    """For messages."""
    return "channelwise" if group == -1 else f"groups of {group}"


def kept_scale_dtype(scales: torch.Tensor) -> torch.dtype:
    """bfloat16 if that holds every scale exactly, else float32: half the bytes to read, at no loss."""
    exact = torch.equal(scales.to(torch.bfloat16).to(scales.dtype), scales)
    return torch.bfloat16 if exact else torch.float32
