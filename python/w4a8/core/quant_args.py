"""Quantization arguments as a checkpoint states them (upstream: ``compressed_tensors.quantization``).

compressed-tensors' own classes are taken too: only attributes are read, and enums compare as strings.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class QuantizationStrategy(str, Enum):
    """The values that share a scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"
    BLOCK = "block"
    TOKEN = "token"


@dataclass(frozen=True)
class QuantizationArgs:
    """How one tensor of a linear layer is quantized.

    Attributes:
        num_bits: bits per value.
        type: ``int`` or ``float``.
        symmetric: no zero point.
        group_size: input features per scale, with strategy ``group``.
        strategy: a value of :class:`QuantizationStrategy`.
        dynamic: quantized while the layer runs.
        actorder: for weights: activation order of compressed-tensors: ``group``, ``weight`` and others; None: none.
    """

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    dynamic: bool = False
    actorder: str | bool | None = None
