"""What is done with the arguments of an engine before vLLM makes its configuration of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from w4a8.integrations.vllm import attention, settings

# Each is called with vLLM's EngineArgs, and may change them.
_readers: list[Callable[[Any], None]] = []


def read_arguments(*readers: Callable[[Any], None]) -> None:
    """Lets an engine's arguments be checked for settings of this plugin, and be handed to ``readers``.

    Raises:
        RuntimeError: vLLM's EngineArgs is not as this expects it.
    """
    for name in ("create_engine_config", "additional_config"):
        if name not in (*dir(EngineArgs), *EngineArgs.__dataclass_fields__):
            raise RuntimeError(f"EngineArgs has no {name}")
    _readers.extend(reader for reader in readers if reader not in _readers)
    if not getattr(EngineArgs.create_engine_config, "w4a8", False):
        EngineArgs.create_engine_config = _with_readers(EngineArgs.create_engine_config)


def _with_readers(create_engine_config: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(create_engine_config)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        attention.forget()
        with settings.of_engine(self.additional_config):
            for reader in _readers:
                reader(self)
            return create_engine_config(self, *args, **kwargs)

    wrapped.w4a8 = True
    return wrapped
