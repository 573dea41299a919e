"""GGUF files: keys, and names, types, shapes and places of tensors. Everything is checked before memory is taken.

    file:    "GGUF" | version 3 | tensors, keys (how many) | keys | tensors | zeros | data of the tensors
    key:     name, type, value           an array: type of its elements, how many, elements
    tensor:  name, dimensions (how many, the fastest first), type, offset in the data

Little-endian; lengths and counts have 8 bytes. The data begin at a multiple of ``general.alignment`` (32).

The reader of the package ``gguf`` is not used: it trusts counts in the file, and makes an object of each element of an
array.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from w4a8.core.blocks import Blocks
from w4a8.core.json_fields import CheckpointError, check_regular, shorten
from w4a8.core.matrix import Matrix
from w4a8.formats.gguf_blocks import TYPES

VERSION = 3
ALIGNMENT = 32
MOST_DIMENSIONS = 4
MOST_BYTES = 1 << 62
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# Types of values that are not strings (8) or arrays (9).
_NUMBERS = {
    0: np.uint8,
    1: np.int8,
    2: np.uint16,
    3: np.int16,
    4: np.uint32,
    5: np.int32,
    6: np.float32,
    7: np.bool_,
    10: np.uint64,
    11: np.int64,
    12: np.float64,
}
_STRING, _ARRAY = 8, 9
_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16, 28: torch.float64}
# Types that ggml has and nobody here reads.
_OTHERS = {
    4: "4 (Q4_2, or MXFP4 as Ollama numbers it)",
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    41: "Q1_0",
    42: "Q2_0",
}


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor is.

    Attributes:
        file: index among the files of a split model.
        shape: the slowest dimension first, as torch has it: [N, K] of a matrix, [E, N, K] of a stack.
        type: a key of TYPES, or of the floats.
        offset: of the first byte in the file.
        row_bytes: bytes of a row, the last dimension.
    """

    file: int
    shape: tuple[int, ...]
    type: int
    offset: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """Rows in all dimensions but the last."""
        return int(np.prod(self.shape[:-1], dtype=object))


def is_gguf(path: Path) -> bool:
    """Whether a name ends in ``.gguf``, in any case."""
    return path.suffix.lower() == ".gguf"


def gguf_in(path: str | Path) -> Path | None:
    """The GGUF file at a path, or in a directory without config.json; None: there is none.

    Raises:
        CheckpointError: a directory with several models.
    """
    path = Path(path)
    if is_gguf(path):
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(filter(is_gguf, path.iterdir()))
    files = [each for each in files if not _SPLIT.search(each.name) or "-00001-of-" in each.name]
    if len(files) > 1:
        names = ", ".join(each.name for each in files)
        raise CheckpointError(f"{path} holds {len(files)} models in GGUF, name one: {names}")
    return files[0] if files else None


class Strings(Sequence[str]):
    """An array of strings in a file. The first access to a string reads all: a list takes some six times the bytes."""

    def __init__(self, path: Path, what: str, count: int, at: int) -> None:
        """Takes ``count`` strings of the key ``what`` from byte ``at`` on, in a checked file."""
        self._path, self._what, self._count, self._at = path, what, count, at

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._read[index]

    def __repr__(self) -> str:
        return f"{self._count} strings"

    @cached_property
    def _read(self) -> list[str]:
        with _mapped(self._path) as data:
            cursor = _Cursor(data, self._path, self._at)
            return [cursor.string(self._what) for _ in range(self._count)]


class _Cursor:
    """Reads one value after the other, never past the end."""

    def __init__(self, data: mmap.mmap, path: Path, at: int = 0) -> None:
        self._data, self._path, self.at = data, path, at

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {problem}")

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def skip(self, count: int, what: str) -> None:
        if count > self.left:
            raise self.fail(
                f"{what} has {count} bytes from byte {self.at} on, but the file has {self.left} bytes there"
            )
        self.at += count

    def bytes(self, count: int, what: str) -> bytes:
        self.skip(count, what)
        return self._data[self.at - count : self.at]

    def number(self, form: str, what: str) -> int:
        return struct.unpack("<" + form, self.bytes(struct.calcsize("<" + form), what))[0]

    def count(self, what: str, least: int) -> int:
        """A count of things, each of at least ``least`` bytes."""
        count = self.number("Q", what)
        if count > self.left // least:
            raise self.fail(f"{what} is {count}, which the rest of the file, {self.left} bytes, does not hold")
        return count

    def string(self, what: str) -> str:
        length = self.number("Q", what)
        try:
            return self.bytes(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is no text in UTF-8") from None

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _NUMBERS:
            raise self.fail(f"{what} has type {kind}, expected 0..12")
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        return np.frombuffer(self.bytes(dtype.itemsize, what), dtype)[0].item()

    def _array(self, what: str) -> Any:
        kind = self.number("I", what)
        if kind == _STRING:
            strings = Strings(self._path, what, self.count(f"the length of {what}", 8), self.at)
            for _ in range(len(strings)):
                self.skip(self.number("Q", what), what)
            return strings
        if kind not in _NUMBERS:
            raise self.fail(f"{what} is an array of type {kind}, expected 0..8 or 10..12")
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        count = self.count(f"the length of {what}", dtype.itemsize)
        return np.frombuffer(self.bytes(count * dtype.itemsize, what), dtype)


class GGUFFile:
    """One file, or all files of a split model."""

    def __init__(self, path: str | Path) -> None:
        """Reads keys and the places of tensors, no data.

        Args:
            path: of the file; for a split model any of ``...-00001-of-0000N.gguf``, all in one folder.

        Raises:
            CheckpointError: not a GGUF file of version 3, damaged, of types that are not read, or a file of a split
                model is missing. Names the file and the problem.
        """
        path = Path(path)
        found = _SPLIT.search(path.name)
        self.paths = [path]
        if found:
            stem, count = path.name[: found.start()], int(found[2])
            if not 1 <= int(found[1]) <= count:
                raise CheckpointError(f"{path}: the name says file {int(found[1])} of {count}")
            self.paths = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
        self.keys: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        self._added: dict[str, torch.Tensor] = {}
        self._pages = [_Pages(part) for part in self.paths]
        for index, part in enumerate(self.paths):
            with _mapped(part) as data:
                keys, tensors = _Head(data, part).read(index)
            stated = keys.get("split.count", 0) or 1
            if stated != len(self.paths):
                raise CheckpointError(f"{part}: split.count is {stated}, but the name says {len(self.paths)}")
            for name in tensors:
                if name in self.tensors:
                    raise CheckpointError(f"{part}: tensor {name!r} is in another file, too")
            self.tensors.update(tensors)
            self.keys = {**keys, **self.keys}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name!r} is missing from {self.paths[0]}")
        return self.tensors[name]

    def split(self, name: str, parts: Mapping[str, int]) -> None:
        """Splits a tensor by rows. ``parts``: number of rows by name of the new tensor, from the first row on.

        Raises:
            CheckpointError: the tensor has another number of rows, or a new name exists already.
        """
        tensor, begin = self.tensors[name], 0
        if tensor.shape[0] != sum(parts.values()) or any(part in self.tensors for part in parts):
            raise CheckpointError(f"tensor {name!r} has {tensor.shape[0]} rows, but {dict(parts)} are expected in it")
        run = tensor.row_bytes if len(tensor.shape) > 1 else tensor.row_bytes // tensor.shape[0]
        for part, rows in parts.items():
            offset = tensor.offset + begin * run
            row_bytes = tensor.row_bytes if len(tensor.shape) > 1 else rows * run
            shape = (rows, *tensor.shape[1:])
            self.tensors[part] = replace(tensor, shape=shape, offset=offset, row_bytes=row_bytes)
            begin += rows
        del self.tensors[name]

    def add(self, name: str, values: torch.Tensor) -> None:
        """Adds a tensor float32 [n] of numbers that the keys have. A tensor of this name is replaced."""
        self._added[name] = values
        self.tensors[name] = GGUFTensor(0, tuple(values.shape), 0, 0, values.nbytes)

    def expect_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises CheckpointError if a tensor is missing or has another shape; names the tensor."""
        found = self._tensor(name).shape
        if found != shape:
            raise CheckpointError(f"tensor {name!r} has shape {found}, but {shape} is expected")

    def bytes(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows [begin, end) of a tensor, counted through all its dimensions but the last: uint8 [rows, row bytes].

        They are mapped from the file: not to be written to.

        Raises:
            CheckpointError: the tensor is missing, or the file cannot be read.
        """
        tensor = self._tensor(name)
        end = tensor.rows if end is None else end
        if name in self._added:
            return self._added[name].view(torch.uint8)[None][begin:end]
        return self._pages[tensor.file].read(
            name, tensor.offset + begin * tensor.row_bytes, end - begin, tensor.row_bytes
        )

    def type_name(self, name: str) -> str:
        """ggml's name of the type."""
        kind = self._tensor(name).type
        return TYPES[kind].name if kind in TYPES else {0: "F32", 1: "F16", 30: "BF16", 28: "F64"}[kind]

    def is_float(self, name: str) -> bool:
        """Whether a tensor has a floating-point type, and no blocks."""
        return self._tensor(name).type in _FLOATS

    def matrix(self, name: str, begin: int = 0, end: int | None = None) -> Matrix:
        """Rows of a tensor in blocks, counted as in :meth:`bytes`. NVFP4: with the tensor ``.scale``, if there is one.

        Raises:
            CheckpointError: as :meth:`bytes`; the type is a float; neither one scale nor one for each matrix.
        """
        if self.is_float(name):
            raise CheckpointError(f"tensor {name!r} is {self.type_name(name)}, expected a type in blocks")
        tensor = self._tensor(name)
        matrix, scale = TYPES[tensor.type].matrix(self.bytes(name, begin, end)), f"{name.removesuffix('.weight')}.scale"
        if matrix.channel_scales is None or scale not in self:
            return matrix
        scales, matrices = self.tensor(scale).float().flatten(), tensor.rows // tensor.shape[-2]
        if len(scales) not in (1, matrices):
            raise CheckpointError(f"tensor {scale!r} has {len(scales)} elements, but 1 or {matrices} are expected")
        which = (begin + torch.arange(matrix.rows)) // tensor.shape[-2] if len(scales) > 1 else 0
        return replace(matrix, channel_scales=matrix.channel_scales * scales[which])

    def blocks(self, name: str, begin: int = 0, end: int | None = None) -> Blocks | Matrix:
        """As :meth:`matrix`, not decoded if the operators pack the type as it is."""
        kind = TYPES.get(self._tensor(name).type)
        if kind is None or not kind.is_packed:
            return self.matrix(name, begin, end)
        return Blocks(self.bytes(name, begin, end), kind)

    def floats(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows of a tensor [rows, last], counted as in :meth:`bytes`: floats in their type, blocks as float32."""
        tensor = self._tensor(name)
        if tensor.type in _FLOATS:
            return self.bytes(name, begin, end).clone().view(_FLOATS[tensor.type])
        return self.matrix(name, begin, end).floats()

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor in its shape, as :meth:`floats`."""
        return self.floats(name).view(self._tensor(name).shape)


class _Pages:
    """A file whose bytes are read through a mapping."""

    MOST = 64 << 20  # bytes that are handed out before this process lets go of the pages that it has read

    def __init__(self, path: Path) -> None:
        """Maps the file when it is read first. ``path``: of the file."""
        self.path, self.read_bytes = path, 0

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return type(self), (self.path,)

    @cached_property
    def mapping(self) -> mmap.mmap:
        """The file. Writable, because torch warns of other memory; the file does not change."""
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    @cached_property
    def data(self) -> torch.Tensor:
        """The bytes of the file."""
        return torch.frombuffer(self.mapping, dtype=torch.uint8)

    def read(self, name: str, offset: int, rows: int, row_bytes: int) -> torch.Tensor:
        """As :meth:`GGUFFile.bytes`, from a place in the file on."""
        size = rows * row_bytes
        try:
            mapping = self.mapping
            if offset + size > min(len(mapping), self.path.stat().st_size):  # reading there would end the process
                raise CheckpointError(f"{self.path}: tensor {name!r} ends behind the end of the file")
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        self.read_bytes += size
        if hasattr(mmap, "MADV_WILLNEED"):
            if self.read_bytes > self.MOST:
                mapping.madvise(mmap.MADV_DONTNEED)
                self.read_bytes = size
            page = offset // mmap.PAGESIZE * mmap.PAGESIZE
            mapping.madvise(mmap.MADV_WILLNEED, page, offset + size - page)
        return self.data[offset : offset + size].view(rows, row_bytes)


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    check_regular(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class _Head(_Cursor):
    """Reads the part before the data."""

    def read(self, index: int) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        """Keys and tensors; ``index``: of the file."""
        if self.bytes(4, "the magic") != b"GGUF":
            raise self.fail("no GGUF file: it does not begin with 'GGUF'")
        version = self.number("I", "the version")
        if version != VERSION:
            raise self.fail(f"version is {shorten(version)}, expected {VERSION}, little-endian")
        # The length of a name, the number of dimensions, one dimension, a type, an offset.
        tensor_count = self.count("the number of tensors", 8 + 4 + 8 + 4 + 8)
        keys = dict(self._keys(self.count("the number of keys", 8 + 4 + 1)))
        alignment = keys.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1) != 0:
            raise self.fail(f"general.alignment is {shorten(alignment)}, expected a power of two in 8..{1 << 20}")
        places = [self._place() for _ in range(tensor_count)]
        start = -(-self.at // alignment) * alignment
        return keys, self._tensors(index, places, start, alignment)

    def _keys(self, count: int) -> Iterator[tuple[str, Any]]:
        seen = set()
        for _ in range(count):
            name = self.string("the name of a key")
            if name in seen:
                raise self.fail(f"key {shorten(name)} is there twice")
            seen.add(name)
            yield name, self.value(self.number("I", name), name)

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("the name of a tensor")
        what = f"tensor {shorten(name)}"
        dimensions = self.number("I", what)
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self.fail(f"{what} has {dimensions} dimensions, expected 1..{MOST_DIMENSIONS}")
        shape = tuple(self.number("Q", what) for _ in range(dimensions))[::-1]
        return name, shape, self.number("I", what), self.number("Q", what)

    def _row_bytes(self, what: str, kind: int, last: int) -> int:
        if kind in _FLOATS:
            return last * torch.empty((), dtype=_FLOATS[kind]).element_size()
        if kind not in TYPES:
            raise self.fail(f"{what} has type {_OTHERS.get(kind, kind)}, which is not read")
        block = TYPES[kind]
        if last % block.weights != 0:
            raise self.fail(f"{what} has rows of {last}, but {block.name} has blocks of {block.weights}")
        return last // block.weights * block.bytes

    def _tensors(self, index: int, places: list, start: int, alignment: int) -> dict[str, GGUFTensor]:
        found: dict[str, GGUFTensor] = {}
        behind, before = start, "the tensors' descriptions"
        for name, shape, kind, offset in sorted(places, key=lambda place: place[3]):
            what = f"tensor {shorten(name)}"
            if name in found:
                raise self.fail(f"{what} is there twice")
            if 0 in shape or np.prod(shape, dtype=object) > MOST_BYTES:
                raise self.fail(f"{what} has shape {shape}, expected 1 to {MOST_BYTES} elements")
            tensor = GGUFTensor(index, shape, kind, start + offset, self._row_bytes(what, kind, shape[-1]))
            end = tensor.offset + tensor.rows * tensor.row_bytes
            if offset % alignment != 0:
                raise self.fail(f"{what} is at {offset}, which is no multiple of {alignment}")
            if end > len(self._data):
                raise self.fail(f"{what} ends at {end}, but the file at {len(self._data)}")
            if tensor.offset < behind:
                raise self.fail(f"{what} begins inside {before}")
            behind, before = end, what
            found[name] = tensor
        return {name: found[name] for name, *_ in places}
