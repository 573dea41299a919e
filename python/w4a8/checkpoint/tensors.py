"""Safetensors files of a folder: which of them are read, and their tensors by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from w4a8.core.json_fields import CheckpointError, check_regular, read_json, shorten

INDEX_NAME = "model.safetensors.index.json"


def read_index(directory: Path) -> dict[str, str] | None:
    """Tensor -> name of its file, as the index of a directory says; None if there is no index.

    Raises:
        CheckpointError: the index is damaged, or a name leads out of the directory.
    """
    index = directory / INDEX_NAME
    if not index.exists():
        return None
    file_of = read_json(index).get("weight_map")
    if not isinstance(file_of, dict):
        raise CheckpointError(f"{index} has no weight_map")
    for name in file_of.values():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise CheckpointError(f"{index} names {shorten(name)}, which is no file of {directory}")
    return file_of


def files_of(directory: Path, index: Mapping[str, str] | None) -> list[str]:
    """Names of the safetensors files of a directory that loading reads; [] if it has none.

    Raises:
        CheckpointError: several files, and no index.
    """
    if index is not None:
        return sorted(set(index.values()))
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    if "model.safetensors" in files:
        return ["model.safetensors"]
    if len(files) > 1:
        raise CheckpointError(f"{directory} holds {len(files)} *.safetensors files, but no {INDEX_NAME}")
    return files


def file_of_each(directory: Path, keys: Mapping[str, Iterable[str]], index: Mapping[str, str] | None) -> dict[str, str]:
    """Tensor -> name of its file; if two files have a tensor, the index decides.

    Raises:
        CheckpointError: two files have a tensor, and the index names neither; names the tensor.
    """
    found: dict[str, str] = {}
    for file, names in keys.items():
        for name in names:
            stated = (index or {}).get(name)
            if name in found and stated not in (file, found[name]):
                raise CheckpointError(
                    f"tensor {name!r} stands in {found[name]} and in {file} of {directory}, and no index says which to "
                    "read"
                )
            if name not in found or stated == file:
                found[name] = file
    return found


def open_file(path: str) -> Any:
    """A safetensors file, open for reading its tensors one by one. A dry run puts another function here.

    Raises:
        CheckpointError: the file is missing, damaged, or no regular file.
    """
    from safetensors import safe_open

    check_regular(Path(path))
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # safetensors raises its own class for damaged headers, OSError and others
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def opened(files: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The open files of one folder by name, in the order given; and the name of each tensor's file.

    Raises:
        CheckpointError: a tensor in two files without an index that decides.
    """
    if not files:
        return {}, {}
    handles = {Path(file).name: open_file(str(file)) for file in files}
    folder = Path(files[0]).parent
    keys = {name: list(handle.keys()) for name, handle in handles.items()}
    return handles, file_of_each(folder, keys, read_index(folder) if len(files) > 1 else None)


def slices(files: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Name and lazy tensor of all tensors in safetensors files, numbers inside of names in their order.

    Raises:
        CheckpointError: other files; or as :func:`opened`.
    """
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise CheckpointError(f"{file}: quantized weights are read from safetensors files only")
    handles, place = opened(files)
    for key in sorted(place, key=_natural):
        part = handles[place[key]].get_slice(key)
        if part.get_dtype() == "F8_E4M3" and not hasattr(torch, "float8_e4m3fn"):
            part = _Bits(part, Path(files[0]).parent / place[key], key)
        yield key, part


class _Bits:
    """A lazy tensor of a type that this torch does not have: its bytes, uint8."""

    def __init__(self, part: Any, path: Path, key: str) -> None:
        self.get_shape, self.get_dtype = part.get_shape, part.get_dtype
        self._path, self._key = path, key

    def __getitem__(self, index: Any) -> torch.Tensor:
        with self._path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            begin, end = json.loads(file.read(size))[self._key]["data_offsets"]
            file.seek(8 + size + begin)
            data = bytearray(file.read(end - begin))
        return torch.tensor(data, dtype=torch.uint8).view(self.get_shape())[index]


def _natural(name: str) -> list[tuple[Any, ...]]:
    """A key that sorts names by the numbers between points: by count of digits, then by digits."""
    parts = ((part, part.lstrip("0")) for part in name.split("."))
    return [(0, len(digits), digits) if part.isdecimal() else (1, 0, part) for part, digits in parts]
