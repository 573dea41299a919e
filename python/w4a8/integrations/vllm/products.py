"""The packed matrices of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from w4a8.ops import dyn_quant_matmul_4bit


class Share(NamedTuple):
    """What a rank holds of a linear layer of vLLM.

    Attributes:
        columns: input features.
        sizes: output features of each part of the layer.
        all_columns: input features on all ranks.
        dtype: of the model.
        load: vLLM's loader of a parameter, which cuts for the rank.
        parts: output features of each part on all ranks, if files have the parts as one matrix that vLLM cannot cut.
            A part of as many as the rank's is whole on each rank.
    """

    columns: int
    sizes: Sequence[int]
    all_columns: int
    dtype: torch.dtype
    load: Callable | None
    parts: Sequence[int] = ()


@dataclass(frozen=True)
class Product:
    """A matrix by which a layer multiplies. ``layer.w4a8`` lists them, one below the other.

    Attributes:
        parameter: of the layer: uint8 [bytes], or floats [N, K] with a bias in ``<parameter>_bias`` or none; of a layer
            of experts uint8 [experts, bytes].
        rows, columns: N and K.
        group: values of k that share a scale; None of floats.
        has_bias: the matrix has the bias of the layer.
    """

    parameter: str
    rows: int
    columns: int
    group: int | None
    has_bias: bool = False


def products_of(layer: Any) -> list[Product]:
    """The matrices of a layer of vLLM; [] if it does not run here."""
    return getattr(layer, "w4a8", [])


def multiply(layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] to [..., N] of its type, by all products. If one of them has a bias, vLLM's own is not loaded."""
    found = []
    for product in layer.w4a8:
        weight = getattr(layer, product.parameter)
        if product.group is not None:
            found.append(dyn_quant_matmul_4bit(x, weight, product.group, product.columns, product.rows))
        else:
            own = getattr(layer, f"{product.parameter}_bias", None)
            found.append(torch.nn.functional.linear(x, weight, own))
    out = found[0] if len(found) == 1 else torch.cat(found, -1)
    return out if bias is None or any(product.has_bias for product in layer.w4a8) else out + bias
