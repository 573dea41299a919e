"""Refuses with a message what a packed model cannot do, before torch fails or moves half a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from w4a8.nn.packed import PackedModule
from w4a8.quantization.float_guard import Guard

device = "cpu"  # where models are loaded to; within dry_run "meta"

_STAY = (
    "its weights are packed for the w4a8 operators, which run on CPUs. Load the unquantized checkpoint without "
    "W4A8Config instead, or, to leave its experts alone on the CPU, with device_map"
)


def goes_to(beside: torch.device) -> str:
    """Why a layer is not packed in a model whose experts stay on the CPU."""
    return f"it goes to {beside}"


def inference_only(model: torch.nn.Module) -> None:
    """Keeps a model, and every part with packed weights, from being trained or leaving the CPU."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        if any(isinstance(part, PackedModule) for part in module.modules()):
            # torch calls these two for a module that is moved or trained, and for all its submodules.
            module.train = _Train(module)
            module._apply = _Apply(module)


class _Train(Guard):
    def __call__(self, mode: bool = True) -> torch.nn.Module:
        if mode:
            raise RuntimeError(
                "the model cannot be trained: int4 weights and the w4a8 operators have no gradients. Train the "
                "unquantized model, and quantize it then"
            )
        module = self._module()
        return type(module).train(module, False)


class _Apply(Guard):
    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> torch.nn.Module:
        module = self._module()
        packed = [part for part in module.modules() if isinstance(part, PackedModule)]
        if not all(getattr(part, "stays_on_cpu", False) for part in packed):
            self._refuse_others(fn)
        return type(module)._apply(module, fn, *args, **kwargs)

    @staticmethod
    def _refuse_others(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raises RuntimeError for anything but CPUs."""
        try:
            tried = fn(torch.empty(0))
        except Exception as error:  # torch lacks the device, in many ways
            raise RuntimeError(f"the model cannot leave the CPU ({error}): {_STAY}") from error
        if tried.device.type not in ("cpu", "meta"):
            raise RuntimeError(f"the model cannot go to {tried.device}: {_STAY}")
