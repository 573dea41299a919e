"""Which modules of a model to leave alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch

Skip = str | Iterable[str] | Callable[[str, torch.nn.Module], bool]

# Output layers decide between many close candidates, and routers between experts: both are small and sensitive.
DEFAULT_SKIP = (r"re:(.*\.)?lm_head$", r"re:(.*\.)?(gate|router|shared_expert_gate)$")


def skip_function(skip: Skip) -> Callable[[str, torch.nn.Module], bool]:
    """What says whether to leave a module alone.

    Args:
        skip: names, regular expressions behind ``re:`` (matched from the beginning of a name, as compressed-tensors
            does in ``ignore``), or the function itself.

    Raises:
        TypeError: none of these.
        ValueError: not a regular expression.
    """
    if callable(skip):
        return skip
    entries = [skip] if isinstance(skip, str) else list(skip)
    names, patterns = set(), []
    for entry in entries:
        if not isinstance(entry, str):
            raise TypeError(f"skip holds {entry!r}, expected names, 're:' and a regular expression, or a callable")
        if not entry.startswith("re:"):
            names.add(entry)
            continue
        try:
            patterns.append(re.compile(entry[3:]))
        except re.error as error:
            raise ValueError(f"skip holds {entry!r}, which is no regular expression: {error}") from error
    return lambda name, module: name in names or any(pattern.match(name) for pattern in patterns)
