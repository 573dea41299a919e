"""Prints answers: text for people, or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class UsageError(Exception):
    """Arguments that do not go together; the command ends with exit code 2."""


def number(kind: type, least: float, most: float = float("inf")) -> Callable[[str], Any]:
    """The ``type`` of an argument of argparse: a finite number in [least, most]."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most or value == float("inf"):
            raise argparse.ArgumentTypeError(
                f"{text} is not in [{least}, {most}]"
                if most < float("inf")
                else f"{text} is no finite number from {least} on"
            )
        return value

    parse.__name__ = kind.__name__  # argparse shows this name if the text is no number
    return parse


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def show(answer: dict[str, Any], text: Iterable[str], as_json: bool) -> None:
    """Prints an answer.

    Args:
        answer: in types of JSON.
        text: lines of the same answer.
        as_json: print ``answer`` instead of ``text``.
    """
    print(json.dumps(answer, indent=2) if as_json else "\n".join(text))


def labelled(rows: Iterable[tuple[str, str]], width: int = 0) -> list[str]:
    """Lines of a label and a text. All texts begin in one column; labels are padded to ``width`` or more."""
    rows = list(rows)
    width = max([width, *(len(label) for label, _ in rows)])
    return [f"{label:<{width}}  {text}".rstrip() for label, text in rows]


def table(rows: Sequence[Sequence[str]], indent: int = 2) -> list[str]:
    """Lines of columns, each as wide as its widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [" " * indent + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]
