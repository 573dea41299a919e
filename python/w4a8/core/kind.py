"""The kinds of weights: the one place that defines the codes of each kind."""

from __future__ import annotations

from enum import Enum

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Kind(str, Enum):
    """The kind of a matrix's codes. Its value is the ``values`` argument of the operators.

    INT4   codes of 4 bits: weight = (code - zero point) * scale
    INT8   as INT4, with codes and zero points of 8 bits
    INT6   codes of 6 bits, as in GGUF's Q6_K and Q5: weight = (code - 32) * scale, without zero points
    E2M1   numbers of 4 bits with a sign, two bits of exponent and one of mantissa: weight = number * scale
    IQ4    16 integers (kvalues_iq4nl of ggml), as in GGUF's IQ4_NL and IQ4_XS: weight = integer * scale

    Attributes:
        bits: bits of a code: 4, 6 or 8.
        table: the 16 numbers that codes stand for; None if codes are integers.
        codes_in_a_byte: codes in a byte of unpacked weights: 2, or 1 for 6 and 8 bits (the upper two bits of 6-bit
            codes are 0).
        middle: the zero point of symmetric weights: 8 for 4 bits, 32 for 6, 128 for 8.
    """

    INT4 = "int4", 4
    INT8 = "int8", 8
    INT6 = "int6", 6
    E2M1 = "e2m1", 4, E2M1_VALUES
    IQ4 = "iq4", 4, IQ4_VALUES

    bits: int
    table: tuple[float, ...] | None
    codes_in_a_byte: int
    middle: int

    def __new__(cls, values: str, bits: int, table: tuple[float, ...] | None = None) -> Kind:
        """Makes a member from its row above."""
        self = str.__new__(cls, values)
        self._value_ = values
        self.bits, self.table = bits, table
        self.codes_in_a_byte, self.middle = 8 // bits, 1 << (bits - 1)
        return self

    __str__ = str.__str__

    def middles(self, like: torch.Tensor) -> torch.Tensor:
        """Zero points that are all :attr:`middle`, uint8, with the shape and device of ``like``."""
        return torch.full(like.shape, self.middle, dtype=torch.uint8, device=like.device)

    def needed_zero_points(self, zero_points: torch.Tensor | None) -> torch.Tensor | None:
        """The zero points, or None if all are :attr:`middle`: None means the same and takes no room.

        The operators pack all zero points that are given, since the size of a packed tensor must not depend on values.
        Zero points on the meta device have no values and are always needed.
        """
        if zero_points is None or zero_points.is_meta or bool((zero_points != self.middle).any()):
            return zero_points
        return None


def integers_of(bits: int) -> Kind:
    """The kind of integer codes of 4 or 8 bits."""
    return Kind.INT8 if bits == 8 else Kind.INT4
