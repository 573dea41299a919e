"""Embeddings that stay packed: rows become floats when they are looked up.

Many of vLLM's models ask no configuration for the method of their embeddings. So the method is replaced before weights
are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from w4a8.core.weight import Weight
from w4a8.integrations.vllm.linear_layers import W4A8LinearMethod
from w4a8.integrations.vllm.pulled import Pulled
from w4a8.ops import dequantize_rows


class W4A8EmbeddingMethod(W4A8LinearMethod):
    """vLLM's method of an embedding; the filler is of the embedding, or of the output layer whose matrix it shares."""

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """Ids [...] to rows [..., K] of the model's type (upstream's contract); the vocabulary's padding is zeros."""
        sizes = layer.embedding_dim, layer.num_embeddings_per_partition
        return dequantize_rows(layer.weight_packed, input_, *sizes, dtype=layer.params_dtype)


def give_method(layer: Any, method: W4A8LinearMethod) -> None:
    """Replaces the method of an embedding or output layer whose weight is not loaded yet."""
    del layer.weight
    layer.quant_method = method
    width, rows = layer.embedding_dim, layer.num_embeddings_per_partition
    method.create_weights(layer, width, [rows], width, layer.num_embeddings_padded, layer.params_dtype)
    record_metadata_for_reloading(layer)  # vLLM has recorded the weight


def pack_embeddings(model: torch.nn.Module, weights: Iterable[tuple[str, Weight]], where: str, is_tied: bool) -> None:
    """Lets embeddings keep their matrices packed, unless vLLM multiplies by the weight of the embeddings itself.

    Args:
        model: of vLLM, whose weights are not loaded yet.
        weights: modules by their names in vLLM, and their matrices in the files.
        where: the files, for errors.
        is_tied: the model's configuration says that the embeddings are the output layer, too.

    Raises:
        ValueError: a matrix does not fit its embedding.
    """
    modules = dict(model.named_modules())
    heads = [module for module in modules.values() if isinstance(module, ParallelLMHead)]
    if is_tied and not heads:
        return
    for name, weight in weights:
        layer = modules.get(name)
        if type(layer) is not VocabParallelEmbedding or not isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            continue
        owners = [each for each in modules.values() if each._parameters.get("weight") is layer.weight]
        if len(owners) > 1 or layer.weight.is_meta:  # meta: other weights are loaded
            continue
        head = next((each for each in heads if _is_of(each, weight)), None)
        if head is None:
            give_method(layer, W4A8EmbeddingMethod(Pulled(name, where, [weight])))
        else:
            del layer.weight
            layer.quant_method, layer.w4a8 = W4A8EmbeddingMethod(head.w4a8_filler), head.w4a8
            head.w4a8_filler.share(layer)
            record_metadata_for_reloading(layer)


def _is_of(head: Any, weight: Weight) -> bool:
    """Whether an output layer reads a matrix of embeddings."""
    filler = getattr(head, "w4a8_filler", None)
    return isinstance(filler, Pulled) and [each.name for each in filler.weights] == [weight.name]
