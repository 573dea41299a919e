"""Architectures of GGUF files: what transformers calls their keys and tensors, and what it has stored otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Keys, after the architecture's name: fields of a config.
_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_DENSE = {"feed_forward_length": "intermediate_size"}
_QWEN_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
# Tensors of a layer, less "blk.<n>." and ".weight" or ".bias".
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TENSOR = re.compile(r"(?:blk\.(\d{1,4})\.)?(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class Architecture:
    """One that is known here.

    Attributes:
        model: how its classes in transformers begin.
        model_type: in the config.
        keys: more of them, all needed.
        fixed: fields of the config that the file does not have.
        names: of tensors, other than those of most.
        turned: rows of q and k are in ggml's order: of each head the pairs that are rotated together are neighbours.
        norm_plus: what is added to the weights of norms in the file.
    """

    model: str
    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: _DENSE)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    turned: bool = False
    norm_plus: int = 0

    def parameter(self, name: str) -> str | None:
        """The parameter that a tensor is, or is part of."""
        match = _TENSOR.fullmatch(name)
        if match is None:
            return None
        layer, leaf, suffix = match.groups()
        module = _OTHERS.get(leaf) if layer is None else self.names.get(leaf, _LAYER.get(leaf))
        if module is None:
            return None
        path = module if layer is None else f"model.layers.{layer}.{module}"
        if path.endswith(("sinks", "experts.gate_up_proj", "experts.down_proj")):
            return path if suffix == "weight" else f"{path}_bias"
        return f"{path}.{suffix}"


_GEMMA_NAMES = {"ffn_norm": "pre_feedforward_layernorm"}
_OSS_NAMES = {"ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"}
# By general.architecture; Mixtral's is llama's with experts.
ARCHITECTURES = {
    "llama": Architecture("Llama", "llama", turned=True),
    "mixtral": Architecture("Mixtral", "mixtral", _DENSE | _LOCAL_EXPERTS, turned=True),
    "gemma3": Architecture(
        "Gemma3",
        "gemma3_text",
        _DENSE | {"attention.sliding_window": "sliding_window"},
        names=_GEMMA_NAMES,
        norm_plus=1,
    ),
    "qwen2": Architecture("Qwen2", "qwen2"),
    "qwen3": Architecture("Qwen3", "qwen3"),
    "qwen2moe": Architecture(
        "Qwen2Moe",
        "qwen2_moe",
        _QWEN_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {"norm_topk_prob": False},
    ),
    "qwen3moe": Architecture("Qwen3Moe", "qwen3_moe", _QWEN_EXPERTS, {"norm_topk_prob": True}),
    "gpt-oss": Architecture(
        "GptOss",
        "gpt_oss",
        _LOCAL_EXPERTS
        | {"expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window"},
        names=_OSS_NAMES,
    ),
}
BY_MODEL_TYPE = {each.model_type: each for each in ARCHITECTURES.values()}


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
    keys, name = _Keys(metadata), metadata["general.architecture"]
    if name == "llama" and keys.get("expert_count"):
        name = "mixtral"
    known = ARCHITECTURES[name]
    config = {"model_type": known.model_type, "architectures": [f"{known.model}ForCausalLM"], **known.fixed}
    config |= {renamed: keys.number(key) for key, renamed in {**_SIZES, **known.keys}.items()}
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
