"""vLLM's configuration class for compressed-tensors, with this package behind the W4A8 layers.

The class is at module level because vLLM pickles it for its worker processes.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

from w4a8.core.quant_args import DYNAMIC_INT8_TOKENS
from w4a8.integrations.vllm.linear import W4A8LinearScheme
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.moe import W4A8MoEMethod, unsupported
from w4a8.integrations.vllm.scheme import is_w4a8, is_w4a16
from w4a8.integrations.vllm.settings import W4A16_SWITCH, runs_w4a16


class W4A8CompressedTensorsConfig(CompressedTensorsConfig):
    """Chooses this package for W4A8 layers, and vLLM's own methods for all others."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        """The method of a layer, or None (upstream's contract)."""
        if isinstance(layer, RoutedExperts):
            method = self._experts_method(layer, prefix)
            if method is not None:
                return method
        return super().get_quant_method(layer, prefix)

    def get_scheme(self, layer: torch.nn.Module, layer_name: str | None = None):
        """The scheme of a linear layer, or None (upstream's contract)."""
        found = self.get_scheme_dict(layer, layer_name) if isinstance(layer, LinearBase) else None
        if found is not None and found.get("output_activations") is None:
            weights = found.get("weights")
            if is_w4a8(weights, found.get("input_activations")):
                return W4A8LinearScheme(weights, found["format"], layer_name)
        return super().get_scheme(layer, layer_name)

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> W4A8MoEMethod | None:
        """The method of a layer of experts if it is one to take over, else None."""
        self._add_fused_moe_to_target_scheme_map()
        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names if name is not None]
        found = schemes[0]
        if found is None or any(other != found for other in schemes):
            return None  # not quantized, or not alike: both are upstream's to handle
        weights, inputs = found.get("weights"), found.get("input_activations")
        if is_w4a16(weights, inputs):
            if not runs_w4a16():
                return None
            logger().info_once(
                "w4a8: experts of a weight-only int4 model run with int8 activations (%s=1)", W4A16_SWITCH
            )
            inputs = DYNAMIC_INT8_TOKENS
        if not is_w4a8(weights, inputs):
            return None
        reason = unsupported(layer.moe_config)
        if reason is not None:
            logger().warning_once("w4a8: leaves layers of experts to vLLM, because of %s", reason)
            return None
        return W4A8MoEMethod(weights, found["format"], layer, prefix)
