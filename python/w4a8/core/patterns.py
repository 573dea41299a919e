"""Names of modules and regular expressions in files. An expression that might run for minutes is refused."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from math import comb
from typing import Any

from w4a8.core.json_fields import CheckpointError, check_field, json_field, shorten

try:
    from re import _constants as ops
    from re import _parser as parser
except ImportError:  # Python 3.10
    import sre_constants as ops
    import sre_parse as parser

# Limits of a pattern: ways to match one name (10^8 take some seconds), and seconds for all names.
_WAYS, _SECONDS = 10**8, 2.0
_LENGTH = 64  # length of names for which every pattern must keep to _WAYS
_REPEATS = [ops.MAX_REPEAT, ops.MIN_REPEAT, getattr(ops, "POSSESSIVE_REPEAT", None)]
_ONE = {ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN, ops.AT, ops.GROUPREF, ops.CATEGORY, ops.RANGE, ops.NEGATE}


class Pattern:
    """A regular expression, matched in bounded time.

    ``re`` tries one way to match after another: ``(a+)+b`` has 2^n ways for a name of n characters, ``.*.*.*b`` n^3.
    """

    def __init__(self, text: object, stated: str, expected: str = "a regular expression") -> None:
        """Reads an expression.

        Args:
            text: the expression.
            stated: "<key> is <value>", for messages.
            expected: the expected values, for messages.

        Raises:
            CheckpointError: ``text`` is no regular expression, or has too many ways to match.
        """
        self._spent, self._stated = 0.0, stated
        try:
            self._compiled = re.compile(text)
            tree = list(parser.parse(text))
            # A repetition at the end never fails later: only one way is tried.
            at_end = bool(tree) and _of_node(*tree[-1]) == (1, 1)
            self._repeats, self._ways = _choices(tree[:-1] if at_end else tree)
        except (re.error, TypeError, RecursionError, OverflowError):
            raise CheckpointError(f"{self._stated}, but {expected} is expected") from None
        self._check(_LENGTH)

    def match(self, name: str) -> bool:
        """Whether the pattern matches from the start of a name.

        Raises:
            CheckpointError: too many ways to match this name, or the time for all names is over.
        """
        return self._run(self._compiled.match, name, 0)

    def search(self, name: str) -> bool:
        """Whether the pattern matches anywhere in a name; raises as :meth:`match`."""
        return self._run(self._compiled.search, name, 1)

    def _run(self, function: Any, name: str, more: int) -> bool:
        if len(name) > _LENGTH or more:
            self._check(len(name), more)
        start = time.thread_time()
        found = function(name) is not None
        self._spent += time.thread_time() - start
        if self._spent > _SECONDS:
            raise self._slow()
        return found

    def _check(self, length: int, more: int = 0) -> None:
        repeats = self._repeats + more
        if self._ways * comb(length + repeats, repeats) > _WAYS:
            raise self._slow()

    def _slow(self) -> CheckpointError:
        return CheckpointError(
            f"{self._stated}, a regular expression that may take minutes: expected are fewer repetitions, and none "
            "inside of another"
        )


def names_field(owner: Mapping[str, Any], name: str, key: str) -> list[str]:
    """A list of names of modules and regular expressions (``re:...``) in a JSON object; [] if the list is missing.

    Raises:
        CheckpointError: the value is no list of strings, or an expression is invalid.
    """
    found = json_field(owner, name, list, key) or []
    for entry in found:
        name_or_pattern(entry, f"an entry of {key}")
    return found


def name_or_pattern(entry: object, key: str) -> Pattern | None:
    """The regular expression behind ``re:``, or None for the name of a module.

    Raises:
        CheckpointError: ``entry`` is no string, or its expression is invalid.
    """
    expected = "a name or a regular expression (re:...)"
    check_field(isinstance(entry, str), key, entry, expected)
    return Pattern(entry[3:], f"{key} is {shorten(entry)}", expected) if entry.startswith("re:") else None


def _choices(tree: Any) -> tuple[int, int]:
    """Number of unbounded repetitions in sequence, and the product of all other choices."""
    repeats, ways = 0, 1
    for op, value in tree:
        more, times = _of_node(op, value)
        repeats, ways = repeats + more, min(ways * times, _WAYS + 1)
    return repeats, ways


def _of_node(op: Any, value: Any) -> tuple[int, int]:
    if op in _ONE:
        return 0, 1
    if op is ops.BRANCH:
        found = [_choices(each) for each in value[1]]
        return max(more for more, _ in found), sum(times for _, times in found)
    if op is ops.SUBPATTERN:
        return _choices(value[-1])
    if op in (ops.ASSERT, ops.ASSERT_NOT):
        return _choices(value[1])
    if op not in _REPEATS:
        return 0, _WAYS + 1  # conditions, and syntax of later Python versions
    low, high, body = value
    more, times = _choices(body)
    if low > 1 and body.getwidth()[0] == 0:
        return 0, _WAYS + 1  # repetitions of an empty match do not use up the name
    if high <= 1:
        return more, times + 1
    if (more, times) == (0, 1):
        return (0, high - low + 1) if high <= _LENGTH else (1, 1)
    if high > _LENGTH:
        return 0, _WAYS + 1
    return more * high, min((times + (low != high)) ** high, _WAYS + 1)
