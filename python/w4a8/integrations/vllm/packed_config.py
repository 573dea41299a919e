"""Lets vLLM read directories of packed weights: their configuration, and their tensors as they are read.

The class is at module level because vLLM pickles it for its worker processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from w4a8.formats import Scheme
from w4a8.formats.packed_directory import METHOD, Parts
from w4a8.integrations.vllm.config import W4A8CompressedTensorsConfig
from w4a8.integrations.vllm.moe import unsupported
from w4a8.integrations.vllm.names import joined_from
from w4a8.integrations.vllm.packed import compressed_tensors_config, only_whole, read_directory
from w4a8.integrations.vllm.packed_layers import W4A8PackedLinearMethod, W4A8PackedMoEMethod, read_packed


class W4A8PackedConfig(W4A8CompressedTensorsConfig):
    """Layers that are whole on a rank take what is packed; to others this is a compressed-tensors checkpoint."""

    packed_config: dict[str, Any]
    model_type: str | None
    modules: dict[str, tuple[str, Parts]]  # by vLLM's name: the name in the files

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> W4A8PackedConfig:
        """Takes the quantization_config of the directory; what is packed, and how, is in the files."""
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
        """Gives modules the names that vLLM has for them (upstream's contract)."""
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        self.modules = hf_to_vllm_mapper.apply_dict(self.modules)

    def method_of(self, layer: torch.nn.Module, prefix: str) -> Any:
        """As :meth:`RunsLayersHere.method_of`.

        Raises:
            ValueError: a layer whose weights can only be taken whole, which is cut among ranks or none that can be run.
        """
        experts = isinstance(layer, RoutedExperts)
        names = [prefix] if experts else joined_from(prefix, self.packed_modules_mapping)
        parts = [self.modules[name] for name in names if name in self.modules]
        if len(parts) == len(names):
            problem = self._not_whole(layer, experts)
            if problem is None and experts:
                return W4A8PackedMoEMethod(layer, prefix, *parts[0])
            if problem is None:
                return W4A8PackedLinearMethod(prefix, [(name, stored["packed"]) for name, stored in parts])
            reason = next(filter(None, (only_whole(stored, self.model_type) for _, stored in parts)), None)
            if reason is not None:
                raise ValueError(f"w4a8: {prefix}: a packed directory with {reason} cannot be served with {problem}")
        return super().method_of(layer, prefix)

    def _stored(self, found: dict | None, name: str | None) -> Scheme | None:
        """As that of a compressed-tensors checkpoint, with the activation group that the headers say."""
        stored = super()._stored(found, name)
        names = [name] if name in self.modules else joined_from(name or "", self.packed_modules_mapping)
        parts = [part for each in names if each in self.modules for part in self.modules[each][1].values()]
        groups = {part.header["activation_group"] for part in parts}
        if stored is None or not groups:
            return stored
        if len(groups) > 1:
            raise ValueError(
                f"w4a8: {name}: a packed directory whose matrices of a layer have several activation groups "
                f"({', '.join(map(str, sorted(groups)))}) cannot be served with layers that are cut"
            )
        return replace(stored, activation_group=groups.pop())

    def _not_whole(self, layer: torch.nn.Module, experts: bool) -> str | None:
        """Why packed matrices cannot be taken as they are, or None."""
        ranks = layer.moe_config.moe_parallel_config.tp_size if experts else get_tensor_model_parallel_world_size()
        if ranks != 1:
            return f"layers cut among {ranks} ranks"
        return unsupported(layer.moe_config) if experts else None


def _read_packed(get_all_weights: Any) -> Any:
    @wraps(get_all_weights)
    def wrapped(self: Any, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        weights = get_all_weights(self, model_config, model)
        if model_config.quantization != METHOD:
            return weights
        config = model_config.hf_config
        directory = read_directory(model_config.model, config.quantization_config)
        return read_packed(weights, model, directory, config.model_type)

    return wrapped


def register() -> None:
    """Once per process. vLLM has no place to register a form of files, only loaders that users would have to name."""
    get_all_weights = _read_packed(DefaultModelLoader.get_all_weights)
    register_quantization_config(METHOD)(W4A8PackedConfig)
    DefaultModelLoader.get_all_weights = get_all_weights
