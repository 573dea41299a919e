"""A directory of packed weights (docs/transformers.md) as a compressed-tensors checkpoint.

``w4a8 pack --format compressed-tensors`` writes such a checkpoint, for other readers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from w4a8.checkpoint.packed_source import open_packed
from w4a8.checkpoint.tensors import INDEX_NAME, files_of, read_index
from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix, matrix_of
from w4a8.core.nibbles import pairs, words_of
from w4a8.formats.packed_directory import (
    EMBEDDINGS,
    STANDS_FOR,
    PackedTensor,
    Parts,
    joined_layer_of,
)

# Part of the name of a block -> names of its experts' gate, up and down projections.
_PROJECTIONS = (("block_sparse_moe", ("w1", "w3", "w2")), ("", ("gate_proj", "up_proj", "down_proj")))
# Model types whose checkpoints have all experts in one piece, with another order of rows and biases.
_WHOLE_EXPERTS = ("gpt_oss",)
# Limits of compressed-tensors checkpoints.
_INTEGERS = (Kind.INT4, Kind.INT8)
_CANNOT = {"minimums": "minimums", "super_scales": "super-scales", "channel_scales": "scales of two levels"}


@dataclass
class PackedDirectory:
    """The content of the files of a directory.

    Attributes:
        packed: by module.
        floats: modules with a weight that is not packed.
    """

    packed: dict[str, dict[str, PackedTensor]]
    floats: set[str]

    def is_symmetric(self, module: str) -> bool:
        """Whether a module, and the modules that vLLM joins with it, have no zero points."""
        return (joined_layer_of(module) or module) not in self._with_zero_points

    @cached_property
    def _with_zero_points(self) -> set[object]:
        return {
            joined_layer_of(module) or module
            for module, parts in self.packed.items()
            if any(stored.packed_as.zero_points for stored in parts.values())
        }


def read_directory(directory: str | Path, config: Mapping[str, Any]) -> PackedDirectory:
    """Reads the headers of a local directory's safetensors files, and the headers of the packed matrices inside.

    Args:
        directory: with the files.
        config: the quantization_config in its config.json.

    Raises:
        ValueError: no local directory of packed tensors, or one in another format.
    """
    source = open_packed(directory, config)
    floats = {key.removesuffix(".weight") for key in source.keys if key.endswith(".weight")}
    return PackedDirectory(source.packed, floats)


def group_sizes(parts: Parts) -> dict[str, int]:
    """Values of k per scale of each matrix or stack of a module; -1 if all have one scale per row."""
    headers = {name: stored.header for name, stored in parts.items()}
    if all(header["group"] == header["k"] for header in headers.values()):
        return dict.fromkeys(headers, -1)
    return {name: header["group"] for name, header in headers.items()}


def problem_of(parts: Parts, model_type: str | None) -> str | None:
    """Why a compressed-tensors checkpoint cannot have the matrices of a module; None: it can.

    Args:
        parts: of the module.
        model_type: of config.json.
    """
    if any(leaf in EMBEDDINGS for leaf in parts):
        return "packed embeddings"
    if model_type in _WHOLE_EXPERTS and "packed" not in parts:
        return f"experts of {model_type}"
    if "packed" not in parts and parts["w13_packed"].header["n"] == parts["w2_packed"].header["k"]:
        return "experts without a gate"
    forms = [stored.packed_as for stored in parts.values()]
    if len({_bits(form.kind) for form in forms}) > 1:
        return "experts of 4 and 8 bits"
    for name, what in _CANNOT.items():
        if any(getattr(form, name) for form in forms):
            return what
    groups = set(group_sizes(parts).values())
    return f"groups of {' and '.join(map(str, sorted(groups)))}" if len(groups) > 1 else None


@dataclass(frozen=True, order=True)
class _Form:
    """The form of the modules of one group of a configuration; ``group`` -1: one scale for each output feature."""

    group: int
    bits: int
    symmetric: bool

    def entry(self, targets: list[str]) -> dict[str, Any]:
        size = {"strategy": "channel"} if self.group == -1 else {"strategy": "group", "group_size": self.group}
        weights = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "dynamic": False, **size}
        return {"targets": targets, "weights": weights, "input_activations": None}


def compressed_tensors_config(directory: PackedDirectory) -> dict[str, Any]:
    """The quantization_config that a compressed-tensors checkpoint of the same weights has."""
    forms: dict[_Form, list[str]] = {}
    for module, parts in directory.packed.items():
        target = module if "packed" in parts else f"re:{re.escape(module)}[.]"
        bits = max(_bits(stored.packed_as.kind) for stored in parts.values())
        form = _Form(min(group_sizes(parts).values()), bits, directory.is_symmetric(module))
        forms.setdefault(form, []).append(target)
    # The most frequent form first. One form is that of all linear layers; of several, vLLM would ask for the class of a
    # joined layer before it asks for the names of its projections.
    ordered = sorted(forms.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": sorted(directory.floats),
        "config_groups": {
            f"group_{i}": form.entry(["Linear"] if len(ordered) == 1 else modules)
            for i, (form, modules) in enumerate(ordered)
        },
    }


def unpacked(tensors: Iterable[tuple[str, torch.Tensor]], symmetric: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Turns the tensors of a packed directory into tensors of a compressed-tensors checkpoint (``pack-quantized``).

    int6, e2m1 and iq4 become integers of 8 bits with the same weights.

    Args:
        tensors: names and tensors, in any order.
        symmetric: otherwise every matrix gets zero points.

    Yields:
        For each packed matrix ``weight_packed``, ``weight_scale``, ``weight_shape``, if not symmetric
        ``weight_zero_point``, and ``bias`` if it has one; experts one by one, gate and up apart. Others as they are.

    Raises:
        ValueError: a tensor is no packed matrix, or compressed-tensors cannot have the matrix; names the tensor.
    """
    for key, tensor in tensors:
        module, _, leaf = key.rpartition(".")
        if leaf not in STANDS_FOR:
            yield key, tensor
        elif leaf == "packed":
            yield from _named(module, _integers(tensor, key), symmetric)
        else:
            gate, up, down = next(names for block, names in _PROJECTIONS if block in module)
            for expert, packed in enumerate(tensor):
                matrix, name = _integers(packed, f"{key}[{expert}]"), f"{module}.{expert}"
                if leaf == "w2_packed":
                    yield from _named(f"{name}.{down}", matrix, symmetric)
                    continue
                half = matrix.rows // 2
                yield from _named(f"{name}.{gate}", matrix.with_rows(slice(half)), symmetric)
                yield from _named(f"{name}.{up}", matrix.with_rows(slice(half, None)), symmetric)


def _bits(kind: Kind) -> int:
    """Bits of the integers for the codes of a kind."""
    return 4 if kind == Kind.INT4 else 8


def _integers(packed: torch.Tensor, name: str) -> Matrix:
    matrix = matrix_of(packed, name)
    for part, what in _CANNOT.items():
        if getattr(matrix, part) is not None:
            raise ValueError(f"{name} has {what}, which a compressed-tensors checkpoint cannot have")
    if matrix.kind in _INTEGERS:
        return matrix
    wide = matrix.as_integers(Kind.INT8, matrix.group)
    return replace(wide, scales=wide.scales.to(matrix.scales.dtype), minimums=None)


def _named(module: str, matrix: Matrix, symmetric: bool) -> Iterator[tuple[str, torch.Tensor]]:
    scales, zeros = matrix.scales, matrix.zero_points
    yield f"{module}.weight_packed", words_of(matrix.codes)
    yield f"{module}.weight_scale", scales.contiguous()
    yield f"{module}.weight_shape", torch.tensor([matrix.rows, matrix.columns])
    if not symmetric:
        zeros = matrix.kind.middles(scales) if zeros is None else zeros
        columns = zeros.T  # words along N
        if matrix.kind == Kind.INT4:
            columns = pairs(torch.nn.functional.pad(columns, (0, -len(zeros) % 2)))
        yield f"{module}.weight_zero_point", words_of(columns).T.contiguous()
    if matrix.bias is not None:
        yield f"{module}.bias", matrix.bias


def export(folder: Path) -> None:
    """Turns a packed directory into a compressed-tensors checkpoint with the same weights, file by file, in place.

    Args:
        folder: of config.json, safetensors files, and their index if they are several.

    Raises:
        ValueError: such a checkpoint cannot have a matrix; names the matrix. Nothing was changed.
    """
    from safetensors.torch import load_file, save_file

    path = folder / "config.json"
    config = json.loads(path.read_text())
    model_type = config.get("model_type")
    directory = read_directory(folder, config["quantization_config"])
    for module, parts in directory.packed.items():
        reason = problem_of(parts, model_type)
        if reason is not None:
            raise ValueError(f"{module}: a compressed-tensors checkpoint cannot have {reason}")
    placed: dict[str, str] = {}  # name of a tensor: its file
    total, ignored = 0, {"lm_head"}  # in no file if it is the embedding
    for name in files_of(folder, read_index(folder)):
        found = {}
        for key, tensor in load_file(folder / name).items():
            symmetric = directory.is_symmetric(key.rpartition(".")[0])
            found.update(unpacked([(key, tensor)], symmetric))
            if key.endswith(".weight") and tensor.dim() == 2:
                ignored.add(key.removesuffix(".weight"))
        save_file(found, folder / name, {"format": "pt"})
        placed |= dict.fromkeys(found, name)
        total += sum(tensor.nbytes for tensor in found.values())
    index = folder / INDEX_NAME
    if index.exists():
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": placed}, indent=2) + "\n")
    stated = compressed_tensors_config(directory)
    config["quantization_config"] = {**stated, "quantization_status": "compressed", "ignore": sorted(ignored)}
    path.write_text(json.dumps(config, indent=2) + "\n")
