"""Heads for further tokens (MTP) that vLLM loads as draft models."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding


def attach(model: torch.nn.Module, vllm_config: Any, model_config: Any) -> None:
    """Gives a head of Qwen3.5 one row of positions, if its rotary embedding takes one.

    Of checkpoints of text alone vLLM 0.32 gives such a head positions on three axes, which are all the same. Its
    operator for CPUs then writes behind the queries (RotaryEmbedding.forward_cpu in base.py).
    """
    if not type(model).__name__.endswith("MTP"):
        return
    found = [each.rotary_emb for each in model.modules() if hasattr(each, "rotary_emb")]
    if not found or any(isinstance(each, MRotaryEmbedding) for each in found):
        return
    forward = model.forward

    @wraps(forward)
    def with_a_row(input_ids: Any, positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(input_ids, positions[0] if positions.dim() == 2 else positions, *args, **kwargs)

    model.forward = with_a_row
