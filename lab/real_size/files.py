"""safetensors files, written and read a tensor (or a part of one) at a time, without the package."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from qwen3_moe import Tensor

INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": "<u2", "F32": "<f4", "I32": "<i4", "I64": "<i8"}  # bfloat16 as its bits


def shards(tensors: Iterable[Tensor], most_bytes: int) -> list[list[Tensor]]:
    """Consecutive tensors of at most `most_bytes` together (or one larger one)."""
    found: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not found or tensor.nbytes > room:
            found.append([])
            room = most_bytes
        found[-1].append(tensor)
        room -= tensor.nbytes
    return found


def header(tensors: list[Tensor]) -> bytes:
    """What a file of these tensors begins with."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        content[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(path: Path, tensors: list[Tensor], chunks: Callable[[Tensor], Iterator[np.ndarray]]) -> None:
    """Writes a file; it has its name only when it is whole."""
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        file.write(header(tensors))
        for tensor in tensors:
            written = sum(_write(file, chunk) for chunk in chunks(tensor))
            if written != tensor.nbytes:
                raise ValueError(f"{tensor.name}: {written} bytes, expected {tensor.nbytes}")
    part.rename(path)


def _write(file: BinaryIO, chunk: np.ndarray) -> int:
    data = np.ascontiguousarray(chunk)
    file.write(data.data)
    return data.nbytes


def write_index(folder: Path, names: list[str], parts: list[list[Tensor]]) -> None:
    """The index of the files."""
    files = {tensor.name: name for name, part in zip(names, parts) for tensor in part}
    total = sum(tensor.nbytes for part in parts for tensor in part)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=1))


class Reader:
    """Tensors of a folder with an index, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        self._headers: dict[str, tuple[int, dict]] = {}

    def _find(self, name: str) -> tuple[Path, int, np.dtype, tuple[int, ...]]:
        file = self._file_of[name]
        if file not in self._headers:
            with open(self._folder / file, "rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                self._headers[file] = (8 + length, json.loads(stream.read(length)))
        start, content = self._headers[file]
        entry = content[name]
        return (
            self._folder / file,
            start + entry["data_offsets"][0],
            np.dtype(DTYPES[entry["dtype"]]),
            tuple(entry["shape"]),
        )

    def get(self, name: str) -> np.ndarray:
        """A tensor."""
        return next(self.parts(name, 1 << 62))

    def parts(self, name: str, most_values: int) -> Iterator[np.ndarray]:
        """Whole rows of a tensor, about `most_values` values at a time."""
        path, offset, dtype, shape = self._find(name)
        width = math.prod(shape[1:])
        step = max(1, most_values // width)
        for start in range(0, shape[0], step):
            rows = min(step, shape[0] - start)
            values = np.fromfile(path, dtype, rows * width, offset=offset + start * width * dtype.itemsize)
            yield values.reshape(rows, *shape[1:])
