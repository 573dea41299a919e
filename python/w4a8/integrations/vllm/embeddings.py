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
from vllm.utils.torch_utils import direct_register_custom_op

from w4a8.core.matrix import floats_of_rows
from w4a8.core.weight import Weight
from w4a8.integrations.vllm.linear_layers import W4A8LinearMethod
from w4a8.integrations.vllm.pulled import Pulled
from w4a8.ops import read_header

_OPERATOR = "w4a8_rows"


def rows_of(packed: torch.Tensor, ids: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a packed matrix, as :func:`floats_of_rows`; zeros for the padding of the vocabulary behind the matrix.

    Args:
        packed: uint8 [bytes].
        ids: int64 or int32 [...].
        rows: of the matrix and the padding.
        columns: K.
        dtype: of the result [..., K].

    Raises:
        IndexError: an id outside of the rows.
    """
    which = ids.reshape(-1)
    padding = (which >= read_header(packed)["n"]) & (which < rows)
    found = floats_of_rows(packed, which.masked_fill(padding, 0), dtype)
    return found.masked_fill_(padding.unsqueeze(1), 0).view(*ids.shape, columns)


def _shape(packed: torch.Tensor, ids: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty((*ids.shape, columns), dtype=dtype)


if not hasattr(torch.ops.vllm, _OPERATOR):  # torch.compile does not look into it
    direct_register_custom_op(_OPERATOR, rows_of, fake_impl=_shape)


class W4A8EmbeddingMethod(W4A8LinearMethod):
    """vLLM's method of an embedding; the filler is of the embedding, or of the output layer whose matrix it shares."""

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """Ids [...] to rows [..., K] of the type of the model (upstream's contract)."""
        sizes = layer.num_embeddings_per_partition, layer.embedding_dim
        return torch.ops.vllm.w4a8_rows(layer.weight_packed, input_, *sizes, layer.params_dtype)


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
