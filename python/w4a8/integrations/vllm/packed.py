"""A directory of packed weights (docs/transformers.md) as vLLM is told of it: a compressed-tensors checkpoint.

vLLM joins, cuts and places tensors by the names of checkpoints, each model in its own way; so packed matrices are
unpacked one by one as they are read, and the plugin's own layers pack what they get. Nothing here imports vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from w4a8.formats.packed_directory import FORMAT, METHOD, VERSION
from w4a8.formats.words import pairs, words_of
from w4a8.ops import PackedHeader, dyn_quant_unpack_any_4bit_weight, read_header

# Last part of a packed tensor's name -> it is a stack of experts.
_PACKED = {"packed": False, "w13_packed": True, "w2_packed": True}
# Part of the name of a block -> what its experts' gate, up and down projections are called.
_PROJECTIONS = (("block_sparse_moe", ("w1", "w3", "w2")), ("", ("gate_proj", "up_proj", "down_proj")))
_REFUSED_MODELS = {"gpt_oss": "the experts of gpt-oss have rows and biases in an order of their own"}


def compressed_tensors_config(directory: str | Path, config: dict[str, Any], model_type: str | None) -> dict[str, Any]:
    """The quantization_config that a compressed-tensors checkpoint of the same weights would have.

    Args:
        directory: with safetensors files; only their headers, and those of packed matrices, are read.
        config: the quantization_config of the directory.
        model_type: of its config.json.

    Raises:
        ValueError: no local directory of packed tensors; a format, a kind of weights or a model that this cannot read.
    """
    stated = tuple(config.get(key) for key in ("quant_method", "format", "version"))
    if stated != (METHOD, FORMAT, VERSION):
        raise ValueError(f"quantization_config has quant_method, format and version {stated}, expected "
                         f"{(METHOD, FORMAT, VERSION)}")  # fmt: skip
    if model_type in _REFUSED_MODELS:
        raise ValueError(f"a packed directory of {model_type} runs in transformers, not in vLLM: "
                         f"{_REFUSED_MODELS[model_type]}")  # fmt: skip
    headers, others = _headers(Path(directory))
    if not headers:
        raise ValueError(f"{directory}: no packed tensors, though config.json says so")
    symmetric = not any(header["has_zero_points"] for found in headers.values() for header in found.values())
    groups: dict[int, list[str]] = {}
    for module, found in headers.items():
        for leaf, header in found.items():
            if header["values"] != "int4":
                raise ValueError(f"{module}.{leaf} is {header['values']}, but vLLM gets int4 only")
        per_channel = all(header["group"] == header["k"] for header in found.values())
        group = -1 if per_channel else min(header["group"] for header in found.values())
        groups.setdefault(group, []).append(module if "packed" in found else f"re:{re.escape(module)}[.]")
    # The most frequent group is that of all linear layers but those that are named.
    ordered = sorted(groups.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": sorted(others),
        "config_groups": {
            f"group_{index}": {
                "targets": modules if index else ["Linear"],
                "weights": weights
                | ({"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}),
                "input_activations": inputs,
            }
            for index, (group, modules) in enumerate(ordered)
        },
    }


def _headers(directory: Path) -> tuple[dict[str, dict[str, PackedHeader]], set[str]]:
    """Module -> leaf -> header (of the first expert), and the modules with a weight that is not packed."""
    from safetensors import safe_open

    found: dict[str, dict[str, PackedHeader]] = {}
    others: set[str] = set()
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{directory} is no local directory with *.safetensors files, which packed weights are read from"
        )
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (it is no dict)
                module, _, leaf = key.rpartition(".")
                if leaf in _PACKED:
                    part = tensors.get_slice(key)
                    first = part[:1][0] if _PACKED[leaf] else part[...]
                    try:
                        found.setdefault(module, {})[leaf] = read_header(first)
                    except (ValueError, TypeError) as error:
                        raise ValueError(f"{key} in {file}: {error}") from error
                elif leaf == "weight":
                    others.add(module)
    return found, others


def unpacked(tensors: Iterable[tuple[str, torch.Tensor]], symmetric: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a packed directory as those of a compressed-tensors checkpoint (``pack-quantized``).

    Args:
        tensors: names and tensors, in any order.
        symmetric: what :func:`compressed_tensors_config` says; otherwise every matrix gets zero points.

    Yields:
        For each packed matrix ``weight_packed``, ``weight_scale``, ``weight_shape``, if not symmetric
        ``weight_zero_point``, and ``bias`` if it has one; experts one by one, gate and up apart. Others as they are.
    """
    for key, tensor in tensors:
        module, _, leaf = key.rpartition(".")
        if leaf not in _PACKED:
            yield key, tensor
        elif not _PACKED[leaf]:
            yield from _named(module, _Unpacked(key, tensor), slice(None), symmetric)
        else:
            gate, up, down = next(names for block, names in _PROJECTIONS if block in module)
            for expert, packed in enumerate(tensor):
                matrix = _Unpacked(f"{key}[{expert}]", packed)
                if leaf == "w2_packed":
                    yield from _named(f"{module}.{expert}.{down}", matrix, slice(None), symmetric)
                    continue
                half = len(matrix.nibbles) // 2
                yield from _named(f"{module}.{expert}.{gate}", matrix, slice(half), symmetric)
                yield from _named(f"{module}.{expert}.{up}", matrix, slice(half, None), symmetric)


class _Unpacked:
    """One matrix: what it was packed of."""

    def __init__(self, key: str, packed: torch.Tensor) -> None:
        try:
            header = read_header(packed)
            sizes = header["group"], header["k"], header["n"]
            self.nibbles, self.scales, zeros, bias, values = dyn_quant_unpack_any_4bit_weight(packed, *sizes)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"{key}: {error}") from error
        if values != "int4":
            raise ValueError(f"{key} is {values}, but vLLM gets int4 only")
        self.zeros = zeros if header["has_zero_points"] else None
        self.bias = bias if header["has_bias"] else None


def _named(module: str, matrix: _Unpacked, rows: slice, symmetric: bool) -> Iterator[tuple[str, torch.Tensor]]:
    nibbles, scales = matrix.nibbles[rows], matrix.scales[rows]
    yield f"{module}.weight_packed", words_of(nibbles)
    yield f"{module}.weight_scale", scales
    yield f"{module}.weight_shape", torch.tensor([len(nibbles), 2 * nibbles.shape[1]])
    if not symmetric:
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8) if matrix.zeros is None else matrix.zeros[rows]
        columns = torch.nn.functional.pad(zeros.T, (0, -len(zeros) % 2))  # words along N
        yield f"{module}.weight_zero_point", words_of(pairs(columns)).T.contiguous()
    if matrix.bias is not None:
        yield f"{module}.bias", matrix.bias[rows]
