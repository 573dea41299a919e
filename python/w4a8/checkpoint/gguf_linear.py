"""The weights of a GGUF file. Codes stay as they are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from w4a8.checkpoint.counts import blocks_of, check_counts
from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, BESIDE, named
from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.checkpoint.gguf_key_table import check_keys
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.checkpoint.gguf_names import Source
from w4a8.core.json_fields import CheckpointError, shorten
from w4a8.core.matrix import SUPER, Matrix, concat_rows
from w4a8.core.weight import ExpertWeights, Floats, Weight
from w4a8.formats.gguf_blocks import TYPES

AT_ONCE = 1 << 25  # weights that are unpacked at once
_STACK = re.compile(r"blk\.([0-9]{1,4})\.ffn_(gate_up|gate|up|down)_exps\.weight")
_LEAF = re.compile(r"blk\.[0-9]{1,4}\.(\w+)(?:\..+)?")
# Kind of a stack in a layer with a gate, and without.
_SHARDS = {"gate": "w1", "up": "w3", "down": "w2", "gate_up": "w13"}
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
        for key in self.architecture.numbers:
            self._add_numbers(key)
        for name, tensor in file.tensors.items():
            if ".ssm_norm." in name:  # of the groups of Mamba-2, which are one parameter
                shape, row_bytes = (math.prod(tensor.shape),), tensor.rows * tensor.row_bytes
                file.tensors[name] = replace(tensor, shape=shape, row_bytes=row_bytes)

    def _add_numbers(self, key: str) -> None:
        """Adds the numbers of a key as a tensor of each layer."""
        found, layers = np.atleast_1d(self.file.keys.get(key)), self.keys.layers
        if found.dtype.kind not in "fi" or found.shape not in ((1,), (layers,)) or not np.isfinite(found).all():
            given = shorten(self.file.keys.get(key))
            raise CheckpointError(f"{key} is {given}, but a number, or one for each of {layers} layers, is expected")
        for layer, number in enumerate(np.broadcast_to(found, layers).tolist()):
            self.file.add(f"blk.{layer}.{key}", torch.tensor([number], dtype=torch.float32))

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

    @property
    def heads(self) -> int:
        """Number of heads for further tokens (MTP) that the file has, and that are known of the architecture."""
        lacks = f"blk.{self.keys.layers}.nextn.eh_proj.weight" not in self.file
        return 0 if lacks or self.architecture.heads is None else self.keys.count("nextn_predict_layers", 0, least=0)

    def unused(self, sources: Iterable[Source]) -> list[str]:
        """Tensors that no parameter uses, except tensors of :data:`BESIDE` and of layers that are left out (MTP)."""
        left = set(self.file.tensors).difference(*(source.tensors for source in sources))
        return sorted(name for name in left if not name.endswith(BESIDE) and not self.keys.is_left_out(name))

    def order(self, name: str) -> torch.Tensor | None:
        """Rows of a tensor, and elements of its bias, in transformers' order; None: the order of the file.

        Raises:
            CheckpointError: the rows do not fit the number of heads in the keys.
        """
        match, shape = _LEAF.fullmatch(name), self.file.tensors[name].shape
        leaf = name if match is None else match[1]
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
        if isinstance(heads, np.ndarray):
            heads = next(map(int, heads[int(name.split(".")[1]) :][:1]), None)
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

    def weight(self, names: Sequence[str]) -> Weight:
        """The weight of one tensor in blocks, or of several, one below the other, made one kind by :func:`joined`.

        A ``.bias`` beside one tensor is the layer's. A tensor of three dimensions is a stack of experts.

        Raises:
            CheckpointError: a tensor is a float, or has another number of dimensions.
        """
        name, file, types = names[0], self.file, " and ".join(dict.fromkeys(map(self.file.type_name, names)))
        tensor = file.tensors[name]
        if len(names) > 1:
            first = concat_rows([file.matrix(each, 0, 1) for each in names])
            shape = sum(file.tensors[each].shape[0] for each in names), tensor.shape[-1]
            return Weight(", ".join(names), shape, first.group, partial(self._joined_rows, names), tuple(names), types)
        if not 2 <= len(tensor.shape) <= 3:
            raise CheckpointError(f"tensor {name!r} has shape {tensor.shape}, expected 2 or 3 dimensions")
        if file.is_float(name):
            raise CheckpointError(f"tensor {name!r} is {types}, but a quantized type is expected")
        block, bias = TYPES[tensor.type], f"{name.removesuffix('.weight')}.bias"
        unit = SUPER if block.weights == SUPER else block.group
        read = self._rows if len(tensor.shape) == 2 else self._rows_of_an_expert
        if bias in file:
            file.expect_shape(bias, tensor.shape[:-1])
        bias_type = torch.float32 if bias in file else None
        return Weight(name, tensor.shape, block.group, partial(read, name), tensor.type, types, unit, bias_type)

    def floats(self, name: str) -> Floats:
        """A matrix of floats, with its bias."""
        (rows, columns), bias = self.file.tensors[name].shape, f"{name.removesuffix('.weight')}.bias" in self.file
        read = partial(self._floats, name)
        return Floats(name, rows, columns, read, self.file.type_name(name), torch.float32 if bias else None)

    def _floats(self, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :attr:`Floats.read`."""
        bias = self.bias(name)
        return self.values(name, dtype).to(dtype), None if bias is None else bias.to(dtype)

    def experts(self, names: Iterable[str], layer: str) -> ExpertWeights:
        """The experts of one layer, by the names of its tensors; biases may be among them.

        Args:
            names: of the stacks: gate, up and down, or gate_up and down; of models without a gate up and down.
            layer: the name in the model.

        Raises:
            CheckpointError: other stacks, types or shapes.
        """
        stacks = {match[2]: match[0] for match in map(_STACK.fullmatch, sorted(names)) if match is not None}
        routing = self.architecture.routing
        gated = routing is None or routing.activation.is_gated
        if set(stacks) not in (({"gate", "up", "down"}, {"gate_up", "down"}) if gated else ({"up", "down"},)):
            expected = "gate, up, down" if gated else "up, down"
            raise CheckpointError(f"{layer} has the stacks of experts {', '.join(stacks)}, expected {expected}")
        shards = {**_SHARDS, "up": "w3" if "gate" in stacks else "w1"}
        found = {shards[stack]: [self.weight([name])] for stack, name in stacks.items()}
        try:
            return ExpertWeights(layer, found)
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    def layers(self, only: Callable[[str], bool] = lambda name: True) -> dict[str, list[Weight] | ExpertWeights]:
        """The matrices in blocks by their names, without embeddings; the experts of a layer as ``blk.<n>.experts``.

        Raises:
            CheckpointError: as :meth:`weight` and :meth:`experts`.
        """
        found: dict[str, list[Weight] | ExpertWeights] = {}
        stacks: dict[str, list[str]] = {}
        for name, tensor in self.file.tensors.items():
            match = _STACK.fullmatch(name)
            if match is not None and not self.keys.is_left_out(name):
                stacks.setdefault(f"blk.{match[1]}.experts", []).append(name)
            is_matrix = len(tensor.shape) == 2 and name.endswith(".weight") and "_embd" not in name
            layer = name.removesuffix(".weight")
            if is_matrix and not self.file.is_float(name) and not self.keys.is_left_out(name) and only(layer):
                found[layer] = [self.weight([name])]
        return found | {layer: self.experts(names, layer) for layer, names in stacks.items() if only(layer)}

    def _rows(self, name: str, begin: int, end: int) -> Iterator[tuple[int, Matrix]]:
        """As :attr:`Weight.read`, of a matrix."""
        bias = self.bias(name)
        for row, matrix in self.pieces(name, begin, end):
            own = None if bias is None else bias[row : row + matrix.rows]
            yield row - begin, matrix if own is None else replace(matrix, bias=own)

    def _rows_of_an_expert(self, name: str, begin: int, end: int) -> Iterator[tuple[int, Matrix]]:
        """As :attr:`Weight.read`, of a stack."""
        matrix, bias = self.file.blocks(name, begin, end), f"{name.removesuffix('.weight')}.bias"
        if bias in self.file:
            expert, first = divmod(begin, self.file.tensors[name].shape[1])
            matrix = replace(matrix, bias=self.file.floats(bias, expert, expert + 1)[0].float()[first:][: end - begin])
        yield 0, matrix

    def _joined_rows(self, names: Sequence[str], begin: int, end: int) -> Iterator[tuple[int, Matrix]]:
        """As :attr:`Weight.read`, of several tensors."""
        whole, order = concat_rows([each for name in names for _, each in self.pieces(name)]), self.joined_order(names)
        whole = whole if order is None else whole.with_rows(order)
        yield 0, whole.with_rows(slice(begin, end))

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
            matrix = self.file.blocks(name, low, high)
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
        return values

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
            first = torch.stack(tuple(gate_up), 2 if self.architecture.interleaved else 1).flatten(1, 2)
        return first.transpose(1, 2).contiguous() if self.architecture.transposed and first.dim() == 3 else first


def without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of a shape that are not 1."""
    return tuple(size for size in shape if size != 1)
