"""Makes transformers know the method ``w4a8``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.auto import AutoHfQuantizer

from w4a8.formats.packed_directory import METHOD, is_packed
from w4a8.integrations.transformers.attention import attention_problems, register_attention
from w4a8.integrations.transformers.config import W4A8Config
from w4a8.integrations.transformers.gguf import gguf_problems, register_gguf
from w4a8.integrations.transformers.quantizer import W4A8HfQuantizer

logger = logging.getLogger(__name__)

# Types of models that transformers does not know, by the type with the same classes.
ALIASES = {"kimi_k2": "deepseek_v3"}
# Arguments of merge_quantization_configs: of the checkpoint, and of from_pretrained.
MERGED = ("quantization_config", "quantization_config_from_args")


def register_in_transformers() -> None:
    """Once per process."""
    register_quantization_config(METHOD)(W4A8Config)
    register_quantizer(METHOD)(W4A8HfQuantizer)
    for name, same in ALIASES.items():
        if name not in CONFIG_MAPPING:
            CONFIG_MAPPING.register(name, _alias(CONFIG_MAPPING[same]))
    # There is nothing to register this with.
    merge = AutoHfQuantizer.merge_quantization_configs
    AutoHfQuantizer.merge_quantization_configs = staticmethod(merge_prequantized(merge))
    problems = gguf_problems()
    if problems:
        logger.info("GGUF files are left to transformers %s: %s", transformers.__version__, "; ".join(problems))
    else:
        register_gguf()
    problems = attention_problems()
    if problems:
        logger.info("attention is left to transformers %s: %s", transformers.__version__, "; ".join(problems))
    else:
        register_attention()


def _alias(known: Any) -> Any:
    """A class whose ``from_dict`` makes configs of a known class, without the code that the checkpoint names."""

    def from_dict(_: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        fields = {key: value for key, value in config_dict.items() if key != "auto_map"}
        return known.from_dict({**fields, "model_type": known.model_type}, **kwargs)

    return type(known.__name__, (known,), {"from_dict": classmethod(from_dict), "__module__": known.__module__})


def merge_prequantized(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Allows W4A8Config beside the config of another method, which transformers takes for a mistake.

    All other arguments are passed on: every ``from_pretrained`` of a quantized model comes through here.
    """

    @wraps(merge)
    def merged(*args: Any, **kwargs: Any) -> Any:
        found, ours = ({**dict(zip(MERGED, args)), **kwargs}.get(name) for name in MERGED)
        if isinstance(ours, W4A8Config) and found is not None:
            source = found if isinstance(found, dict) else found.to_dict()
            if not is_packed(source):
                return ours.for_source(source)
        return merge(*args, **kwargs)

    return merged
