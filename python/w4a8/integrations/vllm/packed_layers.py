"""Directories of packed weights in vLLM: layers that take packed matrices unchanged, and their configuration.

A layer that is whole on its rank is neither unpacked nor cut. If vLLM joins several matrices in a linear layer, their
rows are joined and packed again. The class of configurations is at module level because vLLM pickles it for its worker
processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from w4a8.checkpoint.packed_as_tensors import (
    PackedDirectory,
    PackedTensor,
    Parts,
    compressed_tensors_config,
    group_sizes,
    only_whole,
    read_directory,
    unpacked,
)
from w4a8.core.matrix import PackedAs, matrix_of, pack_as
from w4a8.core.memory import fresh_bytes
from w4a8.formats import Scheme
from w4a8.formats.packed_directory import METHOD, is_packed
from w4a8.integrations.vllm.config import joined_from
from w4a8.integrations.vllm.configs import W4A8CompressedTensorsConfig
from w4a8.integrations.vllm.floats import W4A8FloatsConfig, floats_of
from w4a8.integrations.vllm.loading import is_dummy_load, random_matrix
from w4a8.integrations.vllm.moe import W4A8MoEMethod, unsupported
from w4a8.integrations.vllm.packed import joined, joined_bytes
from w4a8.integrations.vllm.products import Product, multiply
from w4a8.ops import PackedHeader, read_header

# vLLM's names of the parts of a layer for queries, keys and values.
_SHARDS = {None: 0, "q": 0, "k": 1, "v": 2}


def load_packed(
    layer: torch.nn.Module, param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: str | int | None = None
) -> None:
    """The loader of a packed parameter, bound to its layer: see ``load_expert``."""
    layer.w4a8_packed.load(layer, param, loaded_weight, shard_id)


class _TakesPacked:
    """A method of a layer whose parameters are filled with packed tensors (``load``), or with random ones (``fill``).

    When vLLM loads other weights it calls ``load`` twice, first with a ``param`` on "meta" to count copied values.
    """

    layer_name: str

    def start(self, layer: torch.nn.Module, names: Sequence[str], shapes: dict[str, tuple[int, ...]]) -> None:
        """Registers parameters, uint8, which take memory when filled; the layer takes the modules ``names``.

        Args:
            layer: vLLM's.
            names: of modules in the files.
            shapes: of the parameters, by their names.
        """
        layer.w4a8_packed, layer.w4a8_names = self, list(names)
        self.missing, self.dummy = set(shapes), is_dummy_load()
        for name, shape in shapes.items():
            param = torch.nn.Parameter(fresh_bytes(*shape, packed=True), requires_grad=False)
            param.weight_loader = MethodType(load_packed, layer)
            layer.register_parameter(name, param)

    def expect(self, what: str, found: Any, expected: Any) -> None:
        """Raises ValueError if ``found`` differs from ``expected``."""
        if found != expected:
            raise ValueError(f"w4a8: {self.layer_name}: {what} is {found}, expected {expected}")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raises ValueError if the checkpoint lacked something."""
        if self.dummy:
            self.fill(layer)
            self.missing, self.dummy = set(), False
        if self.missing:
            missing = ", ".join(sorted(self.missing))
            raise ValueError(f"w4a8: {self.layer_name}: the checkpoint lacks weights: {missing}")


def _random(header: PackedHeader) -> torch.Tensor:
    """A packed matrix with a header."""
    form = PackedAs.of_header(header)
    matrix = random_matrix(header["n"], header["k"], header["group"], form, header["has_bias"])
    return pack_as(matrix.tensors(), header["group"], form)


class W4A8PackedLinearMethod(_TakesPacked, LinearMethodBase):
    """The method of a linear layer."""

    def __init__(self, layer_name: str, parts: Sequence[tuple[str, PackedTensor]]) -> None:
        """Takes the packed matrices of a layer, with their names in the files, in the order of their rows in the layer.

        Raises:
            ValueError: the matrices are of several kinds.
        """
        self.layer_name, self.names = layer_name, [name for name, _ in parts]
        self.headers = [stored.header for _, stored in parts]
        fields = ("values", "k", "group", "activation_group", "has_minimums")
        kinds = set()
        for _, stored in parts:
            form = stored.packed_as
            kinds.add((*(stored.header[field] for field in fields), form.channel_scales, form.super_scales))
        if len(kinds) > 1:
            names = "(values, in_features, group, activation_group, minimums, scales of two levels, super-scales)"
            raise ValueError(f"w4a8: {layer_name}: {names} of its parts are {sorted(kinds)}")
        _, self.k, self.group, *_ = next(iter(kinds))
        self.has_bias = any(header["has_bias"] for header in self.headers)
        self._came: dict[int, torch.Tensor] = {}

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *_: Any,
        **__: Any,
    ) -> None:
        """Registers ``weight_packed``, uint8 [bytes].

        Raises:
            ValueError: the matrices do not fit the layer.
        """
        if isinstance(layer, ParallelLMHead):
            output_partition_sizes = [layer.shard_indices.num_org_elements]  # without padding
        self.n = sum(output_partition_sizes)
        layer.w4a8 = [Product("weight_packed", self.n, self.k, self.group, self.has_bias)]
        self.start(layer, self.names, {"weight_packed": (joined_bytes(self.headers),)})
        found, expected = [header["n"] for header in self.headers], [output_partition_sizes, input_size_per_partition]
        self.expect("[out_features, in_features]", [found, self.k], expected)

    def load(self, layer: torch.nn.Module, param: torch.Tensor, tensor: torch.Tensor, shard: str | int | None) -> None:
        """Keeps the tensor until the others have come."""
        index = shard if isinstance(shard, int) else _SHARDS[shard]
        self.expect(f"header of {self.names[index]}", read_header(tensor), self.headers[index])
        self._came[index] = tensor
        if len(self._came) < len(self.headers):
            return
        tensors = [self._came[index] for index in range(len(self.headers))]
        self._came.clear()
        self.missing.clear()
        if param.is_meta:
            torch.empty_like(param).copy_(param)
        elif len(tensors) == 1:
            param.data.copy_(tensors[0])
        else:
            param.data.copy_(joined(map(matrix_of, tensors, self.names), self.headers))

    def fill(self, layer: torch.nn.Module) -> None:
        """Fills the layer without a checkpoint."""
        for index, header in enumerate(self.headers):
            self.load(layer, layer.weight_packed, _random(header), index)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] to [..., N] of its type. With a packed bias vLLM's own parameter is not loaded."""
        return multiply(layer, x, bias)


class W4A8PackedMoEMethod(_TakesPacked, W4A8MoEMethod):
    """Of a layer of experts."""

    def __init__(self, layer: torch.nn.Module, layer_name: str, name: str, parts: Parts) -> None:
        """For vLLM's RoutedExperts with whole experts on a rank: ``w13_packed`` and ``w2_packed`` of ``name``."""
        self.name, groups = name, group_sizes(parts)
        super().__init__(Scheme("packed", min(groups.values()), True), layer, layer_name)
        self.stored = {f"{stack}_weight_packed": parts[f"{stack}_packed"] for stack in ("w13", "w2")}
        self.sizes = replace(self.sizes, group_size=groups["w13_packed"], w2_group_size=groups["w2_packed"])

    def register(self, layer: torch.nn.Module, params_dtype: torch.dtype) -> None:
        """Registers ``w13_weight_packed`` and ``w2_weight_packed``, uint8 [experts of this rank, bytes].

        Raises:
            ValueError: the matrices do not fit the layer.
        """
        self.start(layer, [self.name], {key: (self.sizes.experts, part.shape[1]) for key, part in self.stored.items()})
        self.list_products(layer)
        for stack, rows, columns in self.sizes.stacks:
            stored = self.stored[f"{stack}_weight_packed"]
            found = [stored.shape[0], stored.header["n"], stored.header["k"], stored.header["has_bias"]]
            expected = [self.moe.num_experts, rows, columns, self.moe.has_bias]
            self.expect(f"[experts, out_features, in_features, bias] of {stack}", found, expected)

    def load(self, layer: torch.nn.Module, param: torch.Tensor, tensor: torch.Tensor, shard: str | int | None) -> None:
        """Takes the experts of this rank from a stack of all."""
        name = next(name for name in self.stored if getattr(layer, name) is param)
        self.missing.discard(name)
        if param.is_meta:
            torch.empty_like(param).copy_(param)
            return
        for expert, matrix in enumerate(tensor):
            local = layer._map_global_expert_id_to_local_expert_id(expert)
            if local != -1:
                self.expect(f"header of expert {expert} in {name}", read_header(matrix), self.stored[name].header)
                param.data[local].copy_(matrix)

    def fill(self, layer: torch.nn.Module) -> None:
        """Fills each expert of this rank."""
        for name, stored in self.stored.items():
            for matrix in getattr(layer, name).data:
                matrix.copy_(_random(stored.header))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raises ValueError if the checkpoint lacked something."""
        super().process_weights_after_loading(layer)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)


def read_packed(
    tensors: Iterable[tuple[str, torch.Tensor]],
    model: torch.nn.Module,
    directory: PackedDirectory,
    model_type: str | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a packed directory in the form of a model's ``load_weights``.

    Experts go to their layers from here: models know only tensors of single experts, by each model's names. Matrices
    that no layer takes packed are :func:`unpacked`.

    Args:
        tensors: names and tensors.
        model: of vLLM.
        directory: of the tensors, with ``model_type`` in its config.json.
    """
    layers = {name: module for module in model.modules() for name in getattr(module, "w4a8_names", ())}
    for key, tensor in tensors:
        module, _, leaf = key.rpartition(".")
        parts = directory.packed.get(module, {})
        if leaf not in parts:
            yield key, tensor
        elif module not in layers:
            if only_whole(parts, model_type) is None:  # otherwise its layer is on another rank
                yield from unpacked([(key, tensor)], directory.symmetric)
        elif leaf == "packed":
            yield f"{module}.weight_packed", tensor
        else:
            param = getattr(layers[module], leaf.replace("_packed", "_weight_packed"))
            param.weight_loader(param, tensor)


class W4A8PackedConfig(W4A8CompressedTensorsConfig):
    """Layers that are whole on a rank take packed matrices; to others this is a compressed-tensors checkpoint."""

    packed_config: dict[str, Any]
    model_type: str | None
    modules: dict[str, tuple[str, Parts]]  # by vLLM's name: the name in the files

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> W4A8PackedConfig:
        """Takes the quantization_config of the directory; the files have the details."""
        made = cls(target_scheme_map={}, ignore=[], quant_format="pack-quantized", config=config)
        made.packed_config, made.model_type, made.modules = dict(config), None, {}
        return made

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Reads the headers of the files (upstream's contract).

        Raises:
            ValueError: ``model_name`` is no local directory of packed weights that this can read.
        """
        self.model_type = getattr(hf_config, "model_type", None)
        directory = read_directory(model_name, self.packed_config)
        found = W4A8CompressedTensorsConfig.from_config(compressed_tensors_config(directory, self.model_type))
        self.target_scheme_map, self.ignore = found.target_scheme_map, found.ignore
        self.modules = {name: (name, parts) for name, parts in directory.packed.items()}

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Renames modules to vLLM's names (upstream's contract)."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        self.modules = hf_to_vllm_mapper.apply_dict(self.modules)

    def method_of(self, layer: torch.nn.Module, prefix: str) -> Any:
        """As :meth:`RunsLayersHere.method_of`.

        Raises:
            ValueError: a layer with weights that cannot be cut is cut among ranks, or cannot be run.
        """
        experts = isinstance(layer, RoutedExperts)
        names = [prefix] if experts else joined_from(prefix, self.packed_modules_mapping)
        parts = [self.modules[name] for name in names if name in self.modules]
        if len(parts) == len(names):
            ranks = layer.moe_config.moe_parallel_config.tp_size if experts else get_tensor_model_parallel_world_size()
            problem = unsupported(layer.moe_config) if experts else None
            problem = problem if ranks == 1 else f"layers cut among {ranks} ranks"
            if problem is None and experts:
                return W4A8PackedMoEMethod(layer, prefix, *parts[0])
            if problem is None:
                return W4A8PackedLinearMethod(prefix, [(name, stored["packed"]) for name, stored in parts])
            reason = next(filter(None, (only_whole(stored, self.model_type) for _, stored in parts)), None)
            if reason is not None:
                raise ValueError(f"w4a8: {prefix}: a packed directory with {reason} cannot be served with {problem}")
        return super().method_of(layer, prefix)

    def _scheme(self, found: dict | None, name: str | None) -> Scheme | None:
        """The scheme as for compressed-tensors, with the activation group of the headers."""
        scheme = super()._scheme(found, name)
        names = [name] if name in self.modules else joined_from(name or "", self.packed_modules_mapping)
        parts = [part for each in names if each in self.modules for part in self.modules[each][1].values()]
        groups = {part.header["activation_group"] for part in parts}
        if scheme is None or not groups:
            return scheme
        if len(groups) > 1:
            raise ValueError(
                f"w4a8: {name}: a packed directory whose matrices of a layer have several activation groups "
                f"({', '.join(map(str, sorted(groups)))}) cannot be served with layers that are cut"
            )
        return replace(scheme, activation_group=groups.pop())


class W4A8MethodConfig(W4A8FloatsConfig):
    """The method ``w4a8``: named in the config.json of packed directories; for floats the user names it."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """From a quantization_config: packed, or for floats."""
        return W4A8PackedConfig.from_config(config) if is_packed(config) else cls()


def _source_of(hf_config: Any) -> Any:
    """The quantization_config that vLLM reads, or None."""
    owners = ((hf_config, "quantization_config"), (getattr(hf_config, "text_config", None), "quantization_config"))
    found = (getattr(owner, name, None) for owner, name in (*owners, (hf_config, "compression_config")))
    return next((each for each in found if each is not None), None)


def register() -> None:
    """Once per process. vLLM cannot register formats of files, only loaders that users would have to name."""
    get_all_weights = DefaultModelLoader.get_all_weights

    @wraps(get_all_weights)
    def wrapped(self: Any, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        weights = get_all_weights(self, model_config, model)
        if model_config.quantization != METHOD:
            return weights
        config = model_config.hf_config
        source = _source_of(config)
        if not is_packed(source):
            return weights if source is None else floats_of(weights, source)
        directory = read_directory(model_config.model, config.quantization_config)
        return read_packed(weights, model, directory, config.model_type)

    register_quantization_config(METHOD)(W4A8MethodConfig)
    DefaultModelLoader.get_all_weights = wrapped
