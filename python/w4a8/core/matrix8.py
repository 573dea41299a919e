"""8-bit codes as two matrices of 4-bit codes: what mixed checkpoints have beside 4-bit experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from w4a8.core.matrix import Matrix4
from w4a8.core.nibbles import pairs
from w4a8.ops import dyn_quant_matmul_4bit


@dataclass(frozen=True)
class Matrix8:
    """One matrix of 8-bit codes, N output and K input features, G groups of K/G input features.

        weight[n, k] = (code[n, k] - zero[n, k // g]) * scale[n, k // g]

    Attributes:
        codes: uint8 [N, K].
        scales: [N, G], of the type that the checkpoint has.
        zero_points: uint8 [N, G], or None: 128 everywhere.
        bias: [N], of the type that the checkpoint has, or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.codes.dtype == torch.uint8 and self.codes.dim() == self.scales.dim() == 2
        assert self.zero_points is None or self.zero_points.shape == self.scales.shape

    @property
    def rows(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        """K."""
        return self.codes.shape[1]

    @property
    def group(self) -> int:
        """Values of k that share a scale; K if there is one group."""
        return self.columns // self.scales.shape[1]

    def planes(self) -> Matrix4:
        """Two rows of 4-bit codes for each: [2 N, K], the upper four bits of all rows, then the lower ones.

        code = 16 u + l and zero = 16 v + z, so weight = (u - v) * 16 scale + (l - z) * scale. Both are exact: scales
        become float32 but for bfloat16, in which 16 times a scale is a value too.

        Raises:
            ValueError: 16 times a scale is too large for its type.
        """
        scales = self.scales if self.scales.dtype == torch.bfloat16 else self.scales.float()
        upper = 16 * scales
        if not torch.isfinite(upper).all():
            raise ValueError(f"16 times a scale ({float(scales.abs().max()):g}) is no {scales.dtype}")
        zeros = torch.full(scales.shape, 128, dtype=torch.uint8) if self.zero_points is None else self.zero_points
        nibbles = torch.cat([pairs(self.codes >> 4), pairs(self.codes & 15)])
        bias = None if self.bias is None else torch.cat([self.bias, torch.zeros_like(self.bias)])
        return Matrix4(nibbles, torch.cat([upper, scales]), torch.cat([zeros >> 4, zeros & 15]), "int4", bias)

    def pack(self, scale_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The planes, uint8 [bytes], as :func:`matmul_planes` takes them; ``scale_dtype`` as :meth:`Matrix4.pack`."""
        return self.planes().pack(scale_dtype)


def matmul_planes(x: torch.Tensor, packed: torch.Tensor, group_size: int, k: int, n: int) -> torch.Tensor:
    """x times the transpose of a matrix that is packed as :meth:`Matrix8.planes`; x is quantized to int8 per row.

    Args:
        x: float32, bfloat16 or float16 [..., K].
        packed: uint8 [bytes].
        group_size: values of k per scale.
        k, n: K and N, of the matrix of 8-bit codes.

    Returns:
        [..., N] of the type of x. The two products are float32 until they are added.
    """
    upper, lower = dyn_quant_matmul_4bit(x.float(), packed, group_size, k, 2 * n).split(n, dim=-1)
    return (upper + lower).to(x.dtype)
