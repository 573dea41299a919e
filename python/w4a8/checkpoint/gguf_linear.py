"""The linear layers of a GGUF file, packed. Codes stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from w4a8.checkpoint.counts import blocks_of, check_counts
from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, BESIDE, named
from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.checkpoint.gguf_key_table import check_keys
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.checkpoint.gguf_names import Source
from w4a8.core.activation_groups import resolve_activation_group
from w4a8.core.json_fields import CheckpointError, shorten
from w4a8.core.matrix import Matrix, joined
from w4a8.core.stack import MatrixStack
from w4a8.formats.gguf_blocks import TYPES
from w4a8.nn import W4A8Linear, W8A8Linear
from w4a8.nn.linear import linear_class

AT_ONCE = 1 << 25  # weights that are unpacked at once
_HEADS = {"attn_q": "head_count", "attn_k": "head_count_kv"}
# Of linear attention: tensors whose rows are value heads; and tensors with key heads before the value heads.
_OF_VALUES = ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")
_BEHIND_KEYS = ("attn_qkv", "ssm_conv1d")


class GGUFLinears:
    """The linear layers of a file, by the names of its tensors; rows in transformers' order."""

    def __init__(self, file: GGUFFile) -> None:
        """Takes the names of the file's architecture.

        Raises:
            CheckpointError: the architecture is not known here, or a count in the keys is above what the file holds.
        """
        name = named(file.keys)
        if name is None:
            found, known = Keys(file.keys).architecture, ", ".join(sorted(ARCHITECTURES))
            raise CheckpointError(
                f"general.architecture is {found!r}, whose linear layers are not known here (known: {known})"
            )
        check_keys(file.keys)
        self.file, self.keys, self.architecture = file, Keys(file.keys), ARCHITECTURES[name]
        layers = blocks_of(file.tensors) + self.keys.count("nextn_predict_layers", 0, least=0)  # these may be left out
        check_counts(file.keys, {each: tensor.shape for each, tensor in file.tensors.items()}, layers)
        if not self.architecture.joined:
            self._split_joined()

    def _split_joined(self) -> None:
        """Splits queries, keys and values, which some files have in one matrix."""
        names = [name for name in self.file.tensors if ".attn_qkv." in name]
        if not names:
            return
        heads = self.keys.count("attention.head_count")
        others = self.keys.count("attention.head_count_kv", heads)
        key = self.keys.count("attention.key_length", self.keys.count("embedding_length") // heads)
        rows = {"q": heads * key, "k": others * key, "v": others * self.keys.count("attention.value_length", key)}
        for name in names:
            self.file.split(name, {name.replace("attn_qkv", f"attn_{each}"): count for each, count in rows.items()})

    def unused(self, sources: Iterable[Source]) -> list[str]:
        """Tensors that no parameter uses, except tensors of :data:`BESIDE` and of layers that are left out (MTP)."""
        left = set(self.file.tensors).difference(*(source.tensors for source in sources))
        return sorted(name for name in left if not name.endswith(BESIDE) and not self.keys.is_left_out(name))

    def order(self, name: str) -> torch.Tensor | None:
        """Rows of a tensor, and elements of its bias, in transformers' order; None: the order of the file.

        Raises:
            CheckpointError: the rows do not fit the number of heads in the keys.
        """
        leaf, shape = name.split(".")[2] if name.startswith("blk.") else name, self.file.tensors[name].shape
        if self.architecture.turned and leaf in _HEADS:
            return self._turned(name, leaf, shape[0])
        if self.architecture.tiled and leaf in _OF_VALUES:
            return self._heads_of_values(name, shape[0])
        if self.architecture.tiled and leaf in _BEHIND_KEYS:
            keys = 2 * self.keys.count("ssm.group_count") * self.keys.count("ssm.state_size")
            return torch.cat((torch.arange(keys), keys + self._heads_of_values(name, shape[0] - keys)))
        return None

    def _turned(self, name: str, leaf: str, rows: int) -> torch.Tensor:
        keys, key = self.keys, f"attention.{_HEADS[leaf]}"
        heads = keys.get(key, keys.get("attention.head_count"))
        heads = int(heads[int(name.split(".")[1])]) if isinstance(heads, np.ndarray) else heads
        if not isinstance(heads, int) or heads < 1 or rows % (2 * heads) != 0:
            raise CheckpointError(f"tensor {name!r} has {rows} rows, but {keys.architecture}.{key} is {shorten(heads)}")
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()

    def _heads_of_values(self, name: str, rows: int) -> torch.Tensor:
        """The order of rows in which the value heads of a key head are neighbours."""
        heads, keys = self.keys.count("ssm.time_step_rank"), self.keys.count("ssm.group_count")
        if heads % keys != 0 or rows < 1 or rows % heads != 0:
            raise CheckpointError(f"tensor {name!r} does not have rows of {heads} heads of values of {keys} of keys")
        return torch.arange(rows).view(heads // keys, keys, -1).transpose(0, 1).flatten()

    def runs(self, name: str) -> torch.Tensor | None:
        """Runs of columns in transformers' order; None: the order of the file."""
        if not self.architecture.tiled or ".ssm_out." not in name:
            return None
        return self._heads_of_values(name, self.keys.count("ssm.time_step_rank"))

    def joined_order(self, names: Sequence[str]) -> torch.Tensor | None:
        """Rows of several tensors, one below the other, in transformers' order.

        Qwen3-Next's q, k, v and z: the rows of a key head are neighbours. None for other tensors: the order as given.

        Raises:
            CheckpointError: the tensors have another number of rows than the keys say; names the tensors.
        """
        if [name.split(".")[-2] for name in names] != ["attn_qkv", "attn_gate"]:
            return None
        keys, size = self.keys.count("ssm.group_count"), self.keys.count("ssm.state_size")
        inner, rows = self.keys.count("ssm.inner_size"), sum(self.file.tensors[name].shape[0] for name in names)
        counts = [keys * size, keys * size, inner, inner]
        if sum(counts) != rows or inner % keys != 0:
            raise CheckpointError(f"tensors {', '.join(names)} have {rows} rows, but {sum(counts)} are expected")
        parts = torch.arange(rows).split(counts)
        return torch.cat([part.view(keys, -1) for part in parts], 1).flatten()

    def linear(self, names: Sequence[str], activation_group: int | None) -> W4A8Linear | W8A8Linear:
        """A packed matrix, of one tensor in blocks (``blk.0.attn_q.weight`` say) or of several.

        A ``.bias`` beside one tensor is the layer's. ``activation_group`` is as of :func:`w4a8.load`.

        Raises:
            ValueError: the operators cannot run it, or ``activation_group`` does not fit.
        """
        rows, columns = sum(self.file.tensors[name].shape[0] for name in names), self.file.tensors[names[0]].shape[-1]
        if len(names) > 1:
            whole, order = joined([each for name in names for _, each in self.pieces(name)]), self.joined_order(names)
            bias, found = None, [(0, whole if order is None else whole.with_rows(order))]
            group = whole.group
        else:
            bias, found = self.bias(names[0]), self.pieces(names[0])
            group = TYPES[self.file.tensors[names[0]].type].group
        activations = resolve_activation_group(activation_group, group, columns)
        how = {"bias_dtype": None if bias is None else torch.float32, "activation_group": activations}
        stack = MatrixStack(1, rows, columns, group, **how)
        for row, matrix in found:
            stack.put(0, row, matrix if bias is None else replace(matrix, bias=bias[row : row + matrix.rows]))
        return linear_class(matrix.kind)(stack.pack()[0], columns, rows, group)

    def bias(self, name: str) -> torch.Tensor | None:
        """Bias float32 [N] of the layer of a ``.weight`` [N, K]; None: no bias.

        Raises:
            CheckpointError: the bias has another shape, or as :meth:`order`.
        """
        bias_name, order = f"{name.removesuffix('.weight')}.bias", self.order(name)
        if bias_name not in self.file:
            return None
        self.file.expect_shape(bias_name, self.file.tensors[name].shape[:1])
        bias = self.file.tensor(bias_name).float()
        return bias if order is None else bias[order]

    def pieces(self, name: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, Matrix]]:
        """Rows [begin, end) of a matrix in blocks, AT_ONCE weights at a time: the first row's number, and the rows."""
        order, runs, shape = self.order(name), self.runs(name), self.file.tensors[name].shape
        end, step = self.file.tensors[name].rows if end is None else end, max(1, AT_ONCE // shape[-1])
        for first in range(begin, end, step):
            rows = torch.arange(first, min(first + step, end))
            rows = rows if order is None else order[rows]
            low, high = int(rows.min()), int(rows.max()) + 1
            matrix = self.file.matrix(name, low, high)
            matrix = matrix if order is None else matrix.with_rows(rows - low)
            yield first, matrix if runs is None else matrix.with_runs(runs)

    def values(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in transformers' form: blocks as ``dtype``, floats in the type of the file.

        Weights of norms from which ``norm_plus`` is subtracted, and ``ssm_a``, become float32.
        """
        tensor = self.file.tensors[name]
        if self.file.is_float(name):
            order, runs, values = self.order(name), self.runs(name), self.file.tensor(name)
            values = values if order is None else values[order]
            values = values if runs is None else values.unflatten(1, (len(runs), -1))[:, runs].flatten(1)
        else:
            values = torch.empty(tensor.rows, tensor.shape[-1], dtype=dtype)
            for row, matrix in self.pieces(name):
                values[row : row + matrix.rows] = matrix.floats()
            values = values.view(tensor.shape)
        if name.endswith("norm.weight") and ".ssm_norm." not in name and self.architecture.norm_plus:
            values = values.float() - self.architecture.norm_plus
        if name.endswith(".ssm_a"):  # -exp of the parameter
            values = (-values.float()).log()
        return values[None] if "_inp_shexp" in name and values.dim() == 1 else values

    def parameter(self, names: Sequence[str], shape: Sequence[int], name: str, dtype: torch.dtype) -> torch.Tensor:
        """A parameter of a model of transformers, from its tensors, as :meth:`values`.

        Raises:
            ValueError: the tensors give another shape than ``shape``; names the parameter.
        """
        tensors = {each: self.values(each, dtype) for each in names}
        try:
            made = self._joined(tensors)
        except (RuntimeError, IndexError):
            made = None
        if made is None or without_ones(shape) != without_ones(made.shape):
            given = ", ".join(f"{each} {tuple(tensor.shape)}" for each, tensor in tensors.items())
            raise ValueError(f"{name} is {tuple(shape)}, which cannot be made of {given}")
        return made.reshape(shape)

    def _joined(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Several tensors as one parameter."""
        values, leaves = list(tensors.values()), [name.split(".")[-2] for name in tensors]
        first = values[0]
        if leaves == ["attn_k_b", "attn_v_b"]:  # [heads, rank, k], [heads, v, rank]
            return torch.cat((first.transpose(1, 2), values[1]), 1).flatten(0, 1)
        if not any(name.endswith(("_exps.weight", "_exps.bias")) for name in tensors):
            order = self.joined_order(list(tensors)) if len(values) > 1 else None
            made = torch.cat(values) if len(values) > 1 else first
            return made if order is None else made[order]
        if leaves[0] in ("ffn_gate_exps", "ffn_gate_up_exps"):
            gate_up = values if len(values) == 2 else first.chunk(2, 1)
            first = torch.stack(tuple(gate_up), 2 if self.architecture.in_turns else 1).flatten(1, 2)
        return first.transpose(1, 2).contiguous() if self.architecture.transposed and first.dim() == 3 else first

    def layers(self) -> dict[str, str]:
        """Name in transformers -> tensor, of linear layers in blocks: no experts, no embeddings.

        Raises:
            CheckpointError: the names of the architecture are not known without a model.
        """
        if self.architecture.names is None:
            known = ", ".join(sorted(name for name, each in ARCHITECTURES.items() if each.names is not None))
            raise CheckpointError(
                f"general.architecture is {self.keys.architecture!r}, whose linear layers have no names here without a "
                f"model (known: {known}): load it with transformers"
            )
        found = {}
        for name, tensor in self.file.tensors.items():
            layer = self.architecture.linear_layer(name)
            is_packed = len(tensor.shape) == 2 and not self.file.is_float(name)
            if layer is not None and is_packed and not self.keys.is_left_out(name):
                found[layer] = name
        return found


def without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a shape that are not 1."""
    return tuple(size for size in shape if size != 1)
