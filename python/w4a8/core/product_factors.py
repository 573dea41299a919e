"""Factors of the results of a layer's products, of models whose configs have multipliers (Falcon-H1)."""

from __future__ import annotations

from typing import Any

import torch


def product_factors(config: Any, ranks: int = 1) -> dict[str, torch.Tensor]:
    """The arguments of ``Decoder.set_factors``, the same in all layers.

    A factor of a product's input is one of all results, as the products have no bias.

    Args:
        config: of Falcon-H1.
        ranks: with a part each of every layer; copied heads of keys and groups of states are whole.

    Returns:
        By product, float32 [columns]. Products whose factors are all 1 are left out.
    """
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv, inter = max(config.num_key_value_heads // ranks, 1) * head, config.intermediate_size // ranks
    heads, groups = config.mamba_n_heads // ranks, max(config.mamba_n_groups // ranks, 1)
    inner, states = heads * config.mamba_d_head, groups * config.mamba_d_state
    of_ssm = zip(config.ssm_multipliers, (inner, inner, states, states, heads))
    gate, down = config.mlp_multipliers
    found = {
        "qkv": _rows((1.0, config.num_attention_heads // ranks * head), (config.key_multiplier, kv), (1.0, kv))
        * config.attention_in_multiplier,
        "out": _rows((config.attention_out_multiplier, config.hidden_size)),
        "projections": _rows(*of_ssm) * config.ssm_in_multiplier,
        "linear_out": _rows((config.ssm_out_multiplier, config.hidden_size)),
        "gate_up": _rows((gate, inter), (1.0, inter)),
        "down": _rows((down, config.hidden_size)),
    }
    return {name: factors for name, factors in found.items() if bool((factors != 1).any())}


def _rows(*parts: tuple[float, int]) -> torch.Tensor:
    """Each factor as often as it is told."""
    return torch.cat([torch.full((count,), float(factor)) for factor, count in parts])
