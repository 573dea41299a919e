"""Tells whether modules have changed, quickly enough to ask before every token."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import attrgetter, contains, getitem, is_

import torch
from torch.nn.modules import module as of_all_modules

_address, _version = torch.Tensor.data_ptr, attrgetter("_version")


def version(tensor: torch.Tensor) -> int:
    """How often torch saw the tensor written to; 0 for those made in inference mode, which have no version."""
    return 0 if tensor.is_inference() else tensor._version


class _Marks:
    """Addresses and versions of tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]  # others have no version
        self._before = self._now()

    def _now(self) -> list[int]:
        return [*map(_address, self._tensors), *map(_version, self._counted)]

    def same(self) -> bool:
        return self._now() == self._before


class Watch:
    """Modules as they were: their children, hooks, forwards and tensors.

    The loops are left to C: before a token some 0.1 microseconds for a module.
    """

    def __init__(self, root: torch.nn.Module, modules: Iterable[torch.nn.Module]) -> None:
        """Remembers the present state of ``modules``, and the children of ``root``."""
        self._root, self._modules = root, list(modules)
        self.keep_modules()
        slots = [
            (table, name)
            for module in self._modules
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None and not tensor.is_meta
        ]
        self._tables, self._names = [table for table, _ in slots], [name for _, name in slots]
        self._tensors = [table[name] for table, name in slots]
        kept = [tensor.detach() for tensor in self._tensors]  # lest other tensors get the same addresses
        self._packed = _Marks([tensor for tensor in self._tensors if tensor.dtype == torch.uint8])
        self._floats = _Marks([tensor for tensor in self._tensors if tensor.dtype != torch.uint8])
        vectors = (each for each in kept if each.is_floating_point() and each.numel() == max(each.shape, default=1))
        self._copies, self._kept = [(each, each.clone()) for each in vectors], kept

    def keep_modules(self) -> None:
        """Remembers the present children, hooks and forwards."""
        tables = [self._root._modules, of_all_modules._global_forward_hooks, of_all_modules._global_forward_pre_hooks]
        for module in self._modules:
            tables += (module._modules, module._forward_hooks, module._forward_pre_hooks)
        self._empty = [table for table in tables if not table]
        self._filled = [table for table in tables if table]
        self._entries = [dict(table) for table in self._filled]
        attributes = list(map(vars, self._modules))
        self._without_forward = [each for each in attributes if "forward" not in each]
        self._forwards = [(each, each["forward"]) for each in attributes if "forward" in each]

    def same_modules(self) -> bool:
        """Whether no module was replaced and no hook or forward came, went or was replaced."""
        if any(self._empty) or self._filled != self._entries:
            return False
        if any(map(contains, self._without_forward, repeat("forward"))):
            return False
        return all(each.get("forward") is forward for each, forward in self._forwards)

    def same_weights(self, begins: bool) -> bool:
        """Whether no tensor was replaced or moved, and nothing was written to the floats.

        Args:
            begins: before a text, takes three times as long. Sees packed weights that were moved or written to as well,
                and vectors of floats that were written to without torch's counting, as by ``weight.data.mul_(2)``. (A
                decoder has copies of vectors, and reads packed weights where they lie.)
        """
        try:
            if not all(map(is_, map(getitem, self._tables, self._names), self._tensors)):
                return False
        except KeyError:  # a tensor is gone
            return False
        if not self._floats.same():
            return False
        return not begins or (self._packed.same() and all(torch.equal(each, copy) for each, copy in self._copies))
