"""The config of a GGUF file in transformers, from the keys and from the tensors of rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, GROUPS, NORM, SCALE, SIZES, named
from w4a8.checkpoint.gguf_features import latent_attention, long_rope
from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.checkpoint.gguf_key_table import check_keys
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.checkpoint.routers import router_in_file


def config_of(metadata: Mapping[str, Any], tensor_names: Sequence[str]) -> dict[str, Any]:
    """The config of a file of one of ARCHITECTURES, by the keys and the names in the (first) file.

    An array of strings needs only its length.

    Raises:
        ValueError: a key is missing, has a wrong value, or would be ignored and may matter; names the key.
    """
    check_keys(metadata)
    keys, known = Keys(metadata), ARCHITECTURES[named(metadata)]
    config = {"model_type": known.model_type, "architectures": [f"{known.model}ForCausalLM"], **known.constants}
    config |= {renamed: keys.number(key) for key, renamed in {**SIZES, **known.keys}.items()}
    config[known.eps[1]] = keys.number(known.eps[0])
    config |= {
        renamed: keys.number(key, least=0) for key, renamed in known.optional.items() if keys.get(key) is not None
    }
    config["num_hidden_layers"] = keys.layers
    config["rope_parameters"] = _rope(keys, latent_attention in known.features, long_rope in known.features)
    if "intermediate_size" not in config and isinstance(keys.get("feed_forward_length"), int):  # beside the experts'
        config["intermediate_size"] = keys.number("feed_forward_length")
    if not known.model.startswith("Qwen2") and any(name.endswith(".attn_q.bias") for name in tensor_names):
        config["attention_bias"] = True
    tokens = metadata.get("tokenizer.ggml.tokens")
    config["vocab_size"] = keys.number(
        "vocab_size", tokens if tokens is None or isinstance(tokens, int) else len(tokens)
    )
    config["tie_word_embeddings"] = "output.weight" not in tensor_names
    if known.routing is not None and keys.get("expert_count"):
        # The names may come from one file of several.
        has_bias = any("exp_probs_b" in tensor for tensor in tensor_names) or None
        router, follows = router_in_file(metadata, has_bias), known.routing.follows
        renormalizes, groups = router.arguments["renormalize"], router.num_expert_group or 1
        stated = {NORM: renormalizes, SCALE: router.routed_scaling_factor, GROUPS: groups}
        config |= {field: stated[key] for key, field in follows.items()}
        config |= {"topk_group": router.topk_group or 1} if GROUPS in follows else {}
    for feature in known.features:
        config |= feature(keys, config, tensor_names)
    return config | _token_ids(metadata)


def _rope(keys: Keys, latent: bool, long: bool) -> dict[str, Any]:
    """As llama.cpp reads the keys: a factor without a type is linear, and the older key of the factor counts too.

    llama.cpp takes 32 and 1 for yarn_beta_* and ignores the file; the model gets the file's values.
    """
    scaled = "rope.scaling.factor" if keys.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = keys.typed(scaled, float, 0.0)
    kind = keys.typed("rope.scaling.type", str, "linear" if factor else "none")
    more = keys.typed("rope.scaling.attn_factor", float, 1.0)  # times the one that follows from the factor
    multiplier = keys.get("rope.scaling.yarn_log_multiplier") if latent else None
    if more != 1 and (kind != "yarn" or multiplier is not None) and not long:
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
        # llama.cpp's scripts write mscale_all_dim / 10. mscale is taken to be equal, as llama.cpp does.
        if multiplier is not None:
            scale = round(10 * keys.number("rope.scaling.yarn_log_multiplier"), 6)
            rope |= {"mscale": scale, "mscale_all_dim": scale}
    return rope


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The token ids of the file; the end of a turn also ends the text, as in llama.cpp."""
    found = {which: metadata.get(f"tokenizer.ggml.{which}_token_id") for which in ("bos", "eos", "eot", "eom")}
    ends = list(dict.fromkeys(found[which] for which in ("eos", "eot", "eom") if found[which] is not None))
    ids = {"bos_token_id": found["bos"], "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    found = {name: value for name, value in ids.items() if value is not None}
    # A class has an id of its first models, which may be missing in this vocabulary.
    return found | {"pad_token_id": metadata.get("tokenizer.ggml.padding_token_id")}


# Of Llama 3.1 and later. The file has only the factors that follow from these numbers.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def scale_rope(config: Any, file: GGUFFile) -> None:
    """Puts the scaling by tensors into a config of transformers.

    Args:
        config: made of the keys.
        file: with ``rope_freqs.weight``, the divisors of frequencies; or with ``rope_factors_long.weight`` and
            ``rope_factors_short.weight``, divisors for long texts and for others; or without.

    Raises:
        ValueError: factors that the model does not have.
    """
    if "rope_factors_long.weight" in file:
        names = ("short_factor", "rope_factors_short.weight"), ("long_factor", "rope_factors_long.weight")
        factors = {field: file.tensor(name).float().tolist() for field, name in names}
        original = {"original_max_position_embeddings": config.original_max_position_embeddings}
        config.rope_parameters = {**config.rope_parameters, "rope_type": "longrope", **factors, **original}
    if "rope_freqs.weight" not in file:
        return
    factors = file.tensor("rope_freqs.weight").float()
    if config.model_type == "gemma4_text":
        rotated = round(config.rope_parameters["full_attention"]["partial_rotary_factor"] * len(factors))
        if not bool((factors[:rotated] == 1).all() and (factors[rotated:] > 1e20).all()):
            raise ValueError("rope_freqs.weight does not rotate a quarter of the heads, which is not supported")
        return
    _llama3(config, factors)


def _llama3(config: Any, factors: torch.Tensor) -> None:
    """The scaling of Llama 3.1 and later; not in ``config`` yet.

    Raises:
        ValueError: the factors are not Llama 3's.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size = config.head_dim
    frequencies = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    rope = {**config.rope_parameters, "rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    config.rope_parameters = rope
    expected = frequencies / ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
        raise ValueError("rope_freqs.weight has other factors than Llama 3's, which is not supported")
