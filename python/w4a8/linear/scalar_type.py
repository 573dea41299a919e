"""Names for types of weights that torch has no dtype for (upstream: ``vllm.scalar_type``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalarType:
    """An integer type of a few bits.

    Attributes:
        name: as messages print it.
        size_bits: per value.
        signed: whether a value may be negative once the bias is subtracted.
        bias: what is added to a value to store it.
    """

    name: str
    size_bits: int
    signed: bool
    bias: int = 0

    def __str__(self) -> str:
        return self.name


class scalar_types:
    """The types that weights of linear layers come in."""

    int4 = ScalarType("int4", 4, signed=True)
    uint4 = ScalarType("uint4", 4, signed=False)
    int8 = ScalarType("int8", 8, signed=True)
    uint4b8 = ScalarType("uint4b8", 4, signed=False, bias=8)
    uint8b128 = ScalarType("uint8b128", 8, signed=False, bias=128)
