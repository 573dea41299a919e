"""A linear layer with 8-bit weights, as mixed checkpoints have them beside 4-bit experts."""

from __future__ import annotations

import torch

from w4a8.core.matrix import Matrix4
from w4a8.core.matrix8 import Matrix8, matmul_planes
from w4a8.nn.linear import W4A8Linear
from w4a8.nn.packed import PackedModule


class W8A8Linear(PackedModule):
    """``x @ W.T + bias``, [..., in_features] to [..., out_features] of the type of x; x is quantized to int8 per row.

    W is packed as the upper and the lower four bits of its codes (:meth:`Matrix8.planes`), 2 out_features rows. The
    packed weight is a buffer and so part of the state dict; loading checks that it is a matrix of this shape.
    """

    packed: torch.Tensor

    def __init__(self, packed: torch.Tensor, in_features: int, out_features: int, group_size: int = -1) -> None:
        """Takes packed planes.

        Args:
            packed: uint8 [bytes] of dyn_quant_pack_4bit_weight; its bias, if it has one, is the layer's.
            in_features: K.
            out_features: N.
            group_size: values of k per scale; -1 is channelwise.
        """
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.group_size = in_features if group_size == -1 else group_size
        self.check_packed("packed", packed)
        self.register_buffer("packed", packed)

    @classmethod
    def from_matrix(cls, matrix: Matrix8, scale_dtype: torch.dtype | None = None) -> W8A8Linear:
        """A layer of what a reader of a format gives.

        Args:
            matrix: of 8-bit codes.
            scale_dtype: that scales are kept in; bfloat16 where that holds them exactly, else float32, if not given.
        """
        return cls(matrix.planes().pack(scale_dtype), matrix.columns, matrix.rows, matrix.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x float32, bfloat16 or float16 [..., in_features] to [..., out_features] of its type."""
        return matmul_planes(x, self.packed, self.group_size, self.in_features, self.out_features)

    def extra_repr(self) -> str:
        """Sizes, for print()."""
        return f"in_features={self.in_features}, out_features={self.out_features}, group_size={self.group_size}"

    def packed_shapes(self) -> dict[str, dict[str, int]]:
        """What the header must say."""
        return {"packed": {"n": 2 * self.out_features, "k": self.in_features, "group": self.group_size}}


def linear_from_matrix(matrix: Matrix4 | Matrix8) -> W4A8Linear | W8A8Linear:
    """The layer of what a reader of a format gives."""
    return (W8A8Linear if isinstance(matrix, Matrix8) else W4A8Linear).from_matrix(matrix)
