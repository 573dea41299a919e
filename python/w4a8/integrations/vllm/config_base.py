"""What this package's configuration classes for vLLM have in common: which layers run here, and by which method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from w4a8.formats import LeftOut, Scheme
from w4a8.integrations.vllm.linear_layers import W4A8LinearMethod
from w4a8.integrations.vllm.lm_head import lm_head_method
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.moe import experts_method
from w4a8.integrations.vllm.settings import runs_w4a16, say_int8


class RunsLayersHere:
    """A base class that comes before vLLM's: it runs the layers that are read here, and leaves all others to vLLM's.

    A class says in :meth:`scheme_of_layer` which layers these are, or, where vLLM decides by rules of its own, in
    :meth:`method_of`. It must be at module level, because vLLM pickles configurations for its worker processes.

    Attributes:
        w4a8_says: what the log calls its checkpoints.
    """

    w4a8_says: str

    def scheme_of_layer(self, layer: torch.nn.Module, prefix: str) -> Scheme | LeftOut | None:
        """How the weights of a layer are stored, if they are to be run here, or that they are not quantized.

        None leaves the layer to vLLM's own rules, which may find a layer quantized that is not.

        Args:
            layer: vLLM's LinearBase, ParallelLMHead or RoutedExperts.
            prefix: its name.
        """
        raise NotImplementedError

    def method_of(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of such a layer, or None for vLLM's."""
        return self.method_for(self.scheme_of_layer(layer, prefix), layer, prefix)

    def method_for(self, scheme: Scheme | LeftOut | None, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer that is stored so, or None if it is not to be run here: weight-only ones on demand."""
        if isinstance(scheme, LeftOut):
            return None if scheme.quantized or not runs_w4a16() else _unquantized(layer)
        if scheme is None or (scheme.weight_only is not None and not runs_w4a16()):
            return None
        if isinstance(layer, RoutedExperts):
            method = self.experts_method(scheme, layer, prefix)
        else:
            method = W4A8LinearMethod(scheme, prefix)
        if method is not None and scheme.weight_only is not None:
            say_int8(self.w4a8_says)
        return method

    def experts_method(self, scheme: Scheme, layer: RoutedExperts, prefix: str) -> Any:
        """The method of a layer of experts; None, with a warning, if it cannot be run here."""
        return experts_method(scheme, layer, prefix)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer, or None (upstream's contract)."""
        ours = isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts))
        method = self.method_of(layer, prefix) if ours else None
        return lm_head_method(layer, super().get_quant_method(layer, prefix) if method is None else method)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Each type that the operators have, in place of upstream's, unless weight-only models are left to vLLM."""
        if not runs_w4a16():
            return super().get_supported_act_dtypes()
        return [torch.float16, torch.bfloat16, torch.float32]


def _unquantized(layer: torch.nn.Module) -> Any:
    """vLLM's method of a layer that is not quantized."""
    if isinstance(layer, RoutedExperts):
        return UnquantizedFusedMoEMethod(layer.moe_config)
    return UnquantizedEmbeddingMethod() if isinstance(layer, ParallelLMHead) else UnquantizedLinearMethod()


def no_floats_of_gpt_oss(prefix: str, left_out: LeftOut) -> ValueError:
    """The error of experts of gpt-oss that are not quantized, in a checkpoint whose others are MXFP4."""
    return ValueError(f"w4a8: {prefix}: {left_out.reason}, but vLLM's gpt-oss reads experts of such a file as MXFP4")


def are_alike(ways: Sequence[Any], prefix: str) -> bool:
    """Whether all matrices of a layer of experts are quantized in one way; warns if they are not."""
    if all(way == ways[0] for way in ways):
        return True
    logger().warning_once("w4a8: leaves %s to vLLM: its experts are not quantized alike", prefix)
    return False
