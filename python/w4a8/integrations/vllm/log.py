"""The plugin's logger, and silence for trials. Only :func:`logger` and :func:`silence` import vLLM."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

from w4a8.core.logger import log_once

_silent = threading.local()  # .depth: how many silence() this thread is in
# Functions of vLLM's logging that remember their messages.
_VLLM_ONCE = ("_print_debug_once", "_print_info_once", "_print_warning_once")


class _Once:
    """vLLM's logger, with reliable ``_once``: vLLM forgets a message after 128 others."""

    def __init__(self, base: Any) -> None:
        self._base = base

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_once"):
            return getattr(self._base, name)
        return partial(_unless_silent(log_once), self._base, getattr(logging, name.removesuffix("_once").upper()))


def logger() -> Any:
    """vLLM's logger for this plugin, with ``info_once`` and ``warning_once``."""
    from vllm.logger import init_logger

    return _Once(init_logger("vllm.w4a8"))  # below "vllm", so that vLLM's own log settings apply


def _is_silent() -> bool:
    return getattr(_silent, "depth", 0) > 0


def _unless_silent(write: Callable[..., None]) -> Callable[..., None]:
    @wraps(write)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        if not _is_silent():
            write(*args, **kwargs)

    return wrapped


@contextlib.contextmanager
def _replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppresses all messages of this thread up to warnings, of any logger.

    Suppressed messages do not count as said: ``_once`` messages of vLLM or this plugin can still come. Other threads
        log as usual.
    """
    import vllm.logger

    handle = logging.Logger.handle

    def handle_unless_silent(self: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno > logging.WARNING or not _is_silent():
            handle(self, record)

    with contextlib.ExitStack() as replaced:
        replaced.enter_context(_replaced(logging.Logger, "handle", handle_unless_silent))
        for name in _VLLM_ONCE:
            if hasattr(vllm.logger, name):
                replaced.enter_context(_replaced(vllm.logger, name, _unless_silent(getattr(vllm.logger, name))))
        _silent.depth = getattr(_silent, "depth", 0) + 1
        try:
            yield
        finally:
            _silent.depth -= 1
