"""Names that a checkpoint has for what vLLM makes one layer of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def projections(layer: Any, prefix: str) -> list[str]:
    """Every matrix of a layer of vLLM's RoutedExperts, whose name is ``prefix``."""
    names = [layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name]
    return [f"{prefix}.{e}.{name}" for e in range(layer.moe_config.num_experts) for name in names if name is not None]


def joined_from(prefix: str, packed_modules_mapping: Mapping[str, Sequence[str]]) -> list[str]:
    """The matrices whose rows vLLM joins in a linear layer of this name: ``qkv_proj`` has three; most layers one."""
    owner, _, last = prefix.rpartition(".")
    return [f"{owner}.{part}" for part in packed_modules_mapping.get(last, ())] or [prefix]
