"""The kinds of weights: the one place that knows what a code of each is."""

from __future__ import annotations

from enum import Enum

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Kind(str, Enum):
    """What the codes of a matrix are; the value is the name that the operators have for it (``values``).

    INT4   codes of 4 bits: weight = (code - zero point) * scale
    INT8   the same with codes and zero points of 8 bits
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
        """The 16 numbers that codes stand for, or None: codes are integers."""
        return {Kind.E2M1: E2M1_VALUES, Kind.IQ4: IQ4_VALUES}.get(self)

    @property
    def bits(self) -> int:
        """Of a code: 4, 6 or 8."""
        return {Kind.INT8: 8, Kind.INT6: 6}.get(self, 4)

    @property
    def codes_in_a_byte(self) -> int:
        """1 or 2, as checkpoints hold them. Of 6 bits 1: the upper two are zeros there."""
        return 8 // self.bits

    @property
    def middle(self) -> int:
        """The zero point that stands for none: 8, 32 of 6 bits, 128 of 8."""
        return 1 << (self.bits - 1)

    def middles(self, like: torch.Tensor) -> torch.Tensor:
        """Zero points that stand for none, uint8 of the shape and on the device of scales."""
        return torch.full(like.shape, self.middle, dtype=torch.uint8, device=like.device)

    def needed_zero_points(self, zero_points: torch.Tensor | None) -> torch.Tensor | None:
        """The zero points, or None if all are :attr:`middle`, which is what none means: then they take no room.

        The operators pack what they are given, since the size of a packed tensor does not depend on values. Who wants
        the smaller form asks here. On the meta device, where there are no values, they are needed.
        """
        if zero_points is None or zero_points.is_meta or bool((zero_points != self.middle).any()):
            return zero_points
        return None


def integers_of(bits: int) -> Kind:
    """The kind of integer codes of 4 or 8 bits."""
    return Kind.INT8 if bits == 8 else Kind.INT4
