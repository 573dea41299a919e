"""The linear layers of a GGUF file, packed. Codes stay as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, named
from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.core.activation_groups import in_words, resolve_activation_group
from w4a8.core.json_fields import CheckpointError, shorten
from w4a8.core.kind import Kind
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
            found, known = file.keys.get("general.architecture"), ", ".join(sorted(ARCHITECTURES))
            raise CheckpointError(
                f"general.architecture is {shorten(found)}, whose linear layers are not known here (known: {known})"
            )
        self.file, self.architecture = file, ARCHITECTURES[name]

    def order(self, name: str) -> torch.Tensor | None:
        """Which rows of a tensor, and elements of its bias, are the first and so on in transformers; None: as they are.

        Raises:
            CheckpointError: the rows are not those of so many heads as the keys say.
        """
        key = _HEADS.get(name.split(".")[-2]) if self.architecture.turned else None
        if key is None:
            return None
        prefix, rows = f"{self.file.keys['general.architecture']}.attention", self.file.tensors[name].shape[0]
        heads = self.file.keys.get(f"{prefix}.{key}", self.file.keys.get(f"{prefix}.head_count"))
        if not isinstance(heads, int) or heads < 1 or rows % (2 * heads) != 0:
            raise CheckpointError(f"tensor {name!r} has {rows} rows, but {prefix}.{key} is {shorten(heads)}")
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
        group, order = TYPES[self.file.tensors[name].type].group, self.order(name)
        bias_name = f"{name.removesuffix('.weight')}.bias"
        bias = self.file.tensor(bias_name).float() if bias_name in self.file else None
        activations = resolve_activation_group(activation_group, group, columns)
        how = {"bias_dtype": None if bias is None else torch.float32, "activation_group": activations}
        stack = MatrixStack(1, rows, columns, group, **how)
        step = rows if order is not None else max(1, AT_ONCE // columns)
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            matrix = self.file.matrix(name, begin, end)
            matrix = matrix if bias is None else replace(matrix, bias=bias[begin:end])
            stack.put(0, begin, matrix if order is None else matrix.with_rows(order))
        layer = W8A8Linear if matrix.kind == Kind.INT8 else W4A8Linear
        return layer(stack.pack()[0], columns, rows, group)

    def layers(self) -> dict[str, str]:
        """Name in transformers -> tensor, of matrices in blocks that are linear layers: no experts, no embeddings."""
        found = {}
        for name, tensor in self.file.tensors.items():
            parameter = self.architecture.parameter(name)
            if parameter is None or not parameter.endswith(".weight") or len(tensor.shape) != 2:
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
    bar = progress_bar(len(wanted), progress, "layer", "packing linear layers")
    try:
        with on_cpu():
            for name, tensor in wanted.items():
                try:
                    loaded[name] = linears.linear(tensor, activation_group)
                except (ValueError, RuntimeError) as error:  # sizes or scales that the operators do not have
                    raise CheckpointError(f"{name}: {error}") from error
                if bar is not None:
                    bar.update()
    finally:
        if bar is not None:
            bar.close()
    logger.info("packed %d layers of %s: activations rounded to int8 %s", len(loaded), path, in_words(activation_group))
    return loaded
