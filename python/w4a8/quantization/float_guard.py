"""Refuses with a message what a model with packed layers cannot do."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from w4a8.nn.packed import PackedModule


class Guard:
    """A method of one module, set on the instance: a class made here would show in config.json and not be pickled.

    A guard does not keep the module alive; a copy of the module gets a copy of the guard.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)

    def __reduce__(self) -> tuple[type, tuple[torch.nn.Module | None]]:
        return type(self), (self._module(),)


def refuse_resizing(model: torch.nn.Module) -> None:
    """Lets models of transformers whose output layer or embedding is packed not get another vocabulary.

    Args:
        model: one, or a module with some in it.
    """
    for module in model.modules():
        if callable(getattr(type(module), "resize_token_embeddings", None)) and _packed(module) is not None:
            module.resize_token_embeddings = _Resize(module)


def _packed(model: torch.nn.Module) -> tuple[str, str] | None:
    """The packed one of output layer and embedding, and what the user can do instead."""
    skipped = ", or leave the layer a float (default_skip=True)"
    for get, instead in (("get_input_embeddings", ""), ("get_output_embeddings", skipped)):
        try:
            layer = getattr(model, get)()
        except (AttributeError, NotImplementedError):  # a model without
            continue
        # Below: an adapter is around it.
        if layer is not None and any(isinstance(part, PackedModule) for part in layer.modules()):
            return next(path for path, module in model.named_modules() if module is layer), instead
    return None


class _Resize(Guard):
    def __call__(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        model = self._module()
        found = _packed(model)
        if found is None:  # no longer
            return type(model).resize_token_embeddings(model, *args, **kwargs)
        if all(value is None for value in (*args, *kwargs.values())):
            return model.get_input_embeddings()
        raise RuntimeError(
            f"{found[0]} is packed, so it cannot be resized: resize the model before it is quantized{found[1]}"
        )
