"""vLLM's configuration class for AWQ, with this package behind the 4-bit layers."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig

from w4a8.core.matrix import is_group_size
from w4a8.formats import LeftOut, Scheme
from w4a8.integrations.vllm.config_base import RunsLayersHere, are_alike
from w4a8.integrations.vllm.names import projections


class W4A8AWQConfig(RunsLayersHere, AutoAWQConfig):
    """Chooses this package for 4-bit layers, and vLLM's own methods for all others."""

    w4a8_says = "AWQ"

    def scheme_of_layer(self, layer: torch.nn.Module, prefix: str) -> Scheme | LeftOut | None:
        """As :meth:`RunsLayersHere.scheme_of_layer`."""
        version = str(self.full_config.get("version") or "gemm").lower()
        if version != "gemm" or self.weight_bits != 4 or not is_group_size(self.group_size):
            return None
        if isinstance(layer, RoutedExperts):
            names = projections(layer, prefix)
            skipped = [any(entry in name for entry in self.modules_to_not_convert) for name in names]
            if not are_alike(skipped, prefix):
                return None
            if skipped[0]:
                return LeftOut.not_quantized(prefix, "modules_to_not_convert names it")
        else:
            method = AutoAWQConfig.get_quant_method(self, layer, prefix)
            if method is None or isinstance(method, UnquantizedLinearMethod):
                return None
        return Scheme("awq", self.group_size, not self.zero_point, weight_only="quant_method is 'awq'")
