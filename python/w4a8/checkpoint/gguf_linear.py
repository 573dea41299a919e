"""The linear layers of a GGUF file, packed. Codes stay as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, named
from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.checkpoint.gguf_key_table import check_keys
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.core.activation_groups import in_words, resolve_activation_group
from w4a8.core.json_fields import CheckpointError, shorten
from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix
from w4a8.core.memory import on_cpu
from w4a8.core.stack import MatrixStack
from w4a8.formats.gguf_blocks import TYPES
from w4a8.nn import W4A8Linear, W8A8Linear
from w4a8.progress import progress_bar

logger = logging.getLogger(__name__)

AT_ONCE = 1 << 25  # weights that are unpacked at once
_HEADS = {"attn_q": "head_count", "attn_k": "head_count_kv"}


class GGUFLinears:
    """The linear layers of a file, by the names of its tensors; rows in the order that transformers has."""

    def __init__(self, file: GGUFFile) -> None:
        """Takes the names of the file's architecture.

        Raises:
            CheckpointError: they are not known here.
        """
        name = named(file.keys)
        if name is None:
            found, known = Keys(file.keys).architecture, ", ".join(sorted(ARCHITECTURES))
            raise CheckpointError(
                f"general.architecture is {found!r}, whose linear layers are not known here (known: {known})"
            )
        check_keys(file.keys)
        self.file, self.keys, self.architecture = file, Keys(file.keys), ARCHITECTURES[name]

    def order(self, name: str) -> torch.Tensor | None:
        """Which rows of a tensor, and elements of its bias, are the first and so on in transformers; None: as they are.

        Raises:
            CheckpointError: the rows are not those of so many heads as the keys say.
        """
        key = _HEADS.get(name.split(".")[-2]) if self.architecture.turned else None
        if key is None:
            return None
        keys, rows = self.keys, self.file.tensors[name].shape[0]
        heads = keys.get(f"attention.{key}", keys.get("attention.head_count"))
        if not isinstance(heads, int) or heads < 1 or rows % (2 * heads) != 0:
            key = f"{keys.architecture}.attention.{key}"
            raise CheckpointError(f"tensor {name!r} has {rows} rows, but {key} is {shorten(heads)}")
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()

    def linear(self, name: str, activation_group: int | None) -> W4A8Linear | W8A8Linear:
        """A matrix in blocks, packed.

        Args:
            name: of the tensor, ``blk.0.attn_q.weight`` say. If there is a ``.bias`` beside it, it is the layer's.
            activation_group: as of :func:`w4a8.load`.

        Raises:
            ValueError: the operators cannot run it, or ``activation_group`` does not fit.
        """
        rows, columns = self.file.tensors[name].shape
        group, bias = TYPES[self.file.tensors[name].type].group, self.bias(name)
        activations = resolve_activation_group(activation_group, group, columns)
        how = {"bias_dtype": None if bias is None else torch.float32, "activation_group": activations}
        stack = MatrixStack(1, rows, columns, group, **how)
        for row, matrix in self.pieces(name, 0, rows):
            stack.put(0, row, matrix if bias is None else replace(matrix, bias=bias[row : row + matrix.rows]))
        layer = W8A8Linear if matrix.kind == Kind.INT8 else W4A8Linear
        return layer(stack.pack()[0], columns, rows, group)

    def bias(self, name: str) -> torch.Tensor | None:
        """float32 [N], of the layer of a ``.weight`` [N, K]; None: there is none beside it.

        Raises:
            CheckpointError: it has another shape, or the rows of the layer are not as :meth:`order` expects them.
        """
        bias_name, order = f"{name.removesuffix('.weight')}.bias", self.order(name)
        if bias_name not in self.file:
            return None
        self.file.expect_shape(bias_name, self.file.tensors[name].shape[:1])
        bias = self.file.tensor(bias_name).float()
        return bias if order is None else bias[order]

    def pieces(self, name: str, begin: int, end: int) -> Iterator[tuple[int, Matrix]]:
        """Rows [begin, end) of a matrix in blocks, AT_ONCE weights at a time: the first row's number, and the rows."""
        order, step = self.order(name), max(1, AT_ONCE // self.file.tensors[name].shape[-1])
        for first in range(begin, end, step):
            rows = torch.arange(first, min(first + step, end))
            rows = rows if order is None else order[rows]
            low, high = int(rows.min()), int(rows.max()) + 1
            matrix = self.file.matrix(name, low, high)
            yield first, matrix if order is None else matrix.with_rows(rows - low)

    def values(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor as transformers has it: what is in blocks in ``dtype``, all others in the type of the file."""
        tensor = self.file.tensors[name]
        if self.file.is_float(name):
            order, values = self.order(name), self.file.tensor(name)
            values = values if order is None else values[order]
        else:
            values = torch.empty(tensor.rows, tensor.shape[-1], dtype=dtype)
            for row, matrix in self.pieces(name, 0, tensor.rows):
                values[row : row + matrix.rows] = matrix.floats()
            values = values.view(tensor.shape)
        if name.endswith("norm.weight") and self.architecture.norm_plus:
            values = values.float() - self.architecture.norm_plus
        return values[None] if "_inp_shexp" in name and values.dim() == 1 else values

    def layers(self) -> dict[str, str]:
        """Name in transformers -> tensor, of matrices in blocks that are linear layers: no experts, no embeddings."""
        found = {}
        for name, tensor in self.file.tensors.items():
            parameter = self.architecture.parameter(name)
            if parameter is None or not parameter.endswith(".weight") or len(tensor.shape) != 2:
                continue
            if self.keys.is_left_out(name):
                continue
            if name != "token_embd.weight" and not self.file.is_float(name):
                found[parameter.removesuffix(".weight")] = name
        return found


def load_gguf_linear(
    path: Path, only: Callable[[str], bool] | None, activation_group: int | None, progress: bool
) -> dict[str, W4A8Linear | W8A8Linear]:
    """:func:`w4a8.checkpoint.load_linear` of a GGUF file."""
    linears = GGUFLinears(GGUFFile(path))
    wanted = {name: tensor for name, tensor in linears.layers().items() if only is None or only(name)}
    loaded: dict[str, W4A8Linear | W8A8Linear] = {}
    with on_cpu(), progress_bar(len(wanted), progress, "layer", "packing linear layers") as advance:
        for name, tensor in wanted.items():
            try:
                loaded[name] = linears.linear(tensor, activation_group)
            except (ValueError, RuntimeError) as error:  # sizes or scales that the operators do not have
                raise CheckpointError(f"{name}: {error}") from error
            advance()
    logger.info("packed %d layers of %s: activations rounded to int8 %s", len(loaded), path, in_words(activation_group))
    return loaded
