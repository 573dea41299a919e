"""What the user asks for through the environment."""

from __future__ import annotations

import os
from contextvars import ContextVar

from w4a8.core.activation_groups import PER_TOKEN, SIZES, in_words
from w4a8.integrations.vllm.log import logger

SWITCH = "W4A8_VLLM"
W4A16_SWITCH = "W4A8_VLLM_W4A16"
LM_HEAD_SWITCH = "W4A8_VLLM_LM_HEAD"
ACTIVATION_GROUP = "W4A8_VLLM_ACTIVATION_GROUP"

# Whether weight-only layers run whatever the user asks for: the self-test makes such ones.
SELF_TEST: ContextVar[bool] = ContextVar("SELF_TEST", default=False)


def _read(name: str, default: str, *on: str) -> str:
    value = os.environ.get(name, default).strip() or default
    if value not in ("0", default, *on):
        raise ValueError(f"{name}={value!r}, expected {', '.join(('0', *on[:-1]))} or {on[-1]}")
    return value


def mode() -> str:
    """``auto``, ``0`` or ``1``.

    Raises:
        ValueError: another value.
    """
    return _read(SWITCH, "auto", "1")


def runs_w4a16() -> bool:
    """Whether weight-only 4-bit models run here, with int8 activations.

    Raises:
        ValueError: neither 0 nor 1.
    """
    return SELF_TEST.get() or _read(W4A16_SWITCH, "1", "1") == "1"


def say_int8(format_: str) -> None:
    """Tells the log, once for each format, what a weight-only model is computed with."""
    logger().info_once(
        "w4a8: %s weights run with activations rounded to int8 %s (%s); %s=0 leaves such models to vLLM",
        format_,
        in_words(activation_group()),
        ACTIVATION_GROUP,
        W4A16_SWITCH,
    )


def lm_head_bits() -> int:
    """What an output layer that is not quantized is rounded to while the model is loaded: 4 or 8 bits, or 0: it is not.

    Raises:
        ValueError: neither 0 nor int4 nor int8.
    """
    return {"0": 0, "int4": 4, "int8": 8}[_read(LM_HEAD_SWITCH, "0", "int4", "int8")]


def activation_group() -> int | None:
    """Values of k of an input that share a scale when it is quantized: 32, 64, 128, or -1 for all of a row.

    None is what the checkpoint says, and the default where it says nothing.

    Raises:
        ValueError: another value.
    """
    value = os.environ.get(ACTIVATION_GROUP, "").strip()
    allowed = {"": None, **{str(size): size for size in (PER_TOKEN, *SIZES)}}
    if value not in allowed:
        raise ValueError(f"{ACTIVATION_GROUP}={value!r}, expected -1, 32, 64 or 128")
    return allowed[value]


def check() -> None:
    """Reads all of them.

    Raises:
        ValueError: one has a value that it cannot have; names it.
    """
    for read in (mode, runs_w4a16, lm_head_bits, activation_group):
        read()
