"""Matrices of vLLM's linear layers for a Decoder."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from w4a8.integrations.vllm import ranks
from w4a8.integrations.vllm.linear_layers import W4A8LinearMethod
from w4a8.integrations.vllm.products import products_of

_METHODS = (W4A8LinearMethod, CompressedTensorsLinearMethod)


class Unfit(Exception):
    """Why the layers of a model cannot run in one call."""


def packed(linear: Any) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The packed matrices of a linear layer, one under the other, and a bias that is not packed.

    Raises:
        Unfit: the layer is not packed, or rotates its input.
    """
    products = products_of(linear)
    is_here = type(getattr(linear, "quant_method", None)) in _METHODS
    if not is_here or not products or any(product.group is None for product in products):
        raise Unfit(f"{linear.prefix} is not packed")
    is_packed = linear.bias is None or any(product.has_bias for product in products)
    found = [getattr(linear, product.parameter).data for product in products]
    return found, None if is_packed else linear.bias.data


def packed_head(layer: Any) -> torch.Tensor | None:
    """The packed matrix of an output layer; None if the layer is not packed here, or not as one matrix."""
    if not isinstance(layer, ParallelLMHead):
        return None
    products = products_of(layer)
    return getattr(layer, products[0].parameter).data if len(products) == 1 and products[0].group is not None else None


def without_bias(linear: Any) -> list[torch.Tensor]:
    """The packed matrices of a linear layer whose bias, if there is one, is packed with them.

    Raises:
        Unfit: as :func:`packed`, or the bias is beside them.
    """
    found, bias = packed(linear)
    if bias is not None:
        raise Unfit(f"{linear.prefix} has a bias beside its packed matrix")
    return found


def only(linear: Any) -> torch.Tensor:
    """The one packed matrix of a linear layer, with its bias if there is one.

    Raises:
        Unfit: as :func:`without_bias`, or there are several.
    """
    return _one(linear, without_bias(linear))


def summed(linear: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The one packed matrix of a linear layer whose results all ranks add, and a bias of this rank that is not packed.

    Raises:
        Unfit: as :func:`packed`, there are several matrices, or each rank has the whole layer.
    """
    _check_is_cut(linear)
    found, bias = packed(linear)
    return _one(linear, found), bias if linear.tp_rank == 0 else None


def summed_without_bias(linear: Any) -> torch.Tensor:
    """The same of a layer whose bias, if there is one, is packed.

    Raises:
        Unfit: as :func:`summed` and :func:`without_bias`.
    """
    _check_is_cut(linear)
    return only(linear)


def _check_is_cut(linear: Any) -> None:
    if linear.tp_size != ranks.count():
        raise Unfit(f"{linear.prefix} is whole on each of {ranks.count()} ranks")


def _one(linear: Any, found: list[torch.Tensor]) -> torch.Tensor:
    if len(found) != 1:
        raise Unfit(f"{linear.prefix} has {len(found)} packed matrices")
    return found[0]


def any_weight(linear: Any) -> torch.Tensor:
    """The one packed matrix of a linear layer without a bias, or floats [out_features, in_features].

    Raises:
        Unfit: as :func:`only` and :func:`float_weight`.
    """
    if type(linear.quant_method) is not UnquantizedLinearMethod:
        return only(linear)
    weight, bias = float_weight(linear)
    if bias is not None:
        raise Unfit(f"{linear.prefix} has a bias")
    return weight


def float_weight(linear: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Floats [out_features, in_features] of a linear layer that is not quantized, and the bias.

    vLLM may keep the weight only in the form of the multiplying library. Multiplying a unit matrix gives the weight
    exactly.

    Raises:
        Unfit: the weight is no matrix of floats.
    """
    if type(linear.quant_method) is not UnquantizedLinearMethod:
        raise Unfit(f"{linear.prefix} is quantized")
    bias = None if linear.bias is None else linear.bias.data
    if linear.weight.dim() == 2:
        return linear.weight.data, bias
    unit = torch.eye(linear.input_size, dtype=linear.params_dtype)
    return linear.quant_method.apply(linear, unit).t().contiguous(), bias
