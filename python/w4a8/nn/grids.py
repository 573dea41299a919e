"""What 4 bits can stand for: the values that a scale multiplies, and where weights are rounded to them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from w4a8.core.nibbles import pairs, to_nibbles
from w4a8.formats.matrix import E2M1

# Weights that share a scale where floats are quantized and nothing else is asked for.
DEFAULT_GROUP_SIZE = 32

# A scale for each group, and a zero point (as float32) where the grid has them.
Choice = tuple[torch.Tensor, "torch.Tensor | None"]


class Int4:
    """The integers -8 to 7.

    Attributes:
        peak: what the largest magnitude of a group becomes, either way, if nothing is searched.
        shares: scales to try in a search, of the one that gives ``peak``. Ones above 1 serve groups whose weights are
            nearly multiples of something larger.
        most_in_features: K that the operators take.
    """

    most_in_features = 1 << 20
    peak = 7
    shares = tuple(1.2 - 0.04 * i for i in range(21))

    def covering(self, groups: torch.Tensor, dtype: torch.dtype) -> Choice:
        """float32 [..., g] to scales [...] of a type that reach the largest magnitude; 1 for zeros."""
        return self._positive(groups.abs().amax(-1) / self.peak, dtype), None

    def tries(self, groups: torch.Tensor, covering: Choice) -> Iterator[tuple[float, torch.Tensor | None]]:
        """Shares of the covering scales to try, with zero points."""
        for share in self.shares:
            yield share, None

    def nearest(self, u: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        """Rounds float32 [..., g], weights over their scales, in place."""
        return u.round_().clamp_(-8, 7)

    def nibbles(self, values: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        """Values [N, G, g] of ``nearest`` as uint8 [N, K/2]."""
        return to_nibbles(values.to(torch.int8).flatten(1))

    def stored(self, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Scales as they are kept."""
        return scales.to(dtype)

    def _positive(self, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scales = self.stored(scales, dtype)
        return torch.where(scales == 0, torch.ones_like(scales), scales)


class Int4ZeroPoints(Int4):
    """The integers -z to 15 - z, with a zero point z in [0, 15] for each group: 0 is always among them."""

    most_in_features = 1 << 19

    def covering(self, groups: torch.Tensor, dtype: torch.dtype) -> Choice:
        """Fifteen steps from the least weight, or 0, to the largest, or 0; z where 0 is."""
        low, high = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
        scales = self._positive(high / 15 - low / 15, dtype)  # the difference itself could overflow
        return scales, (-low / scales.float()).round_().clamp_(0, 15)

    def tries(self, groups: torch.Tensor, covering: Choice) -> Iterator[tuple[float, torch.Tensor | None]]:
        """What a smaller scale cannot reach is left out at both ends alike."""
        scales = covering[0].float()
        middle = (groups.amin(-1).clamp_(max=0) / scales + groups.amax(-1).clamp_(min=0) / scales) / 2
        for share in self.shares:
            yield share, (7.5 - middle / share).round_().clamp_(0, 15)

    def nearest(self, u: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        z = zeros.unsqueeze(-1)
        return u.round_().add_(z).clamp_(0, 15).sub_(z)

    def nibbles(self, values: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        return pairs((values + zeros.unsqueeze(-1)).to(torch.uint8).flatten(1))


class Floats(Int4):
    """The numbers of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; ties go to the even code."""

    most_in_features = 1 << 19
    peak = 6
    # 4 and 6 are far apart: a largest magnitude of 4, a share of 1.5, is often better.
    shares = tuple(1.6 - 0.05 * i for i in range(21))

    def nearest(self, u: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        # Steps of 0.5 below 2, 1 below 4, 2 above: half of the power of two below |u|, which its exponent's bits are.
        steps = u.abs().clamp_(1, 4).mul_(0.5)
        steps.view(torch.int32).bitwise_and_(0x7F800000)
        return u.div_(steps).round_().mul_(steps).clamp_(-6, 6)

    def nibbles(self, values: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        return pairs(_E2M1_CODES[(2 * values + 12).long()].flatten(1))

    def stored(self, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """With a half that is exact, which the operators need: of denormals, the even ones."""
        return (scales.to(dtype) / 2) * 2


# Twice a number, plus 12 -> its code.
_E2M1_CODES = torch.zeros(25, dtype=torch.uint8)
for _code in (*range(9, 16), *range(8)):  # 8 is -0, which 0 stands for
    _E2M1_CODES[int(2 * E2M1[_code]) + 12] = _code


def grid_of(symmetric: bool, values: str) -> Int4:
    """The grid of what ``from_float`` and ``quantize_`` take.

    Raises:
        ValueError: unknown values, or zero points for e2m1.
    """
    if values not in ("int4", "e2m1"):
        raise ValueError(f"values is {values!r}, expected 'int4' or 'e2m1'")
    if values == "e2m1":
        if not symmetric:
            raise ValueError("symmetric is False, expected True for values = 'e2m1', which have no zero points")
        return Floats()
    return Int4() if symmetric else Int4ZeroPoints()
