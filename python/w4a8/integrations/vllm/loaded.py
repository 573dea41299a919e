"""What is done with a model when vLLM has loaded it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.model_executor.model_loader.base_loader import BaseModelLoader

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


def _with_actions(load_model: Callable[..., Any], actions: list[Action]) -> Callable[..., Any]:
    @wraps(load_model)
    def wrapped(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = load_model(self, vllm_config, model_config, *args, **kwargs)
        for action in actions:
            action(model, vllm_config, model_config)
        return model

    wrapped.w4a8 = actions
    return wrapped
