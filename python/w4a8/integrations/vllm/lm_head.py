"""The output layer in int4 or int8, rounded when its weight has been loaded: for whoever asks for it.

A decoded token reads all of it, which in bfloat16 can be a third of all that is read.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from w4a8.core.weight_utils import replace_parameter
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.settings import LM_HEAD_SWITCH, activation_group, lm_head_bits
from w4a8.nn import QuantOptions
from w4a8.nn.rounding import round_to_8_bits, round_weight
from w4a8.ops import dyn_quant_matmul_4bit

GROUP = 32


def lm_head_method(layer: torch.nn.Module, method: Any) -> Any:
    """What runs a layer: ``method``, the one chosen so far, or integers for an unquantized output layer.

    Args:
        layer: any.
        method: vLLM's, or None, which is unquantized.

    Raises:
        ValueError: the variable is neither 0 nor int4 nor int8.
    """
    bits = lm_head_bits()
    if not isinstance(layer, ParallelLMHead) or bits == 0:
        return method
    if method is not None and not isinstance(method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)):
        return method
    if layer.embedding_dim % GROUP != 0:
        logger().warning_once(
            "w4a8: the output layer stays as it is: %d columns are no multiple of %d", layer.embedding_dim, GROUP
        )
        return method
    return W4A8LMHeadMethod(bits)


class W4A8LMHeadMethod(UnquantizedEmbeddingMethod):
    """Loads the weight as vLLM does, and multiplies by integers.

    int4 in groups of 32, or int8 with one scale a row; inputs as for weights that were made for float ones.
    """

    tied = False  # to the embedding's weight

    def __init__(self, bits: int) -> None:
        """Of 4 or 8 bits."""
        super().__init__()
        self.bits, self.activation_group = bits, activation_group()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the weight into ``layer.weight_rounded``, uint8 [bytes], and frees it unless an embedding has it."""
        weight = layer.weight
        self.n, self.k = weight.shape
        if self.bits == 8:
            matrix, groups = round_to_8_bits(weight.data), "with a scale for each row"
        else:
            matrix = round_weight(weight.data, QuantOptions(GROUP, torch.bfloat16))
            groups = f"in groups of {GROUP}"
        self.group = matrix.group
        try:
            packed = matrix.pack(activation_group=self.activation_group)
        except ValueError as error:
            raise ValueError(f"w4a8: the output layer: {error}") from None
        replace_parameter(layer, "weight_rounded", packed)
        if not self.tied:
            del layer.weight
        logger().info_once("w4a8: the output layer is int%d %s (%s)", self.bits, groups, LM_HEAD_SWITCH)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """As vLLM's; the weight stays."""
        self.tied = True
        return super().tie_weights(layer, embed_tokens)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] to logits [..., N] of its type."""
        out = dyn_quant_matmul_4bit(x, layer.weight_rounded, self.group, self.k, self.n)
        return out if bias is None else out + bias
