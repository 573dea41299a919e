"""The weights of a packed directory (docs/transformers.md), by the names of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from w4a8.checkpoint.tensors import files_of, read_index, slices
from w4a8.core.matrix import SUPER, Matrix, matrix_of
from w4a8.core.weight import ExpertWeights, Floats, Weight
from w4a8.formats.packed_directory import ALL_STAND_FOR, check_listed, check_stated, packed_tensors


class PackedSource:
    """The packed tensors of files.

    Attributes:
        keys: names of all tensors.
        packed: module -> last part of the name -> packed tensor.
    """

    def __init__(self, files: Sequence[str], listed: object = None) -> None:
        """Reads the headers of the packed matrices.

        Args:
            files: safetensors files of one folder.
            listed: the list of packed tensors in config.json, or None.

        Raises:
            ValueError: no packed tensors, a damaged one, or one that is listed and missing.
        """
        self.files = files
        self._slices = dict(slices(files))
        self.keys = list(self._slices)
        self.packed = packed_tensors(self._slices.items(), ALL_STAND_FOR)
        if not self.packed:
            raise ValueError(
                f"{', '.join(map(str, files)) or 'no file'}: no packed tensors, though config.json says so"
            )
        check_listed(listed, self.keys, str(Path(files[0]).parent))

    def weight(self, module: str, leaf: str) -> Weight:
        """A packed matrix or stack: ``leaf`` is the last part of its name."""
        stored, name = self.packed[module][leaf], f"{module}.{leaf}"
        header, form = stored.header, stored.packed_as
        n, k, group = header["n"], header["k"], header["group"]
        return Weight(
            name,
            (n, k) if len(stored.shape) == 1 else (stored.shape[0], n, k),
            -1 if group == k else group,
            partial(self._read, name, n),
            form=(form.kind, group, form.activation_group, form.minimums, form.channel_scales, form.super_scales),
            unit=SUPER if form.super_scales else group if group < k else 2,
            bias=torch.float32 if header["has_bias"] else None,
            activation_group=form.activation_group,
            is_fixed=True,
            packed=partial(self.tensor, name),
        )

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as it is in the files, of which it may be a view."""
        return self._slices[name][...]

    def matrix(self, name: str) -> Weight | Floats:
        """A packed matrix or stack, or a matrix of floats, by the whole name of its tensor.

        Raises:
            ValueError: there is no such tensor.
        """
        module, _, leaf = name.rpartition(".")
        if leaf in self.packed.get(module, {}):
            return self.weight(module, leaf)
        shape = self._slices[name].get_shape() if name in self._slices else ()
        if len(shape) != 2:
            raise ValueError(f"{Path(self.files[0]).parent} has no matrix {name}")
        bias = f"{module}.bias"
        return Floats(
            name, *shape, partial(self._floats, name, bias), bias=torch.float32 if bias in self._slices else None
        )

    def _floats(self, name: str, bias: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :attr:`Floats.read`."""
        return self.tensor(name).to(dtype), self.tensor(bias).to(dtype) if bias in self._slices else None

    def layers(self, only: Callable[[str], bool] = lambda name: True) -> dict[str, list[Weight] | ExpertWeights]:
        """The linear layers, and the experts of each layer, by their names."""
        found: dict[str, list[Weight] | ExpertWeights] = {}
        for module, parts in self.packed.items():
            if not only(module):
                continue
            if "w13_packed" in parts and "w2_packed" in parts:
                found[module] = self.experts(module)
            elif "packed" in parts:
                found[module] = [self.weight(module, "packed")]
        return found

    def experts(self, module: str) -> ExpertWeights:
        """The experts of a module."""
        return experts_of(module, *(self.weight(module, leaf) for leaf in ("w13_packed", "w2_packed")))

    def _read(self, name: str, rows: int, begin: int, end: int) -> Iterator[tuple[int, Matrix]]:
        """As :attr:`Weight.read`."""
        stored, expert = self._slices[name], begin // rows
        is_stack = len(stored.get_shape()) == 2
        packed = stored[expert : expert + 1][0] if is_stack else stored[...]
        matrix = matrix_of(packed, f"{name}[{expert}]" if is_stack else name)
        yield 0, matrix.with_rows(slice(begin - expert * rows, end - expert * rows))


def experts_of(name: str, w13: Weight, w2: Weight) -> ExpertWeights:
    """The experts of two packed stacks; one group for a row is a group size of -1 if both have it.

    Raises:
        ValueError: the stacks do not fit each other.
    """
    if (w13.group == -1) != (w2.group == -1):
        w13, w2 = (replace(each, group=each.columns if each.group == -1 else each.group) for each in (w13, w2))
    return ExpertWeights(name, {"w1" if w13.rows == w2.columns else "w13": [w13], "w2": [w2]})


def open_packed(directory: str | Path, config: Mapping[str, Any]) -> PackedSource:
    """The packed tensors of a local directory, with the quantization_config of its config.json.

    Raises:
        ValueError: no local directory of packed tensors, or one in another format.
    """
    check_stated(*(config.get(key) for key in ("quant_method", "format", "version")))
    folder = Path(directory)
    files = [str(folder / name) for name in files_of(folder, read_index(folder))]
    if not files:
        raise ValueError(
            f"{directory} is no local directory with *.safetensors files, which packed weights are read from"
        )
    return PackedSource(files, config.get("packed"))
