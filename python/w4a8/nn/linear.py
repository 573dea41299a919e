"""Linear layers with 4-bit or 8-bit weights whose input is quantized to int8 on the fly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from w4a8.core.activation_groups import PER_TOKEN
from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix
from w4a8.core.nibbles import CODES
from w4a8.formats import (
    from_auto_round,
    from_awq,
    from_gptq,
    from_int_quantized,
    from_mxfp4,
    from_mxfp4_pack_quantized,
    from_nvfp4,
    from_nvfp4_pack_quantized,
    from_pack_quantized,
    from_quark_mxfp4,
)
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

    @classmethod
    def from_compressed_tensors(
        cls,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        weight_shape: torch.Tensor | tuple[int, int] | None = None,
        bias: torch.Tensor | None = None,
        *,
        weight_zero_point: torch.Tensor | None = None,
        scale_dtype: torch.dtype | None = None,
        activation_group: int | None = None,
    ) -> W4A8Linear:
        """A layer of a compressed-tensors checkpoint: int4, in groups or per channel.

        Args:
            weight: ``weight_packed``, int32 [N, ceil(K/8)] (pack-quantized), or ``weight``, int8 [N, K]
                (int-quantized).
            weight_scale: float32, bfloat16 or float16 [N, K/g], or [N, 1] per channel.
            weight_shape: (N, K); None: from the weight, with K = 8 times the words of a row.
            bias: [N] or None.
            weight_zero_point: int32 [ceil(N/8), K/g] (pack-quantized) or int8 [N, K/g] in [-8, 7]; None if symmetric.
            scale_dtype: as in :meth:`from_matrix`.
            activation_group: as in :meth:`from_matrix`, but None is -1 for int-quantized: W4A8 checkpoints say that
                inputs are quantized per token.

        Raises:
            ValueError: the tensors do not fit each other, values are outside [-8, 7], or a scale is not finite.
        """
        words = weight.dtype == torch.int32
        if weight.dim() != 2 or not (words or weight.dtype == torch.int8):
            raise ValueError(f"weight is {weight.dtype} {list(weight.shape)}, expected int32 or int8 with 2 dimensions")
        n, k = weight.shape[0], weight.shape[1] * (CODES if words else 1)
        if weight_shape is not None:
            rows, columns = (int(size) for size in weight_shape)
            if rows != n or not (columns <= k < columns + CODES if words else columns == k):
                raise ValueError(f"weight is {list(weight.shape)}, but weight_shape says {[rows, columns]}")
            k = columns
        if weight_scale.dim() != 2 or weight_scale.shape[0] != n or weight_scale.shape[1] == 0:
            raise ValueError(f"weight_scale is {list(weight_scale.shape)}, expected [{n}, groups]")
        if k % weight_scale.shape[1] != 0:
            raise ValueError(f"weight_scale has {weight_scale.shape[1]} groups, which do not divide K = {k}")
        found = {"weight_scale": weight_scale, "weight_zero_point": weight_zero_point, "bias": bias}
        found |= {"weight_packed": weight, "weight_shape": torch.tensor([n, k])} if words else {"weight": weight}
        read = from_pack_quantized if words else from_int_quantized
        matrix = read(found, "layer", k // weight_scale.shape[1], symmetric=weight_zero_point is None)
        if activation_group is None and not words:
            activation_group = PER_TOKEN
        return cls.from_matrix(matrix, scale_dtype, activation_group=activation_group)

    # From the tensors of one matrix, by the last part of their names. ``name`` is for errors, ``**how`` as in
    # from_matrix. Raise ValueError: a tensor is missing, has another dtype or shape, or values that the format does not
    # have.

    @classmethod
    def from_gptq(
        cls,
        tensors: Mapping[str, torch.Tensor],
        group_size: int,
        *,
        symmetric: bool = True,
        version: int = 1,
        name: str = "layer",
        **how: Any,
    ) -> W4A8Linear:
        """A layer of a GPTQ checkpoint: :func:`w4a8.formats.from_gptq`; ``**how`` as in :meth:`from_matrix`."""
        return cls.from_matrix(from_gptq(tensors, name, group_size, symmetric, version), **how)

    @classmethod
    def from_awq(
        cls,
        tensors: Mapping[str, torch.Tensor],
        group_size: int,
        *,
        symmetric: bool = False,
        name: str = "layer",
        **how: Any,
    ) -> W4A8Linear:
        """A layer of an AWQ checkpoint: :func:`w4a8.formats.from_awq`; ``**how`` as in :meth:`from_matrix`."""
        return cls.from_matrix(from_awq(tensors, name, group_size, symmetric), **how)

    @classmethod
    def from_auto_round(
        cls,
        tensors: Mapping[str, torch.Tensor],
        group_size: int,
        *,
        symmetric: bool = True,
        packing: str = "auto_round:auto_gptq",
        name: str = "layer",
        **how: Any,
    ) -> W4A8Linear:
        """A layer of AutoRound: :func:`w4a8.formats.from_auto_round`; ``**how`` as in :meth:`from_matrix`."""
        return cls.from_matrix(from_auto_round(tensors, name, group_size, symmetric, packing), **how)

    @classmethod
    def from_mxfp4(cls, tensors: Mapping[str, torch.Tensor], *, name: str = "layer", **how: Any) -> W4A8Linear:
        """A layer in MXFP4; ``**how`` as in :meth:`from_matrix`.

        Without ``scale_dtype`` scales stay e8m0, one byte; with one group in a row bfloat16.

        Args:
            tensors: of gpt-oss :func:`w4a8.formats.from_mxfp4`; with ``weight_packed`` of compressed-tensors
                :func:`w4a8.formats.from_mxfp4_pack_quantized`; with ``weight`` and ``weight_scale`` of AMD Quark
                :func:`w4a8.formats.from_quark_mxfp4`.
            name: of the layer, for errors.
        """
        read = from_mxfp4
        if "weight_scale" in tensors:
            read = from_mxfp4_pack_quantized if "weight_packed" in tensors else from_quark_mxfp4
        return cls.from_matrix(read(tensors, name), **how)

    @classmethod
    def from_nvfp4(
        cls, tensors: Mapping[str, torch.Tensor], *, name: str = "layer", activation_group: int | None = None
    ) -> W4A8Linear:
        """A layer in NVFP4; ``activation_group`` as in :meth:`from_matrix`.

        Args:
            tensors: of nvidia-modelopt :func:`w4a8.formats.from_nvfp4`; with ``weight_packed`` of compressed-tensors
                :func:`w4a8.formats.from_nvfp4_pack_quantized`.
            name: of the layer, for errors.
        """
        read = from_nvfp4_pack_quantized if "weight_packed" in tensors else from_nvfp4
        return cls.from_matrix(read(tensors, name), activation_group=activation_group)


class W8A8Linear(PackedLinear):
    """``x @ W.T + bias`` with W packed as ``int8``; :meth:`W4A8Linear.from_float` and :meth:`from_matrix` make it."""

    def packed_shapes(self) -> dict[str, dict[str, int | str]]:
        """The required fields of the header."""
        return {"packed": {**super().packed_shapes()["packed"], "values": Kind.INT8.value}}


def linear_class(kind: str) -> type[W4A8Linear] | type[W8A8Linear]:
    """The class of layers for a :class:`Kind` of codes."""
    return W8A8Linear if kind == Kind.INT8 else W4A8Linear


def linear_from_matrix(matrix: Matrix, activation_group: int | None = None) -> W4A8Linear | W8A8Linear:
    """The layer of a matrix from a reader; ``activation_group`` as in :meth:`PackedLinear.from_matrix`."""
    return linear_class(matrix.kind).from_matrix(matrix, activation_group=activation_group)
