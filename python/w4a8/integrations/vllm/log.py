"""The plugin's logger. Imports vLLM only when it is asked for."""

from __future__ import annotations

from typing import Any


def logger() -> Any:
    """vLLM's logger for this plugin, with ``info_once`` and ``warning_once``."""
    from vllm.logger import init_logger

    return init_logger("vllm.w4a8")  # below "vllm", so that vLLM's own log settings apply
