"""The part of a model that each of several ranks holds, as vLLM cuts it, and cuts that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from w4a8.checkpoint.gguf_file import GGUFFile, is_gguf
from w4a8.checkpoint.routers import EXPERT_COUNTS
from w4a8.command.contents import EMBEDDING, EXPERTS, OTHER, OUTPUT, ROUTER, RUNS, Layer
from w4a8.core.json_fields import read_json
from w4a8.formats.gguf_blocks import TYPES
from w4a8.formats.rules import config_in, method_of, rules_of
from w4a8.formats.scheme import Scheme

# Names of linear layers whose inputs are cut: the layers before these give each rank a part of the features.
_INPUTS = ("o_proj", "out_proj", "down_proj", "fc2", "dense", "wo", "w2", "dense_4h_to_h", "c_proj")
# Those that each rank has a copy of: they make few features, which all heads need.
_COPIED = ("q_a_proj", "kv_a_proj_with_mqa", "per_layer_input_gate", "per_layer_projection")
_KEYS = ("k_proj", "v_proj")


def heads_problem(sizes: Mapping[str, Any], ranks: int) -> str:
    """Why the heads of attention cannot be cut; "" if they can.

    Args:
        sizes: ``queries`` and ``heads``, numbers of heads, the latter of keys; and ``latent`` (:func:`serve.sizes_of`).
        ranks: of tensor parallelism.
    """
    queries, heads = sizes["queries"] or 0, sizes["heads"] or 0
    if queries % ranks:
        return f"{queries} heads of queries cannot be dealt out to {ranks} ranks alike"
    if heads and not sizes["latent"] and heads % ranks and ranks % heads:
        return f"{heads} heads of keys can neither be dealt out to {ranks} ranks alike nor be copied to as many each"
    return ""


def of_ranks(layers: Iterable[Layer], sizes: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The bytes of each rank, of these those that all ranks have, and what does not fit, in types of JSON.

    Args:
        layers: of the model.
        sizes: as for :func:`heads_problem`.
        ranks: of tensor parallelism.
    """
    cut, copied, problems = 0.0, 0.0, {heads_problem(sizes, ranks): 1}
    for layer in layers:
        share = _share(layer, sizes, ranks)
        cut += layer.bytes * (share < 1) * share
        copied += layer.bytes * (share == 1)
        problems[_problem(layer, ranks)] = 1
    problems.pop("", None)
    return {"ranks": ranks, "rank_bytes": round(cut + copied), "copied_bytes": round(copied), "problems": [*problems]}


def _share(layer: Layer, sizes: Mapping[str, Any], ranks: int) -> float:
    """The share of a layer's bytes that a rank holds."""
    last, heads = layer.name.rpartition(".")[2], sizes["heads"] or ranks
    if layer.role in (ROUTER, OTHER) or last in _COPIED:
        return 1.0
    return max(1, heads // ranks) / heads if last in _KEYS else 1 / ranks


def _problem(layer: Layer, ranks: int) -> str:
    """Why a packed layer cannot be cut, or ""; the same for layers with the same sizes."""
    last = layer.name.rpartition(".")[2]
    if layer.state != RUNS or layer.role in (EMBEDDING, OUTPUT) or last in _COPIED:
        return ""
    if ".mamba." in layer.name or ".mixer." in layer.name:
        return f"{last} of Mamba-2: quantized, it is not cut"
    for rows, columns, unit in layer.shapes:
        of_inputs = last in _INPUTS or (layer.role == EXPERTS and (rows, columns, unit) == layer.shapes[-1])
        if not of_inputs and rows % ranks:
            return f"{last}: {rows} output features in {ranks} parts"
        problem = _groups_problem(last, columns, unit, ranks, layer.role == EXPERTS) if of_inputs else ""
        if problem:
            return problem
    return ""


def _groups_problem(name: str, columns: int, unit: int, ranks: int, of_experts: bool) -> str:
    """Why the input features of a packed matrix cannot be cut, or "". ``unit``: features that stay together."""
    if columns % ranks == 0 and (unit >= columns or columns // ranks % unit == 0):
        return ""
    whole = ". With --enable-expert-parallel each rank has whole experts" * of_experts
    return f"{name}: {columns} input features in {ranks} parts, which cuts groups or blocks of {unit}{whole}"


def down_problem(path: Path, ranks: int, whole_experts: bool) -> str:
    """Why the last matrix of MLPs or experts cannot be cut, as far as the keys of a model say at once; or "".

    Args:
        path: of a folder or a GGUF file.
        ranks: of tensor parallelism.
        whole_experts: experts are dealt out to the ranks.
    """
    if is_gguf(path):
        file = GGUFFile(path)
        downs = [name for name in file.tensors if "ffn_down" in name and not file.is_float(name)]
        found = [(name, file.tensors[name].shape[-1], TYPES[file.tensors[name].type].weights) for name in downs]
    else:
        config, source = read_json(path / "config.json"), config_in(path)
        text = config.get("text_config") or config
        if source is None or method_of(source) is None:
            return ""
        # Models of experts may have other MLPs, or none: of these their config says too little.
        has_experts = any(text.get(name) for name in EXPERT_COUNTS)
        columns = (text.get("moe_intermediate_size") if has_experts else None) or text.get("intermediate_size")
        name = f"model.layers.0.mlp{'.experts.0' * has_experts}.down_proj"
        try:
            scheme = rules_of(source).of(name)
        except ValueError:  # which vLLM will say, if it reads the same keys
            return ""
        found = [(name, columns, scheme.group_size)] if isinstance(scheme, Scheme) and isinstance(columns, int) else []
    for name, columns, unit in found:
        of_experts = "exps" in name or ".experts." in name
        problem = _groups_problem(name, columns, max(1, unit), ranks, of_experts)
        if problem and not (of_experts and whole_experts):
            return problem
    return ""
