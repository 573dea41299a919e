"""Directories of packed weights (docs/transformers.md): the quantization_config, and the headers in the files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from w4a8.core.json_fields import shorten
from w4a8.core.matrix import PackedAs
from w4a8.ops import PackedHeader, read_header

# ``quant_method`` of the quantization_config.
METHOD = "w4a8"
# The names of modules and their packed tensors.
FORMAT, VERSION = "packed", 1
# Last part of a packed tensor's name -> the parameter of a float module that the packed tensor replaces.
STANDS_FOR = {"packed": "weight", "w13_packed": "gate_up_proj", "w2_packed": "down_proj"}
# The same for an embedding, which an output layer may share.
EMBEDDINGS = {"rows_packed": "weight"}
ALL_STAND_FOR = {**STANDS_FOR, **EMBEDDINGS}
# Projections that vLLM joins to one layer; but for GGUF files and packed directories all must be of one kind.
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class PackedTensor:
    """A packed tensor in a file.

    Attributes:
        header: header of the matrix, or of the first matrix of a stack.
        shape: shape of the tensor.
    """

    header: PackedHeader
    shape: tuple[int, ...]

    @property
    def packed_as(self) -> PackedAs:
        """The form that the header states."""
        return PackedAs.of_header(self.header)


# The tensors of one module, by the last part of their names.
Parts = Mapping[str, PackedTensor]


def is_packed(config: Mapping[str, Any] | None) -> bool:
    """Whether a quantization_config is that of a directory of packed weights."""
    return config is not None and config.get("quant_method") == METHOD


def joined_layer_of(name: str) -> tuple[str, int] | None:
    """The joined layer of vLLM that a projection is part of: owner and index in JOINED; None: a layer of its own."""
    owner, _, last = name.rpartition(".")
    return next(((owner, number) for number, names in enumerate(JOINED) if last in names), None)


def check_stated(method: object, kind: object, version: object) -> None:
    """Raises ValueError if a quantization_config is of another method, format or version than this package reads."""
    if (method, kind, version) != (METHOD, FORMAT, VERSION):
        raise ValueError(
            f"quantization_config is {method!r} in format {kind!r}, version {version}; this w4a8 reads {METHOD!r} in "
            f"format {FORMAT!r}, version {VERSION}"
        )


def check_listed(listed: object, found: Collection[str], where: str) -> None:
    """Compares the tensors in files with ``packed`` of the quantization_config (older directories have no list).

    Raises:
        ValueError: a listed tensor is not in the files (names it and ``where``), or ``listed`` is no list of names.
    """
    if listed is None:
        return
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ValueError(f"quantization_config.packed is {shorten(listed)}, but a list of names is expected")
    lacking = [name for name in listed if name not in found]
    if lacking:
        raise ValueError(f"tensor {lacking[0]!r} is missing from {where}, though config.json lists it as packed")


def packed_tensors(
    slices: Iterable[tuple[str, Any]], leaves: Collection[str] = STANDS_FOR.keys()
) -> dict[str, dict[str, PackedTensor]]:
    """Module -> last part of the name -> packed tensor, from (name, safetensors' slice). Other tensors are not read.

    Raises:
        ValueError: a tensor with such a name is no packed matrix or stack; names the tensor.
    """
    found: dict[str, dict[str, PackedTensor]] = {}
    for key, part in slices:
        module, _, leaf = key.rpartition(".")
        if leaf in leaves:
            shape = tuple(part.get_shape())
            first = part[...] if len(shape) == 1 else part[:1][0]  # a view: only the header is read
            try:
                found.setdefault(module, {})[leaf] = PackedTensor(read_header(first), shape)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{key}: {error}") from error
    return found
