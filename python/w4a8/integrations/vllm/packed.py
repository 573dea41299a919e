"""A directory of packed weights (docs/transformers.md) as vLLM is told of it: a compressed-tensors checkpoint.

That is for what vLLM knows of the model, and for layers that are cut among ranks: vLLM cuts and places tensors by the
names of checkpoints, so their packed matrices are unpacked one by one as they are read. Layers that are whole on a rank
take packed matrices (packed_layers.py). Nothing here imports vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from w4a8.checkpoint.tensors import files_of, read_index
from w4a8.core.activation_groups import PER_TOKEN
from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix, PackedAs, packed_bytes, unpack_codes
from w4a8.core.nibbles import pairs, words_of
from w4a8.core.scale_types import E8M0
from w4a8.core.stack import MatrixStack
from w4a8.formats.packed_directory import (
    EMBEDDINGS,
    STANDS_FOR,
    PackedTensor,
    Parts,
    check_listed,
    check_stated,
    packed_tensors,
)
from w4a8.ops import PackedHeader, read_header

# Part of the name of a block -> what its experts' gate, up and down projections are called.
_PROJECTIONS = (("block_sparse_moe", ("w1", "w3", "w2")), ("", ("gate_proj", "up_proj", "down_proj")))
# Their experts come in one piece, whose rows and biases have an order of their own, in every checkpoint but this.
_WHOLE_EXPERTS = ("gpt_oss",)
# What compressed-tensors checkpoints have.
_INTEGERS = (Kind.INT4, Kind.INT8)


@dataclass
class PackedDirectory:
    """What is in the files of a directory.

    Attributes:
        packed: by module.
        floats: modules with a weight that is not packed.
    """

    packed: dict[str, dict[str, PackedTensor]]
    floats: set[str]

    @property
    def symmetric(self) -> bool:
        """Whether no matrix of 4 bits has zero points; as tensors of compressed-tensors, those of 8 bits always do."""
        forms = [stored.packed_as for parts in self.packed.values() for stored in parts.values()]
        return not any(form.zero_points for form in forms if form.kind.bits == 4)


def read_directory(directory: str | Path, config: Mapping[str, Any]) -> PackedDirectory:
    """Reads the headers of a local directory's safetensors files, and those of the packed matrices in them.

    Args:
        directory: with the files.
        config: the quantization_config in its config.json.

    Raises:
        ValueError: no local directory of packed tensors, or one in another format.
    """
    check_stated(*(config.get(key) for key in ("quant_method", "format", "version")))
    files = [Path(directory) / name for name in files_of(Path(directory), read_index(Path(directory)))]
    if not files:
        raise ValueError(
            f"{directory} is no local directory with *.safetensors files, which packed weights are read from"
        )
    packed: dict[str, dict[str, PackedTensor]] = {}
    floats: set[str] = set()
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            embeddings = [key for key in tensors.keys() if key.rpartition(".")[2] in EMBEDDINGS]  # noqa: SIM118
            if embeddings:
                raise ValueError(
                    f"{file}: tensor {embeddings[0]!r} is packed embeddings, which vLLM has no layer for: serve the "
                    "GGUF file that this directory was made of"
                )
            try:
                found = packed_tensors((key, tensors.get_slice(key)) for key in tensors.keys())  # noqa: SIM118 (no dict)
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error
            floats.update(key.removesuffix(".weight") for key in tensors.keys() if key.endswith(".weight"))  # noqa: SIM118
        for module, parts in found.items():
            twice = parts.keys() & packed.get(module, {}).keys()
            if twice:  # vLLM gives the tensors of both
                raise ValueError(f"{file}: tensor '{module}.{min(twice)}' stands in another file, too")
            packed.setdefault(module, {}).update(parts)
    names = {f"{module}.{leaf}" for module, parts in packed.items() for leaf in parts}
    check_listed(config.get("packed"), names, str(directory))
    if not packed:
        raise ValueError(f"{directory}: no packed tensors, though config.json says so")
    return PackedDirectory(packed, floats)


def group_sizes(parts: Parts) -> dict[str, int]:
    """Values of k per scale of each matrix or stack of a module; -1 if all have one scale per row."""
    headers = {name: stored.header for name, stored in parts.items()}
    if all(header["group"] == header["k"] for header in headers.values()):
        return dict.fromkeys(headers, -1)
    return {name: header["group"] for name, header in headers.items()}


def group_of(parts: Parts) -> int:
    """The least of :func:`group_sizes`."""
    return min(group_sizes(parts).values())


def only_whole(parts: Parts, model_type: str | None) -> str | None:
    """Why the matrices of a module cannot be unpacked for vLLM to cut them, or None."""
    if model_type in _WHOLE_EXPERTS and "packed" not in parts:
        return f"experts of {model_type}"
    if "packed" not in parts and parts["w13_packed"].header["n"] == parts["w2_packed"].header["k"]:
        return "experts without a gate"
    forms = [stored.packed_as for stored in parts.values()]
    kinds = [form.kind for form in forms]
    for kind in kinds:
        if kind not in _INTEGERS:
            return f"weights of type {kind}"
    if len(set(kinds)) > 1:
        return "experts of 4 and 8 bits"
    for what, there in (
        ("minimums", [form.minimums for form in forms]),
        ("super-scales", [form.super_scales for form in forms]),
        ("scales of two levels", [form.channel_scales for form in forms]),
    ):
        if any(there):
            return what
    groups = set(group_sizes(parts).values())
    return f"groups of {' and '.join(map(str, sorted(groups)))}" if len(groups) > 1 else None


def compressed_tensors_config(directory: PackedDirectory, model_type: str | None) -> dict[str, Any]:
    """The quantization_config that a compressed-tensors checkpoint of the same weights would have.

    What such a checkpoint cannot have (:func:`only_whole`) is not in it.
    """
    groups: dict[tuple[int, int, bool], list[str]] = {}  # by group size, bits, and whether inputs are int8 per token
    for module, parts in directory.packed.items():
        if only_whole(parts, model_type) is None:
            target = module if "packed" in parts else f"re:{re.escape(module)}[.]"
            bits = max(stored.packed_as.kind.bits for stored in parts.values())
            # Weights and inputs of 8 bits are another kind of layer there.
            per_token = bits == 4 and all(stored.header["activation_group"] == PER_TOKEN for stored in parts.values())
            groups.setdefault((group_of(parts), bits, per_token), []).append(target)
    # The most frequent group is that of all linear layers but those that are named.
    ordered = sorted(groups.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": sorted(directory.floats),
        "config_groups": {
            f"group_{index}": {
                "targets": modules if index else ["Linear"],
                "weights": {
                    "num_bits": bits,
                    "type": "int",
                    "symmetric": directory.symmetric and bits == 4,
                    "dynamic": False,
                    **({"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}),
                },
                "input_activations": inputs if per_token else None,
            }
            for index, ((group, bits, per_token), modules) in enumerate(ordered)
        },
    }


def unpacked(tensors: Iterable[tuple[str, torch.Tensor]], symmetric: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a packed directory as those of a compressed-tensors checkpoint (``pack-quantized``).

    Args:
        tensors: names and tensors, in any order.
        symmetric: of the directory; otherwise every matrix gets zero points, as those of 8 bits do.

    Yields:
        For each packed matrix ``weight_packed``, ``weight_scale``, ``weight_shape``, if not symmetric
        ``weight_zero_point``, and ``bias`` if it has one; experts one by one, gate and up apart. Others as they are.
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


def matrix_of(packed: torch.Tensor, name: str) -> Matrix:
    """What a packed matrix, uint8 [bytes], was packed of.

    Raises:
        ValueError: it is none; begins with ``name``.
    """
    try:
        header = read_header(packed)
        found = unpack_codes(packed, header["group"], header["k"], header["n"])
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name}: {error}") from error
    return Matrix(kind=header["values"], **found)


def joined(matrices: Iterable[Matrix], headers: Sequence[PackedHeader]) -> torch.Tensor:
    """The rows of all as one packed matrix, uint8 [bytes]; they are of one kind, K, group and activation group.

    The headers are of what the matrices were unpacked from. They alone say how many bytes there will be: values do not.
    """
    rows, columns, group, has_bias, form = _joined_form(headers)
    stack, row = MatrixStack(1, rows, columns, group, torch.float32 if has_bias else None, packed_as=form), 0
    for matrix in matrices:
        stack.put(0, row, matrix, has_bias=matrix.bias is not None)
        row += matrix.rows
    return stack.pack()[0]


def joined_bytes(headers: Sequence[PackedHeader]) -> int:
    """How long :func:`joined` makes what is packed with these headers."""
    return packed_bytes(*_joined_form(headers))


def _joined_form(headers: Sequence[PackedHeader]) -> tuple[int, int, int, bool, PackedAs]:
    """N of all, K, values of k per scale, whether one has a bias, and the form that holds zeros and scales of all.

    One type of scales is that of all. bfloat16 holds e8m0 as well. Every other mixture is float32.
    """
    rows, has_bias = sum(header["n"] for header in headers), any(header["has_bias"] for header in headers)
    forms = [PackedAs.of_header(header) for header in headers]
    dtypes = {form.scale_dtype for form in forms}
    dtype = torch.bfloat16 if dtypes == {E8M0, torch.bfloat16} else torch.float32
    dtype = dtypes.pop() if len(dtypes) == 1 else dtype
    form = replace(forms[0], scale_dtype=dtype, zero_points=any(form.zero_points for form in forms))
    return rows, headers[0]["k"], headers[0]["group"], has_bias, form


def _integers(packed: torch.Tensor, name: str) -> Matrix:
    matrix = matrix_of(packed, name)
    if matrix.kind not in _INTEGERS:
        raise ValueError(f"{name} is {matrix.kind}, which a compressed-tensors checkpoint cannot have")
    if matrix.minimums is not None or matrix.super_scales is not None:
        what = "super-scales" if matrix.minimums is None else "minimums"
        raise ValueError(f"{name} has {what}, which a compressed-tensors checkpoint cannot have")
    return matrix


def _named(module: str, matrix: Matrix, symmetric: bool) -> Iterator[tuple[str, torch.Tensor]]:
    scales, zeros = matrix.scales, matrix.zero_points
    yield f"{module}.weight_packed", words_of(matrix.codes)
    yield f"{module}.weight_scale", scales
    yield f"{module}.weight_shape", torch.tensor([matrix.rows, matrix.columns])
    if not symmetric or matrix.kind == Kind.INT8:
        zeros = matrix.kind.middles(scales) if zeros is None else zeros
        columns = zeros.T  # words along N
        if matrix.kind == Kind.INT4:
            columns = pairs(torch.nn.functional.pad(columns, (0, -len(zeros) % 2)))
        yield f"{module}.weight_zero_point", words_of(columns).T.contiguous()
    if matrix.bias is not None:
        yield f"{module}.bias", matrix.bias
