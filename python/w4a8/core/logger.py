"""Messages that are logged once per process, not once per layer."""

from __future__ import annotations

import logging

_said: set[tuple] = set()


def log_once(logger: logging.Logger, level: int, message: str, *args: object) -> None:
    """Logs a %-format once for each logger, level and arguments. The arguments must be hashable."""
    key = (logger.name, level, message, args)
    # A message of a disabled level does not count as logged: the level may be enabled later.
    if key in _said or not logger.isEnabledFor(level):
        return
    _said.add(key)
    logger.log(level, message, *args)


def forget_logged() -> None:
    """Lets every message be logged again (for tests, and for services that rotate their logs)."""
    _said.clear()
