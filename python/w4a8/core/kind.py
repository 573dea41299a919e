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
    """

    INT4 = "int4"
    INT8 = "int8"
    INT6 = "int6"
    E2M1 = "e2m1"
    IQ4 = "iq4"

    __str__ = str.__str__

    @property
    def table(self) -> tuple[float, ...] | None:
        """The 16 numbers that codes stand for; None if codes are integers."""
        return {Kind.E2M1: E2M1_VALUES, Kind.IQ4: IQ4_VALUES}.get(self)

    @property
    def bits(self) -> int:
        """Bits of a code: 4, 6 or 8."""
        return {Kind.INT8: 8, Kind.INT6: 6}.get(self, 4)

    @property
    def codes_in_a_byte(self) -> int:
        """Codes in a byte of unpacked weights: 2, or 1 for 6 and 8 bits (the upper two bits of 6-bit codes are 0)."""
        return 8 // self.bits

    @property
    def middle(self) -> int:
        """The zero point of symmetric weights: 8 for 4 bits, 32 for 6, 128 for 8."""
        return 1 << (self.bits - 1)

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
