"""A GGUF file of the model: keys, names and shapes as llama.cpp's converter writes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from real_size.gguf_shapes import GGUFShapes

SUPERBLOCK = 256  # values of a block of a K-quant
# Weights and bytes of a block.
BLOCKS = {
    "F32": (1, 4),
    "Q4_0": (32, 18),
    "Q5_0": (32, 22),
    "Q8_0": (32, 34),
    "Q4_K": (SUPERBLOCK, 144),
    "Q6_K": (SUPERBLOCK, 210),
}
_FLOATS = ("_norm.weight", "gate_inp", "conv1d", "shortconv.conv")


@dataclass(frozen=True)
class Part:
    """A tensor of the file.

    Attributes:
        name: in the file.
        shape: in values, rows first.
        layer: or None.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None = None

    @property
    def is_float(self) -> bool:
        """Norms, routers, convolutions and numbers of heads."""
        return len(self.shape) == 1 or self.shape[-1] == 1 or any(each in self.name for each in _FLOATS)


class Source(Protocol):
    """Where the tensors come from."""

    def type_of(self, part: Part) -> str:
        """A name of BLOCKS, for a tensor that is not float32."""

    def data(self, part: Part) -> np.ndarray:
        """float32 of the shape, or uint8 with the blocks of a row along the last axis."""


def parts(shapes: GGUFShapes) -> Iterator[Part]:
    """All tensors."""
    for name, shape in shapes.sized(shapes.outer):
        yield Part(name, shape)
    for layer in range(shapes.blocks):
        for name, shape in shapes.layer_parts(layer):
            yield Part(f"blk.{layer}.{name}", shape, layer)


def keys(shapes: GGUFShapes) -> dict[str, Any]:
    """Keys of the file, without the architecture."""
    return {
        "context_length": shapes.positions,
        "block_count": shapes.blocks,
        "embedding_length": shapes.hidden,
        "feed_forward_length": 8 * shapes.intermediate,
        "attention.head_count": shapes.heads,
        "attention.head_count_kv": shapes.kv_heads,
        "attention.key_length": shapes.head_dim,
        "attention.value_length": shapes.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000000.0,
        "expert_count": shapes.experts,
        "expert_used_count": shapes.top_k,
        "expert_feed_forward_length": shapes.intermediate,
        "vocab_size": shapes.vocabulary,
        **shapes.keys(),
    }


def _type(part: Part, source: Source) -> str:
    return "F32" if part.is_float else source.type_of(part)


def _bytes_shape(part: Part, kind: str) -> tuple[int, ...]:
    weights, size = BLOCKS[kind]
    if part.shape[-1] % weights != 0:
        raise ValueError(f"{part.name} has rows of {part.shape[-1]}, expected a multiple of {weights} ({kind})")
    return *part.shape[:-1], part.shape[-1] // weights * size


def nbytes(shapes: GGUFShapes, source: Source) -> int:
    """About how large the file is: its tensors, and room for keys and names."""
    return (64 << 10) + sum(math.prod(_bytes_shape(part, _type(part, source))) for part in parts(shapes))


def write(shapes: GGUFShapes, source: Source, file_type: str, path: Path, wrote: Callable[[int], None]) -> None:
    """Writes the file; calls wrote(bytes) after each tensor. At most one tensor is in memory.

    Args:
        shapes: of the model.
        source: of the tensors.
        file_type: the name in gguf.LlamaFileType.
        path: of the file, which has its name only when it is whole.
        wrote: told how many bytes were written.

    Raises:
        ValueError: a row is not whole blocks.
    """
    import gguf

    part_path = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part_path, shapes.architecture)
    writer.add_name(f"random {shapes.architecture}, {shapes.layers} layers")
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in keys(shapes).items():
        add[type(value)](f"{shapes.architecture}.{key}", value)
    writer.add_tokenizer_model("none")  # token ids only
    writer.add_file_type(gguf.LlamaFileType[file_type])
    found = list(parts(shapes))
    for part in found:
        kind = _type(part, source)
        size = _bytes_shape(part, kind)
        if kind == "F32":
            writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), math.prod(size))
        else:
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(part.name, size, np.dtype(np.uint8), math.prod(size), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for part in found:
        data = source.data(part)
        writer.write_tensor_data(data)
        wrote(data.nbytes)
    writer.close()
    part_path.rename(path)
