"""Layers whose ``weight`` or ``bias`` other code reads: a packed layer has neither."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType

import torch

# Methods for GPUs alone.
_NOT_ON_CPUS = "cuda"


@cache
def read_by(owner: type) -> frozenset[str]:
    """The submodules of which the forward of a class reads ``weight`` or ``bias``.

    Args:
        owner: ``forward`` is searched, and the methods of the class that ``forward`` names, but no code behind
            ``if self.training``.

    Returns:
        Paths below the module: ``wo`` for ``self.wo.weight``. Ends of paths: ``.attention.output`` for
        ``block.attention.output.weight``, since ``block`` is unknown.
    """
    found, seen, names = set(), set(), {"forward"}
    while names:
        name = names.pop()
        seen.add(name)
        method = getattr(owner, name, None)
        method = method.fget if isinstance(method, property) else method
        code = getattr(inspect.unwrap(method), "__code__", None)
        if code is None or _NOT_ON_CPUS in name or (name != "forward" and hasattr(torch.nn.Module, name)):
            continue
        for base, *path in _paths(code, code.co_varnames[:1]):
            if base == "self":
                names |= {path[0]} - seen
            if len(path) > 1 and path[-1] in ("weight", "bias"):
                found.add(("" if base == "self" else ".") + ".".join(path[:-1]))
    return frozenset(found)


def _paths(code: CodeType, own: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """``("self", "wo", "weight")`` of ``self.wo.weight``, and its beginnings; ``("", ...)`` of anything else's."""
    path, training_until = ("",), 0
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if name in ("CACHE", "EXTENDED_ARG", "TO_BOOL", "NOT_TAKEN"):
            continue
        if path == ("self", "training") and name.startswith("POP_JUMP") and name.endswith("IF_FALSE"):
            training_until = instruction.argval
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, instruction.argval)
            if instruction.offset >= training_until:
                yield path
        else:
            mine = name.startswith(("LOAD_FAST", "LOAD_DEREF")) and instruction.argval in own
            path = ("self",) if mine else ("",)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _paths(inner, own)


def reader_of(model: torch.nn.Module, path: str) -> str | None:
    """The class of the module that reads ``weight`` or ``bias`` of the one at a path in a model, or None."""
    module, keys = model, path.split(".")
    for depth, key in enumerate(keys):
        below, ends = ".".join(keys[depth:]), read_by(type(module))
        # Bloom cuts weights up for another value only.
        if getattr(module, "pretraining_tp", None) != 1 and any(
            end == below or (end.startswith(".") and f".{below}".endswith(end)) for end in ends
        ):
            return type(module).__name__
        module = module._modules.get(key)
    return None
