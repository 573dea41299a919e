"""vLLM's configuration class for GPTQ, with this package behind the 4-bit layers, and 8-bit linear ones."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.utils.gptq_utils import (
    flatten_list,
    get_dynamic_override,
    get_linear_quant_method,
    override_config,
)
from vllm.scalar_type import scalar_types

from w4a8.core.matrix import is_group_size
from w4a8.formats import Stored
from w4a8.integrations.vllm.activation_order import ChecksActivationOrder
from w4a8.integrations.vllm.dtypes import TakesEveryDtype
from w4a8.integrations.vllm.linear import W4A8LinearMethod
from w4a8.integrations.vllm.lm_head import rounds_lm_head
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.moe import experts_method
from w4a8.integrations.vllm.names import joined_from, projections
from w4a8.integrations.vllm.settings import runs_w4a16, say_int8

_VERSIONS = {None: 1, "": 1, "gptq": 1, "gptq_v2": 2}  # by checkpoint_format


@rounds_lm_head
class W4A8GPTQConfig(TakesEveryDtype, ChecksActivationOrder, AutoGPTQConfig):
    """Chooses this package for 4-bit layers and 8-bit linear ones, symmetric or not; vLLM's own for all others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As upstream's, which knows no zero points.

        Raises:
            ValueError: as upstream's, among others for activation order with groups.
        """
        if runs_w4a16():
            zero_points = {(4, False): scalar_types.uint4, (8, False): scalar_types.uint8}
            self.TYPE_MAP = {**AutoGPTQConfig.TYPE_MAP, **zero_points}
        super().__init__(*args, **kwargs)

    def stored(self) -> Stored | None:
        """How weights are stored, if they are to be run here; of a copy for one layer."""
        full = self.full_config
        version = _VERSIONS.get(full.get("checkpoint_format") or full.get("format"))
        if not runs_w4a16() or version is None or not is_group_size(self.group_size):
            return None
        if self.weight_bits not in (4, 8):
            return None
        if self.desc_act and self.group_size != -1:
            raise ValueError("w4a8: GPTQ with activation order (desc_act) and groups is not supported")
        say_int8("GPTQ")
        how = {"bits": self.weight_bits, "weight_only": "quant_method is 'gptq'"}
        return Stored("gptq", self.group_size, bool(self.is_sym), version, **how)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        """The method of a layer, or None (upstream's contract)."""
        if isinstance(layer, RoutedExperts):
            return self._experts_method(layer, prefix) or super().get_quant_method(layer, prefix)
        method = get_linear_quant_method(self, layer, self._ruled(prefix), partial(_linear_method, prefix=prefix))
        return super().get_quant_method(layer, prefix) if isinstance(method, _Stock) else method

    def _ruled(self, prefix: str) -> str:
        """The name that rules are asked about: of a layer of several matrices one of theirs, if no rule has its own."""
        names = joined_from(prefix, self.packed_modules_mapping)
        first, *others = (get_dynamic_override(self, name) for name in names)
        alike = first is not None and all(rule == first for rule in others)
        return names[0] if alike and get_dynamic_override(self, prefix) is None else prefix

    def _experts_method(self, layer: RoutedExperts, prefix: str):
        names = projections(layer, prefix)
        rules = []
        for name in names:
            rule = get_dynamic_override(self, name)
            rules.append(get_dynamic_override(self, prefix) if rule is None else rule)
        if any(rule != rules[0] for rule in rules):
            logger().warning_once("w4a8: leaves %s to vLLM: its experts are not quantized alike", prefix)
            return None
        known = flatten_list(self.modules_in_block_to_quantize)
        if rules[0] is False or (known and not any("expert" in entry for entry in known)):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        config = deepcopy(self)
        override_config(config, prefix if get_dynamic_override(self, names[0]) is None else names[0])
        return experts_method(config.stored(), layer, prefix)


class _Stock:
    """Stands for a layer that upstream's method is to run."""


def _linear_method(config: W4A8GPTQConfig, prefix: str) -> W4A8LinearMethod | _Stock:
    stored = config.stored()
    return _Stock() if stored is None else W4A8LinearMethod(stored, prefix)
