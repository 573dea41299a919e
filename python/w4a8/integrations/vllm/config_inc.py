"""vLLM's configuration class for AutoRound, with this package behind the 4-bit layers, and 8-bit linear ones."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.inc import INCConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from w4a8.core.matrix import is_group_size
from w4a8.formats import Stored
from w4a8.formats.awq import packing_of
from w4a8.formats.mxfp4 import BLOCK
from w4a8.formats.nvfp4 import BLOCK as NVFP4_BLOCK
from w4a8.integrations.vllm.activation_order import ChecksActivationOrder
from w4a8.integrations.vllm.dtypes import TakesEveryDtype
from w4a8.integrations.vllm.linear import W4A8LinearMethod
from w4a8.integrations.vllm.lm_head import rounds_lm_head
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.moe import experts_method
from w4a8.integrations.vllm.names import projections
from w4a8.integrations.vllm.settings import runs_w4a16, say_int8


@rounds_lm_head
class W4A8INCConfig(TakesEveryDtype, ChecksActivationOrder, INCConfig):
    """Chooses this package for 4-bit integer layers and 8-bit linear ones, and vLLM's own methods for all others.

    Attributes:
        w4a8_version: of GPTQ's packing: 2 stores zero points as they are.
        w4a8_weight_only: as in :class:`Stored`, of integers.
        w4a8_nvfp4: floats are NVFP4's, which upstream takes for MXFP4's, the only ones that it knows.
    """

    w4a8_version = 1
    w4a8_nvfp4 = False
    w4a8_weight_only: str | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> INCConfig:
        """As upstream's, which does not know all names of the two packings, no NVFP4, and nothing of inputs."""
        made, bits = cls._known(config), config.get("act_bits", 16)
        made.w4a8_weight_only = None if bits == 8 else f"act_bits is {bits}"
        return made

    @classmethod
    def _known(cls, config: dict[str, Any]) -> INCConfig:
        """Upstream's, of what it knows."""
        if runs_w4a16() and str(config.get("data_type")).startswith("nv_fp") and config.get("bits") == 4:
            made = super().from_config({**config, "data_type": "mx_fp", "group_size": BLOCK})
            made.w4a8_nvfp4, made.group_size = True, config["group_size"]
            return made
        stated = config.get("packing_format")
        found = packing_of(stated) if isinstance(stated, str) else None
        if not runs_w4a16() or found is None or stated in cls.SUPPORTED_FORMATS:
            return super().from_config(config)
        known = {"gptq": "auto_round:auto_gptq", "awq": "auto_round:auto_awq"}[found[0]]
        made = super().from_config({**config, "packing_format": known})
        made.w4a8_version = found[1]
        return made

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        """The method of a layer, or None (upstream's contract)."""
        method = None
        if runs_w4a16():
            if isinstance(layer, RoutedExperts):
                method = self._experts_method(layer, prefix)
            elif isinstance(layer, (LinearBase, ParallelLMHead)) and not self._is_excluded(prefix):
                stored = self._stored(layer, prefix)
                method = None if stored is None else W4A8LinearMethod(stored, prefix)
        if method is None and self._is_only_ours(layer, prefix):
            raise ValueError(f"w4a8: {prefix}: a layer of NVFP4 that this cannot run, and vLLM neither")
        return super().get_quant_method(layer, prefix) if method is None else method

    def _is_only_ours(self, layer: torch.nn.Module, prefix: str) -> bool:
        """Whether upstream would take a layer of NVFP4 for one of MXFP4."""
        if not self.w4a8_nvfp4 or not isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts)):
            return False
        names = projections(layer, prefix) if isinstance(layer, RoutedExperts) else [prefix]
        quantized = any(self.config_parser.resolve(layer, name).quantized for name in names)
        return quantized and not self._is_excluded(prefix)

    def _is_excluded(self, prefix: str) -> bool:
        """Whether the configuration names a layer as not quantized, as upstream looks it up."""
        entries: dict[str, Any] = self.extra_config or {}
        found = [entries[name] for name in (prefix, f"model.{prefix}") if name in entries]
        return any(entry.get("bits", 16) >= 16 for entry in found)

    def _stored(self, layer: torch.nn.Module, name: str) -> Stored | None:
        found = self.config_parser.resolve(layer, name)
        if found.quantized and getattr(found, "is_mxfp4", False):
            block = NVFP4_BLOCK if self.w4a8_nvfp4 else BLOCK
            if found.group_size != block:
                return None
            say_int8("AutoRound")
            form = f"{'nv' if self.w4a8_nvfp4 else 'mx'}fp4-pack-quantized"
            return Stored(form, block, True, weight_only="data_type is of floats")
        if not found.quantized or found.data_type != "int" or not is_group_size(found.group_size):
            return None
        if not (found.is_gptq and found.bits in (4, 8)) and not (found.is_awq and found.bits == 4):
            return None
        if self.w4a8_weight_only is not None:
            say_int8("AutoRound")
        symmetric, inputs = bool(found.sym), {"weight_only": self.w4a8_weight_only}
        if found.is_gptq:
            return Stored("gptq", found.group_size, symmetric, self.w4a8_version, bits=found.bits, **inputs)
        return Stored("awq", found.group_size, symmetric, **inputs)

    def _experts_method(self, layer: RoutedExperts, prefix: str):
        # Upstream's rules for experts want a layer class that is no longer called so; names of matrices need none.
        excluded = self._is_excluded(prefix)
        ways = {None if excluded else self._stored(layer, name) for name in projections(layer, prefix)}
        if len(ways) > 1:
            logger().warning_once("w4a8: leaves %s to vLLM: its experts are not quantized alike", prefix)
            return None
        (stored,) = ways
        return experts_method(stored, layer, prefix)
