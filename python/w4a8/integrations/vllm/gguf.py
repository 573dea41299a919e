"""GGUF files in vLLM: how a path becomes a model, which layers read blocks from the file, and the loader.

vLLM reads a config before any registered code runs, and a GGUF file has no config. So the arguments of an engine get a
folder made from the file (gguf_folder.py) instead. The class of configurations is at module level because vLLM pickles
it for its worker processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.utils import is_pp_missing_parameter
from vllm.utils.torch_utils import set_default_torch_dtype

from w4a8.checkpoint.gguf_file import gguf_in
from w4a8.checkpoint.gguf_linear import GGUFLinears
from w4a8.checkpoint.gguf_names import Source
from w4a8.core.json_fields import read_json
from w4a8.core.memory import on_cpu
from w4a8.core.threads import call_each
from w4a8.core.weight import Floats, Weight
from w4a8.integrations.selftest import missing, more_to_implement
from w4a8.integrations.vllm.config import joined_from
from w4a8.integrations.vllm.gguf_folder import (
    NAME,
    SAYS,
    config_of_file,
    experts_of,
    folder_of,
    linears_of,
    sources_of_file,
)
from w4a8.integrations.vllm.linear_layers import W4A8LinearMethod, lm_head_method
from w4a8.integrations.vllm.moe import unsupported
from w4a8.integrations.vllm.products import products_of
from w4a8.integrations.vllm.pulled import Pulled, PulledMoEMethod
from w4a8.integrations.vllm.settings import lm_head_is_set, read_arguments, say_int8

FLOATS_AT_ONCE = 1 << 22
# Names that users may give: the second is registered by a plugin for GPUs.
_MAY_BE = {"quantization": (None, "gguf"), "load_format": ("auto", "gguf"), "config_format": ("auto", "hf", "gguf")}
_ARGUMENTS = ("model", "tokenizer", "skip_tokenizer_init", "served_model_name", *_MAY_BE)


def take_file(arguments: Any) -> None:
    """Replaces a GGUF file as the model of vLLM's EngineArgs by its folder.

    Raises:
        ValueError: the file cannot be run, or has an argument that GGUF files cannot have.
    """
    path = gguf_in(arguments.model)
    if path is None:
        return
    for name, allowed in _MAY_BE.items():
        given = getattr(arguments, name)
        if given not in allowed:
            expected = " or ".join(str(each) for each in allowed)
            raise ValueError(f"w4a8: {name} is {given!r}, but for a GGUF file {expected} is expected")
    model = arguments.model
    if arguments.tokenizer == model:
        arguments.tokenizer = None
    wants_tokenizer = arguments.tokenizer is None and not arguments.skip_tokenizer_init
    arguments.model = str(folder_of(path, Path(envs.VLLM_CACHE_ROOT) / NAME, wants_tokenizer))
    arguments.quantization = arguments.load_format = NAME
    arguments.config_format = "auto"
    if arguments.served_model_name is None:
        arguments.served_model_name = model


class W4A8GGUFConfig(QuantizationConfig):
    """Packs linear layers and experts in blocks unchanged; floats stay floats."""

    def __init__(self, path: str) -> None:
        """Of a file.

        Raises:
            ValueError: the file cannot be run.
        """
        super().__init__()
        self.path, linears = path, linears_of(path)
        self.matrices: dict[str, tuple[str, ...]] = {}  # vLLM's name: tensors of two dimensions, one below the other
        for source in sources_of_file(path).values():
            shapes = [linears.file.tensors[name].shape for name in source.tensors]
            is_matrix = source.checkpoint.endswith(".weight") and all(len(shape) == 2 for shape in shapes)
            if is_matrix and not source.of_experts and linears.joined_order(source.tensors) is None:
                self.matrices[source.checkpoint.removesuffix(".weight")] = source.tensors
        # If a layer has no value matrix, its keys are also its values (Gemma 4).
        self.keys_are_values = getattr(config_of_file(path), "attention_k_eq_v", False)
        # vLLM's name: name in checkpoints. vLLM's models use either this name or transformers'.
        self.experts = {name: name for name in experts_of(path)}
        for parameter, source in sources_of_file(path).items():
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

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Each type that the operators have."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """CPUs have no such number."""
        return -1

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Renames modules to vLLM's names."""
        self.matrices = hf_to_vllm_mapper.apply_dict(self.matrices)
        self.experts = hf_to_vllm_mapper.apply_dict(self.experts)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer, or None (upstream's contract).

        Raises:
            ValueError: the layer cannot be run, or the file lacks a matrix.
        """
        if isinstance(layer, RoutedExperts):
            return self._of_experts(layer, prefix)
        is_head = isinstance(layer, ParallelLMHead)
        method = self._of_linear(prefix) if is_head or isinstance(layer, LinearBase) else None
        if method is None and isinstance(layer, LinearBase):
            method = UnquantizedLinearMethod()
        if method is None and is_head and not lm_head_is_set():
            # In the bits of the embeddings in the file, if the embeddings are the output layer too.
            names = self.matrices.get("model.embed_tokens")
            if names is not None and not linears_of(self.path).file.is_float(names[0]):
                method = self._pulled(prefix, names, is_shared=True)
        if isinstance(method, W4A8LinearMethod):
            say_int8("GGUF")
        return lm_head_method(layer, method)

    def _pulled(self, prefix: str, tensors: Sequence[str], is_shared: bool = False) -> W4A8LinearMethod:
        return W4A8LinearMethod(Pulled(prefix, self.path, weights_of(linears_of(self.path), tensors), is_shared))

    def _of_linear(self, prefix: str) -> W4A8LinearMethod | None:
        names = joined_from(prefix, self.packed_modules_mapping)
        found = [tensor for name in names for tensor in self.matrices.get(name, ())]
        lacking = [name for name in names if name not in self.matrices]
        if lacking and lacking == [name for name in names if name.endswith(".v_proj")] and self.keys_are_values:
            found, lacking = [*found, found[-1]], []
        if found and lacking:
            raise ValueError(f"w4a8: {self.path} holds no tensor for {', '.join(lacking)}")
        if all(map(linears_of(self.path).file.is_float, found)):
            return None
        return self._pulled(prefix, found)

    def _of_experts(self, layer: RoutedExperts, prefix: str) -> PulledMoEMethod:
        if prefix not in self.experts:
            raise ValueError(f"w4a8: {self.path} holds no tensors for {prefix}")
        reason = unsupported(layer.moe_config)
        if reason is not None:
            raise ValueError(f"w4a8: {prefix}: experts of a GGUF file cannot be served with {reason}")
        say_int8("GGUF")
        return PulledMoEMethod(experts_of(self.path)[self.experts[prefix]], self.path, layer, prefix)


def weights_of(linears: GGUFLinears, tensors: Iterable[str]) -> list[Weight | Floats]:
    """Tensors of two dimensions as weights."""
    return [linears.floats(name) if linears.file.is_float(name) else linears.weight([name]) for name in tensors]


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
            _Filled(model, linears_of(path), model_config.dtype).fill()


class _Filled:
    """A model that is being filled."""

    def __init__(self, model: torch.nn.Module, linears: GGUFLinears, dtype: torch.dtype) -> None:
        self.model, self.linears, self.dtype = model, linears, dtype
        self.file, mapper = linears.file, getattr(model, "hf_to_vllm_mapper", None)
        self.sources: list[tuple[Source, str]] = []  # with the names in vLLM
        for source in sources_of_file(str(linears.file.paths[0])).values():
            name = source.checkpoint
            self.sources.append((source, name if mapper is None else mapper.get_rename_mapper().map_name(name)))
        self.here = dict(model.named_modules())

    def fill(self) -> None:
        """As :meth:`W4A8GGUFLoader.load_weights`."""
        self._pack_output_layer()
        self.params = dict(self.model.named_parameters())
        params = {id(param): name for name, param in self.params.items()}
        packed = [module for module in self.here.values() if products_of(module)]
        mine = {params.pop(id(param), None) for module in packed for param in module.parameters(recurse=False)}
        call_each(lambda module: module.w4a8_filler.load(module), packed)
        embeddings = self._fill_embeddings()
        mine |= {params[id(param)] for _, param in embeddings}
        taken = {name for module in packed for name in module.w4a8_filler.names}
        taken |= {f"{name.removesuffix('.weight')}.bias" for name in taken}
        came = self.model.load_weights(self._others(taken.union(name for name, _ in embeddings)))
        lacking = sorted(set(params.values()) - mine - set(came))
        if lacking:
            raise ValueError(f"w4a8: {self.file.paths[0]} holds no tensor for {', '.join(lacking[:3])}")

    def _pack_output_layer(self) -> None:
        """Packs the output layer of models that vLLM makes without asking for its method (gpt-oss)."""
        for source, mapped in self.sources:
            layer, name = self.here.get(mapped.removesuffix(".weight")), source.tensors[0]
            if type(layer) is not ParallelLMHead or products_of(layer) or self.file.is_float(name):
                continue
            weights = weights_of(self.linears, [name])
            layer.quant_method = W4A8LinearMethod(Pulled(layer.prefix, str(self.file.paths[0]), weights))
            del layer.weight
            width, dtype = layer.embedding_dim, layer.params_dtype
            rows = layer.num_embeddings_per_partition, layer.num_embeddings_padded
            layer.quant_method.create_weights(layer, width, [rows[0]], width, rows[1], dtype)

    def _fill_embeddings(self) -> list[tuple[str, torch.Tensor]]:
        """Fills embeddings in blocks, some rows at a time: returns tensors, and the parameters that they fill."""
        found = []
        for source, mapped in self.sources:
            layer, name = self.here.get(mapped.removesuffix(".weight")), source.tensors[0]
            if self.file.is_float(name) or type(layer) is not VocabParallelEmbedding:
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


def register() -> None:
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
