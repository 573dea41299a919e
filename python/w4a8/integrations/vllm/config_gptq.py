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
from w4a8.formats import Scheme
from w4a8.integrations.vllm.activation_order import ChecksActivationOrder
from w4a8.integrations.vllm.config_base import RunsLayersHere, are_alike
from w4a8.integrations.vllm.names import joined_from, projections
from w4a8.integrations.vllm.settings import runs_w4a16

_VERSIONS = {None: 1, "": 1, "gptq": 1, "gptq_v2": 2}  # by checkpoint_format


class W4A8GPTQConfig(RunsLayersHere, ChecksActivationOrder, AutoGPTQConfig):
    """Chooses this package for 4-bit layers and 8-bit linear ones, symmetric or not; vLLM's own for all others."""

    w4a8_says = "GPTQ"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As upstream's, which knows no zero points.

        Raises:
            ValueError: as upstream's, among others for activation order with groups.
        """
        if runs_w4a16():
            zero_points = {(4, False): scalar_types.uint4, (8, False): scalar_types.uint8}
            self.TYPE_MAP = {**AutoGPTQConfig.TYPE_MAP, **zero_points}
        super().__init__(*args, **kwargs)

    def scheme(self) -> Scheme | None:
        """How weights are stored, if they are to be run here; of a copy for one layer."""
        full = self.full_config
        version = _VERSIONS.get(full.get("checkpoint_format") or full.get("format"))
        if not runs_w4a16() or version is None or not is_group_size(self.group_size):
            return None
        if self.weight_bits not in (4, 8):
            return None
        if self.desc_act and self.group_size != -1:
            raise ValueError("w4a8: GPTQ with activation order (desc_act) and groups is not supported")
        how = {"bits": self.weight_bits, "weight_only": "quant_method is 'gptq'"}
        return Scheme("gptq", self.group_size, bool(self.is_sym), version, **how)

    def method_of(self, layer: torch.nn.Module, prefix: str) -> Any:
        """As :meth:`RunsLayersHere.method_of`; which layers are quantized, and how, is decided by upstream's rules."""
        if isinstance(layer, RoutedExperts):
            return self._method_of_experts(layer, prefix)
        method = partial(_linear_method, layer=layer, prefix=prefix)
        return get_linear_quant_method(self, layer, self._ruled(prefix), method)

    def _ruled(self, prefix: str) -> str:
        """The name that rules are asked about: of a layer of several matrices one of theirs, if no rule has its own."""
        names = joined_from(prefix, self.packed_modules_mapping)
        first, *others = (get_dynamic_override(self, name) for name in names)
        alike = first is not None and all(rule == first for rule in others)
        return names[0] if alike and get_dynamic_override(self, prefix) is None else prefix

    def _method_of_experts(self, layer: RoutedExperts, prefix: str) -> Any:
        names = projections(layer, prefix)
        rules = []
        for name in names:
            rule = get_dynamic_override(self, name)
            rules.append(get_dynamic_override(self, prefix) if rule is None else rule)
        if not are_alike(rules, prefix):
            return None
        known = flatten_list(self.modules_in_block_to_quantize)
        if rules[0] is False or (known and not any("expert" in entry for entry in known)):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        config = deepcopy(self)
        override_config(config, prefix if get_dynamic_override(self, names[0]) is None else names[0])
        return config.method_for(config.scheme(), layer, prefix)


def _linear_method(config: W4A8GPTQConfig, layer: torch.nn.Module, prefix: str) -> Any:
    """The method of a linear layer, whose rules ``config`` has taken over; None for vLLM's."""
    return config.method_for(config.scheme(), layer, prefix)
