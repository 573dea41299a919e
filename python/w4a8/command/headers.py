"""Headers of safetensors files: names, types and shapes of tensors, without their data."""

from __future__ import annotations

import json
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from w4a8.checkpoint.tensors import file_of_each, files_of, read_index
from w4a8.command.model import hub
from w4a8.core.json_fields import CheckpointError, check_regular, shorten

_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}
_BITS |= {"C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


@dataclass(frozen=True)
class Header:
    """The header of one tensor.

    Attributes:
        dtype: the name in safetensors: F32, BF16, I32, U8, F8_E4M3, ...
        shape: of the tensor.
        file: path of the file. The file may be missing if the header was read from the Hub.
        begin: offset of the first byte of data in the file, in bytes; 0 if the header was read from the Hub.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int = 0

    @property
    def bytes(self) -> int:
        """The size of the data."""
        return prod(self.shape) * _BITS.get(self.dtype, 8) // 8


def read_headers(folder: Path, repo: str | None = None) -> dict[str, Header]:
    """The headers of all tensors, by name.

    Args:
        folder: with safetensors files.
        repo: on the Hub; its headers are read if files are missing in the folder.

    Raises:
        CheckpointError: no file; a missing or damaged file; a tensor in two files, and no index says which to read.
    """
    index = read_index(folder)
    files = [folder / name for name in files_of(folder, index)]
    if repo is not None and not (files and all(file.is_file() for file in files)):
        found = {}
        for file, metadata in hub().get_safetensors_metadata(repo).files_metadata.items():
            for name, tensor in metadata.tensors.items():
                found[name] = _header(name, tensor.dtype, tensor.shape, folder / file)
        return found
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file")
    headers = {file.name: _of_file(file) for file in files}
    places = file_of_each(folder, headers, index)
    return {name: headers[file][name] for name, file in places.items()}


def _header(name: str, dtype: str, shape: Sequence[int], path: Path, begin: int = 0) -> Header:
    if not isinstance(dtype, str):
        raise CheckpointError(f"{path}: tensor {name!r} is of dtype {shorten(dtype)}")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise CheckpointError(f"{path}: tensor {name!r} has shape {shorten(list(shape))}")
    return Header(dtype, tuple(shape), path, begin)


def _of_file(path: Path) -> dict[str, Header]:
    check_regular(path)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            room = path.stat().st_size - 8 - size
            if room < 0:
                raise CheckpointError(f"{path} is truncated: its header has {size} bytes")
            entries = json.loads(file.read(size))
        found, end = {}, 0
        for name, entry in entries.items():
            if name != "__metadata__":
                begin, last = entry["data_offsets"]
                found[name] = _header(name, entry["dtype"], entry["shape"], path, 8 + size + begin)
                is_place = type(begin) is type(last) is int and 0 <= begin <= last
                if not is_place or last - begin != found[name].bytes:
                    stated = f"{entry['dtype']} of shape {shorten(entry['shape'])}"
                    raise CheckpointError(f"{path}: tensor {name!r} is {stated}, but at bytes {begin} to {last}")
                end = max(end, last)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if end != room:
        raise CheckpointError(f"{path} has {room} bytes of tensors, but its header says {end}")
    return found


class Mapped:
    """Maps files, to read the data of tensors without a copy."""

    def __init__(self) -> None:
        self._files: dict[Path, memoryview] = {}

    def bytes(self, header: Header, begin: int, count: int) -> memoryview:
        """The data of a tensor from byte ``begin`` on: ``count`` bytes."""
        if header.file not in self._files:
            with header.file.open("rb") as file:
                self._files[header.file] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        start = header.begin + begin
        return self._files[header.file][start : start + count]
