"""The config of a GGUF file, as transformers has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, SIZES, Architecture, named
from w4a8.checkpoint.gguf_keys import Keys


def config_of(metadata: Mapping[str, Any], tensor_names: Sequence[str]) -> dict[str, Any]:
    """The config of a file of one of ARCHITECTURES.

    Args:
        metadata: all keys; of an array of strings its length is enough.
        tensor_names: of the file, or of the first one of several.

    Raises:
        ValueError: a key is missing or not as it should be; names it.
    """
    keys, name = Keys(metadata), named(metadata)
    known = ARCHITECTURES[name]
    config = {"model_type": known.model_type, "architectures": [f"{known.model}ForCausalLM"]}
    config |= {renamed: keys.number(key) for key, renamed in {**SIZES, **known.keys}.items()}
    config["num_hidden_layers"] = keys.layers
    config["num_key_value_heads"] = keys.number("attention.head_count_kv", config["num_attention_heads"])
    config["rope_parameters"] = _rope(keys)
    if keys.get("feed_forward_length") is not None:  # beside that of the experts
        config.setdefault("intermediate_size", keys.number("feed_forward_length"))
    if "blk.0.attn_q.bias" in tensor_names and not name.startswith("qwen2"):
        config["attention_bias"] = True
    tokens = metadata.get("tokenizer.ggml.tokens")
    config["vocab_size"] = keys.number(
        "vocab_size", tokens if tokens is None or isinstance(tokens, int) else len(tokens)
    )
    config["tie_word_embeddings"] = "output.weight" not in tensor_names
    if name in ("deepseek2", "deepseek3"):
        config |= _deepseek(keys)
    else:
        config |= _heads(keys, config, partly=name == "glm4moe")
    if known.routing is not None:
        config |= _router(keys, config, known)
    if name == "deepseek2":
        config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    if name == "glm4moe":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensor_names
    if name == "gpt-oss" and config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"] |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    if name == "gemma3":
        sliding = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": sliding}
        # The 27B model alone has another one, which llama.cpp knows by its 62 layers as well.
        whole = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = whole if config["num_hidden_layers"] == 62 else config["head_dim"]
    return config | _token_ids(metadata)


def _heads(keys: Keys, config: Mapping[str, Any], partly: bool) -> dict[str, Any]:
    """Sizes of heads; ``partly``: the model may rotate a part of a head."""
    size = keys.number("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    rotated = keys.number("rope.dimension_count", size)
    if partly:
        return {
            "head_dim": size,
            "rope_parameters": {**config["rope_parameters"], "partial_rotary_factor": rotated / size},
        }
    if rotated != size:
        raise ValueError(f"{rotated} of {size} values of a head are rotated, which is not supported")
    return {"head_dim": size}


def _deepseek(keys: Keys) -> dict[str, Any]:
    """Of multi-head latent attention. Of a file with k_b and v_b the usual keys describe what llama.cpp multiplies."""
    if keys.typed("attention.temperature_scale", float, 0.0) != 0:
        raise ValueError(f"{keys.architecture}.attention.temperature_scale in the GGUF file is not supported")
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


def _router(keys: Keys, config: Mapping[str, Any], known: Architecture) -> dict[str, Any]:
    """What the file says of the router.

    Raises:
        ValueError: it is not what the model computes.
    """
    routing, found = known.routing, {}
    renormalize = keys.typed("expert_weights_norm", bool, routing.renormalize)
    stated = [("expert_gating_func", keys.typed("expert_gating_func", int, routing.gating), routing.gating)]
    if "n_routed_experts" in config:
        found = {
            "first_k_dense_replace": keys.count("leading_dense_block_count", 0, least=0),
            "n_group": keys.count("expert_group_count", 1),
            "topk_group": keys.count("expert_group_used_count", 1),
            "routed_scaling_factor": keys.typed("expert_weights_scale", float, 1.0) or 1.0,
        }
    if known.model_type in ("mixtral", "gpt_oss", "deepseek_v2"):  # they have no choice
        stated.append(("expert_weights_norm", renormalize, routing.renormalize))
    else:
        found["norm_topk_prob"] = renormalize
    if known.model_type in ("deepseek_v3", "glm4_moe"):
        found["num_nextn_predict_layers"] = 0
    for key, value, expected in stated:
        if value != expected:
            raise ValueError(
                f"{keys.architecture}.{key} is {value} in the GGUF file, but {known.model_type} computes {expected}"
            )
    return found


def _rope(keys: Keys) -> dict[str, Any]:
    kind = keys.typed("rope.scaling.type", str, "none")
    rope = {"rope_type": "default", "rope_theta": float(keys.number("rope.freq_base", 10000.0))}
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type is {kind!r} in the GGUF file, but none, linear or yarn is expected")
    rope |= {"rope_type": kind, "factor": float(keys.number("rope.scaling.factor"))}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = keys.number("rope.scaling.original_context_length")
        # The scripts write a tenth of it. The other one is as large, which llama.cpp takes for granted, too.
        if keys.get("rope.scaling.yarn_log_multiplier") is not None:
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
