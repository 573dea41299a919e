"""from_pretrained without weights: the model on the meta device, and all errors except those of values of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils as modeling
from transformers.utils import logging

from w4a8.checkpoint import tensors
from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.checkpoint.gguf_linear import GGUFLinears
from w4a8.core.matrix import Matrix
from w4a8.formats import FORMATS
from w4a8.formats.packed_directory import ALL_STAND_FOR
from w4a8.integrations.expectations import missing
from w4a8.integrations.transformers import gguf, guard

# Last parts of the names of tensors whose values decide whether a matrix is read: small beside codes and scales.
_SMALL = {
    part.suffix for each in FORMATS.values() for part in each.parts if part.kind not in ("weight", "weight_scale")
}
_SMALL |= {"bias"}


@contextmanager
def dry_run(headers: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[None]:
    """A context in which models are loaded to the meta device, by the usual code, and no weights are read.

    Layers that cannot be packed go to ``report.refused`` of the quantizer, if another method quantized the checkpoint.
    For floats and GGUF files, and outside of this context, the first such layer is an error.

    Args:
        headers: of safetensors files, by their names: name of a tensor -> ``dtype`` (F32 and so on), ``shape``,
            ``file``, ``begin`` in the file and ``bytes``. Instead of a missing file there must be an empty file; its
            values are then unknown.

    Raises:
        ImportError: transformers is not as expected, and would read weights; says why.
    """
    problems = gguf.gguf_problems() + missing("modeling_utils", ("safe_open", "str_to_torch_dtype"), dir(modeling))
    if problems:
        raise ImportError(f"transformers is not as expected: {'; '.join(problems)}")
    opened, own, shows = modeling.safe_open, tensors.open_file, logging.is_progress_bar_enabled()

    def open_file(file: str, *_: Any, **__: Any) -> _File:
        header = (headers or {}).get(Path(file).name, {})
        is_there = all(each.is_file() for each in {tensor.file for tensor in header.values()})
        return _File(header, opened(file, framework="pt") if is_there else None)

    logging.disable_progress_bar()
    modeling.safe_open = tensors.open_file = open_file
    guard.device, gguf.open_linears = "meta", lambda path: _Linears(_Heads(path))
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()
        modeling.safe_open, tensors.open_file = opened, own
        guard.device, gguf.open_linears = "cpu", gguf.linears_of


class _Slice:
    """The used part of safetensors' interface of a tensor in a file."""

    def __init__(self, header: Any, is_read: bool) -> None:
        self.header, self.is_read = header, is_read

    def get_dtype(self) -> str:
        return self.header.dtype

    def get_shape(self) -> list[int]:
        return list(self.header.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        dtype = modeling.str_to_torch_dtype.get(self.header.dtype, torch.uint8)
        if not self.is_read or self.header.bytes == 0:  # of 0 bytes torch.frombuffer makes no tensor
            device = "cpu" if self.is_read else "meta"
            return torch.empty(self.header.shape, dtype=dtype, device=device)[index]
        with self.header.file.open("rb", buffering=0) as file:  # a mapping would read far more around it
            file.seek(self.header.begin)
            data = bytearray(file.read(self.header.bytes))
        return torch.frombuffer(data, dtype=dtype).view(self.header.shape)[index]


class _File:
    """The used part of safetensors' interface of a file; by the header alone if the file is missing."""

    def __init__(self, header: Mapping[str, Any], file: Any) -> None:
        self.header, self.file = header, file

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            self.file.__exit__(*error)

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"} if self.file is None else self.file.metadata()

    def keys(self) -> list[str]:
        return list(self.header if self.file is None else self.file.keys())

    def get_slice(self, key: str) -> Any:
        leaf = key.replace("_bias", ".bias").rpartition(".")[2]  # gpt-oss has down_proj_bias, of all experts
        # The index may name another file than the one with the header.
        if self.file is not None and (leaf in ALL_STAND_FOR or key not in self.header):
            return self.file.get_slice(key)
        return _Slice(self.header[key], self.file is not None and leaf in _SMALL)


class _Heads(GGUFFile):
    """A GGUF file. Tensors of one dimension are read; others are on the meta device; a single row is zeros."""

    def bytes(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        tensor = self._tensor(name)
        if len(tensor.shape) == 1:
            return super().bytes(name, begin, end)
        rows = (tensor.rows if end is None else end) - begin
        return torch.zeros(rows, tensor.row_bytes, dtype=torch.uint8, device="cpu" if rows == 1 else "meta")

    def matrix(self, name: str, begin: int = 0, end: int | None = None) -> Matrix:
        tensor = self._tensor(name)
        key = tensor.type, tensor.row_bytes, (tensor.rows if end is None else end) - begin
        made = self.__dict__.setdefault("made", {})
        if key not in made or made[key].channel_scales is not None:  # a scale beside it is looked at
            row = super().matrix(name, begin, begin + 1)
            parts = {each: part.to("meta").expand(key[2], *part.shape[1:]) for each, part in row.tensors().items()}
            made[key] = replace(row, **parts)
        return made[key]

    blocks = matrix


class _Linears(GGUFLinears):
    """The linear layers of such a file."""

    def values(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if self.file.is_float(name):
            return super().values(name, dtype)
        self.order(name)
        return torch.empty(self.file.tensors[name].shape, dtype=dtype, device="meta")
