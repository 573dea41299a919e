"""Which quantization schemes of a checkpoint are taken over. Reads attributes only, so it needs no other package."""

from __future__ import annotations

from typing import Any

import torch

from w4a8.core.matrix import kept_scale_dtype


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


def packed_scale_dtype(
    scales: list[torch.Tensor], packed_before: torch.dtype | None, layer_name: str | None
) -> torch.dtype:
    """The type that the scales of a layer are packed in, which stays what it was when other weights are loaded.

    Args:
        scales: of all matrices of the layer.
        packed_before: its dtype, if the layer is packed into the same memory again; None at first.
        layer_name: for errors.

    Raises:
        ValueError: the layer was packed with bfloat16, which does not hold these scales.
    """
    needed = kept_scale_dtype(*scales)
    if packed_before is None:
        return needed
    if packed_before == torch.bfloat16 and needed != packed_before:
        raise ValueError(
            f"w4a8: {layer_name}: the scales of the new weights are not bfloat16 values as the first ones were, and "
            "do not fit into their memory: load these weights with a new engine"
        )
    return packed_before
