"""What the user asks for through the environment."""

from __future__ import annotations

import os

SWITCH = "W4A8_VLLM"
W4A16_SWITCH = "W4A8_VLLM_W4A16"


def _read(name: str, default: str) -> str:
    value = os.environ.get(name, default).strip() or default
    if value not in ("0", "1", default):
        raise ValueError(f"{name}={value!r}, expected 0 or 1")
    return value


def mode() -> str:
    """``auto``, ``0`` or ``1``.

    Raises:
        ValueError: another value.
    """
    return _read(SWITCH, "auto")


def runs_w4a16() -> bool:
    """Whether the experts of weight-only int4 models may run with int8 activations.

    Raises:
        ValueError: neither 0 nor 1.
    """
    return _read(W4A16_SWITCH, "0") == "1"
