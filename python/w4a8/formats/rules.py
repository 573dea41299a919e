"""The rules of a ``quantization_config``: how the weights of each module are stored, or why the module is left out.

``read_layers`` and the integration in transformers call :func:`rules_of`. (In vLLM, vLLM's own configuration classes
read a ``quantization_config``, so that vLLM's rules hold.) Each method has its rules in a file of this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from w4a8.core.json_fields import CheckpointError, check_field, json_field, read_json, shorten
from w4a8.core.matrix import GROUP_SIZES, is_group_size
from w4a8.core.patterns import Pattern
from w4a8.formats.format import quantized_suffixes
from w4a8.formats.scheme import NotRead, Scheme, scheme_or_not_read

WHERE = "quantization_config"
RULES: dict[str, Callable[[Mapping[str, Any]], Rules]] = {}
_OLDER: dict[str, str] = {}  # name of a file -> method


def rules_for(method: str, file: str | None = None) -> Callable[[Any], Any]:
    """Registers the class that reads a method's configuration.

    Args:
        method: ``quant_method``.
        file: the file in which older tools wrote the configuration, before config.json had it.
    """

    def add_rules(rules: Any) -> Any:
        RULES[method] = rules
        if file is not None:
            _OLDER[file] = method
        return rules

    return add_rules


class Rules(Protocol):
    """How a configuration says that each module is stored.

    Rules may have an attribute ``default``: how a module is stored that no entry of the configuration names.
    """

    def of(self, module: str) -> Scheme | NotRead:
        """How a module is stored.

        Args:
            module: name of a linear layer in the files, as ``model.layers.0.mlp.experts.3.gate_proj``; in MXFP4 also
                of all experts of a layer, as ``model.layers.0.mlp.experts``.
        """


def rules_of(config: Mapping[str, Any]) -> Rules:
    """Reads a quantization_config.

    Args:
        config: the object ``quantization_config`` of config.json.

    Raises:
        CheckpointError: an unknown method, or a value that is missing or of the wrong type; names the key.
    """
    method = method_of(config)
    if method is None:
        stated = shorten(config.get("quant_method"))
        raise CheckpointError(f"{WHERE}.quant_method is {stated}, but one of {', '.join(sorted(RULES))} is expected")
    return RULES[method](config)


def method_of(config: Mapping[str, Any]) -> str | None:
    """The key of :data:`RULES` that a quantization_config names, in any spelling of the tools; None if unknown."""
    method = config.get("quant_method")
    name = method.lower().replace("_", "-").rpartition("/")[2] if isinstance(method, str) else None
    return name if name in RULES else None


def find_config(config: Mapping[str, Any], directory: Path | None = None) -> Mapping[str, Any]:
    """The quantization_config in config.json, for the whole model or its text part, or in an older file beside it.

    Raises:
        CheckpointError: no quantization_config is found.
    """
    found = _in_config(config)
    if found is None and directory is not None:
        found = older_config(directory)
    if found is None:
        raise CheckpointError("config.json has no quantization_config: this is not a quantized checkpoint")
    return found


def config_in(directory: Path) -> Mapping[str, Any] | None:
    """The quantization_config of a directory, config.json first; None if no file has one.

    Raises:
        CheckpointError: a file is no JSON object.
    """
    path = directory / "config.json"
    found = _in_config(read_json(path)) if path.is_file() else None
    return older_config(directory) if found is None else found


def _in_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for owner in (config, json_field(config, "text_config", dict, "text_config") or {}):
        for name in ("quantization_config", "compression_config"):
            found = json_field(owner, name, dict, name)
            if found:
                return found
    return None


def older_config(directory: Path) -> dict[str, Any] | None:
    """The quantization_config in a file of its own, as older tools wrote it; None if there is no such file.

    Raises:
        CheckpointError: the file is no JSON object.
    """
    for name, method in _OLDER.items():
        if (directory / name).is_file():
            return {"quant_method": method, **read_json(directory / name)}
    return None


def scheme_of(
    rules: Rules,
    module: str,
    suffixes: Collection[str],
    is_int8: Callable[[], bool] = lambda: False,
) -> Scheme | NotRead:
    """How a module is stored whose tensors have the last parts ``suffixes`` in their names.

    The tensors in files decide whether a module is quantized: configurations name left-out modules by parts of names,
    with a meaning that changes between versions. ``is_int8`` says whether ``weight`` is int8. ``is_int8`` is called
    only if ``weight`` may be codes and no other tensor says that the module is quantized.
    """
    found = rules.of(module)
    quantized = any(suffix in suffixes for suffix in quantized_suffixes())
    if isinstance(found, Scheme):
        quantized = quantized or (found.weight == "weight" and "weight" in suffixes and is_int8())
        return found if quantized else NotRead.not_quantized(module, "it has weights without scales")
    default = getattr(rules, "default", None)
    if not found.quantized and quantized and isinstance(default, Scheme) and default.weight in suffixes:
        return default
    return found


class Fields:
    """The values of a quantization_config that most methods have, read and checked. Errors name the key."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def first(self, *names: str, default: object = None) -> tuple[Any, str]:
        """The value of the first of ``names`` that is not null or missing, else ``default``; and the value's key."""
        name = next((name for name in names if self._config.get(name) is not None), names[0])
        value = self._config.get(name)
        return default if value is None else value, f"{WHERE}.{name}"

    def bits(self, *names: str, allowed: tuple[int, ...]) -> int:
        """Bits of a code."""
        value, key = self.first(*names)
        valid = isinstance(value, int) and not isinstance(value, bool) and value in allowed
        check_field(valid, key, value, " or ".join(map(str, allowed)))
        return value

    def group_size(self, *names: str) -> int:
        """Input features of a group, -1 for all of them; 128 if the configuration does not say."""
        value, key = self.first(*names, default=128)
        check_field(is_group_size(value), key, value, f"-1, {GROUP_SIZES}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value, key = self.first(name, default=default)
        check_field(isinstance(value, bool), key, value, "true or false")
        return value


def strings(config: Mapping[str, Any], name: str) -> list[str]:
    """A list of strings, also from lists of strings inside, or from one string with commas."""
    key = f"{WHERE}.{name}"
    value = config.get(name)
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    found: list[str] = []
    for entry in json_field(config, name, list, key) or []:
        for part in entry if isinstance(entry, list) else [entry]:
            check_field(isinstance(part, str), f"an entry of {key}", part, "a name")
            found.append(part)
    return found


def pattern(text: str, key: str) -> Pattern:
    return Pattern(text, f"{key} is {shorten(text)}")


def patterns(config: Mapping[str, Any], name: str) -> list[Pattern]:
    """A list of regular expressions."""
    return [pattern(text, f"{WHERE}.{name}") for text in strings(config, name)]


def objects(config: Mapping[str, Any], name: str) -> dict[str, Mapping[str, Any]]:
    """An object of objects."""
    found = json_field(config, name, dict, f"{WHERE}.{name}") or {}
    return {key: json_field(found, key, dict, f"{WHERE}.{name}[{shorten(key)}]") or {} for key in found}


class BaseRules:
    """Rules with one scheme for all modules, and exceptions."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Reads a quantization_config.

        Raises:
            CheckpointError: a value of the wrong type.
        """
        self.config = config
        self.default = self.attempt({}, "")
        self.read_exceptions(config)

    def read_exceptions(self, config: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def attempt(self, changes: Mapping[str, Any], where: str) -> Scheme | NotRead:
        """How a module is stored with ``changes`` to the configuration; ``where`` follows the reason in messages."""
        return scheme_or_not_read(partial(self.scheme, Fields({**self.config, **changes})), where)

    def scheme(self, fields: Fields) -> Scheme:
        raise NotImplementedError

    def head_not_read(self, module: str) -> NotRead | None:
        """NotRead for ``lm_head`` unless the configuration says that it is quantized; None for other modules."""
        if module.rpartition(".")[2] != "lm_head" or self.config.get("lm_head") is True:
            return None
        return NotRead.not_quantized(module, f"{WHERE}.lm_head is not true")


def named(module: str, entries: Iterable[str]) -> str | None:
    """The first entry that is part of the module's name."""
    return next((entry for entry in entries if entry in module), None)
