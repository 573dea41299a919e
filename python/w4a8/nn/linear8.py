"""A linear layer with 8-bit weights, as mixed checkpoints have them beside 4-bit experts."""

from __future__ import annotations

import torch

from w4a8.core.matrix import Matrix4
from w4a8.core.matrix8 import Matrix8, matmul_planes
from w4a8.nn.linear import W4A8Linear
from w4a8.nn.packed import PackedLinear


class W8A8Linear(PackedLinear):
    """``x @ W.T + bias``, [..., in_features] to [..., out_features] of the type of x; x is quantized to int8 per row.

    W is packed as the upper and the lower four bits of its codes (:meth:`Matrix8.planes`), 2 out_features rows. The
    packed weight is a buffer and so part of the state dict; loading checks that it is a matrix of this shape.
    """

    planes = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x float32, bfloat16 or float16 [..., in_features] to [..., out_features] of its type."""
        return matmul_planes(x, self.packed, self.group_size, self.in_features, self.out_features)


def linear_from_matrix(matrix: Matrix4 | Matrix8) -> W4A8Linear | W8A8Linear:
    """The layer of what a reader of a format gives."""
    return (W8A8Linear if isinstance(matrix, Matrix8) else W4A8Linear).from_matrix(matrix)
