"""What is done with a model when vLLM has loaded it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from w4a8.core.memory import move_together

Action = Callable[[Any, Any, Any], None]


def after_loading(action: Action) -> None:
    """Lets vLLM's loaders call ``action(model, vllm_config, model_config)`` when they have loaded a model.

    Args:
        action: it may change the model, and raises nothing.

    Raises:
        RuntimeError: vLLM's loaders are not as this expects them.
    """
    if not hasattr(BaseModelLoader, "load_model"):
        raise RuntimeError("BaseModelLoader has no load_model")
    if not hasattr(BaseModelLoader.load_model, "w4a8"):
        BaseModelLoader.load_model = _with_actions(BaseModelLoader.load_model, [])
    actions = BaseModelLoader.load_model.w4a8
    if action not in actions:
        actions.append(action)


def move_weights_together() -> None:
    """Lets small packed matrices of loaded models lie in huge pages.

    Raises:
        RuntimeError: vLLM's loaders are not as this expects them.
    """
    after_loading(_move)


def _move(model: torch.nn.Module, vllm_config: Any, model_config: Any) -> None:
    owners: dict[torch.Tensor, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if type(parameter) is torch.nn.Parameter and name.startswith(("weight_packed", "weight_rounded")):
                owners.setdefault(parameter, []).append((module, name))

    def put(old: torch.Tensor, moved: torch.Tensor) -> None:
        new = torch.nn.Parameter(moved, requires_grad=False)
        vars(new).update(vars(old))  # its loader
        for module, name in owners[old]:
            module.register_parameter(name, new)
        del owners[old]

    move_together(list(owners), put)


def _with_actions(load_model: Callable[..., Any], actions: list[Action]) -> Callable[..., Any]:
    @wraps(load_model)
    def wrapped(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = load_model(self, vllm_config, model_config, *args, **kwargs)
        for action in actions:
            action(model, vllm_config, model_config)
        return model

    wrapped.w4a8 = actions
    return wrapped
