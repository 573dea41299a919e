"""vLLM's configuration classes for NVIDIA's ModelOpt, with this package behind the NVFP4 layers."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig, ModelOptNvFp4Config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from w4a8.formats import Stored
from w4a8.formats.nvfp4 import BLOCK
from w4a8.integrations.vllm.dtypes import TakesEveryDtype
from w4a8.integrations.vllm.kv_cache import KeepsKVCache
from w4a8.integrations.vllm.linear import W4A8LinearMethod
from w4a8.integrations.vllm.lm_head import rounds_lm_head
from w4a8.integrations.vllm.moe import experts_method
from w4a8.integrations.vllm.settings import runs_w4a16, say_int8

_NVFP4 = ("NVFP4", "W4A16_NVFP4")
# Parts of names of layers that upstream never takes for quantized.
_FLOATS = ("vision_tower", "vision_model", "vit_large_projector")


class _NVFP4Layers(TakesEveryDtype, KeepsKVCache):
    """Of a configuration class of ModelOpt's."""

    def _algorithm(self, prefix: str) -> tuple[str | None, int]:
        """What a layer is quantized by, and in which groups."""
        raise NotImplementedError

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        """The method of a layer, or None (upstream's contract)."""
        return self._method(layer, prefix) or super().get_quant_method(layer, prefix)

    def _method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """This package's, if it is a layer to take over."""
        if not isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts)) or not runs_w4a16():
            return None
        if self.is_layer_excluded(prefix) or any(part in prefix for part in _FLOATS):
            return None
        algorithm, group = self._algorithm(prefix)
        if algorithm not in _NVFP4 or group != BLOCK:
            return None
        stored = Stored("modelopt-nvfp4", BLOCK, True, weight_only=f"quant_algo is {algorithm!r}")
        method = (
            experts_method(stored, layer, prefix)
            if isinstance(layer, RoutedExperts)
            else W4A8LinearMethod(stored, prefix)
        )
        if method is not None:
            say_int8("ModelOpt")
        return method


@rounds_lm_head
class W4A8ModelOptConfig(_NVFP4Layers, ModelOptNvFp4Config):
    """Chooses this package for all layers that are quantized."""

    w4a8_name = "modelopt_fp4"

    def _algorithm(self, prefix: str) -> tuple[str | None, int]:
        return self.quant_method, self.group_size


@rounds_lm_head
class W4A8ModelOptMixedConfig(_NVFP4Layers, ModelOptMixedPrecisionConfig):
    """Chooses this package for NVFP4 layers, and vLLM's own methods for others, FP8 say."""

    w4a8_name = "modelopt_mixed"

    def _algorithm(self, prefix: str) -> tuple[str | None, int]:
        return self._resolve_quant_algo(prefix), self.nvfp4_config.group_size
