"""vLLM's configuration class for AutoRound, with this package behind the 4-bit layers, and 8-bit linear ones."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.inc import INCConfig

from w4a8.core.matrix import is_group_size
from w4a8.formats import LeftOut, Scheme
from w4a8.formats.auto_round import packing_of
from w4a8.formats.mxfp4 import BLOCK
from w4a8.formats.nvfp4 import BLOCK as NVFP4_BLOCK
from w4a8.integrations.vllm.activation_order import ChecksActivationOrder
from w4a8.integrations.vllm.config_base import RunsLayersHere, are_alike
from w4a8.integrations.vllm.names import projections
from w4a8.integrations.vllm.settings import runs_w4a16


class W4A8INCConfig(RunsLayersHere, ChecksActivationOrder, INCConfig):
    """Chooses this package for 4-bit integer layers and 8-bit linear ones, and vLLM's own methods for all others.

    Attributes:
        w4a8_version: of GPTQ's packing: 2 stores zero points as they are.
        w4a8_weight_only: as in :class:`Scheme`, of integers.
        w4a8_nvfp4: floats are NVFP4's, which upstream takes for MXFP4's, the only ones that it knows.
    """

    w4a8_says = "AutoRound"
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

    def method_of(self, layer: torch.nn.Module, prefix: str) -> Any:
        """As :meth:`RunsLayersHere.method_of`.

        Raises:
            ValueError: a layer of NVFP4 that cannot be run here, which upstream would take for one of MXFP4.
        """
        method = super().method_of(layer, prefix)
        if method is not None or not self.w4a8_nvfp4 or self._is_excluded(prefix):
            return method
        if any(self.config_parser.resolve(layer, name).quantized for name in _matrices(layer, prefix)):
            raise ValueError(f"w4a8: {prefix}: a layer of NVFP4 that this cannot run, and vLLM neither")
        return None

    def scheme_of_layer(self, layer: torch.nn.Module, prefix: str) -> Scheme | LeftOut | None:
        """As :meth:`RunsLayersHere.scheme_of_layer`."""
        # Upstream's rules for experts want a layer class that is no longer called so; names of matrices need none.
        names = _matrices(layer, prefix)
        if self._is_excluded(prefix) or not any(self.config_parser.resolve(layer, name).quantized for name in names):
            return LeftOut.not_quantized(prefix, "the configuration says so")
        ways = [self._scheme(layer, name) for name in names]
        return ways[0] if are_alike(ways, prefix) else None

    def _is_excluded(self, prefix: str) -> bool:
        """Whether the configuration names a layer as not quantized, as upstream looks it up."""
        entries: dict[str, Any] = self.extra_config or {}
        found = [entries[name] for name in (prefix, f"model.{prefix}") if name in entries]
        return any(entry.get("bits", 16) >= 16 for entry in found)

    def _scheme(self, layer: torch.nn.Module, name: str) -> Scheme | None:
        found = self.config_parser.resolve(layer, name)
        if found.quantized and getattr(found, "is_mxfp4", False):
            block = NVFP4_BLOCK if self.w4a8_nvfp4 else BLOCK
            if found.group_size != block:
                return None
            form = f"{'nv' if self.w4a8_nvfp4 else 'mx'}fp4-pack-quantized"
            return Scheme(form, block, True, weight_only="data_type is of floats")
        if not found.quantized or found.data_type != "int" or not is_group_size(found.group_size):
            return None
        if not (found.is_gptq and found.bits in (4, 8)) and not (found.is_awq and found.bits == 4):
            return None
        symmetric, inputs = bool(found.sym), {"weight_only": self.w4a8_weight_only}
        if found.is_gptq:
            return Scheme("gptq", found.group_size, symmetric, self.w4a8_version, bits=found.bits, **inputs)
        return Scheme("awq", found.group_size, symmetric, **inputs)


def _matrices(layer: torch.nn.Module, prefix: str) -> list[str]:
    """Names that the configuration may have rules for."""
    return projections(layer, prefix) if isinstance(layer, RoutedExperts) else [prefix]
