"""The config of a GGUF file, as transformers has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from w4a8.checkpoint.gguf_architectures import ARCHITECTURES, SIZES, named


class _Keys:
    """Keys of one architecture."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self._keys, self._prefix = keys, keys["general.architecture"]

    def get(self, name: str, default: Any = None) -> Any:
        return self._keys.get(f"{self._prefix}.{name}", default)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{self._prefix}.{name} is {value!r} in the GGUF file, but a number above 0 is expected")
        return value


def config_of(metadata: Mapping[str, Any], tensor_names: Sequence[str]) -> dict[str, Any]:
    """The config of a file of one of ARCHITECTURES.

    Args:
        metadata: all keys; of an array of strings its length is enough.
        tensor_names: of the file, or of the first one of several.

    Raises:
        ValueError: a key is missing or not as it should be; names it.
    """
    keys, name = _Keys(metadata), named(metadata)
    known = ARCHITECTURES[name]
    config = {"model_type": known.model_type, "architectures": [f"{known.model}ForCausalLM"], **known.fixed}
    config |= {renamed: keys.number(key) for key, renamed in {**SIZES, **known.keys}.items()}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    config["num_key_value_heads"] = keys.number("attention.head_count_kv", heads)
    config["head_dim"] = keys.number("attention.key_length", hidden // heads)
    rotated = keys.number("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise ValueError(f"{rotated} of {config['head_dim']} values of a head are rotated, which is not supported")
    if keys.get("expert_weights_norm") is not None:
        config["norm_topk_prob"] = bool(keys.get("expert_weights_norm"))
    if keys.get("feed_forward_length") is not None:  # beside that of the experts
        config.setdefault("intermediate_size", keys.number("feed_forward_length"))
    if "blk.0.attn_q.bias" in tensor_names and not name.startswith("qwen2"):
        config["attention_bias"] = True
    tokens = metadata.get("tokenizer.ggml.tokens")
    config["vocab_size"] = keys.number(
        "vocab_size", tokens if tokens is None or isinstance(tokens, int) else len(tokens)
    )
    config["tie_word_embeddings"] = "output.weight" not in tensor_names
    config["rope_parameters"] = rope = _rope(keys)
    if name == "gpt-oss":
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False} if rope["rope_type"] == "yarn" else {}
    if name == "gemma3":
        sliding = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
        config["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}
        # The 27B model alone has another one, which llama.cpp knows by its 62 layers as well.
        config["query_pre_attn_scalar"] = hidden // heads if config["num_hidden_layers"] == 62 else config["head_dim"]
    return config | _token_ids(metadata)


def _rope(keys: _Keys) -> dict[str, Any]:
    kind = keys.get("rope.scaling.type") or "none"
    rope = {"rope_type": "default", "rope_theta": float(keys.number("rope.freq_base", 10000.0))}
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type is {kind!r} in the GGUF file, but none, linear or yarn is expected")
    rope |= {"rope_type": kind, "factor": float(keys.number("rope.scaling.factor"))}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = keys.number("rope.scaling.original_context_length")
    return rope


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the file; the end of a turn ends the text as well, as in llama.cpp."""
    found = {which: metadata.get(f"tokenizer.ggml.{which}_token_id") for which in ("bos", "eos", "eot", "eom")}
    ends = list(dict.fromkeys(found[which] for which in ("eos", "eot", "eom") if found[which] is not None))
    ids = {"bos_token_id": found["bos"], "eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    ids["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    return {name: value for name, value in ids.items() if value is not None}
