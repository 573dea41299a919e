"""Matrices of 8-bit codes, which mixed checkpoints have beside those of 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from w4a8.core.matrix import Matrix


@dataclass(frozen=True)
class Matrix8(Matrix):
    """One matrix of 8-bit codes, N output and K input features, G groups of K/G input features.

        weight[n, k] = (code[n, k] - zero[n, k // g]) * scale[n, k // g]

    Attributes:
        codes: uint8 [N, K].
        scales: [N, G], of the type that the checkpoint has.
        zero_points: uint8 [N, G], or None: 128 everywhere.
        bias: [N], of the type that the checkpoint has, or None.
    """

    kind: ClassVar[str] = "int8"
    channel_scales: ClassVar[None] = None

    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.codes.dtype == torch.uint8 and self.codes.dim() == self.scales.dim() == 2
        assert self.zero_points is None or self.zero_points.shape == self.scales.shape
