"""Which quantization schemes of a checkpoint are taken over. Reads attributes only, so it needs no other package."""

from __future__ import annotations

from typing import Any

from w4a8.core.matrix import is_group_size
from w4a8.formats import Stored
from w4a8.formats.mxfp4 import BLOCK
from w4a8.formats.nvfp4 import BLOCK as NVFP4_BLOCK
from w4a8.formats.parts import Part

_IGNORED = {
    "nvfp4-pack-quantized": ("input_global_scale",),
    "modelopt-nvfp4": ("input_scale",),
    "quark-mxfp4": ("input_scale",),
}


def _is(value: Any, wanted: str) -> bool:
    """Compares what is an enum in compressed-tensors, or its string."""
    return getattr(value, "value", value) == wanted


def _is_int(weights: Any, bits: int) -> bool:
    """Static integers, with zero points or without, channelwise or in groups that the operators have."""
    if weights is None or not _is(weights.type, "int") or weights.num_bits != bits or weights.dynamic:
        return False
    actorder = getattr(weights, "actorder", None)
    if getattr(actorder, "value", actorder) in (True, "group", "dynamic"):
        return False  # input features in another order
    if _is(weights.strategy, "channel"):
        return True
    return _is(weights.strategy, "group") and is_group_size(weights.group_size)


def is_w4a8(weights: Any, inputs: Any) -> bool:
    """Whether QuantizationArgs of weights and inputs (or None) are int4 and int8 per token, quantized as it comes.

    Inputs may be declared symmetric or not: the operators choose the zero point of each token, which is never less
    exact than none.
    """
    if not _is_int(weights, 4) or inputs is None:
        return False
    return bool(_is(inputs.type, "int") and inputs.num_bits == 8 and inputs.dynamic and _is(inputs.strategy, "token"))


def is_weight_only(weights: Any, inputs: Any) -> bool:
    """Whether weights are such int4 weights, or int8, and the inputs are not quantized."""
    return inputs is None and (_is_int(weights, 4) or _is_int(weights, 8))


def is_mxfp4(weights: Any) -> bool:
    """Whether weights are 4-bit floats in blocks of 32."""
    if weights is None or not _is(weights.type, "float") or weights.num_bits != 4 or weights.dynamic:
        return False
    return _is(weights.strategy, "group") and weights.group_size == BLOCK


def is_nvfp4(weights: Any) -> bool:
    """Whether weights are 4-bit floats in blocks of 16, whose 8-bit scales share a scale."""
    if weights is None or not _is(weights.type, "float") or weights.num_bits != 4 or weights.dynamic:
        return False
    return _is(weights.strategy, "tensor_group") and weights.group_size == NVFP4_BLOCK and weights.symmetric


def stored_in(weights: Any, format_: str | None) -> Stored | None:
    """How such weights are stored in a format of compressed-tensors; None if that is another format."""
    if is_mxfp4(weights):
        return Stored(format_, BLOCK, True) if format_ == "mxfp4-pack-quantized" else None
    if is_nvfp4(weights):
        return Stored(format_, NVFP4_BLOCK, True) if format_ == "nvfp4-pack-quantized" else None
    if format_ not in ("int-quantized", "pack-quantized") or (weights.num_bits == 8 and format_ == "int-quantized"):
        return None
    group = -1 if _is(weights.strategy, "channel") else weights.group_size
    return Stored(format_, group, bool(weights.symmetric), bits=weights.num_bits)


def loaded_parts(stored: Stored) -> dict[str, Part]:
    """The tensors that vLLM's loaders bring, but for ``weight_shape``, by the names that vLLM has for their last parts.

    Zero points of a symmetric format are among them if its files have them all the same. vLLM names MXFP4's tensors
    after what they are.
    """
    kinds = ("weight", "weight_scale", "zero_points", "global_scale")
    parts = [part for part in stored.parts if part.kind in kinds]
    if stored.format == "mxfp4":
        return {part.kind: part for part in parts}
    return {part.suffix: part for part in parts if stored.format in ("gptq", "awq") or stored.requires(part)}


def ignored_in(stored: Stored) -> tuple[str, ...]:
    """Last parts of the names of tensors that files have and nothing here needs: scales of inputs."""
    return _IGNORED.get(stored.format, ())
