"""How much of a model is floats, and where."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.parameter import is_lazy

from w4a8.nn.packed import PackedModule

# A parameter with this share of the bytes of all parameters, or more, is large, and is named if it stays float.
_LARGE = 1 / 10_000


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of tensors, each counted once. Tensors on the meta device count in full, lazy tensors as 0."""
    different = {id(tensor): tensor for tensor in tensors if not is_lazy(tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in different.values())


def float_bytes(model: torch.nn.Module) -> int:
    """Of the parameters that are floating point."""
    return _bytes(parameter for parameter in model.parameters() if parameter.is_floating_point())


def weight_bytes(model: torch.nn.Module) -> int:
    """Of all parameters and packed weights."""
    packed = [buffer for module in model.modules() if isinstance(module, PackedModule) for buffer in module.buffers()]
    return _bytes([*model.parameters(), *packed])


class Large:
    """The large parameters of a model: floating point, of two or more dimensions, 1/10,000 of its bytes or more."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Takes the sizes of the model as it is now."""
        self._least = _LARGE * _bytes(model.parameters())

    def of(self, module: torch.nn.Module) -> list[str]:
        """Names of the large parameters that a module itself has."""
        return [name for name, parameter in module._parameters.items() if parameter is not None and self._is(parameter)]

    def _is(self, parameter: torch.nn.Parameter) -> bool:
        matrix = not is_lazy(parameter) and parameter.dim() >= 2 and parameter.is_floating_point()
        return matrix and _bytes([parameter]) >= self._least
