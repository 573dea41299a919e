"""Settings of the user: ``--additional-config '{"w4a8": {...}}'``, then environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from w4a8.core.activation_groups import check_activation_group, in_words
from w4a8.core.matrix import GROUP_SIZES, is_group_size
from w4a8.integrations.vllm.log import logger
from w4a8.nn.options import DEFAULT_GROUP_SIZE, QuantOptions

SWITCH = "W4A8_VLLM"
W4A16_SWITCH = "W4A8_VLLM_W4A16"
LM_HEAD_SWITCH = "W4A8_VLLM_LM_HEAD"
ACTIVATION_GROUP = "W4A8_VLLM_ACTIVATION_GROUP"
ATTENTION = "W4A8_VLLM_ATTENTION"
DECODER = "W4A8_VLLM_DECODER"
VALUES = "W4A8_VLLM_VALUES"
GROUP_SIZE = "W4A8_VLLM_GROUP_SIZE"

# Keys of vLLM's additional_config["w4a8"], and their variables. SWITCH has no key: the plugin is on or off before vLLM
# reads arguments.
KEYS = {
    "w4a16": W4A16_SWITCH,
    "lm_head": LM_HEAD_SWITCH,
    "activation_group": ACTIVATION_GROUP,
    "attention": ATTENTION,
    "decoder": DECODER,
    "values": VALUES,
    "group_size": GROUP_SIZE,
}
# Values of --kv-cache-dtype, and the kind of cache for this package's attention. Other values are left to vLLM.
CACHE_KINDS = {"auto": "int8", "int8_per_token_head": "int8", "bfloat16": "bfloat16"}
# vLLM's additional_config while an engine's configuration is being made: code needs it earlier.
_MAKING: ContextVar[Any] = ContextVar("MAKING", default=None)

# Whether weight-only layers run in spite of the settings: the self-test makes such layers.
SELF_TEST: ContextVar[bool] = ContextVar("SELF_TEST", default=False)

# Each is called with vLLM's EngineArgs, which it may change, before vLLM makes an engine's configuration.
_readers: list[Callable[[Any], None]] = []


def _from_engine() -> dict[str, Any]:
    """Settings of the engine that is being made or runs; {} outside of engines."""
    additional = _MAKING.get()
    if additional is None:
        if "vllm.config" not in sys.modules:  # no engine can exist; `w4a8 doctor` asks without importing vLLM
            return {}
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        additional = None if config is None else config.additional_config
    return additional.get("w4a8", {}) if isinstance(additional, dict) else {}


def _given(name: str) -> tuple[str, str]:
    """The value of a setting, "" if there is none, and the setting's name for errors."""
    for key, variable in KEYS.items():
        if variable == name:
            value = _from_engine().get(key)
            if value is not None:
                text = str(int(value) if isinstance(value, bool) else value).strip()
                return text, f'additional_config["w4a8"]["{key}"]'
    return os.environ.get(name, "").strip(), name


def _read(name: str, default: str, *on: str) -> str:
    value, where = _given(name)
    if value not in ("", "0", default, *on):
        raise ValueError(f"{where}={value!r}, expected {', '.join(('0', *on[:-1]))} or {on[-1]}")
    return value or default


@contextmanager
def of_engine(additional_config: Any) -> Iterator[None]:
    """A context with the settings of an engine that is being made.

    Args:
        additional_config: vLLM's; the value of "w4a8" is checked.

    Raises:
        ValueError: an unknown key, or a value that the setting cannot have.
    """
    given = additional_config.get("w4a8", {}) if isinstance(additional_config, dict) else {}
    if not isinstance(given, dict):
        raise ValueError(f'additional_config["w4a8"] is {given!r}, expected an object with {_listed_keys()}')
    for key in given:
        if key not in KEYS:
            raise ValueError(f'additional_config["w4a8"] has {key!r}, expected {_listed_keys()}')
    token = _MAKING.set(additional_config or {})
    try:
        check()
        yield
    finally:
        _MAKING.reset(token)


def _listed_keys() -> str:
    *names, last = map(repr, KEYS)
    return f"{', '.join(names)} or {last}"


def read_arguments(*readers: Callable[[Any], None]) -> None:
    """Lets vLLM check this plugin's settings of each new engine, and pass the engine's arguments to ``readers``.

    Raises:
        RuntimeError: vLLM's EngineArgs is not as expected.
    """
    from vllm.engine.arg_utils import EngineArgs

    for name in ("create_engine_config", "additional_config"):
        if name not in (*dir(EngineArgs), *EngineArgs.__dataclass_fields__):
            raise RuntimeError(f"EngineArgs has no {name}")
    _readers.extend(reader for reader in readers if reader not in _readers)
    create_engine_config = EngineArgs.create_engine_config
    if getattr(create_engine_config, "w4a8", False):
        return

    @wraps(create_engine_config)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with of_engine(self.additional_config):
            for reader in _readers:
                reader(self)
            return create_engine_config(self, *args, **kwargs)

    wrapped.w4a8 = True
    EngineArgs.create_engine_config = wrapped


# All of these raise ValueError, with the name of the setting, for an impossible value.


def mode() -> str:
    """``auto``, ``0`` or ``1``."""
    return _read(SWITCH, "auto", "1")


def runs_w4a16() -> bool:
    """Whether weight-only 4-bit models run here, with int8 activations."""
    return SELF_TEST.get() or _read(W4A16_SWITCH, "1", "1") == "1"


def attends() -> bool:
    """Whether attention, linear attention too, of models that the plugin runs is computed here, if possible."""
    return _read(ATTENTION, "1", "1") == "1"


def decodes() -> bool:
    """Whether all layers of a model run in one call, if possible."""
    return _read(DECODER, "1", "1") == "1"


def lm_head_bits() -> int:
    """Bits for rounding an output layer of floats while loading: 4, 8, or 0 for none."""
    return {"0": 0, "int4": 4, "int8": 8}[_read(LM_HEAD_SWITCH, "int8", "int4", "int8")]


def lm_head_is_set() -> bool:
    """Whether the bits of output layers were chosen; "0" is a choice too."""
    return _given(LM_HEAD_SWITCH)[0] != ""


def activation_group() -> int | None:
    """Values of k of an input that share a scale when it is quantized: 32, 64, 128, or -1 for all of a row.

    None: as the checkpoint says, otherwise the default.
    """
    value, where = _given(ACTIVATION_GROUP)
    asked = int(value) if value.removeprefix("-").isdecimal() else value or None
    try:
        check_activation_group(asked)
    except ValueError as error:
        raise ValueError(f"{where}={value!r}: {error}") from None
    return asked


def rounding() -> QuantOptions:
    """Options of rounding models of floats (``--quantization w4a8``)."""
    given, where = _given(GROUP_SIZE)
    size = int(given or DEFAULT_GROUP_SIZE) if given.removeprefix("-").isdecimal() or not given else None
    if not is_group_size(size):
        raise ValueError(f"{where}={given!r}, expected -1, {GROUP_SIZES}")
    values, where = _given(VALUES)
    if values not in ("", "int4", "int8"):
        raise ValueError(f"{where}={values!r}, expected int4 or int8")
    return QuantOptions(size, values=values or "int4")


def check() -> None:
    """Reads all settings."""
    for read in (mode, runs_w4a16, lm_head_bits, activation_group, attends, decodes, rounding):
        read()


def say_int8(format_: str) -> None:
    """Logs, once for each format, the type of activations of a weight-only model."""
    logger().info_once(
        "w4a8: %s weights run with activations rounded to int8 %s (%s); %s=0 leaves such models to vLLM",
        format_,
        in_words(activation_group()),
        ACTIVATION_GROUP,
        W4A16_SWITCH,
    )
