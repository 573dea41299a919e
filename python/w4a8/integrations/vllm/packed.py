"""A directory of packed weights (docs/transformers.md) as vLLM is told of it: a compressed-tensors checkpoint.

That is for what vLLM knows of the model, and for layers that are cut among ranks: vLLM cuts and places tensors by the
names of checkpoints, so their packed matrices are unpacked one by one as they are read. Layers that are whole on a rank
take packed matrices (packed_layers.py). Nothing here imports vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from w4a8.core.activation_groups import PER_TOKEN
from w4a8.core.matrix import Matrix, Matrix4, codes_in_a_byte, middle_codes, pack_codes, unpack_codes
from w4a8.core.matrix8 import Matrix8
from w4a8.core.nibbles import pairs
from w4a8.core.scale_types import E8M0, scale_type_named
from w4a8.formats.packed_directory import FORMAT, METHOD, VERSION
from w4a8.formats.words import words_of
from w4a8.ops import PackedHeader, read_header

# Last part of a packed tensor's name -> it is a stack of experts.
_PACKED = {"packed": False, "w13_packed": True, "w2_packed": True}
# Part of the name of a block -> what its experts' gate, up and down projections are called.
_PROJECTIONS = (("block_sparse_moe", ("w1", "w3", "w2")), ("", ("gate_proj", "up_proj", "down_proj")))
# Their experts come in one piece, whose rows and biases have an order of their own, in every checkpoint but this.
_WHOLE_EXPERTS = ("gpt_oss",)


@dataclass(frozen=True)
class PackedTensor:
    """A packed tensor in a file.

    Attributes:
        header: of the matrix, or of the first one of a stack.
        shape: of the tensor.
    """

    header: PackedHeader
    shape: tuple[int, ...]


# Last part of the name -> tensor, of one module.
Parts = Mapping[str, PackedTensor]


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
        headers = [stored.header for parts in self.packed.values() for stored in parts.values()]
        return not any(header["has_zero_points"] for header in headers if header["values"] != "int8")


def read_directory(directory: str | Path, config: Mapping[str, Any]) -> PackedDirectory:
    """Reads the headers of a directory's safetensors files, and those of the packed matrices in them.

    Args:
        directory: local.
        config: the quantization_config in its config.json.

    Raises:
        ValueError: no local directory of packed tensors, or one in another format.
    """
    from safetensors import safe_open

    stated = tuple(config.get(key) for key in ("quant_method", "format", "version"))
    if stated != (METHOD, FORMAT, VERSION):
        raise ValueError(f"quantization_config has quant_method, format and version {stated}, expected "
                         f"{(METHOD, FORMAT, VERSION)}")  # fmt: skip
    found = PackedDirectory({}, set())
    files = sorted(Path(directory).glob("*.safetensors"))
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
                        stored = PackedTensor(read_header(first), tuple(part.get_shape()))
                    except (ValueError, TypeError) as error:
                        raise ValueError(f"{key} in {file}: {error}") from error
                    found.packed.setdefault(module, {})[leaf] = stored
                elif leaf == "weight":
                    found.floats.add(module)
    if not found.packed:
        raise ValueError(f"{directory}: no packed tensors, though config.json says so")
    return found


def group_of(parts: Parts) -> int:
    """Values of k per scale in all matrices of a module; -1 if each has one scale per row."""
    headers = [stored.header for stored in parts.values()]
    per_channel = all(header["group"] == header["k"] for header in headers)
    return -1 if per_channel else min(header["group"] for header in headers)


def only_whole(parts: Parts, model_type: str | None) -> str | None:
    """Why the matrices of a module cannot be unpacked for vLLM to cut them, or None."""
    if model_type in _WHOLE_EXPERTS and "packed" not in parts:
        return f"experts of {model_type}"
    headers = [stored.header for stored in parts.values()]
    kinds = {header["values"] for header in headers}
    if "e2m1" in kinds:
        return "weights of type e2m1"
    if len(kinds) > 1:
        return "experts of 4 and 8 bits"
    return "scales of two levels" if any(has_channel_scales(header) for header in headers) else None


def compressed_tensors_config(directory: PackedDirectory, model_type: str | None) -> dict[str, Any]:
    """The quantization_config that a compressed-tensors checkpoint of the same weights would have.

    What such a checkpoint cannot have (:func:`only_whole`) is not in it.
    """
    groups: dict[tuple[int, int, bool], list[str]] = {}  # by group size, bits, and whether inputs are int8 per token
    for module, parts in directory.packed.items():
        if only_whole(parts, model_type) is None:
            target = module if "packed" in parts else f"re:{re.escape(module)}[.]"
            bits = 8 if any(stored.header["values"] == "int8" for stored in parts.values()) else 4
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
        if leaf not in _PACKED:
            yield key, tensor
        elif not _PACKED[leaf]:
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
    codes, scales, zeros, bias = (found.get(part) for part in ("codes", "scales", "zero_points", "bias"))
    if header["values"] == "int8":
        return Matrix8(codes, scales, zeros, bias)
    return Matrix4(codes, scales, zeros, header["values"], bias, found.get("channel_scales"))


def has_channel_scales(header: PackedHeader) -> bool:
    """Whether a matrix has scales of two levels."""
    return header["scale_dtype"] == "e5m3"


def joined(matrices: Sequence[Matrix], headers: Sequence[PackedHeader]) -> torch.Tensor:
    """The rows of all as one packed matrix, uint8 [bytes]; they are of one kind, K, group and activation group.

    Args:
        matrices: what was unpacked.
        headers: of what it was unpacked from. They alone say how many bytes there will be: values do not.
    """
    zeros = biases = channels = None
    kind = matrices[0].kind
    if any(matrix.zero_points is not None for matrix in matrices):
        zeros = torch.cat([_or(m.zero_points, middle_codes(m.scales, kind)) for m in matrices])
    if any(matrix.bias is not None for matrix in matrices):
        biases = torch.cat([_or(m.bias, torch.zeros_like(m.scales[:, 0], dtype=torch.float32)) for m in matrices])
    if matrices[0].channel_scales is not None:
        channels = torch.cat([matrix.channel_scales for matrix in matrices])
    scales = torch.cat([matrix.scales for matrix in matrices])
    codes = torch.cat([matrix.codes for matrix in matrices])
    how = (matrices[0].group, _joint_scale_dtype(headers), zeros, kind, channels, headers[0]["activation_group"])
    return pack_codes(codes, scales, biases, *how)


def _joint_scale_dtype(headers: Sequence[PackedHeader]) -> torch.dtype | None:
    """The type that holds the scales of all; None if they have two levels.

    One type is that of all. bfloat16 holds e8m0 as well. Every other mixture is float32.
    """
    if any(has_channel_scales(header) for header in headers):
        return None
    dtypes = {scale_type_named(header["scale_dtype"]) for header in headers}
    if len(dtypes) == 1:
        return dtypes.pop()
    return torch.bfloat16 if dtypes == {E8M0, torch.bfloat16} else torch.float32


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor


def joined_bytes(headers: Sequence[PackedHeader]) -> int:
    """How long :func:`joined` makes what is packed with these headers."""

    def like(header: PackedHeader) -> Matrix:
        def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(header["n"], columns, dtype=dtype, device="meta")

        groups, values = header["k"] // header["group"], header["values"]
        codes = empty(header["k"] // codes_in_a_byte(values), torch.uint8)
        bias = empty(1, torch.float32)[:, 0] if header["has_bias"] else None
        zeros = empty(groups, torch.uint8) if header["has_zero_points"] else None
        if values == "int8":
            return Matrix8(codes, empty(groups, torch.float32), zeros, bias)
        channels = empty(1, torch.float32)[:, 0] if has_channel_scales(header) else None
        scales = empty(groups, torch.float32 if channels is None else torch.uint8)
        return Matrix4(codes, scales, zeros, values, bias, channels)

    return joined([like(header) for header in headers], headers).numel()


def _integers(packed: torch.Tensor, name: str) -> Matrix:
    matrix = matrix_of(packed, name)
    if matrix.kind == "e2m1":
        raise ValueError(f"{name} is {matrix.kind}, which a compressed-tensors checkpoint cannot have")
    return matrix


def _named(module: str, matrix: Matrix, symmetric: bool) -> Iterator[tuple[str, torch.Tensor]]:
    scales, zeros = matrix.scales, matrix.zero_points
    yield f"{module}.weight_packed", words_of(matrix.codes)
    yield f"{module}.weight_scale", scales
    yield f"{module}.weight_shape", torch.tensor([matrix.rows, matrix.columns])
    if not symmetric or matrix.kind == "int8":
        zeros = middle_codes(scales, matrix.kind) if zeros is None else zeros
        columns = zeros.T  # words along N
        if matrix.kind == "int4":
            columns = pairs(torch.nn.functional.pad(columns, (0, -len(zeros) % 2)))
        yield f"{module}.weight_zero_point", words_of(columns).T.contiguous()
    if matrix.bias is not None:
        yield f"{module}.bias", matrix.bias
