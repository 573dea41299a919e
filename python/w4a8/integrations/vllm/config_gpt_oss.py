"""vLLM's configuration class for gpt-oss as it is published, with this package behind the MXFP4 experts."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from w4a8.formats import Stored
from w4a8.formats.mxfp4 import BLOCK
from w4a8.integrations.vllm.dtypes import TakesEveryDtype
from w4a8.integrations.vllm.lm_head import rounds_lm_head
from w4a8.integrations.vllm.moe import experts_method
from w4a8.integrations.vllm.settings import runs_w4a16, say_int8


@rounds_lm_head
class W4A8GptOssConfig(TakesEveryDtype, GptOssMxfp4Config):
    """Chooses this package for experts; everything else is not quantized, and vLLM's."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        """The method of a layer, or None (upstream's contract)."""
        if isinstance(layer, RoutedExperts) and runs_w4a16():
            stored = Stored("mxfp4", BLOCK, True, weight_only="quant_method is 'mxfp4'")
            method = experts_method(stored, layer, prefix)
            if method is not None:
                say_int8("MXFP4")
                return method
        return super().get_quant_method(layer, prefix)
