"""The output layer in int4, rounded when its weight has been loaded: for whoever asks for it.

A decoded token reads all of it, which in bfloat16 can be a third of all that is read.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from w4a8.core.weight_utils import replace_parameter
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.settings import LM_HEAD_SWITCH, runs_int4_lm_head
from w4a8.nn import W4A8Linear
from w4a8.nn.rounding import round_weight
from w4a8.ops import dyn_quant_matmul_4bit

GROUP = 32


def offers_int4_lm_head(config: type) -> type:
    """A configuration class's decorator: layers that it does not quantize may be :class:`W4A8LMHeadMethod`'s."""
    chosen = config.get_quant_method

    @wraps(chosen)
    def get_quant_method(self: Any, layer: torch.nn.Module, prefix: str) -> Any:
        return lm_head_method(layer, chosen(self, layer, prefix))

    config.get_quant_method = get_quant_method
    return config


def lm_head_method(layer: torch.nn.Module, method: Any) -> Any:
    """What runs a layer: ``method``, the one chosen so far, or int4 if it is an unquantized output layer and asked for.

    Args:
        layer: any.
        method: vLLM's, or None, which is unquantized.

    Raises:
        ValueError: the variable is neither 0 nor int4.
    """
    if not isinstance(layer, ParallelLMHead) or not runs_int4_lm_head():
        return method
    if method is not None and not isinstance(method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)):
        return method
    if layer.embedding_dim % GROUP != 0:
        logger().warning_once(
            "w4a8: the output layer stays as it is: %d columns are no multiple of %d", layer.embedding_dim, GROUP
        )
        return method
    return W4A8LMHeadMethod()


class W4A8LMHeadMethod(UnquantizedEmbeddingMethod):
    """Loads the weight as vLLM does, and multiplies by int4 in groups of 32, their scales searched for."""

    tied = False  # to the embedding's weight

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the weight into ``layer.weight_int4``, uint8 [bytes], and frees it unless an embedding has it."""
        weight = layer.weight
        self.n, self.k = weight.shape
        rounded = round_weight(weight.data, GROUP, torch.bfloat16, clip_search=True)
        packed = W4A8Linear.from_matrix(rounded).packed
        replace_parameter(layer, "weight_int4", packed)
        if not self.tied:
            del layer.weight
        logger().info_once("w4a8: the output layer is int4 in groups of %d (%s)", GROUP, LM_HEAD_SWITCH)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """As vLLM's; the weight stays."""
        self.tied = True
        return super().tie_weights(layer, embed_tokens)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] to logits [..., N] of its type."""
        out = dyn_quant_matmul_4bit(x, layer.weight_int4, GROUP, self.k, self.n)
        return out if bias is None else out + bias
