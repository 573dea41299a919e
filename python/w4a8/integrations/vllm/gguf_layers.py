"""Layers that read their weights from a GGUF file: each rank reads its part, packed unchanged.

If vLLM joins several matrices in a linear layer, there is one product for each run of one type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from w4a8.checkpoint.gguf_linear import GGUFLinears
from w4a8.core.activation_groups import resolve_activation_group
from w4a8.core.matrix import SUPER
from w4a8.core.packer import ExpertPacker
from w4a8.core.stack import MatrixStack
from w4a8.core.weight_utils import replace_parameter
from w4a8.formats import Scheme
from w4a8.formats.gguf_blocks import TYPES
from w4a8.integrations.vllm.gguf_folder import experts_of, linears_of
from w4a8.integrations.vllm.moe import W4A8MoEMethod
from w4a8.integrations.vllm.settings import activation_group
from w4a8.ops import dyn_quant_matmul_4bit


@dataclass
class _Part:
    """Rows [begin, end) and columns [first, last) of a tensor of the file."""

    tensor: str
    begin: int
    end: int
    first: int
    last: int


@dataclass
class _Product:
    """One product: parts of one type, one under the other.

    Attributes:
        parameter: of the layer.
        group: of weights; None of floats.
        padding: rows of zeros behind the parts.
    """

    parameter: str
    parts: list[_Part]
    group: int | None
    padding: int = 0

    @property
    def n(self) -> int:
        """Rows."""
        return sum(part.end - part.begin for part in self.parts) + self.padding

    @property
    def k(self) -> int:
        """Columns."""
        return self.parts[0].last - self.parts[0].first


def unit_of(kind: int) -> int:
    """Columns that a cut must be a multiple of, for a type of blocks."""
    return SUPER if TYPES[kind].weights == SUPER else TYPES[kind].group


class W4A8GGUFLinearMethod(LinearMethodBase):
    """The method of a linear layer or of an output layer."""

    def __init__(self, path: str, layer_name: str, tensors: list[str]) -> None:
        """Takes the tensors of a layer, not all of them floats, in the order of their rows in the layer."""
        self.path, self.layer_name, self.tensors = path, layer_name, tensors
        self.products: list[_Product] = []
        self.is_loaded = False

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers a parameter for each product, empty until the file is read.

        Raises:
            ValueError: the tensors do not fit the layer, or this rank's part cuts blocks.
        """
        self.dtype, padding, types = params_dtype, 0, linears_of(self.path).file
        if isinstance(layer, ParallelLMHead):
            mine = layer.shard_indices
            parts = [self._part(layer, self.tensors[0], mine.num_org_elements, input_size_per_partition, input_size)]
            parts[0].begin, parts[0].end = mine.org_vocab_start_index, mine.org_vocab_end_index
            # Rows of zeros are for several ranks, which send each other the same amount.
            padding = 0 if layer.tp_size == 1 else sum(output_partition_sizes) - mine.num_org_elements
        else:
            sizes = output_partition_sizes
            if len(self.tensors) == 1 and layer.tp_size == 1:  # joined in the file as well
                sizes = [sum(sizes)]
            if len(self.tensors) != len(sizes):
                self._refuse(f"{len(self.tensors)} tensors, but {len(sizes)} are expected")
            sizes = zip(self.tensors, sizes)
            parts = [self._part(layer, name, size, input_size_per_partition, input_size) for name, size in sizes]
        for index, (kind, group) in enumerate(groupby(parts, lambda part: types.tensors[part.tensor].type)):
            size = TYPES[kind].group if kind in TYPES else None
            self.products.append(_Product(f"weight_packed{index or ''}", list(group), size))
        self.products[-1].padding = padding
        for product in self.products:
            empty = torch.empty(0, dtype=torch.uint8)
            layer.register_parameter(product.parameter, torch.nn.Parameter(empty, requires_grad=False))
        layer.w4a8_gguf = self

    def _refuse(self, problem: str) -> None:
        raise ValueError(f"w4a8: {self.layer_name} of {self.path}: {problem}")

    def _part(self, layer: torch.nn.Module, name: str, rows: int, columns: int, all_columns: int) -> _Part:
        """This rank's part of a tensor, of ``rows`` rows and ``columns`` columns."""
        file, ranks, rank = linears_of(self.path).file, layer.tp_size, layer.tp_rank
        tensor = file.tensors[name]
        found, width = tensor.shape
        is_head = isinstance(layer, ParallelLMHead)
        expected = layer.org_vocab_size if is_head else rows
        cuts = 1 if is_head else found // rows
        if width != all_columns or cuts < 1 or found != cuts * expected or ranks % cuts != 0:
            self._refuse(f"tensor {name!r} has shape {tensor.shape}, but ({expected}, {all_columns}) is expected")
        # With fewer parts than ranks (heads of keys and values) neighbours have the same part.
        begin = rank // (ranks // cuts) * rows
        first = 0 if columns == width else rank * columns
        if columns != width and not file.is_float(name) and columns % unit_of(tensor.type) != 0:
            self._refuse(
                f"{columns} of the {width} columns of tensor {name!r} for each of {ranks} ranks cut blocks of "
                f"{unit_of(tensor.type)} ({file.type_name(name)})"
            )
        return _Part(name, begin, begin + rows, first, first + columns)

    def load(self, layer: torch.nn.Module) -> list[str]:
        """Reads and packs this rank's part; the names of all tensors of the file that belong to the layer.

        Raises:
            ValueError: values that the operators do not have, or an activation group that does not fit.
        """
        linears = linears_of(self.path)
        for product in self.products:
            read = _read_floats if product.group is None else _read
            try:
                found = read(linears, product, self.dtype)
            except (ValueError, RuntimeError) as error:  # the second: values that the operators do not have
                raise ValueError(f"w4a8: {self.layer_name} of {self.path}: {error}") from error
            for suffix, tensor in found.items():
                replace_parameter(layer, product.parameter + suffix, tensor)
        if getattr(layer, "bias", None) is not None:
            layer.bias.data.zero_()  # the packed matrix has it
        self.is_loaded = True
        biases = [f"{tensor.removesuffix('.weight')}.bias" for tensor in self.tensors]
        return self.tensors + [name for name in biases if name in linears.file]

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raises ValueError if the file was not read."""
        if not self.is_loaded:
            self._refuse("nothing was read")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] to [..., N] of its type. A bias is packed, not in vLLM's parameter."""
        found = []
        for product in self.products:
            weight = getattr(layer, product.parameter)
            if product.group is not None:
                found.append(dyn_quant_matmul_4bit(x, weight, product.group, product.k, product.n))
            else:
                own = getattr(layer, f"{product.parameter}_bias", None)
                found.append(torch.nn.functional.linear(x, weight, own))
        return found[0] if len(found) == 1 else torch.cat(found, -1)


class TiedGGUFOutputMethod(W4A8GGUFLinearMethod):
    """The method of an output layer that shares the embeddings' matrix: packed beside vLLM's dequantized embeddings."""

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """The layer keeps its own weight (upstream's contract)."""
        return layer

    def load(self, layer: torch.nn.Module) -> list[str]:
        """As above; the tensor stays for the embeddings."""
        super().load(layer)
        return []


def _biases(linears: GGUFLinears, product: _Product) -> list[torch.Tensor] | None:
    """Biases of the parts, float32. None: no part has one; or ranks split the columns, and another rank adds them."""
    found = [linears.bias(part.tensor) if part.first == 0 else None for part in product.parts]
    if all(bias is None for bias in found):
        return None
    parts = zip(product.parts, found)
    return [torch.zeros(p.end - p.begin) if bias is None else bias[p.begin : p.end] for p, bias in parts]


def _read_floats(linears: GGUFLinears, product: _Product, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weight and bias of floats, by the suffix of the parameter's name."""
    read = [(linears.values(part.tensor, dtype), part) for part in product.parts]
    weights = [weight[part.begin : part.end, part.first : part.last] for weight, part in read]
    found, biases = {"": torch.cat(weights).to(dtype)}, _biases(linears, product)
    return found if biases is None else {**found, "_bias": torch.cat(biases).to(dtype)}


def _read(linears: GGUFLinears, product: _Product, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The matrix of blocks, packed with its bias: uint8 [bytes]."""
    biases = _biases(linears, product)
    activations = resolve_activation_group(activation_group(), product.group, product.k)
    how = {"bias_dtype": None if biases is None else torch.float32, "activation_group": activations}
    stack, row = MatrixStack(1, product.n, product.k, product.group, **how), 0
    for index, part in enumerate(product.parts):
        whole = linears.file.tensors[part.tensor].shape[-1]
        for first, matrix in linears.pieces(part.tensor, part.begin, part.end):
            at = first - part.begin
            if part.last - part.first != whole:
                matrix = matrix.with_columns(part.first, part.last)
            if biases is not None:
                matrix = replace(matrix, bias=biases[index][at : at + matrix.rows])
            stack.put(0, row + at, matrix)
        row += part.end - part.begin
    if product.padding:
        stack.put(0, row, linears.file.matrix(part.tensor, 0, 1).zeros(product.padding))
    return {"": stack.pack()[0]}


class W4A8GGUFMoEMethod(W4A8MoEMethod):
    """Of a layer of experts."""

    def __init__(self, path: str, name: str, layer: torch.nn.Module, layer_name: str) -> None:
        """A method for one layer.

        Args:
            path: of the file.
            name: of the experts, in :func:`experts_of`.
            layer: vLLM's RoutedExperts, whose ``moe_config`` is not :func:`unsupported`.
            layer_name: for errors.

        Raises:
            ValueError: this rank's part of an expert cuts blocks.
        """
        super().__init__(Scheme("packed", -1, True), layer, layer_name)
        self.path, self.is_loaded = path, False
        self.experts = experts = experts_of(path)[name]
        first, down = experts.group_sizes
        self.sizes = replace(self.sizes, group_size=first, w2_group_size=down)
        name = f"{experts.names['down']}.weight"
        tensor, mine = experts.file.tensors[name], self.sizes.intermediate
        if mine != tensor.shape[-1] and mine % unit_of(tensor.type) != 0:
            raise ValueError(
                f"w4a8: {layer_name} of {path}: {mine} of the {tensor.shape[-1]} columns of tensor {name!r} for each "
                f"of {self.moe.moe_parallel_config.tp_size} ranks cut blocks of {unit_of(tensor.type)} "
                f"({experts.file.type_name(name)}): expert parallelism does not (--enable-expert-parallel)"
            )

    def register(self, layer: torch.nn.Module, params_dtype: torch.dtype) -> None:
        """``w13_weight_packed`` and ``w2_weight_packed``, empty until the file is read.

        Raises:
            ValueError: the tensors do not fit the layer; the activation group does not fit.
        """
        experts, ranks = self.experts, self.moe.moe_parallel_config.tp_size
        found = (experts.experts, experts.hidden, experts.intermediate, experts.has_bias)
        expected = (self.moe.num_experts, self.sizes.hidden, self.sizes.intermediate * ranks, self.moe.has_bias)
        if found != expected:
            names = "(experts, hidden size, intermediate size, bias)"
            raise ValueError(f"w4a8: {self.layer_name} of {self.path}: {names} are {found}, expected {expected}")
        self.activation_groups = self.groups_of_activations(activation_group())
        for stack, _, _ in self.sizes.stacks:
            empty = torch.nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
            layer.register_parameter(f"{stack}_weight_packed", empty)
        layer.w4a8_gguf = self

    def load(self, layer: torch.nn.Module) -> list[str]:
        """Reads and packs the experts of this rank; the names of all tensors of the file that belong to the layer.

        Raises:
            ValueError: gate and up are of different types, or values that the operators do not have.
        """
        experts, parallel = self.experts, self.moe.moe_parallel_config
        bias_dtype = torch.float32 if experts.has_bias else None
        ranks = {"tp_rank": parallel.tp_rank, "tp_size": parallel.tp_size}
        packer = ExpertPacker(self.sizes, bias_dtype, **ranks, activation_groups=self.activation_groups)
        for expert in range(self.moe.num_experts):
            local = layer._map_global_expert_id_to_local_expert_id(expert)
            if local == -1:
                continue
            for shard, matrix, tensor in experts.matrices(expert):
                try:
                    packer.put(local, shard, matrix, tensor)
                except ValueError as error:
                    raise ValueError(f"w4a8: {self.layer_name} of {self.path}: {error}") from error
        for stack, packed in packer.pack().items():
            replace_parameter(layer, f"{stack}_weight_packed", packed)
        self.is_loaded = True
        found = [f"{stack}.{suffix}" for stack in experts.names.values() for suffix in ("weight", "bias")]
        return [name for name in found if name in experts.file]

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raises ValueError if the file was not read."""
        if not self.is_loaded:
            raise ValueError(f"w4a8: {self.layer_name} of {self.path}: nothing was read")
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
