"""A linear layer with 8-bit weights, as mixed checkpoints have them."""

from __future__ import annotations

from w4a8.core.matrix import Matrix
from w4a8.nn.linear import W4A8Linear
from w4a8.nn.packed import PackedLinear


class W8A8Linear(PackedLinear):
    """``x @ W.T + bias`` with W packed as ``int8``; the rest as in :class:`W4A8Linear`."""

    def packed_shapes(self) -> dict[str, dict[str, int | str]]:
        """What the header must say."""
        return {"packed": {**super().packed_shapes()["packed"], "values": "int8"}}


def linear_from_matrix(matrix: Matrix, activation_group: int | None = None) -> W4A8Linear | W8A8Linear:
    """The layer of what a reader of a format gives; ``activation_group`` as in :meth:`PackedLinear.from_matrix`."""
    kind = W8A8Linear if matrix.kind == "int8" else W4A8Linear
    return kind.from_matrix(matrix, activation_group=activation_group)
