"""The tensors of a linear layer as vLLM's loaders push them, packed when the last one has come."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)

from w4a8.core.activation_groups import resolve_activation_group
from w4a8.core.matrix import Matrix, PackedAs
from w4a8.core.memory import fresh_bytes
from w4a8.core.packer import pack_rows
from w4a8.core.weight import Cut, Weight
from w4a8.core.weight_utils import replace_parameter
from w4a8.formats import Scheme
from w4a8.formats.format import Part
from w4a8.integrations.vllm.experts_loader import form_of, is_dummy_load, loaded_parts, random_matrix
from w4a8.integrations.vllm.products import Product, Share
from w4a8.integrations.vllm.settings import activation_group


class _CopiedValues(TorchDispatchMode):
    """Counts the values that are copied: how much of a parameter a loader has filled."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def load_parameter(
    layer: torch.nn.Module, param: torch.Tensor, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The loader of a parameter, bound to its layer: see ``load_expert``."""
    return layer.w4a8_filler.load(layer, param, loaded_weight, *args, **kwargs)


def load_nothing(param: torch.Tensor, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """The loader of a parameter that is not needed here: scales of inputs."""


def _load_output_layer(layer: torch.nn.Module, param: torch.Tensor, loaded: torch.Tensor) -> None:
    """This rank's part of the vocabulary, without padding; vLLM's own loader cuts the first dimension only."""
    indices, dim = layer.shard_indices, param.output_dim
    begin, size = indices.org_vocab_start_index, param.shape[dim]
    if getattr(param, "packed_dim", None) == dim:
        begin //= param.packed_factor
    param.data.copy_(loaded.narrow(dim, begin, size))


def _load_parts(layer: torch.nn.Module, param: torch.Tensor, loaded: torch.Tensor) -> None:
    """This rank's rows of the parts of a matrix, as of a :class:`Share`."""
    share, dim = layer.w4a8_filler.share, getattr(param, "output_dim", None)
    if dim is None:  # the numbers of rows and columns
        share.load(param, loaded)
        return
    factor = param.packed_factor if getattr(param, "packed_dim", None) == dim else 1
    found, begin = [], 0
    for rows, own in zip(share.parts, share.sizes):
        first = begin if rows == own else begin + layer.tp_rank * own
        found.append(loaded.narrow(dim, first // factor, own // factor))
        begin += rows
    if loaded.shape[dim] * factor != begin:
        raise IndexError(f"{begin} rows are expected")
    param.data.copy_(torch.cat(found, dim))


def _load_number(param: torch.Tensor, loaded: torch.Tensor, loaded_shard_id: Any = None) -> None:
    """A number for one part of a layer, for several parts that are one matrix in the file, or for all (None)."""
    shards = range(len(param)) if loaded_shard_id is None else loaded_shard_id
    for shard in shards if isinstance(shards, (range, tuple)) else (shards,):
        param.data["qkv".index(shard) if isinstance(shard, str) else shard].copy_(loaded.reshape(()))


class Received:
    """A filler of a layer: parameters that a checkpoint fills, packed when the last one is full."""

    def __init__(self, scheme: Scheme, layer_name: str | None) -> None:
        """Takes the scheme of the layer's matrix, and the layer's name, for errors."""
        self.scheme, self.parts, self.layer_name = scheme, tuple(loaded_parts(scheme).values()), layer_name
        self.optional = scheme.optional
        self.packed_as: PackedAs | None = None  # once packed
        self._lacking: dict[str, int] = {}

    def add_parameters(self, layer: torch.nn.Module, share: Share) -> None:
        """Registers the tensors of the format for this rank's part, as vLLM's loaders cut them; scales as float32.

        Raises:
            ValueError: this rank's features are no whole groups or words, or not possible in the operators; the
                activation group does not fit.
        """
        sizes, self._load, self.share = share.sizes, share.load, share
        if share.parts:
            self._load = MethodType(_load_parts, layer)
        self.n, self.k = sum(sizes), share.columns
        if isinstance(layer, ParallelLMHead):
            self._load = MethodType(_load_output_layer, layer)
            sizes = [layer.shard_indices.num_org_elements]
        group = self.scheme.group_size
        problem = PackedAs(self.scheme.kind).problem(self.n, self.k, group)
        if problem:
            raise ValueError(
                f"w4a8: {self.layer_name}: {self.k} input features per rank (of {share.all_columns}): {problem}"
            )
        try:
            asked = self.scheme.wanted_activation_group(activation_group())
            self.activation_group = resolve_activation_group(asked, group, self.k)
        except ValueError as error:
            raise ValueError(f"w4a8: {self.layer_name}: {error}") from None
        self.rows, self.sizes = sum(sizes), sizes
        groups = self.scheme.groups(self.k)
        for part in self.parts:
            try:
                shapes = {rows: part.shape(rows, self.k, groups) for rows in dict.fromkeys((*sizes, self.rows))}
            except ValueError as error:
                raise ValueError(f"w4a8: {self.layer_name}: {error} per rank and part of the layer") from None
            self._register(layer, part, shapes[self.rows])
        # A layer may lack shapes and unused tensors. A shape comes once per part of a layer. Unused tensors stay when
        # the rest is packed, because they may come later.
        uncounted: dict[str, torch.nn.Parameter] = {}
        if self.scheme.states_shape:
            data = torch.zeros(2, dtype=torch.int64)
            uncounted["weight_shape"] = BasevLLMParameter(data=data, weight_loader=MethodType(load_parameter, layer))
        for suffix in self.scheme.file_format.unused:
            data = torch.zeros(len(sizes), dtype=torch.float32)
            uncounted[suffix] = PerTensorScaleParameter(data=data, weight_loader=load_nothing)
        for suffix, param in uncounted.items():
            param.weight_loader_numel = 0
            layer.register_parameter(suffix, param)
        self.dummy = is_dummy_load()
        layer.w4a8 = [Product("weight_packed", self.n, self.k, self.k if group == -1 else group)]

    def _register(self, layer: torch.nn.Module, part: Part, shape: tuple[int, ...]) -> None:
        arguments: dict[str, Any] = {"weight_loader": MethodType(load_parameter, layer)}
        if part.kind == "global_scale":
            arguments["data"] = torch.zeros(len(self.sizes), dtype=torch.float32)
            kind = PerTensorScaleParameter
        else:
            size = torch.empty((), dtype=part.dtype).element_size()
            arguments["data"] = fresh_bytes(shape[0], size * shape[1]).view(part.dtype)
            arguments["output_dim"] = part.axes.index("n")
            # One group for a row is the same on each rank, for any number of cuts.
            whole = "g" in part.axes and self.scheme.group_size == -1
            if not whole:
                arguments["input_dim"] = 1 - arguments["output_dim"]
            if part.packed is not None:
                arguments.update(packed_dim=part.packed, packed_factor=part.codes_in_an_element)
                kind = PackedColumnParameter if whole else PackedvLLMParameter
            elif part.kind == "weight":
                kind = ModelWeightParameter
            else:
                kind = ChannelQuantScaleParameter if whole else GroupQuantScaleParameter
        param = kind(**arguments)
        layer.register_parameter(part.suffix, param)
        self._lacking[part.suffix] = param.numel()
        if part.kind != "global_scale" and part.suffix in self.optional:
            param.weight_loader_numel = 0

    def load(
        self, layer: torch.nn.Module, param: torch.Tensor, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """vLLM's loader of a parameter; packs the weight after the last tensor of the first load.

        Raises:
            ValueError: a tensor has a wrong dtype or shape; names the tensor.
        """
        part = next((part for part in self.parts if getattr(layer, part.suffix, None) is param), None)
        name = f"{self.layer_name}.{'weight_shape' if part is None else part.suffix}"
        if part is not None and not part.takes(loaded_weight.dtype):
            raise ValueError(f"w4a8: {name}: dtype {loaded_weight.dtype}, but {part.dtype} is expected")
        try:
            with _CopiedValues() as copied:
                load = _load_number if part is not None and part.kind == "global_scale" else self._load
                found = load(param, loaded_weight, *args, **kwargs)
        except (AssertionError, IndexError, RuntimeError) as error:
            whole = f"[{self.n}, {self.k}] in groups of {self.scheme.group_size} ({self.scheme.format})"
            shape = tuple(loaded_weight.shape)
            raise ValueError(f"w4a8: {name}: shape {shape} is no part of a weight {whole}: {error}") from error
        if part is not None and part.suffix in self._lacking:
            self._lacking[part.suffix] -= copied.count
            if all(count <= 0 for count in self._lacking.values()):
                filled = [getattr(layer, part.suffix) for part in self.parts]
                self.finish(layer)
                for old in filled:  # the model's loader keeps these until all layers are loaded
                    old.data = torch.empty(0, dtype=old.dtype)
        return found

    def _complete_tensors(self, layer: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint.

        Raises:
            ValueError: a tensor that the format needs is not complete: the layer would run on zeros.
        """
        tensors, missing = {}, []
        for part in self.parts:
            optional = part.suffix in self.optional
            if optional and self.packed_as is not None:
                continue  # of other weights, they may come when their layer is complete
            tensor = getattr(layer, part.suffix).data
            lacking = self._lacking.get(part.suffix, 0)
            if lacking <= 0:
                tensors[part.suffix] = tensor
            elif not optional or lacking < tensor.numel():
                missing.append(f"{part.suffix}: {tensor.numel() - lacking} of {tensor.numel()} elements")
        if missing:
            raise ValueError(f"w4a8: {self.layer_name}: the checkpoint lacks weights: {', '.join(missing)}")
        if self.scheme.states_shape:
            tensors["weight_shape"] = torch.tensor([self.rows, self.k])
        return tensors

    def finish(self, layer: torch.nn.Module) -> None:
        """Packs the weight into ``layer.weight_packed``, uint8 [bytes], and frees the rest.

        vLLM calls this again after loading another weight.

        Raises:
            ValueError: a tensor is missing, or has impossible values; scales do not fit the packed form of the first
                weight.
        """
        first = getattr(layer, self.scheme.weight, None)
        if first is None or getattr(first, "w4a8_is_packed", False):
            return
        if self.dummy:
            matrices = iter([random_matrix(self.rows, self.k, self.scheme.group_size, form_of(self.scheme))])
        else:
            matrices = self._matrices(self._complete_tensors(layer))
        self._lacking, self.dummy = {}, False
        try:
            packed = self._pack(matrices)
        except (ValueError, RuntimeError) as error:  # the second: values that the operators do not have
            raise ValueError(f"w4a8: {self.layer_name}: {error}") from None
        # A parameter weight_shape stays: when other weights are loaded, the last shape comes to a complete layer.
        for part in self.parts:
            delattr(layer, part.suffix)
        replace_parameter(layer, "weight_packed", packed)
        layer.weight_packed.w4a8_is_packed = True

    def _matrices(self, tensors: dict[str, torch.Tensor]) -> Iterator[Matrix]:
        """The weight; or the matrix of each part, if parts have a global scale."""
        number = next((part for part in self.parts if part.kind == "global_scale"), None)
        if number is None:
            yield self.scheme.read(tensors, "weight")
            return
        rows = {part.suffix: tensors[part.suffix].split(self.sizes) for part in self.parts if part is not number}
        for index, factor in enumerate(tensors[number.suffix].split(1)):
            mine = {suffix: parts[index] for suffix, parts in rows.items()}
            yield self.scheme.read({**mine, number.suffix: factor}, "weight")

    def _pack(self, matrices: Iterator[Matrix]) -> torch.Tensor:
        """uint8 [bytes] of all rows; the second time in the memory, and so the form, of the first."""
        cuts = [Cut.whole(Weight.of(matrix, "weight", self.scheme.group_size)) for matrix in matrices]
        padding = self.n - self.rows  # of the vocabulary
        packed = pack_rows(cuts, self.activation_group, self.packed_as, padding)
        self.packed_as = packed.form
        return packed.bytes

    def tie(self) -> bool:
        """As vLLM."""
        return True
