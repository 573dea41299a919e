"""Names in checkpoint files, as others wrote them, and in the model: they differ for some architectures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key


class Names:
    """What transformers would make of the names in files."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Takes the names of a model of transformers with float weights."""
        mapping = get_model_conversion_mapping(model)
        self.renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.prefix = model.base_model_prefix
        self.parameters = model.state_dict()

    def parameter(self, key: str) -> tuple[str | None, list[str], str | None]:
        """Where a tensor of a float checkpoint goes.

        Returns:
            Name of the parameter, None if the model has no such; the patterns of the tensors that are joined into it;
            and the one of them that ``key`` matched. Without joining there are none.
        """
        name, pattern = rename_source_key(key, self.renamings, self.converters, self.prefix, self.parameters)
        if name not in self.parameters:
            return None, [], None
        sources = next((c.source_patterns for c in self.converters if pattern in c.source_patterns), [])
        return name, list(sources), pattern


def slices(files: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Name and lazy tensor of all that is in safetensors files, in transformers' order.

    Raises:
        ValueError: other files.
    """
    found = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"{file}: quantized weights are read from safetensors files only")
        with safe_open(file, framework="pt") as tensors:
            found.update({key: tensors.get_slice(key) for key in tensors.keys()})  # noqa: SIM118 (it is no dict)
    yield from sorted(found.items(), key=lambda item: dot_natural_key(item[0]))
