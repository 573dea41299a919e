"""vLLM's configuration class for AMD Quark, with this package behind the MXFP4 layers."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from w4a8.core.activation import MoEActivation
from w4a8.core.json_fields import CheckpointError
from w4a8.formats import Stored
from w4a8.formats.quark_rules import MXFP4, QuarkRules
from w4a8.integrations.vllm.dtypes import TakesEveryDtype
from w4a8.integrations.vllm.linear import W4A8LinearMethod
from w4a8.integrations.vllm.lm_head import rounds_lm_head
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.moe import experts_method, unsupported
from w4a8.integrations.vllm.names import joined_from, projections
from w4a8.integrations.vllm.quark_gpt_oss import W4A8QuarkGptOssMethod
from w4a8.integrations.vllm.settings import runs_w4a16, say_int8


@rounds_lm_head
class W4A8QuarkConfig(TakesEveryDtype, QuarkConfig):
    """Chooses this package for layers with MXFP4 weights, and vLLM's own methods for others, FP8 say."""

    _read: tuple[dict[str, Any], QuarkRules | None] | None = None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        """The method of a layer, or None (upstream's contract)."""
        return self._method(layer, prefix) or super().get_quant_method(layer, prefix)

    def _method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """This package's, if it is a layer to take over."""
        if not isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts)) or not runs_w4a16():
            return None
        experts = isinstance(layer, RoutedExperts)
        stored = self._stored(
            projections(layer, prefix) if experts else joined_from(prefix, self.packed_modules_mapping)
        )
        if stored is None:
            return None
        if experts and layer.moe_config.activation.value == MoEActivation.SWIGLUOAI.value:
            method = _gpt_oss_method(layer, prefix)
        else:
            method = experts_method(stored, layer, prefix) if experts else W4A8LinearMethod(stored, prefix)
        if method is not None:
            say_int8("AMD Quark")
        return method

    def _stored(self, names: list[str]) -> Stored | None:
        """How all of some matrices are stored, if they are alike and to be run here."""
        if self._read is None or self._read[0] is not self.quant_config:  # vLLM renames what it has
            try:
                rules = QuarkRules(self.quant_config)
            except CheckpointError:
                rules = None  # upstream's to handle
            self._read = self.quant_config, rules
        if self._read[1] is None:
            return None
        found = [self._read[1].of(name) for name in names]
        alike = all(isinstance(each, Stored) and each.format == MXFP4 for each in found)
        return found[0] if found and alike else None


def _gpt_oss_method(layer: RoutedExperts, prefix: str) -> W4A8QuarkGptOssMethod | None:
    """The method of a layer of gpt-oss's experts; None, with a warning, if it cannot be run here."""
    reason = unsupported(layer.moe_config)
    if reason is None and layer.moe_config.moe_parallel_config.use_ep:
        reason = "expert parallelism, in which vLLM's model does not fill them"
    if reason is not None:
        logger().warning_once("w4a8: leaves gpt-oss's experts in AMD Quark's format to vLLM, because of %s", reason)
        return None
    return W4A8QuarkGptOssMethod(layer, prefix)
