"""Linear layers (attention, shared experts, dense MLPs, output layers) with 4-bit weights, or with 8-bit ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from vllm.model_executor.layers import linear as vllm_linear
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from w4a8.core.weight_utils import replace_parameter
from w4a8.formats import Scheme
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.products import Product, Share, multiply
from w4a8.integrations.vllm.received import Received
from w4a8.integrations.vllm.settings import LM_HEAD_SWITCH, activation_group, lm_head_bits, lm_head_is_set
from w4a8.integrations.vllm.state_projections import in_parts, keep_loaders
from w4a8.nn import QuantOptions
from w4a8.nn.rounding import round_weight


class Filler(Protocol):
    """Where the weights of a layer come from."""

    def add_parameters(self, layer: torch.nn.Module, share: Share) -> None:
        """Registers the parameters of a layer of vLLM, and its products in ``layer.w4a8``."""

    def finish(self, layer: torch.nn.Module) -> None:
        """Lets the layer have all its products; raises ValueError if weights are missing. May be called again."""

    def tie(self) -> bool:
        """Whether the layer shares the weight of the embeddings to which vLLM ties it."""


class W4A8LinearMethod(LinearMethodBase):
    """vLLM's method of a linear layer: says how the layer runs; a filler says where its weights come from."""

    def __init__(self, filler: Filler) -> None:
        """Takes the filler of one layer."""
        self.filler = filler

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Callable | None = None,
        **extra_weight_attrs: Any,
    ) -> None:
        """As :meth:`Filler.add_parameters` (upstream's contract)."""
        layer.w4a8_filler = self.filler
        sizes = input_size_per_partition, output_partition_sizes, input_size
        share = in_parts(layer, Share(*sizes, params_dtype, weight_loader))
        self.filler.add_parameters(layer, share)
        keep_loaders(layer, share)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """As :meth:`Filler.finish`; vLLM calls this again after loading other weights."""
        self.filler.finish(layer)

    def tie_weights(self, layer: torch.nn.Module, embed_tokens: torch.nn.Module) -> torch.nn.Module:
        """Shares the embeddings' weight, unless the filler has a matrix of its own (upstream's contract)."""
        if self.filler.tie():
            layer.weight = embed_tokens.weight
        return layer

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] to [..., N] of its type."""
        return multiply(layer, x, bias)


# Only methods of these names get the loaders that know packed tensors.
if W4A8LinearMethod.__name__ not in vllm_linear.WEIGHT_LOADER_V2_SUPPORTED:
    vllm_linear.WEIGHT_LOADER_V2_SUPPORTED.append(W4A8LinearMethod.__name__)


class W4A8LinearScheme(W4A8LinearMethod, CompressedTensorsScheme):
    """The same for vLLM's method of compressed-tensors."""

    apply_weights = W4A8LinearMethod.apply

    @classmethod
    def get_min_capability(cls) -> int:
        """CPUs have no such number."""
        return -1


def received(scheme: Scheme, layer_name: str | None) -> W4A8LinearMethod:
    """The method of a layer whose tensors vLLM's loaders push."""
    return W4A8LinearMethod(Received(scheme, layer_name))


HEAD_GROUP = 32  # of an output layer in int4


def head_options(bits: int) -> QuantOptions:
    """How an output layer is rounded to integers of 4 or 8 bits."""
    return QuantOptions(HEAD_GROUP, torch.bfloat16) if bits == 4 else QuantOptions(-1, values="int8")


def lm_head_method(layer: torch.nn.Module, method: Any, by_default: bool = True) -> Any:
    """The method of any layer: ``method``, chosen so far, or integers for an output layer with an unquantized method.

    Args:
        layer: of vLLM.
        method: None is unquantized too.
        by_default: whether to round without a setting of the user.

    Raises:
        ValueError: the setting is neither 0 nor int4 nor int8.
    """
    bits = lm_head_bits()
    if not isinstance(layer, ParallelLMHead) or bits == 0 or not (by_default or lm_head_is_set()):
        return method
    if method is not None and not isinstance(method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)):
        return method
    options = head_options(bits)
    problem = options.form.problem(1, layer.embedding_dim, options.group_size)
    if problem:
        logger().warning_once("w4a8: the output layer stays as it is: %s", problem)
        return method
    return W4A8LinearMethod(Rounded(bits))


class Rounded:
    """A filler of an output layer, whose weight vLLM loads: int4 in groups of 32, or int8 with one scale a row.

    Inputs are as in weight-only checkpoints.
    """

    def __init__(self, bits: int) -> None:
        """Of 4 or 8 bits."""
        self.bits, self.activation_group = bits, activation_group()
        self.is_tied = False  # to the embedding's weight

    def add_parameters(self, layer: torch.nn.Module, share: Share) -> None:
        """Registers vLLM's weight."""
        UnquantizedEmbeddingMethod().create_weights(
            layer, share.columns, list(share.sizes), share.all_columns, sum(share.sizes), share.dtype,
            weight_loader=share.load,
        )  # fmt: skip

    def finish(self, layer: torch.nn.Module) -> None:
        """Packs the weight into ``layer.weight_rounded``, uint8 [bytes]; frees the floats if no embedding has them.

        Raises:
            ValueError: the weight has a NaN or an infinity, or the activation group does not fit.
        """
        groups = f"in groups of {HEAD_GROUP}" if self.bits == 4 else "with a scale for each row"
        matrix = round_weight(layer.weight.data, head_options(self.bits))
        try:
            packed = matrix.pack(activation_group=self.activation_group)
        except ValueError as error:
            raise ValueError(f"w4a8: the output layer: {error}") from None
        replace_parameter(layer, "weight_rounded", packed)
        layer.w4a8 = [Product("weight_rounded", matrix.rows, matrix.columns, matrix.group)]
        if not self.is_tied:
            del layer.weight
        logger().info_once("w4a8: the output layer is int%d %s (%s)", self.bits, groups, LM_HEAD_SWITCH)

    def tie(self) -> bool:
        """The weight stays."""
        self.is_tied = True
        return True
