"""vLLM's configuration class for gpt-oss as it is published, with this package behind the MXFP4 experts."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from w4a8.formats import Stored
from w4a8.formats.mxfp4 import BLOCK
from w4a8.integrations.vllm.config_base import RunsLayersHere


class W4A8GptOssConfig(RunsLayersHere, GptOssMxfp4Config):
    """Chooses this package for experts; everything else is not quantized, and vLLM's."""

    w4a8_says = "MXFP4"

    def stored_of(self, layer: torch.nn.Module, prefix: str) -> Stored | None:
        """As :meth:`RunsLayersHere.stored_of`."""
        if not isinstance(layer, RoutedExperts):
            return None
        return Stored("mxfp4", BLOCK, True, weight_only="quant_method is 'mxfp4'")
