"""Linear layers with 4-bit or 8-bit weights whose input is quantized to int8 on the fly."""

from __future__ import annotations

from typing import Any

import torch

from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix
from w4a8.core.packer import Packed
from w4a8.nn.compensation import Inputs, round_compensated
from w4a8.nn.options import QuantOptions
from w4a8.nn.packed import PackedLinear
from w4a8.nn.rounding import round_weight


class W4A8Linear(PackedLinear):
    """``x @ W.T + bias`` with W packed, [..., in_features] to [..., out_features] of the type of x.

    The packed weight is a buffer and so part of the state dict; loading checks that it is a matrix of this shape.
    """

    @classmethod
    def from_float(
        cls,
        linear: torch.nn.Linear,
        options: QuantOptions | int | None = None,
        *,
        importance: torch.Tensor | None = None,
        inputs: Inputs | None = None,
        **fields: Any,
    ) -> W4A8Linear | W8A8Linear:
        """Quantizes a layer (docs/quantization.md, "Rounding"); of ``int8`` it is a :class:`W8A8Linear`.

        Args:
            linear: with any floating point weight, and not changed. A layer on the meta device gives a layer there.
            options: a :class:`QuantOptions`, whose group divides in_features, or its group size alone.
            importance: floating point [in_features], factors of the squared errors of weights, such as the mean square
                of the input channel; None: all alike.
            inputs: sums over inputs of the layer; products with these inputs shall change little. Then no
                ``importance``.
            **fields: of :class:`QuantOptions`, by name.

        Raises:
            TypeError, ValueError: as :class:`QuantOptions`.
            ValueError: a group that does not divide, or the weight or the bias has a NaN or an infinity.
        """
        options = QuantOptions.of(options, fields)
        if inputs is None:
            matrix = round_weight(linear.weight, options, linear.bias, importance)
        else:
            matrix, _ = round_compensated(linear.weight, options, inputs, linear.bias)
        layer = W8A8Linear if matrix.kind == Kind.INT8 else cls
        return layer.from_matrix(matrix, options.scale_dtype, activation_group=options.activation_group)


class W8A8Linear(PackedLinear):
    """``x @ W.T + bias`` with W packed as ``int8``; :meth:`W4A8Linear.from_float` and :meth:`from_matrix` make it."""

    def packed_shapes(self) -> dict[str, dict[str, int | str]]:
        """The required fields of the header."""
        return {"packed": {**super().packed_shapes()["packed"], "values": Kind.INT8.value}}


def linear_class(kind: str) -> type[W4A8Linear] | type[W8A8Linear]:
    """The class of layers for a :class:`Kind` of codes."""
    return W8A8Linear if kind == Kind.INT8 else W4A8Linear


def linear_from_packed(packed: Packed) -> W4A8Linear | W8A8Linear:
    """The layer of a packed matrix."""
    return linear_class(packed.form.kind)(packed.bytes, packed.columns, packed.rows, packed.group)


def linear_from_matrix(matrix: Matrix, activation_group: int | None = None) -> W4A8Linear | W8A8Linear:
    """The layer of a matrix from a reader; ``activation_group`` as in :meth:`PackedLinear.from_matrix`."""
    return linear_class(matrix.kind).from_matrix(matrix, activation_group=activation_group)
