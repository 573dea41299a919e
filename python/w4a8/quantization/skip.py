"""Which modules of a model to leave alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import accumulate

import torch

Skip = str | Iterable[str] | Callable[[str, torch.nn.Module], bool]

# Output layers decide between many close candidates, and routers between experts: both are small and sensitive.
DEFAULT_SKIP = (r"re:(.*\.)?lm_head$", r"re:(.*\.)?(gate|router|shared_expert_gate)$")

# Why a head with made-up weights is left alone: somebody wants to train it, or nobody needs it.
NOT_LOADED = "the checkpoint does not have it"


class Skipped:
    """Says of each module whether to leave it alone; its submodules are then left alone too."""

    def __init__(self, skip: Skip = (), default_skip: bool = True) -> None:
        """Takes names, patterns or a function.

        Args:
            skip: names, regular expressions behind ``re:`` (matched from the beginning of a name, as compressed-tensors
                does in ``ignore``), or a function of name and module.
            default_skip: also leave ``DEFAULT_SKIP`` and :func:`heads` alone.

        Raises:
            TypeError: none of these, or ``default_skip`` is no bool.
            ValueError: not a regular expression.
        """
        if not isinstance(default_skip, bool):
            raise TypeError(f"default_skip is {default_skip!r}, expected True or False")
        given = [] if callable(skip) else [skip] if isinstance(skip, str) else list(skip)
        self.default_skip = default_skip
        self._function = skip if callable(skip) else None
        self._given = [(entry, _matcher(entry)) for entry in given]
        self._default = [_matcher(entry) for entry in DEFAULT_SKIP] if default_skip else []

    def __call__(self, name: str, module: torch.nn.Module) -> bool:
        """Whether to leave a module of this name alone."""
        if any(matches(name) for matches in (*self._default, *(matches for _, matches in self._given))):
            return True
        return self._function is not None and bool(self._function(name, module))

    def has_inside(self, name: str, module: torch.nn.Module) -> bool:
        """Whether to leave a module of this name alone, or one that it is part of. Not asked of a function's choice."""
        return any(self(owner, module) for owner in accumulate(name.split("."), "{}.{}".format))

    def check(self, model: torch.nn.Module) -> None:
        """Looks for entries that match no module of a model; an entry of DEFAULT_SKIP may match none.

        Raises:
            ValueError: an entry matches nothing; names the entry.
        """
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        for entry, matches in self._given:
            if entry not in DEFAULT_SKIP and not any(map(matches, names)):
                raise ValueError(f"skip holds {entry!r}, which matches the name of no module of the model")


def heads(model: torch.nn.Module) -> dict[int, str]:
    """The output layers of models of transformers, whatever their names, and linear layers that were not loaded.

    transformers marks the parameters that a checkpoint had.

    Returns:
        id of a module: why it is left alone.
    """
    found: dict[int, str] = {}
    for owner in model.modules():
        get = getattr(owner, "get_output_embeddings", None)
        if not callable(get):
            continue
        if any(map(_is_loaded, owner.parameters())):
            linears = [part for part in owner.modules() if isinstance(part, torch.nn.Linear)]
            found.update({id(linear): NOT_LOADED for linear in linears if not _is_loaded(linear.weight)})
        try:
            found[id(get())] = "skip"
        except (AttributeError, NotImplementedError):  # a model without
            continue
    return found


def _is_loaded(parameter: torch.nn.Parameter) -> bool:
    return getattr(parameter, "_is_hf_initialized", False)


def _matcher(entry: object) -> Callable[[str], object]:
    """A function of a name; true if the entry matches the name."""
    if not isinstance(entry, str):
        raise TypeError(f"skip holds {entry!r}, expected names, 're:' and a regular expression, or a callable")
    if not entry.startswith("re:"):
        return lambda name: name == entry
    try:
        return re.compile(entry[3:]).match
    except re.error as error:
        raise ValueError(f"skip holds {entry!r}, which is no regular expression: {error}") from error
