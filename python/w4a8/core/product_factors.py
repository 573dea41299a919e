"""Factors of the results of a layer's products, of models whose configs have multipliers (Falcon-H1)."""

from __future__ import annotations

from typing import Any

import torch


def product_factors(config: Any) -> dict[str, torch.Tensor]:
    """The arguments of ``Decoder.set_factors``, the same in all layers.

    A factor of a product's input is one of all results, as the products have no bias.

    Args:
        config: of Falcon-H1.

    Returns:
        By product, float32 [columns]. Products whose factors are all 1 are left out.
    """
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv = config.num_key_value_heads * head
    inner, states = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
    of_ssm = zip(config.ssm_multipliers, (inner, inner, states, states, config.mamba_n_heads))
    gate, down = config.mlp_multipliers
    found = {
        "qkv": _rows((1.0, config.num_attention_heads * head), (config.key_multiplier, kv), (1.0, kv))
        * config.attention_in_multiplier,
        "out": _rows((config.attention_out_multiplier, config.hidden_size)),
        "projections": _rows(*of_ssm) * config.ssm_in_multiplier,
        "linear_out": _rows((config.ssm_out_multiplier, config.hidden_size)),
        "gate_up": _rows((gate, config.intermediate_size), (1.0, config.intermediate_size)),
        "down": _rows((down, config.hidden_size)),
    }
    return {name: factors for name, factors in found.items() if bool((factors != 1).any())}


def _rows(*parts: tuple[float, int]) -> torch.Tensor:
    """Each factor as often as it is told."""
    return torch.cat([torch.full((count,), float(factor)) for factor, count in parts])
