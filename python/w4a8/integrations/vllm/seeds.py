"""Requests with a seed whose prompt comes in several steps.

For a part of a prompt vLLM draws a token that it throws away, and sets the request's generator back by an offset.
Generators of CPUs have none: vLLM 0.32's engine ends with "CPU Generator does not use offset".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_METHODS = ("_sample", "_bookkeeping_sync")


def register_seeds() -> None:
    """Once per process.

    Raises:
        RuntimeError: vLLM's runner is not as expected.
    """
    for name in _METHODS:
        if not hasattr(GPUModelRunner, name):
            raise RuntimeError(f"GPUModelRunner has no {name}")
    for name in _METHODS:
        method = getattr(GPUModelRunner, name)
        if not getattr(method, "w4a8", False):
            setattr(GPUModelRunner, name, _without_parts(method))


def _without_parts(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method without the generators of requests whose token is thrown away, which then draw nothing."""

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, thrown_away = self.input_batch.generators, self.discard_request_mask.np
        held = {request: generators.pop(request) for request in [*generators] if thrown_away[request]}
        try:
            return method(self, *args, **kwargs)
        finally:
            generators.update(held)

    wrapped.w4a8 = True
    return wrapped
