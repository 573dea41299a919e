"""Names in checkpoint files, and in the model: the names differ for some architectures."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from w4a8.checkpoint.tensors import opened, read_index, slices
from w4a8.quantization.moe_blocks import fused_experts

FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them


def split_into(name: str, converters: Iterable[WeightConverter]) -> list[str]:
    """All parameters that transformers makes of a tensor whose first parameter is ``name``."""
    for converter in converters:
        first, *others = converter.target_patterns
        if others and first in name:
            return [name, *(name.replace(first, other, 1) for other in others)]
    return [name]


class Names:
    """transformers' mapping of names in files to names in the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Takes the names of a model of transformers with float weights."""
        mapping = get_model_conversion_mapping(model)
        self.renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.prefix = model.base_model_prefix
        self.parameters = model.state_dict()

    def renamed(self, key: str) -> str:
        """transformers' name of a tensor of a float checkpoint, even if the model lacks it."""
        return rename_source_key(key, self.renamings, self.converters, self.prefix, self.parameters)[0]

    def all_renamed(self, key: str) -> list[str]:
        """As :meth:`renamed`, and the other parameters if the tensor is split."""
        name, pattern = rename_source_key(key, self.renamings, self.converters, self.prefix, self.parameters)
        return split_into(name, [each for each in self.converters if pattern in each.source_patterns])

    def casts(self, key: str) -> bool:
        """Whether a tensor goes to a parameter of floats: transformers would cast codes to floats."""
        parameter = self.parameters.get(self.renamed(key))
        return parameter is not None and parameter.is_floating_point()

    def parameter(self, key: str) -> tuple[str | None, list[str], str | None]:
        """The parameter that gets a tensor of a float checkpoint.

        Returns:
            Name of the parameter, None if the model lacks it; the patterns of the tensors that are joined into the
            parameter; and the pattern that ``key`` matched. Without joining there are no patterns.
        """
        name, pattern = rename_source_key(key, self.renamings, self.converters, self.prefix, self.parameters)
        if name not in self.parameters:
            return None, [], None
        sources = next((c.source_patterns for c in self.converters if pattern in c.source_patterns), [])
        return name, list(sources), pattern


def check_inside(files: Sequence[str], folder: str) -> None:
    """Compares the files that transformers is going to read with the folder (or name on the Hub) and its index.

    Raises:
        ValueError: a file outside of the folder, several folders, or a model.safetensors beside the files that an index
            names instead.
    """
    for file in map(Path, files):
        if Path(folder).is_dir() and (not file.is_relative_to(folder) or ".." in file.relative_to(folder).parts):
            raise ValueError(f"the index of {folder} names {file}, which is no file of {folder}")
        if file.parent != Path(files[0]).parent:
            raise ValueError(f"the weights are in {files[0]} and in {file}, but one folder is expected")
        stated = set((read_index(file.parent) or {}).values()) if file.name == "model.safetensors" else set()
        others = [name for name in stated if file.name not in stated and (file.parent / name).is_file()]
        if others:
            raise ValueError(f"transformers would read {file}, but the index beside it names {min(others)}: remove one")


def check_files(files: Sequence[str], ours: Collection[str] = ()) -> None:
    """Compares with the index the file of each tensor, except ``ours``: transformers takes the last file with it.

    Raises:
        ValueError: a tensor is in two files, and no index names the last one.
    """
    if not all(str(file).endswith(".safetensors") for file in files):
        return
    handles, place = opened(files)
    last = {key: file for file, handle in handles.items() for key in handle.keys()}  # noqa: SIM118 (it is no dict)
    for key, file in place.items():
        if last[key] != file and key not in ours:
            raise ValueError(
                f"tensor {key!r} stands in {file} and in {last[key]}, which transformers would read though the index "
                "names the first: remove it there"
            )


def refuse_codes(model: torch.nn.Module, files: Sequence[str]) -> None:
    """Looks for codes in a checkpoint whose config.json has no quantization_config: transformers would cast them.

    Raises:
        ValueError: a tensor of integers, or of floats of 8 bits or less, goes to a parameter of floats; names it.
    """
    if not all(str(file).endswith(".safetensors") for file in files):
        return
    types = {key: part.get_dtype() for key, part in slices(files)}
    codes = {key: dtype for key, dtype in types.items() if dtype not in FLOATS}
    names = Names(model) if codes else None
    for key, dtype in codes.items():
        if names.casts(key):
            raise ValueError(
                f"tensor {key!r} is of {dtype}, but config.json has no quantization_config, which would say what the "
                "codes stand for"
            )


def left_out(model: torch.nn.Module, keys: Iterable[str]) -> set[str]:
    """The tensors among ``keys``, by transformers' names, that the class of a model ignores in checkpoints.

    Layers behind the last, which predict further tokens (MTP), are included: classes name these layers by their numbers
    in the released models.
    """
    keys = set(keys)
    found = SimpleNamespace(missing_keys=set(), unexpected_keys=set(keys))
    model._adjust_missing_and_unexpected_keys(found)
    config = model.config.get_text_config()
    last = getattr(config, "num_hidden_layers", None)
    more = getattr(config, "num_nextn_predict_layers", None) or 0
    layer = re.compile(r"(?:.+\.)?layers\.(\d+)\..+")
    numbers = {key: int(match[1]) for key in keys if (match := layer.fullmatch(key))}
    past = {key for key, number in numbers.items() if last is not None and last <= number < last + more}
    return (keys - found.unexpected_keys) | past


def refuse_missing(model: torch.nn.Module, given: Collection[str]) -> None:
    """Raises ValueError for a missing parameter of linear layers or experts: transformers would make it up.

    New heads, outside of the base model, may be missing: somebody wants to train them.
    """
    lacking = [
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or fused_experts(module) is not None
        for parameter, _ in module.named_parameters(recurse=False)
    ]
    refuse_made_up(model, [key for key in lacking if key not in given])


def refuse_made_up(model: torch.nn.Module, lacking: Iterable[str]) -> None:
    """Raises ValueError for the first of these parameters, which no file has, except those of new heads."""
    found = SimpleNamespace(missing_keys=set(lacking), unexpected_keys=set())
    model._adjust_missing_and_unexpected_keys(found)
    output, prefix = model.get_output_embeddings(), f"{model.base_model_prefix}."
    for key in sorted(found.missing_keys, key=dot_natural_key):
        inside = model.base_model is model or key.startswith(prefix)
        inside = inside or (output is not None and model.get_submodule(key.rpartition(".")[0]) is output)
        if inside and key not in model.all_tied_weights_keys:
            raise ValueError(f"{key} is not in the checkpoint: a model with numbers made up for it is not loaded")
