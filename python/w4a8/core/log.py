"""Messages that are worth saying once per process, not once per layer."""

from __future__ import annotations

import logging

_said: set[tuple] = set()


def log_once(logger: logging.Logger, level: int, message: str, *args: object) -> None:
    """Logs a %-format the first time this logger is given it with these arguments, which are hashable."""
    key = (logger.name, level, message, args)
    # A message nobody would see must not use up its one occasion: the level may be raised later.
    if key in _said or not logger.isEnabledFor(level):
        return
    _said.add(key)
    logger.log(level, message, *args)


def forget_logged() -> None:
    """Lets every message be said again (for tests, and for services that rotate their logs)."""
    _said.clear()
