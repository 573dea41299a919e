"""vLLM's configuration class for AMD Quark, with this package behind the MXFP4 layers."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig

from w4a8.core.activation import MoEActivation
from w4a8.core.json_fields import CheckpointError
from w4a8.formats import LeftOut, Scheme
from w4a8.formats.mxfp4 import QUARK_MXFP4
from w4a8.formats.quark import QuarkRules
from w4a8.integrations.vllm.config_base import RunsLayersHere, no_floats_of_gpt_oss
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.moe import experts_method
from w4a8.integrations.vllm.names import joined_from, projections
from w4a8.integrations.vllm.quark_gpt_oss import W4A8QuarkGptOssMethod
from w4a8.integrations.vllm.settings import runs_w4a16


class W4A8QuarkConfig(RunsLayersHere, QuarkConfig):
    """Chooses this package for layers with MXFP4 weights, and vLLM's own methods for others, FP8 say."""

    w4a8_says = "AMD Quark"
    _read: tuple[dict[str, Any], QuarkRules | None] | None = None

    def experts_method(self, scheme: Scheme, layer: RoutedExperts, prefix: str) -> Any:
        """As :meth:`RunsLayersHere.experts_method`; vLLM's model of gpt-oss fills its experts in another way."""
        if not _of_gpt_oss(layer):
            return super().experts_method(scheme, layer, prefix)
        if layer.moe_config.moe_parallel_config.use_ep:
            logger().warning_once(
                "w4a8: leaves gpt-oss's experts in AMD Quark's format to vLLM, because of expert parallelism, in which "
                "vLLM's model does not fill them"
            )
            return None
        return experts_method(scheme, layer, prefix, W4A8QuarkGptOssMethod)

    def scheme_of_layer(self, layer: torch.nn.Module, prefix: str) -> Scheme | LeftOut | None:
        """As :meth:`RunsLayersHere.scheme_of_layer`: how all matrices of the layer are stored, if they are alike.

        Raises:
            ValueError: of a linear layer's matrices some are quantized; experts of gpt-oss are not.
        """
        experts = isinstance(layer, RoutedExperts)
        names = projections(layer, prefix) if experts else joined_from(prefix, self.packed_modules_mapping)
        if self._read is None or self._read[0] is not self.quant_config:  # vLLM renames what it has
            try:
                rules = QuarkRules(self.quant_config)
            except CheckpointError:
                rules = None  # upstream's to handle
            self._read = self.quant_config, rules
        if self._read[1] is None:
            return None
        found = [self._read[1].of(name) for name in names]
        floats = [each for each in found if isinstance(each, LeftOut) and not each.quantized]
        if floats and len(floats) < len(found) and not experts:
            raise ValueError(f"w4a8: {prefix}: {floats[0].reason}, but others of {', '.join(names)} are quantized")
        of_fp4 = isinstance(self._read[1].default, Scheme)
        if floats and of_fp4 and experts and _of_gpt_oss(layer) and runs_w4a16():
            raise no_floats_of_gpt_oss(prefix, floats[0])
        alike = len(floats) == len(found) or all(
            isinstance(each, Scheme) and each.facts is QUARK_MXFP4 for each in found
        )
        return found[0] if found and alike else None


def _of_gpt_oss(layer: RoutedExperts) -> bool:
    return layer.moe_config.activation.value == MoEActivation.SWIGLUOAI.value
