"""vLLM's loader for GGUF files: layers in blocks read their own weights, all others come as a checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.utils import is_pp_missing_parameter
from vllm.utils.torch_utils import set_default_torch_dtype

from w4a8.checkpoint.gguf_linear import GGUFLinears
from w4a8.checkpoint.gguf_names import Source
from w4a8.core.memory import on_cpu
from w4a8.integrations.vllm.gguf_folder import linears_of, path_in, sources_of_file
from w4a8.integrations.vllm.gguf_layers import W4A8GGUFLinearMethod

FLOATS_AT_ONCE = 1 << 22


class W4A8GGUFLoader(BaseModelLoader):
    """Reads a file tensor by tensor."""

    def download_model(self, model_config: Any) -> None:
        """The file is there."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fills a model.

        Raises:
            ValueError: the file lacks a weight, or has one that cannot be packed; names it.
        """
        path = path_in(model_config.model)
        with on_cpu(), set_default_torch_dtype(torch.float32):
            _Filled(model, linears_of(path), model_config.dtype).fill()


class _Filled:
    """A model that is being filled."""

    def __init__(self, model: torch.nn.Module, linears: GGUFLinears, dtype: torch.dtype) -> None:
        self.model, self.linears, self.dtype = model, linears, dtype
        self.file, mapper = linears.file, getattr(model, "hf_to_vllm_mapper", None)
        self.sources: list[tuple[Source, str]] = []  # and their names in vLLM
        for source in sources_of_file(str(linears.file.paths[0])).values():
            name = source.checkpoint
            self.sources.append((source, name if mapper is None else mapper.get_rename_mapper().map_name(name)))
        self.here = dict(model.named_modules())

    def fill(self) -> None:
        """As :meth:`W4A8GGUFLoader.load_weights`."""
        self._pack_output_layer()
        self.params = dict(self.model.named_parameters())
        params = {id(param): name for name, param in self.params.items()}
        packed = [module for module in self.here.values() if hasattr(module, "w4a8_gguf")]
        mine = {params.pop(id(param), None) for module in packed for param in module.parameters(recurse=False)}
        taken = [name for module in packed for name in module.w4a8_gguf.load(module)]
        embeddings = self._fill_embeddings(set(taken))
        mine |= {params[id(param)] for _, param in embeddings}
        came = self.model.load_weights(self._others({*taken, *(name for name, _ in embeddings)}))
        lacking = sorted(set(params.values()) - mine - set(came))
        if lacking:
            raise ValueError(f"w4a8: {self.file.paths[0]} holds no tensor for {', '.join(lacking[:3])}")

    def _pack_output_layer(self) -> None:
        """Of models that vLLM makes without asking how it is quantized (gpt-oss)."""
        for source, mapped in self.sources:
            layer, name = self.here.get(mapped.removesuffix(".weight")), source.tensors[0]
            if type(layer) is not ParallelLMHead or hasattr(layer, "w4a8_gguf") or self.file.is_float(name):
                continue
            layer.quant_method = W4A8GGUFLinearMethod(str(self.file.paths[0]), mapped.removesuffix(".weight"), [name])
            del layer.weight
            width, dtype = layer.embedding_dim, layer.params_dtype
            rows = layer.num_embeddings_per_partition, layer.num_embeddings_padded
            layer.quant_method.create_weights(layer, width, [rows[0]], width, rows[1], dtype)

    def _fill_embeddings(self, taken: set[str]) -> list[tuple[str, torch.Tensor]]:
        """Those in blocks, some rows at a time: tensors, and the parameters that they fill."""
        found = []
        for source, mapped in self.sources:
            layer, name = self.here.get(mapped.removesuffix(".weight")), source.tensors[0]
            if name in taken or self.file.is_float(name) or type(layer) is not VocabParallelEmbedding:
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
        """What has not been taken, as the model's ``load_weights`` takes it."""
        for source, mapped in self.sources:
            if taken.issuperset(source.tensors) or source.of_experts or is_pp_missing_parameter(mapped, self.model):
                continue
            dtype = self.params[mapped].dtype if mapped in self.params else self.dtype
            yield source.checkpoint, self.linears.parameter(source.tensors, source.shape, mapped, dtype).to(dtype)
