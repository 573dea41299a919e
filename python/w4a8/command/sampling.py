"""How ``w4a8 chat`` chooses tokens: by the options of the command, else as the model's files say."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from w4a8.command.report import number


@dataclass(frozen=True)
class _Setting:
    field: str  # of the arguments, of generation_config.json and of generate
    key: str  # of GGUF files, behind "general.sampling."
    kind: type
    least: float
    most: float
    default: float  # if neither says anything
    off: float | None  # has no effect
    help: str


_MANY = 2**31 - 1
_SETTINGS = (
    _Setting("temperature", "temp", float, 0, 100, 0.7, None, "0 always takes the likeliest token"),
    _Setting("top_k", "top_k", int, 0, _MANY, 50, 0, "draw from the K likeliest tokens; 0: from all"),
    _Setting("top_p", "top_p", float, 0, 1, 1.0, 1.0, "draw from the likeliest tokens that have P together"),
    _Setting("min_p", "min_p", float, 0, 1, 0.0, 0.0, "draw from tokens P times as likely as the likeliest, or more"),
    _Setting("repetition_penalty", "penalty_repeat", float, 0.01, 100, 1.0, 1.0, "for tokens that are there already"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each setting."""
    group = parser.add_argument_group("choice of tokens; the defaults are the model's own and are shown")
    for each in _SETTINGS:
        kind = number(each.kind, each.least, each.most)
        group.add_argument("--" + each.field.replace("_", "-"), type=kind, metavar="N", help=each.help)


def settings(args: argparse.Namespace, config: Any, keys: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The arguments of ``generate``, and a line that says them and where they are from.

    Args:
        args: with the options of :func:`add_options`; None: not given.
        config: the model's ``generation_config``.
        keys: of the GGUF file, or none.

    Raises:
        ValueError: a number of the model is out of its range.
    """
    found, said = {}, {}
    for each in _SETTINGS:
        value, source = getattr(args, each.field), "as asked"
        if value is None:
            value, source = _of_model(each, config, keys), "the model's"
        if value is None:
            value, source = each.default, "default"
        found[each.field] = value
        if value != each.off:
            said[each.field] = f"{each.field.replace('_', ' ')} {value:g} ({source})"
    if found["temperature"] == 0:  # the others have no effect
        found = {"repetition_penalty": found["repetition_penalty"]}
        said = {field: text for field, text in said.items() if field in ("temperature", *found)}
    return {**found, "do_sample": "temperature" in found}, ", ".join(said.values())


def _of_model(each: _Setting, config: Any, keys: Mapping[str, Any]) -> float | None:
    """What the model's files say; None: nothing."""
    name = f"general.sampling.{each.key}"
    value = keys.get(name)
    if value is None:
        name, value = f"generation_config.json: {each.field}", getattr(config, each.field, None)
    if value is None and each.field == "temperature" and config.do_sample is not None:
        return 1.0 if config.do_sample else 0.0  # transformers' own default
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not each.least <= value <= each.most:
        raise ValueError(f"{name} is {value!r}, expected a number of {each.least:g} to {each.most:g}")
    return each.kind(value)
