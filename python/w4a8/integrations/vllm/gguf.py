"""GGUF files in vLLM: how a path becomes a model, which layers read blocks from the file, and the loader.

vLLM reads a config before any registered code runs, and a GGUF file has no config. So the arguments of an engine get a
folder made from the file (gguf_folder.py) instead. The class of configurations is at module level because vLLM pickles
it for its worker processes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.utils import is_pp_missing_parameter
from vllm.utils.torch_utils import set_default_torch_dtype

from w4a8.checkpoint.gguf_file import gguf_in
from w4a8.checkpoint.gguf_linear import GGUFLinears
from w4a8.core.json_fields import read_json
from w4a8.core.memory import on_cpu
from w4a8.core.threads import call_each
from w4a8.core.weight import ExpertWeights, Floats, Weight
from w4a8.integrations.expectations import missing, more_to_implement
from w4a8.integrations.vllm.embeddings import give_method, pack_embeddings
from w4a8.integrations.vllm.gguf_folder import (
    NAME,
    SAYS,
    config_of_file,
    experts_of,
    folder_of,
    linears_of,
    sources_of_file,
)
from w4a8.integrations.vllm.linear_layers import W4A8LinearMethod
from w4a8.integrations.vllm.products import products_of
from w4a8.integrations.vllm.pulled import FromFiles, Pulled, PulledConfig, name_in_vllm, pulled_layers
from w4a8.integrations.vllm.settings import read_arguments, say_int8

FLOATS_AT_ONCE = 1 << 22
_AND = ", "  # between the names of tensors whose rows alternate in one matrix, as in the name of a weight
# Names that users may give: the second is registered by a plugin for GPUs.
_MAY_BE = {"quantization": (None, "gguf"), "load_format": ("auto", "gguf"), "config_format": ("auto", "hf", "gguf")}
_OTHERS = ("tokenizer", "skip_tokenizer_init", "served_model_name", "mamba_ssm_cache_dtype", "speculative_config")
_ARGUMENTS = ("model", *_OTHERS, *_MAY_BE)


def take_file(arguments: Any) -> None:
    """Replaces a GGUF file as the model of vLLM's EngineArgs by its folder.

    Raises:
        ValueError: the file cannot be run, has an argument that GGUF files cannot have, or lacks a head for guesses.
    """
    path = gguf_in(arguments.model)
    if path is None:
        return
    for name, allowed in _MAY_BE.items():
        given = getattr(arguments, name)
        if given not in allowed:
            expected = " or ".join(str(each) for each in allowed)
            raise ValueError(f"w4a8: {name} is {given!r}, but for a GGUF file {expected} is expected")
    guesses = arguments.speculative_config or {}
    if "model" not in guesses and str(guesses.get("method")).endswith("mtp") and not linears_of(str(path)).heads:
        raise ValueError(f"w4a8: {path} has no head that is read here, but speculative_config is {guesses}")
    model = arguments.model
    if arguments.tokenizer == model:
        arguments.tokenizer = None
    wants_tokenizer = arguments.tokenizer is None and not arguments.skip_tokenizer_init
    arguments.model = str(folder_of(path, Path(envs.VLLM_CACHE_ROOT) / NAME, wants_tokenizer))
    arguments.quantization = arguments.load_format = NAME
    arguments.config_format = "auto"
    if arguments.served_model_name is None:
        arguments.served_model_name = model
    if arguments.mamba_ssm_cache_dtype == "auto":  # the model's type, where a config does not say
        arguments.mamba_ssm_cache_dtype = "float32"  # as in llama.cpp


class W4A8GGUFConfig(PulledConfig):
    """Packs linear layers and experts in blocks unchanged."""

    says = "GGUF file"

    def __init__(self, path: str) -> None:
        """Of a file.

        Raises:
            ValueError: the file cannot be run.
        """
        super().__init__()
        self.path, linears, self.matrices = path, linears_of(path), {}
        sources = sources_of_file(path)
        for source in chain(*(found.values() for found in sources)):
            shapes = [linears.file.tensors[name].shape for name in source.tensors]
            is_matrix = source.checkpoint.endswith(".weight") and all(len(shape) == 2 for shape in shapes)
            if is_matrix and not source.of_experts:
                is_one = linears.joined_order(source.tensors) is not None
                names = (_AND.join(source.tensors),) if is_one else source.tensors
                self.matrices[source.checkpoint.removesuffix(".weight")] = names
        self.keys_are_values = getattr(config_of_file(path), "attention_k_eq_v", False)
        # vLLM's models use either the name in checkpoints or transformers'.
        self.experts = {name: name for name in experts_of(path)}
        for parameter, source in chain(*(found.items() for found in sources)):
            if source.of_experts:
                self.experts[parameter.rpartition(".")[0]] = source.checkpoint

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> W4A8GGUFConfig:
        """Takes the settings of the folder."""
        return cls(config["file"])

    @staticmethod
    def get_config_filenames() -> list[str]:
        """The file with these settings, if the config is another one."""
        return [SAYS]

    def get_name(self) -> str:
        """As upstream's."""
        return NAME

    def weight(self, name: str) -> Weight | Floats:
        """A tensor of two dimensions."""
        linears = linears_of(self.path)
        if linears.architecture.model == "Llama4":  # vLLM turns rows of q and k of the tensors that it loads
            linears = copy.copy(linears)
            linears.architecture = replace(linears.architecture, turned=True)
        return weight_of(linears, name)

    def expert_weights(self, name: str) -> ExpertWeights:
        """The experts of a layer."""
        return experts_of(self.path)[name]

    def is_float(self, name: str) -> bool:
        """Whether a tensor is not in blocks; of several, whether one is not."""
        return any(map(linears_of(self.path).file.is_float, name.split(_AND)))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """As above; says what becomes of activations."""
        method = super().get_quant_method(layer, prefix)
        if isinstance(getattr(method, "filler", None), FromFiles):
            say_int8("GGUF")
        return method


def weight_of(linears: GGUFLinears, name: str) -> Weight | Floats:
    """A tensor of two dimensions, or several whose rows are those of one matrix, as a weight."""
    names = name.split(_AND)
    is_float = len(names) == 1 and linears.file.is_float(name)
    return linears.floats(name) if is_float else linears.weight(names)


class W4A8GGUFLoader(BaseModelLoader):
    """Reads a file tensor by tensor."""

    def download_model(self, model_config: Any) -> None:
        """Nothing: the file is local."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fills a model (upstream's contract).

        Raises:
            ValueError: a weight is missing, or cannot be packed; names the weight.
        """
        path = read_json(Path(model_config.model) / SAYS)["file"]
        with on_cpu(), set_default_torch_dtype(torch.float32):
            is_tied = getattr(model_config.hf_text_config, "tie_word_embeddings", False)
            is_head = model_config.runner_type == "draft"
            _Filled(model, linears_of(path), model_config.dtype, is_head).fill(is_tied)


class _Filled:
    """A model that is being filled, or its heads for further tokens, which vLLM loads as a model."""

    def __init__(self, model: torch.nn.Module, linears: GGUFLinears, dtype: torch.dtype, is_head: bool = False) -> None:
        self.model, self.linears = model, linears
        self.dtype = torch.float32 if is_head else dtype  # of parameters that vLLM renames when it loads them
        self.file = linears.file
        sources, heads = sources_of_file(str(linears.file.paths[0]))
        if is_head:  # beside the embeddings and the output layer of the model
            ends = ("embed_tokens.weight", "lm_head.weight")
            sources = {name: source for name, source in sources.items() if name.endswith(ends)} | heads
        self.sources = [(source, name_in_vllm(model, source.checkpoint)) for source in sources.values()]
        self.here = dict(model.named_modules())

    def fill(self, is_tied: bool) -> None:
        """As :meth:`W4A8GGUFLoader.load_weights`; ``is_tied`` as of :func:`pack_embeddings`."""
        self._pack_output_layer()
        pack_embeddings(self.model, self._embeddings(), str(self.file.paths[0]), is_tied)
        self.params = dict(self.model.named_parameters())
        params = {id(param): name for name, param in self.params.items()}
        packed = pulled_layers(self.model)
        mine = {params.pop(id(param), None) for module in packed for param in module.parameters(recurse=False)}
        call_each(lambda module: module.w4a8_filler.load(module), packed)
        embeddings = self._fill_embeddings()
        mine |= {params[id(param)] for _, param in embeddings}
        taken = {each for module in packed for name in module.w4a8_filler.names for each in name.split(_AND)}
        taken |= {f"{name.removesuffix('.weight')}.bias" for name in taken}
        came = self.model.load_weights(self._others(taken.union(name for name, _ in embeddings)))
        lacking = sorted(set(params.values()) - mine - set(came))
        if lacking:
            raise ValueError(f"w4a8: {self.file.paths[0]} holds no tensor for {', '.join(lacking[:3])}")

    def _pack_output_layer(self) -> None:
        """Packs the output layer of models that vLLM makes without asking for its method (gpt-oss)."""
        for source, mapped in self.sources:
            layer, name = self.here.get(mapped.removesuffix(".weight")), source.tensors[0]
            if type(layer) is not ParallelLMHead or hasattr(layer, "w4a8_filler") or self.file.is_float(name):
                continue
            filler = Pulled(layer.prefix, str(self.file.paths[0]), [weight_of(self.linears, name)])
            give_method(layer, W4A8LinearMethod(filler))

    def _embeddings(self) -> Iterator[tuple[str, Weight]]:
        """Embeddings in blocks, by their names in vLLM."""
        for source, mapped in self.sources:
            layer, name = mapped.removesuffix(".weight"), source.tensors[0]
            if type(self.here.get(layer)) is VocabParallelEmbedding and not self.file.is_float(name):
                yield layer, self.linears.weight([name])

    def _fill_embeddings(self) -> list[tuple[str, torch.Tensor]]:
        """Fills float embeddings from blocks, some rows at a time: returns tensors, and the parameters they fill."""
        found = []
        for mapped, weight in self._embeddings():
            layer, name = self.here[mapped], weight.name
            if products_of(layer):
                continue
            shape, expected = self.file.tensors[name].shape, (layer.org_vocab_size, layer.embedding_dim)
            if shape != expected:
                raise ValueError(
                    f"w4a8: tensor {name!r} of {self.file.paths[0]} has shape {shape}, but {expected} is expected"
                )
            begin, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
            step = max(1, FLOATS_AT_ONCE // shape[1])
            for row in range(begin, end, step):
                rows = self.file.floats(name, row, min(row + step, end))
                layer.weight.data[row - begin : row - begin + len(rows)].copy_(rows)
            layer.weight.data[end - begin :].zero_()
            found.append((name, layer.weight))
        return found

    def _others(self, taken: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are left, in the form of the model's ``load_weights``."""
        for source, mapped in self.sources:
            if taken.issuperset(source.tensors) or source.of_experts or is_pp_missing_parameter(mapped, self.model):
                continue
            dtype = self.params[mapped].dtype if mapped in self.params else self.dtype
            yield source.checkpoint, self.linears.parameter(source.tensors, source.shape, mapped, dtype).to(dtype)


def register_gguf() -> None:
    """Once per process.

    The name is not ``gguf``: vllm-gguf-plugin has that name, and may be loaded before or after this plugin.

    Raises:
        RuntimeError: vLLM is not as this expects it.
    """
    found = [
        *missing("EngineArgs", _ARGUMENTS, [field.name for field in fields(EngineArgs)]),
        *missing("vllm.envs", ("VLLM_CACHE_ROOT",), dir(envs)),
        *more_to_implement(BaseModelLoader, ("download_model", "load_weights")),
    ]
    if found:
        raise RuntimeError("; ".join(found))
    read_arguments(take_file)  # first: it may refuse
    register_quantization_config(NAME)(W4A8GGUFConfig)
    register_model_loader(NAME)(W4A8GGUFLoader)
