"""A directory whose tensors are packed: what the model looks like, from the headers in its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from w4a8.integrations.transformers.names import Names, slices
from w4a8.nn import W4A8Experts, W4A8Linear, W8A8Linear
from w4a8.ops import PackedHeader, read_header
from w4a8.quantization.moe_blocks import fused_experts

# Name of a packed tensor in its module -> a parameter of the module that it stands for.
_STANDS_FOR = {"packed": "weight", "w13_packed": "gate_up_proj", "w2_packed": "down_proj"}


@dataclass
class _Entry:
    header: PackedHeader
    shape: tuple[int, ...]


def build_packed(model: torch.nn.Module, files: Sequence[str]) -> list[str]:
    """Puts modules for packed weights, on the meta device, where the files have such weights.

    Args:
        model: of transformers, on the meta device.
        files: safetensors.

    Returns:
        Names of the modules.

    Raises:
        ValueError: no packed tensors, or ones that do not fit the model.
    """
    with torch.device("cpu"):  # transformers builds models with the meta device as default
        found = _read_headers(model, files)
    if not found:
        raise ValueError(f"{', '.join(map(str, files)) or 'no file'}: no packed tensors, though config.json says so")
    for name, entries in found.items():
        owner, _, key = name.rpartition(".")
        owner = model.get_submodule(owner)
        try:
            new = _new_module(getattr(owner, key), entries)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        setattr(owner, key, new)
    return list(found)


def _read_headers(model: torch.nn.Module, files: Sequence[str]) -> dict[str, dict[str, _Entry]]:
    """Module name -> tensor name -> header (of the first expert)."""
    names = Names(model)
    found: dict[str, dict[str, _Entry]] = {}
    for key, part in slices(files):
        path, _, leaf = key.rpartition(".")
        parameter = names.parameter(f"{path}.{_STANDS_FOR[leaf]}")[0] if leaf in _STANDS_FOR else None
        if parameter is not None:
            shape = tuple(part.get_shape())
            first = part[...] if len(shape) == 1 else part[:1][0]  # a view: only the header is read
            found.setdefault(parameter.rpartition(".")[0], {})[leaf] = _Entry(_header(key, first), shape)
    return found


def _header(key: str, matrix: torch.Tensor) -> PackedHeader:
    try:
        return read_header(matrix)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{key}: {error}") from error


def _new_module(old: torch.nn.Module, entries: dict[str, _Entry]) -> torch.nn.Module:
    def check(what: str, given: Any, expected: Any) -> None:
        if given != expected:
            raise ValueError(f"{what} is {given}, expected {expected}")

    tensors = {leaf: torch.empty(entry.shape, dtype=torch.uint8, device="meta") for leaf, entry in entries.items()}
    headers = {leaf: entry.header for leaf, entry in entries.items()}
    if isinstance(old, torch.nn.Linear):
        header = headers["packed"]
        given, sizes = [header["n"], header["k"]], [old.out_features, old.in_features]
        check("packed: [n, k]", given, sizes)
        check("packed: bias", header["has_bias"], old.bias is not None)
        kind = W8A8Linear if header["values"] == "int8" else W4A8Linear
        return kind(tensors["packed"], old.in_features, old.out_features, header["group"])
    experts = fused_experts(old)
    if experts is None or experts.activation is None:
        raise ValueError(f"packed experts, but {type(old).__name__} is no block that W4A8Experts can stand for")
    check("packed tensors of experts", sorted(entries), ["w13_packed", "w2_packed"])
    count, hidden, intermediate = experts.sizes
    biased = experts.w13_bias is not None
    for leaf, n, k in (("w13_packed", 2 * intermediate, hidden), ("w2_packed", hidden, intermediate)):
        check(f"{leaf}: bias", headers[leaf]["has_bias"], biased)
        given = [entries[leaf].shape[0], headers[leaf]["n"], headers[leaf]["k"]]
        check(f"{leaf}: [experts, n, k]", given, [count, n, k])
    groups = [headers[leaf]["group"] for leaf in ("w13_packed", "w2_packed")]
    group = -1 if groups == [hidden, intermediate] else groups[0]
    check("group of w2_packed", groups[1], intermediate if group == -1 else group)
    return W4A8Experts(tensors["w13_packed"], tensors["w2_packed"], hidden, intermediate, group, experts.activation)
