"""Attributes and replacement of a layer's parameters (upstream: ``set_weight_attrs``, ``replace_parameter``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def set_weight_attrs(weight: torch.Tensor, weight_attrs: Mapping[str, Any] | None) -> None:
    """Sets attributes on a parameter that does not have them.

    Raises:
        ValueError: the parameter already has one of them.
    """
    for name, value in (weight_attrs or {}).items():
        if hasattr(weight, name):
            raise ValueError(f"parameter attribute {name!r} is already set and would be overwritten")
        setattr(weight, name, value)


def replace_parameter(layer: torch.nn.Module, param_name: str, new_data: torch.Tensor) -> None:
    """Replaces a parameter, which frees the memory of the old one.

    Args:
        layer: owner of the parameter.
        param_name: name of the parameter.
        new_data: the new parameter (without gradient), which gets the ``weight_loader`` of the old one.
    """
    old = getattr(layer, param_name, None)
    new = torch.nn.Parameter(new_data.detach(), requires_grad=False)
    if hasattr(old, "weight_loader"):
        set_weight_attrs(new, {"weight_loader": old.weight_loader})
    if old is not None:
        delattr(layer, param_name)
    layer.register_parameter(param_name, new)
