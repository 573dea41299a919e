"""Directories of packed weights in vLLM: their configuration, and the tensors that layers do not read themselves.

The class of configurations is at module level because vLLM pickles it for its worker processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache, wraps
from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import is_pp_missing_parameter
from vllm.utils.torch_utils import set_default_torch_dtype

from w4a8.checkpoint.packed_source import PackedSource, open_packed
from w4a8.core.memory import on_cpu
from w4a8.core.pages import Pages
from w4a8.core.threads import call_each
from w4a8.core.weight import ExpertWeights, Floats, Weight
from w4a8.formats.packed_directory import EMBEDDINGS, METHOD, is_packed
from w4a8.integrations.vllm.embeddings import pack_embeddings
from w4a8.integrations.vllm.floats import W4A8FloatsConfig, floats_of
from w4a8.integrations.vllm.pulled import PulledConfig, name_in_vllm, pulled_layers

ROWS_AT_ONCE = 1 << 12  # of embeddings
_MOVED = ("llama4_text", "bloom")  # types of models of whose queries, keys and values vLLM's loading moves the rows


@lru_cache(maxsize=1)
def _opened(directory: str, stated: str) -> PackedSource:
    """A directory, opened once in a process."""
    return open_packed(directory, json.loads(stated))


class W4A8PackedConfig(PulledConfig):
    """Packed linear layers and experts run as they are."""

    says = "packed directory"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> W4A8PackedConfig:
        """Takes the quantization_config of the directory; the files have the details."""
        made = cls()
        made.matrices, made.experts = {}, {}
        made.stated = json.dumps({key: config.get(key) for key in ("quant_method", "format", "version", "packed")})
        return made

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Reads the headers of the files (upstream's contract).

        Raises:
            ValueError: ``model_name`` is no local directory of packed weights that this can read, or has weights that
                vLLM would change.
        """
        text = getattr(hf_config, "text_config", None) or hf_config
        kind = getattr(text, "model_type", None)
        if kind in _MOVED:
            raise ValueError(f"w4a8: {model_name}: packed weights of {kind}, whose rows vLLM moves when it loads them")
        _opened.cache_clear()
        self.path, source = model_name, _opened(model_name, self.stated)
        self.keys_are_values = getattr(text, "attention_k_eq_v", False)
        for key in source.keys:
            if key.endswith(".weight"):
                self.matrices[key.removesuffix(".weight")] = (key,)
        for module, parts in source.packed.items():
            if "w13_packed" in parts:
                self.experts[module] = module
            else:
                self.matrices[module] = (f"{module}.{next(iter(parts))}",)

    @property
    def embeddings(self) -> str | None:
        """The embeddings that are packed."""
        found = (name for name, [key] in self.matrices.items() if key.rpartition(".")[2] in EMBEDDINGS)
        return next(found, None)

    def weight(self, name: str) -> Weight | Floats:
        """A matrix, by the name of its tensor."""
        return _opened(self.path, self.stated).matrix(name)

    def expert_weights(self, name: str) -> ExpertWeights:
        """The experts of a module."""
        return _opened(self.path, self.stated).experts(name)

    def is_float(self, name: str) -> bool:
        """Whether a tensor is not packed."""
        return name.endswith(".weight")


class W4A8MethodConfig(W4A8FloatsConfig):
    """The method ``w4a8``: named in the config.json of packed directories; for floats the user names it."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """From a quantization_config: packed, or for floats."""
        return W4A8PackedConfig.from_config(config) if is_packed(config) else cls()


def embeddings_of(model: torch.nn.Module, source: PackedSource) -> Iterator[tuple[str, Weight]]:
    """Packed embeddings, by their names in vLLM's model."""
    for module, parts in source.packed.items():
        for leaf in parts.keys() & EMBEDDINGS.keys():
            yield name_in_vllm(model, f"{module}.weight").removesuffix(".weight"), source.weight(module, leaf)


def fill(model: torch.nn.Module, source: PackedSource) -> set[str]:
    """Lets the layers of a model read their weights; the names of tensors that nothing else needs."""
    layers, pages = pulled_layers(model), Pages(source.files)

    def read(layer: torch.nn.Module) -> None:
        param = getattr(layer, layer.w4a8[0].parameter)
        param.weight_loader(param, layer.w4a8_filler.again(lambda weight: source.matrix(weight.name)))
        pages.release(map(source.tensor, layer.w4a8_filler.names))

    # Loading other weights, vLLM has put the parameters on "meta", and keeps books that are not for several threads.
    again = [layer for layer in layers if getattr(layer, layer.w4a8[0].parameter).is_meta]
    call_each(read, [layer for layer in layers if layer not in again])
    for layer in again:
        read(layer)
    return {name for layer in layers for name in layer.w4a8_filler.names}


def read_packed(
    tensors: Iterable[tuple[str, torch.Tensor]], model: torch.nn.Module, source: PackedSource, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a packed directory that no layer reads itself, in the form of a model's ``load_weights``.

    Packed matrices among them become floats: embeddings by whose weight vLLM multiplies, and layers that vLLM makes
    without asking for a method.

    Args:
        tensors: names and tensors.
        model: of vLLM, whose layers read their weights first.
        source: the directory.
        dtype: of the model.
    """
    with on_cpu(), set_default_torch_dtype(torch.float32):
        taken = fill(model, source)
    for key, tensor in tensors:
        module, _, leaf = key.rpartition(".")
        if leaf not in source.packed.get(module, {}):
            if key not in taken:
                yield key, tensor
        elif tensor.dim() == 1 and key not in taken:
            if is_pp_missing_parameter(name_in_vllm(model, key), model):
                continue
            weight = source.weight(module, leaf)
            values, bias = torch.empty(weight.rows, weight.columns, dtype=dtype), None
            for row, matrix in weight.read(0, weight.rows):
                bias = matrix.bias
                for begin in range(0, matrix.rows, ROWS_AT_ONCE):
                    part = matrix.with_rows(slice(begin, begin + ROWS_AT_ONCE))
                    values[row + begin :][: part.rows] = part.floats()
            yield f"{module}.weight", values
            if bias is not None:
                yield f"{module}.bias", bias


def _source_of(hf_config: Any) -> Any:
    """The quantization_config that vLLM reads, or None."""
    owners = ((hf_config, "quantization_config"), (getattr(hf_config, "text_config", None), "quantization_config"))
    found = (getattr(owner, name, None) for owner, name in (*owners, (hf_config, "compression_config")))
    return next((each for each in found if each is not None), None)


def register_packed_directories() -> None:
    """Once per process. vLLM cannot register formats of files, only loaders that users would have to name."""
    get_all_weights = DefaultModelLoader.get_all_weights

    @wraps(get_all_weights)
    def wrapped(self: Any, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        weights = get_all_weights(self, model_config, model)
        if model_config.quantization != METHOD:
            return weights
        stated = _source_of(model_config.hf_config)
        if not is_packed(stated):
            return weights if stated is None else floats_of(weights, stated)
        # The directory may be another one than that of the configuration (reload_weights).
        where, is_tied = model_config.model, getattr(model_config.hf_text_config, "tie_word_embeddings", False)
        source = open_packed(where, stated)
        pack_embeddings(model, embeddings_of(model, source), where, is_tied)
        return read_packed(weights, model, source, model_config.dtype)

    register_quantization_config(METHOD)(W4A8MethodConfig)
    DefaultModelLoader.get_all_weights = wrapped
