"""A packed directory: builds the model from the headers in the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from w4a8.core.memory import on_cpu
from w4a8.formats.packed_directory import ALL_STAND_FOR, Parts, check_listed, packed_tensors
from w4a8.integrations.transformers.names import Names, refuse_missing, slices
from w4a8.integrations.transformers.tied import (
    experts_to_pack,
    output_of,
    packed_embedding,
    packed_experts,
    stand_in,
    take_out,
    untie,
)
from w4a8.nn.linear import linear_class
from w4a8.quantization.readers import reader_of


def build_packed(model: torch.nn.Module, files: Sequence[str], listed: object = None) -> dict[str, str]:
    """Puts modules for packed weights, on the meta device, in place of layers with packed weights in the files.

    Args:
        model: of transformers, on the meta device.
        files: safetensors.
        listed: the list of packed tensors in config.json, or None.

    Returns:
        Embedding -> output layer that shares the weight; :func:`share` makes the output layer when the weights are
        loaded.

    Raises:
        ValueError: no packed tensors, tensors that do not fit the model, or a layer without tensors.
    """
    names = Names(model)
    with on_cpu():  # transformers builds models with the meta device as default
        tensors = dict(slices(files))
        found = _of_modules(names, packed_tensors(tensors.items(), ALL_STAND_FOR))
    if not found:
        raise ValueError(f"{', '.join(map(str, files)) or 'no file'}: no packed tensors, though config.json says so")
    check_listed(listed, tensors, str(Path(files[0]).parent))
    tied = {}
    for name, entries in found.items():
        reader = reader_of(model, name)
        if reader is not None:
            raise ValueError(f"{name} is packed, but {reader} reads its weight or bias itself")
        owner, _, key = name.rpartition(".")
        owner = model.get_submodule(owner)
        old = getattr(owner, key)
        output = output_of(model, name) if isinstance(old, torch.nn.Embedding) else None
        try:
            new = _new_module(old, entries, tied=output is not None)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        stand_in(new, old)
        setattr(owner, key, new)
        if output is not None:
            take_out(model, output)
            tied[name] = output
        else:
            untie(model, name)
    refuse_missing(model, {names.renamed(key) for key in tensors})
    return tied


def _of_modules(names: Names, packed: Mapping[str, Parts]) -> dict[str, Parts]:
    """Packed tensors by the names of modules in the model, without tensors that the model has no place for."""
    found: dict[str, dict[str, Any]] = {}
    for module, parts in packed.items():
        for leaf, entry in parts.items():
            parameter = names.parameter(f"{module}.{ALL_STAND_FOR[leaf]}")[0]
            if parameter is None and leaf == "w13_packed":  # of experts without a gate
                parameter = names.parameter(f"{module}.up_proj")[0]
            if parameter is not None:
                found.setdefault(parameter.rpartition(".")[0], {})[leaf] = entry
    return found


def _new_module(old: torch.nn.Module, entries: Parts, tied: bool) -> torch.nn.Module:
    def check(what: str, given: Any, expected: Any) -> None:
        if given != expected:
            raise ValueError(f"{what} is {given}, expected {expected}")

    tensors = {leaf: torch.empty(entry.shape, dtype=torch.uint8, device="meta") for leaf, entry in entries.items()}
    headers = {leaf: entry.header for leaf, entry in entries.items()}
    if isinstance(old, torch.nn.Linear):
        check("packed tensors", sorted(entries), ["packed"])
        header = headers["packed"]
        given, sizes = [header["n"], header["k"]], [old.out_features, old.in_features]
        check("packed: [n, k]", given, sizes)
        check("packed: bias", header["has_bias"], old.bias is not None)
        return linear_class(header["values"])(tensors["packed"], old.in_features, old.out_features, header["group"])
    if isinstance(old, torch.nn.Embedding):
        check("packed tensors", sorted(entries), ["rows_packed"])
        header = headers["rows_packed"]
        check("rows_packed: [n, k]", [header["n"], header["k"]], [old.num_embeddings, old.embedding_dim])
        check("rows_packed: bias", header["has_bias"], False)
        if not tied:
            raise ValueError("rows_packed, but no output layer shares its weight")
        return packed_embedding(old, tensors["rows_packed"], header["group"])
    experts = experts_to_pack(old)
    check("packed tensors of experts", sorted(entries), ["w13_packed", "w2_packed"])
    count, hidden, intermediate = experts.sizes
    biased = experts.w13_bias is not None
    rows = (1 + experts.gated) * intermediate
    for leaf, n, k in (("w13_packed", rows, hidden), ("w2_packed", hidden, intermediate)):
        check(f"{leaf}: bias", headers[leaf]["has_bias"], biased)
        given = [entries[leaf].shape[0], headers[leaf]["n"], headers[leaf]["k"]]
        check(f"{leaf}: [experts, n, k]", given, [count, n, k])
    groups = [headers[leaf]["group"] for leaf in ("w13_packed", "w2_packed")]
    if groups == [hidden, intermediate]:
        groups = [-1, -1]
    return packed_experts(experts, tensors["w13_packed"], tensors["w2_packed"], groups)
