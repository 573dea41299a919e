"""A packed directory: modules take their packed matrices from the files."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from w4a8.checkpoint.packed_source import PackedSource, experts_of
from w4a8.core.memory import on_cpu
from w4a8.core.pages import Pages
from w4a8.formats.packed_directory import ALL_STAND_FOR
from w4a8.integrations.transformers.modules import Found, Modules
from w4a8.integrations.transformers.names import Names, refuse_missing


class PackedModules(Modules):
    """The packed modules of a model.

    Attributes:
        keys: the packed tensors, by their names in the files.
    """

    def __init__(self, model: torch.nn.Module, files: Sequence[str], listed: object = None) -> None:
        """Finds the modules, and takes them out of the model, which is on the meta device.

        Args:
            model: of transformers.
            files: safetensors.
            listed: the list of packed tensors in config.json, or None.

        Raises:
            ValueError: no packed tensors, or a layer without tensors.
        """
        with on_cpu():  # transformers builds models with the meta device as default
            self.source = PackedSource(files, listed)
        names, self.found = Names(model), {}  # module: last part of a tensor's name: module in the files
        for module, parts in self.source.packed.items():
            for leaf in parts:
                parameter = names.parameter(f"{module}.{ALL_STAND_FOR[leaf]}")[0]
                if parameter is None and leaf == "w13_packed":  # of experts without a gate
                    parameter = names.parameter(f"{module}.up_proj")[0]
                if parameter is not None:  # otherwise the model has no place for it
                    self.found.setdefault(parameter.rpartition(".")[0], {})[leaf] = module
        self.keys = {f"{module}.{leaf}" for parts in self.found.values() for leaf, module in parts.items()}
        pages = Pages(files)  # of the headers of all experts, which packed modules compare
        super().__init__(
            *(model, self.found, self._find, None, lambda parameter: "it is not packed in the directory"),
            packed_one=lambda module: pages.release(module.buffers()),
        )
        theirs = {f"^{re.escape(names.renamed(key))}$" for key in self.keys}
        model._keys_to_ignore_on_load_unexpected = theirs.union(model._keys_to_ignore_on_load_unexpected or ())
        refuse_missing(model, {names.renamed(key) for key in self.source.keys})

    def _find(self, name: str, old: torch.nn.Module) -> Found:
        weights = {leaf: self.source.weight(module, leaf) for leaf, module in self.found[name].items()}
        kinds = {torch.nn.Linear: ["packed"], torch.nn.Embedding: ["rows_packed"]}
        expected = next(
            (leaves for kind, leaves in kinds.items() if isinstance(old, kind)), ["w13_packed", "w2_packed"]
        )
        if sorted(weights) != expected:
            raise ValueError(f"packed tensors are {sorted(weights)}, expected {expected}")
        if len(expected) == 1:
            return list(weights.values())
        return experts_of(name, weights["w13_packed"], weights["w2_packed"])
