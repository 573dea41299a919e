"""The config of a GGUF file, as transformers has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, GROUPS, NORM, SIZES, Architecture, named
from w4a8.checkpoint.gguf_key_table import check_keys
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.checkpoint.gguf_settings import settings_from_keys
from w4a8.checkpoint.settings import MoESettings
from w4a8.core.json_fields import shorten
from w4a8.core.routing import RoutingMethodType


def config_of(metadata: Mapping[str, Any], tensor_names: Sequence[str]) -> dict[str, Any]:
    """The config of a file of one of ARCHITECTURES.

    Args:
        metadata: all keys; of an array of strings its length is enough.
        tensor_names: of the file, or of the first one of several.

    Raises:
        ValueError: a key is missing, not as it should be, or would be ignored and may matter; names it.
    """
    check_keys(metadata)
    keys, name = Keys(metadata), named(metadata)
    known = ARCHITECTURES[name]
    config = {"model_type": known.model_type, "architectures": [f"{known.model}ForCausalLM"]}
    config |= {renamed: keys.number(key) for key, renamed in {**SIZES, **known.keys}.items()}
    config["num_hidden_layers"] = keys.layers
    latent = name in ("deepseek2", "deepseek3")
    config["rope_parameters"] = _rope(keys, latent)
    if "intermediate_size" not in config and keys.get("feed_forward_length") is not None:  # beside that of the experts
        config["intermediate_size"] = keys.number("feed_forward_length")
    if "blk.0.attn_q.bias" in tensor_names and not name.startswith("qwen2"):
        config["attention_bias"] = True
    tokens = metadata.get("tokenizer.ggml.tokens")
    config["vocab_size"] = keys.number(
        "vocab_size", tokens if tokens is None or isinstance(tokens, int) else len(tokens)
    )
    config["tie_word_embeddings"] = "output.weight" not in tensor_names
    if latent:
        config |= _deepseek(keys)
    else:
        config |= _heads(keys, config, known.model_type)
    if known.window_period:
        config |= _windows(keys, known.window_period, config["num_hidden_layers"])
    if known.routing is not None:
        # The names may be those of one file of several.
        has_bias = any("exp_probs_b" in tensor for tensor in tensor_names) or None
        config |= _router(keys, known, settings_from_keys(metadata, has_bias))
    if name == "deepseek2":
        config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    if name == "glm4moe":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensor_names
    if name == "gpt-oss" and config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} | config["rope_parameters"]
    if name == "gemma3":
        if keys.typed("final_logit_softcapping", float, 0.0) > 0:
            config["final_logit_softcapping"] = keys.typed("final_logit_softcapping", float)
        sliding = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": sliding}
        # The 27B model alone has another one, which llama.cpp knows by its 62 layers as well.
        whole = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = whole if config["num_hidden_layers"] == 62 else config["head_dim"]
    return config | _token_ids(metadata)


def _windows(keys: Keys, period: int, layers: int) -> dict[str, Any]:
    """Which layers see a sliding window alone, as llama.cpp has it (llama_hparams::set_swa_pattern).

    Args:
        keys: of the file.
        period: Architecture.window_period.
        layers: of the model.

    Raises:
        ValueError: a key is not as it should be.
    """
    window = keys.count("attention.sliding_window", 0, least=0)
    pattern = keys.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        period = keys.count("attention.sliding_window_pattern", period, least=0)
        slides = [period == 0 or layer % period < period - 1 for layer in range(layers)]
    else:
        slides = [bool(each) for each in pattern] if hasattr(pattern, "__len__") else []
        if len(slides) != layers:
            key = f"{keys.architecture}.attention.sliding_window_pattern"
            raise ValueError(
                f"{key} is {shorten(pattern)}, but a period or one flag for each of {layers} layers is expected"
            )
    names = {True: "sliding_attention", False: "full_attention"}
    found = {"layer_types": [names[window > 0 and each] for each in slides]}
    return found | ({"sliding_window": window} if window else {})


def _heads(keys: Keys, config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Numbers and sizes of heads. GLM's are rotated in part."""
    size = keys.number("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    rotated = keys.number("rope.dimension_count", size)
    found = {"head_dim": size}
    found["num_key_value_heads"] = keys.number("attention.head_count_kv", config["num_attention_heads"])
    stated = {"attention.value_length": keys.number("attention.value_length", size), "rope.dimension_count": rotated}
    if model_type == "glm4_moe":
        del stated["rope.dimension_count"]
        found["rope_parameters"] = {**config["rope_parameters"], "partial_rotary_factor": rotated / size}
    for key, value in stated.items():
        if value != size:
            key = f"{keys.architecture}.{key}"
            raise ValueError(f"{key} is {value} in the GGUF file, but {model_type} has {size} there")
    return found


def _deepseek(keys: Keys) -> dict[str, Any]:
    """Of multi-head latent attention. Of a file with k_b and v_b the usual keys describe what llama.cpp multiplies."""
    rotated = keys.count("rope.dimension_count")
    key, value = (keys.get(f"attention.{each}_length_mla") for each in ("key", "value"))
    key = keys.count("attention.key_length") if key is None else keys.count("attention.key_length_mla")
    value = keys.count("attention.value_length") if value is None else keys.count("attention.value_length_mla")
    rank = keys.get("attention.q_lora_rank")
    return {
        "num_key_value_heads": keys.count("attention.head_count"),
        "q_lora_rank": None if rank is None else keys.count("attention.q_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
    }


def _router(keys: Keys, known: Architecture, settings: MoESettings) -> dict[str, Any]:
    """What the model has a choice of."""
    found = {}
    if GROUPS in known.routing.follows:
        found = {
            "first_k_dense_replace": keys.count("leading_dense_block_count", 0, least=0),
            "n_group": settings.num_expert_group or 1,
            "topk_group": settings.topk_group or 1,
            "routed_scaling_factor": settings.routed_scaling_factor,
        }
    if NORM in known.routing.follows:
        renormalized = (RoutingMethodType.Renormalize, RoutingMethodType.DeepSeekV3)
        found["norm_topk_prob"] = settings.routing_method in renormalized
    if known.model_type in ("deepseek_v3", "glm4_moe"):
        found["num_nextn_predict_layers"] = 0
    return found


def _rope(keys: Keys, latent: bool) -> dict[str, Any]:
    """As llama.cpp reads it: a factor without a type is linear, and an older key for it counts as well.

    llama.cpp takes 32 and 1 for the two of yarn_beta_*, whatever the file says; the model has what the file says.
    """
    scaled = "rope.scaling.factor" if keys.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = keys.typed(scaled, float, 0.0)
    kind = keys.typed("rope.scaling.type", str, "linear" if factor else "none")
    more = keys.typed("rope.scaling.attn_factor", float, 1.0)  # times the one that follows from the factor
    multiplier = keys.get("rope.scaling.yarn_log_multiplier") if latent else None
    if more != 1 and (kind != "yarn" or multiplier is not None):
        key = f"{keys.architecture}.rope.scaling.attn_factor"
        raise ValueError(
            f"{key} is {more} in the GGUF file, which is supported with yarn and without yarn_log_multiplier alone"
        )
    rope = {"rope_type": "default", "rope_theta": float(keys.number("rope.freq_base", 10000.0))}
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return rope
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type is {kind!r} in the GGUF file, but none, linear or yarn is expected")
    rope |= {"rope_type": kind, "factor": float(keys.number(scaled))}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = keys.number("rope.scaling.original_context_length")
        if more != 1:
            rope["attention_factor"] = more * (0.1 * math.log(rope["factor"]) + 1)
        for each in ("beta_fast", "beta_slow"):
            if keys.get(f"rope.scaling.yarn_{each}") is not None:
                rope[each] = float(keys.number(f"rope.scaling.yarn_{each}"))
        # The scripts write a tenth of it. The other one is as large, which llama.cpp takes for granted, too.
        if multiplier is not None:
            scale = round(10 * keys.number("rope.scaling.yarn_log_multiplier"), 6)
            rope |= {"mscale": scale, "mscale_all_dim": scale}
    return rope


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the file; the end of a turn ends the text as well, as in llama.cpp."""
    found = {which: metadata.get(f"tokenizer.ggml.{which}_token_id") for which in ("bos", "eos", "eot", "eom")}
    ends = list(dict.fromkeys(found[which] for which in ("eos", "eot", "eom") if found[which] is not None))
    ids = {"bos_token_id": found["bos"], "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    ids["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    return {name: value for name, value in ids.items() if value is not None}
