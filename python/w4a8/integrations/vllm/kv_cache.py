"""Quantized KV caches that a checkpoint asks for, if vLLM has none on this CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.settings import runs_w4a16

# The two keys of a quantization_config for such a cache: compressed-tensors' object, and ModelOpt's name.
_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")


def kv_cache_problem(asked: Any, hf_config: Any) -> str | None:
    """Why vLLM's attention on this CPU cannot have a KV cache.

    Args:
        asked: the value of one of the two keys, not None.
        hf_config: of the model, from transformers.

    Returns:
        The reason; or None if vLLM can: 8-bit floats, heads of a multiple of 32, no latent attention, AVX-512 or AMX.
        (vLLM itself takes 4 bits for 8, and fails with latent keys and values at the first token.) None also for caches
        that vLLM refuses itself.
    """
    if isinstance(asked, Mapping):
        bits = asked.get("num_bits") if asked.get("type") == "float" else None
    else:
        bits = {"FP8": 8, "NVFP4": 4}.get(str(asked).upper())
    if bits not in (4, 8):
        return None
    if bits == 4:
        return "it is not of 8 bits"
    text = getattr(hf_config, "text_config", None) or hf_config
    if getattr(text, "kv_lora_rank", None) is not None:
        return "latent attention (MLA) has none"
    if not torch.cpu._is_avx512_supported() and not torch.cpu._is_amx_tile_supported():
        return "it needs AVX-512"
    heads = getattr(text, "num_attention_heads", None)
    head = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    return f"heads of {head} are no multiple of 32" if head % 32 != 0 else None


def _take_out(config: Any, hf_config: Any) -> str | None:
    """Removes a cache with a :func:`kv_cache_problem` from a quantization_config; returns the problem, or None."""
    found = None
    for owner in (config, config.get("quantization")) if isinstance(config, dict) else ():
        for key in _KEYS if isinstance(owner, dict) else ():
            asked = owner.get(key)
            # Scales for each head are loaded by this rule: it must stay.
            per_head = isinstance(asked, Mapping) and asked.get("strategy") == "attn_head"
            reason = kv_cache_problem(asked, hf_config) if asked and not per_head else None
            if reason is not None:
                owner[key], found = None, reason
    return found


class KeepsKVCache:
    """Base of a configuration class: called before vLLM decides on the cache, which becomes "auto" if necessary."""

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: Any, hf_config: Any = None) -> Any:
        """As upstream's. Changes both vLLM's copy of the configuration and the one that vLLM reads again."""
        found = super().override_quantization_method(hf_quant_cfg, user_quant, hf_config=hf_config)
        if not runs_w4a16() or (found or hf_quant_cfg.get("quant_method")) != cls.w4a8_name:
            return found
        configs = [hf_quant_cfg]
        for owner in (hf_config, getattr(hf_config, "text_config", None)):
            configs += [getattr(owner, name, None) for name in ("quantization_config", "compression_config")]
        reasons = [_take_out(config, hf_config) for config in configs]
        reason = next(filter(None, reasons), None)
        if reason is not None:
            logger().warning(
                "w4a8: the checkpoint asks for a quantized KV cache, which vLLM does not have here (%s): it gets that "
                "of --kv-cache-dtype auto",
                reason,
            )
        return found
