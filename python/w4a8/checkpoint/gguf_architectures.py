"""Architectures of GGUF files: what transformers calls their keys and tensors, and what it has stored otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Keys, after the architecture's name: fields of a config.
SIZES = {
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


def named(keys: Mapping[str, Any]) -> str | None:
    """The key of ARCHITECTURES that a file has, or None."""
    name = keys.get("general.architecture")
    if name == "llama" and keys.get("llama.expert_count"):
        name = "mixtral"
    return name if name in ARCHITECTURES else None
