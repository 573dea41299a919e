"""vLLM's configuration class for AWQ, with this package behind the 4-bit layers."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig

from w4a8.core.matrix import is_group_size
from w4a8.formats import Stored
from w4a8.integrations.vllm.dtypes import TakesEveryDtype
from w4a8.integrations.vllm.linear import W4A8LinearMethod
from w4a8.integrations.vllm.lm_head import rounds_lm_head
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.moe import experts_method
from w4a8.integrations.vllm.names import projections
from w4a8.integrations.vllm.settings import runs_w4a16, say_int8


@rounds_lm_head
class W4A8AWQConfig(TakesEveryDtype, AutoAWQConfig):
    """Chooses this package for 4-bit layers, and vLLM's own methods for all others."""

    def stored(self) -> Stored | None:
        """How weights are stored, if they are to be run here."""
        version = str(self.full_config.get("version") or "gemm").lower()
        if not runs_w4a16() or version != "gemm" or self.weight_bits != 4 or not is_group_size(self.group_size):
            return None
        say_int8("AWQ")
        return Stored("awq", self.group_size, not self.zero_point, weight_only="quant_method is 'awq'")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        """The method of a layer, or None (upstream's contract)."""
        stored = self.stored()
        if stored is None:
            return super().get_quant_method(layer, prefix)
        if isinstance(layer, RoutedExperts):
            skipped = [
                any(entry in name for entry in self.modules_to_not_convert) for name in projections(layer, prefix)
            ]
            if any(skipped):
                if not all(skipped):
                    logger().warning_once("w4a8: leaves %s to vLLM: its experts are not quantized alike", prefix)
                return super().get_quant_method(layer, prefix)
            return experts_method(stored, layer, prefix) or super().get_quant_method(layer, prefix)
        method = super().get_quant_method(layer, prefix)
        if method is None or isinstance(method, UnquantizedLinearMethod):
            return method
        return W4A8LinearMethod(stored, prefix)
