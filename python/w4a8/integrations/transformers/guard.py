"""What a packed model cannot do is refused in words, before torch fails somewhere inside or half a model has moved."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from w4a8.nn.packed import PackedModule

_STAY = (
    "its weights are packed for the w4a8 operators, which run on CPUs. Load the unquantized checkpoint without "
    "W4A8Config instead"
)


def inference_only(model: torch.nn.Module) -> None:
    """Lets a model neither be trained nor leave the CPU, nor a part of it that has packed weights."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        if any(isinstance(part, PackedModule) for part in module.modules()):
            # On the instance: a class made here would show in config.json and could not be pickled. torch calls
            # these two of whatever is below a module that is moved or trained, and of the module itself.
            module.train = _Train(module)
            module._apply = _Apply(module)


def refuse_resizing(model: torch.nn.Module) -> None:
    """Lets a model whose output layer or embedding is packed not get another vocabulary."""
    for name in ("get_output_embeddings", "get_input_embeddings"):
        layer = getattr(model, name)()
        if isinstance(layer, PackedModule):
            path = next(path for path, module in model.named_modules() if module is layer)
            model.resize_token_embeddings = _Resize(model, path)


def refuse_device(device: Any) -> None:
    """Raises RuntimeError for anything but CPUs."""
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        raise RuntimeError(f"the model cannot go to {device}: {_STAY}")


class Guard:
    """A method of one module. It does not keep the module alive; a copy of the module gets a copy of it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def __reduce__(self) -> tuple[type, tuple[torch.nn.Module | None]]:
        return type(self), (self._module(),)


class _Train(Guard):
    def __call__(self, mode: bool = True) -> torch.nn.Module:
        if mode:
            raise RuntimeError(
                "the model cannot be trained: int4 weights and the w4a8 operators have no gradients. Train the "
                "unquantized model, and quantize it then"
            )
        module = self._module()
        return type(module).train(module, False)


class _Resize(Guard):
    def __init__(self, module: torch.nn.Module, path: str) -> None:
        super().__init__(module)
        self._path = path

    def __reduce__(self) -> tuple[type, tuple[torch.nn.Module | None, str]]:
        return type(self), (self._module(), self._path)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if any(value is not None for value in (*args, *kwargs.values())):
            raise RuntimeError(
                f"{self._path} is packed, so it cannot be resized: load with default_skip=True, or resize the "
                "unquantized model"
            )
        return self._module().get_input_embeddings()


class _Apply(Guard):
    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> torch.nn.Module:
        try:
            tried = fn(torch.empty(0))
        except Exception as error:  # torch lacks the device, in many ways
            raise RuntimeError(f"the model cannot leave the CPU ({error}): {_STAY}") from error
        refuse_device(tried.device)
        module = self._module()
        return type(module)._apply(module, fn, *args, **kwargs)
