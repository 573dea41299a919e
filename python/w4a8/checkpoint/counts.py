"""Counts in a config.json or in the keys of a GGUF file beside what the files hold, before a model of so many is built.

A wrong count of layers or experts would make modules until the memory is full; a wrong size overflows in torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from w4a8.core.json_fields import CheckpointError, shorten

_BLOCK = re.compile(r"blk\.(\d+)\.")
# The last parts of names in a config.json of transformers, and in the keys of a GGUF file.
_LAYERS = re.compile(r"(?:num|n)_(?:\w+_)?layers?|\w+coder_layers|depth|block_count")
_EXPERTS = re.compile(r"(?:\w+_)?experts|expert_count|expert_used_count")
_SIZES = re.compile(
    r"(?:vocab|hidden|(?:\w+_)?intermediate)_size|head_dim|(?:\w+_)?heads?|head_count\w*|embedding_length"
)


def blocks_of(tensors: Iterable[str]) -> int:
    """Number of layers that have tensors in a GGUF file."""
    return len({match[1] for match in map(_BLOCK.match, tensors) if match})


def check_counts(stated: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], layers: int, where: str = "") -> None:
    """Compares counts with the tensors.

    Args:
        stated: a config.json, or keys of a GGUF file.
        shapes: of all tensors, by name.
        layers: the largest number of layers that the tensors can be of.
        where: begins the names in errors.

    Raises:
        CheckpointError: more layers than ``layers``, more experts than any tensor has and than there are tensors, or a
            size above the number of all weights; names the field.
    """
    experts = max((len(shapes), *map(max, filter(None, shapes.values()))), default=0)
    weights = sum(map(prod, shapes.values()))
    most = ((_LAYERS, layers, "layers"), (_EXPERTS, experts, "experts"), (_SIZES, weights, "weights"))
    for name, value in _fields(stated):
        limit, what = next((each for pattern, *each in most if pattern.fullmatch(name.rpartition(".")[2])), (None, ""))
        numbers = value if isinstance(value, list) else [value]
        if limit is not None and any(isinstance(each, (int, float)) and each > limit for each in numbers):
            raise CheckpointError(f"{where}{name} is {shorten(value)}, but the tensors are of at most {limit} {what}")


def _fields(stated: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values, also of the objects inside."""
    for name, value in stated.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", each) for inner, each in _fields(value))
        yield name, value.tolist() if isinstance(value, np.ndarray) else value
