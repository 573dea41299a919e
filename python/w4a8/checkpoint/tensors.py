"""Tensors of a checkpoint directory by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from w4a8.core.json_fields import CheckpointError, check_regular, read_json, shorten

MOST_MAPPED = 128 << 20  # bytes; after reading more, files are closed, and opened again when they are needed
INDEX_NAME = "model.safetensors.index.json"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or with a zero byte
        return False


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
            raise CheckpointError(_no_file(directory, name))
    return file_of


def _no_file(directory: Path, name: object) -> str:
    return f"{directory / INDEX_NAME} names {shorten(name)}, which is no file of {directory}"


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


class CheckpointTensors:
    """Reads single tensors of a directory with one safetensors file, or with several and an index."""

    def __init__(self, directory: str | Path) -> None:
        """Reads the names of all tensors, and none of their data.

        Files in the index may be missing, if a rank needs only a part, until a tensor is asked for
        (:meth:`check_files`, :meth:`get`).

        Raises:
            ImportError: safetensors is not installed.
            CheckpointError: no safetensors file, or an index that is damaged.
        """
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError("reading checkpoints needs the safetensors package: pip install safetensors") from error
        self._open = safe_open
        self.directory = Path(directory)
        self._handles: dict[str, Any] = {}
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}
        self._mapped = 0  # bytes that were read since the files were opened
        self._file_of = read_index(self.directory)
        self._absent = {name for name in set((self._file_of or {}).values()) if not _is_file(self.directory / name)}
        if self._file_of is None:
            files = files_of(self.directory, None)
            if not files:
                raise CheckpointError(f"{self.directory} holds no *.safetensors file")
            self._file_of = dict.fromkeys(self._handle(files[0]).keys(), files[0])

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            path = self.directory / name
            check_regular(path)
            try:
                self._handles[name] = self._open(str(path), framework="pt", device="cpu")
            except Exception as error:  # safetensors raises its own class for damaged headers, OSError and others
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        return self._handles[name]

    def release(self) -> None:
        """Closes the memory-mapped files: pages that have been read no longer count as this process's."""
        self._handles.clear()
        self._mapped = 0

    def keys(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file_of)

    def __contains__(self, key: str) -> bool:
        return key in self._file_of

    def check_files(self, keys: Iterable[str]) -> None:
        """Raises CheckpointError if the file of a tensor is missing; ignores tensors that are not listed."""
        for key in keys:
            name = self._file_of.get(key)
            if name in self._absent:
                raise CheckpointError(f"{_no_file(self.directory, name)}, but tensor {key!r} is needed")

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it: the file has as many bytes.

        Raises:
            CheckpointError: the tensor is missing, not readable, or empty: the other dimensions of an empty tensor may
                be any number.
        """
        shape = self._shape(key)
        if 0 in shape:
            raise CheckpointError(f"tensor {key!r} has shape {shape}, which holds nothing")
        return shape

    def _shape(self, key: str) -> tuple[int, ...]:
        handle = self._handle_of(key)
        try:
            return tuple(handle.get_slice(key).get_shape())
        except Exception as error:
            raise self._unreadable(key, error) from error

    def is_int8(self, key: str) -> bool:
        """Whether a matrix is int8; False if it is missing.

        Raises:
            CheckpointError: the matrix is not readable; names the key.
        """
        if key not in self:
            return False
        shape = self._shape(key)
        return len(shape) == 2 and shape[0] > 0 and self.get(key, 0).dtype == torch.int8

    def get(self, key: str, index: int | None = None) -> torch.Tensor:
        """One tensor, or only its part at an index of the first dimension.

        float8_e4m3fn becomes its bits, uint8, if torch has no such type.

        Raises:
            CheckpointError: the tensor is missing or not readable; names the key.
        """
        handle = self._handle_of(key)
        try:
            if not hasattr(torch, "float8_e4m3fn") and handle.get_slice(key).get_dtype() == "F8_E4M3":
                tensor = self._bits(key)
                tensor = tensor if index is None else tensor[index]
            else:
                tensor = handle.get_tensor(key) if index is None else handle.get_slice(key)[index]
        except Exception as error:
            raise self._unreadable(key, error) from error
        self._mapped += tensor.numel() * tensor.element_size()
        return tensor

    def _bits(self, key: str) -> torch.Tensor:
        """A tensor of a type that this torch does not have, as uint8: its bytes, of a file that is open already."""
        name = self._file_of[key]
        with (self.directory / name).open("rb") as file:
            if name not in self._headers:
                size = int.from_bytes(file.read(8), "little")
                self._headers[name] = 8 + size, json.loads(file.read(size))
            start, header = self._headers[name]
            begin, end = header[key]["data_offsets"]
            file.seek(start + begin)
            data = bytearray(file.read(end - begin))
        return torch.tensor(data, dtype=torch.uint8).view(header[key]["shape"])

    def _handle_of(self, key: str) -> Any:
        """The file of a tensor."""
        if key not in self._file_of:
            raise CheckpointError(f"tensor {key!r} is missing from {self.directory}")
        self.check_files([key])
        if self._mapped > MOST_MAPPED:
            self.release()
        return self._handle(self._file_of[key])

    def _unreadable(self, key: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"tensor {key!r} cannot be read from {self.directory / self._file_of[key]}: {error}")
