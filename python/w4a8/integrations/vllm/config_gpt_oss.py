"""vLLM's configuration class for gpt-oss as it is published, with this package behind the MXFP4 experts."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

from w4a8.formats import LeftOut, Rules, Scheme, rules_of
from w4a8.integrations.vllm.config_base import RunsLayersHere, no_floats_of_gpt_oss
from w4a8.integrations.vllm.settings import runs_w4a16


class W4A8GptOssConfig(RunsLayersHere, GptOssMxfp4Config):
    """Chooses this package for experts; everything else is not quantized, and vLLM's."""

    w4a8_says = "MXFP4"
    w4a8_rules: Rules

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> W4A8GptOssConfig:
        """Reads what upstream does not: ``modules_to_not_convert``.

        Raises:
            CheckpointError: it is not a list of regular expressions; names it.
        """
        made = super().from_config(config)
        made.w4a8_rules = rules_of({**config, "quant_method": "mxfp4"})  # vLLM has a name of its own
        return made

    def scheme_of_layer(self, layer: torch.nn.Module, prefix: str) -> Scheme | None:
        """As :meth:`RunsLayersHere.scheme_of_layer`.

        Raises:
            ValueError: experts that are not quantized: vLLM's model copies floats [E, K, N] without transposing them.
        """
        if not isinstance(layer, RoutedExperts):
            return None
        scheme = self.w4a8_rules.of(prefix)
        if isinstance(scheme, LeftOut) and runs_w4a16():
            raise no_floats_of_gpt_oss(prefix, scheme)
        return scheme if isinstance(scheme, Scheme) else None
