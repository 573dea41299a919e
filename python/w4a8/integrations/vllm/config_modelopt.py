"""vLLM's configuration classes for NVIDIA's ModelOpt, with this package behind the NVFP4 layers."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig, ModelOptNvFp4Config

from w4a8.formats import LeftOut, Scheme
from w4a8.formats.modelopt import ALGORITHMS
from w4a8.formats.nvfp4 import BLOCK, MODELOPT_NVFP4
from w4a8.integrations.vllm.config_base import RunsLayersHere
from w4a8.integrations.vllm.kv_cache import KeepsKVCache

# Parts of names of layers that upstream never takes for quantized.
_NEVER_QUANTIZED = ("vision_tower", "vision_model", "vit_large_projector")


class _NVFP4Layers(RunsLayersHere, KeepsKVCache):
    """What the two configuration classes have in common."""

    w4a8_says = "ModelOpt"

    def _algorithm(self, prefix: str) -> tuple[str | None, int]:
        """What a layer is quantized by, and in which groups."""
        raise NotImplementedError

    def scheme_of_layer(self, layer: torch.nn.Module, prefix: str) -> Scheme | LeftOut | None:
        """As :meth:`RunsLayersHere.scheme_of_layer`."""
        if self.is_layer_excluded(prefix) or any(part in prefix for part in _NEVER_QUANTIZED):
            return LeftOut.not_quantized(prefix, "the configuration excludes it")
        algorithm, group = self._algorithm(prefix)
        if algorithm is None:
            return LeftOut.not_quantized(prefix, "quantized_layers does not name it")
        if algorithm not in ALGORITHMS or group != BLOCK:
            return None
        return Scheme(MODELOPT_NVFP4.name, BLOCK, True, weight_only=f"quant_algo is {algorithm!r}")


class W4A8ModelOptConfig(_NVFP4Layers, ModelOptNvFp4Config):
    """Chooses this package for all layers that are quantized."""

    w4a8_name = "modelopt_fp4"

    def _algorithm(self, prefix: str) -> tuple[str | None, int]:
        return self.quant_method, self.group_size


class W4A8ModelOptMixedConfig(_NVFP4Layers, ModelOptMixedPrecisionConfig):
    """Chooses this package for NVFP4 layers, and vLLM's own methods for others, FP8 say."""

    w4a8_name = "modelopt_mixed"

    def _algorithm(self, prefix: str) -> tuple[str | None, int]:
        return self._resolve_quant_algo(prefix), self.nvfp4_config.group_size
