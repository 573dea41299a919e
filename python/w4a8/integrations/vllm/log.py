"""The plugin's logger. Imports vLLM only when it is asked for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

_silent: list[object] = []
_said: set[tuple[object, ...]] = set()


class _Nothing:
    """Takes every message and remembers none: what is said once is still to be said."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class _Once:
    """vLLM's logger, but what is said once is said once: vLLM forgets it after 128 other messages of its own."""

    def __init__(self, base: Any) -> None:
        self._base = base

    def __getattr__(self, name: str) -> Any:
        write = getattr(self._base, name)
        return partial(_once, name, write) if name.endswith("_once") else write


def _once(name: str, write: Callable[..., None], *message: object) -> None:
    if (name, *message) not in _said:
        _said.add((name, *message))
        write(*message)


def logger() -> Any:
    """vLLM's logger for this plugin, with ``info_once`` and ``warning_once``."""
    if _silent:
        return _Nothing()
    from vllm.logger import init_logger

    return _Once(init_logger("vllm.w4a8"))  # below "vllm", so that vLLM's own log settings apply


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Nothing is logged inside, neither by this plugin nor by others, up to warnings."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    _silent.append(None)
    try:
        yield
    finally:
        _silent.pop()
        logging.disable(disabled)
