"""Reads values of JSON objects from outside. A value of the wrong type is an error that names the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message names the key or the file."""


def check_regular(path: Path) -> None:
    """Raises CheckpointError for a path that is a named pipe, a device or a socket: reading it may never end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise CheckpointError(f"{path} is no regular file")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing, unreadable, no regular file or no JSON object.
    """
    check_regular(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, too long an integer, too deep
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def json_field(owner: Mapping[str, Any], name: str, kind: type | tuple[type, ...], key: str) -> Any:
    """A value of a JSON object; None if the value is null or missing. A bool is valid only if ``kind`` has bool.

    Raises:
        CheckpointError: the value is not of ``kind``; the message names it as ``key``.
    """
    value = owner.get(name)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if value is None or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
        return value
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        int: "an integer",
        float: "a number",
        bool: "true or false",
    }
    raise CheckpointError(f"{key} is {shorten(value)}, but {names[kinds[-1]]} is expected")


def shorten(value: object) -> str:
    """repr of a value from outside, at most 200 characters."""
    try:
        text = repr(value)
    except ValueError:  # too long an integer
        return "a huge integer"
    return text if len(text) <= 200 else f"{text[:197]}..."


def check_field(condition: bool, key: str, found: object, expected: str) -> None:
    """Raises CheckpointError with key, found and expected value unless ``condition`` holds."""
    if not condition:
        raise CheckpointError(f"{key} is {shorten(found)}, but {expected} is expected")
