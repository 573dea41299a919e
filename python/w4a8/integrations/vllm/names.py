"""Names that a checkpoint has for what vLLM makes one layer of."""

from __future__ import annotations

from typing import Any


def projections(layer: Any, prefix: str) -> list[str]:
    """Every matrix of a layer of vLLM's RoutedExperts, whose name is ``prefix``."""
    names = [layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name]
    return [f"{prefix}.{e}.{name}" for e in range(layer.moe_config.num_experts) for name in names if name is not None]
