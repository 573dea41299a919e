"""Architectures of GGUF files: what transformers calls their keys and tensors, and what it has stored otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from w4a8.checkpoint.gguf_keys import Keys
from w4a8.core.activation import MoEActivation

# expert_gating_func in the file (llama_expert_gating_func_type).
SOFTMAX, SIGMOID, SOFTMAX_OF_SELECTED = 1, 2, 3
# Keys of a router that some models follow.
NORM, SCALE, GROUPS = "expert_weights_norm", "expert_weights_scale", "expert_group_count"

# Keys, after the architecture's name: fields of a config.
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_DENSE = {"feed_forward_length": "intermediate_size"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_QWEN_EXPERTS = _EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"}
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
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SHARED_EXPERTS = {f"ffn_{each}_shexp": f"mlp.shared_experts.{each}_proj" for each in ("gate", "up", "down")}
# Tensors that are no weights of a model: rope_freqs is in the config, the others belong to a matrix of NVFP4.
BESIDE = ("rope_freqs.weight", ".scale", ".input_scale")
# Of multi-head latent attention. k_b and v_b are the parts of kv_b.
_MLA = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
}
_OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TENSOR = re.compile(r"(?:blk\.(\d{1,4})\.)?(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class Routing:
    """Of a layer of experts: what llama.cpp takes where the file does not say, and what the model has a choice of.

    Attributes:
        gating: ``expert_gating_func``.
        renormalize: ``expert_weights_norm``.
        size_key: of an expert's intermediate size.
        activation: between w13 and w2.
        follows: keys of the router that the model follows; it is as it is in all others.
        has_bias: it has a correction bias.
    """

    gating: int = SOFTMAX
    renormalize: bool = False
    size_key: str = "expert_feed_forward_length"
    activation: MoEActivation = MoEActivation.SILU
    follows: tuple[str, ...] = (NORM,)
    has_bias: bool = False


@dataclass(frozen=True)
class Architecture:
    """One that is known here.

    Attributes:
        model: how its classes in transformers begin.
        model_type: in the config.
        keys: more of them, all needed.
        routing: of its experts, or None.
        names: of tensors, other than those of most.
        turned: rows of q and k are in ggml's order: of each head the pairs that are rotated together are neighbours.
        in_turns: a stack of gate and up alternates them, in its last dimension; stacks are transposed.
        norm_plus: what is added to the weights of norms in the file.
        window_period: every so manieth layer sees the whole text, the others a sliding window, if the file has one and
            does not say otherwise; 0: the model has none.
    """

    model: str
    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: _DENSE)
    routing: Routing | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    turned: bool = False
    in_turns: bool = False
    norm_plus: int = 0
    window_period: int = 0

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
        if path.endswith((".sinks", ".e_score_correction", ".experts.gate_up_proj", ".experts.down_proj")):
            return path if suffix == "weight" else f"{path}_bias"
        return f"{path}.{suffix}"


_ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_DEEPSEEK = _DENSE | _ROUTED | {"attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim"}
_BIASED = {"follows": (NORM, SCALE, GROUPS), "has_bias": True}
_DEEPSEEK_NAMES = _SHARED_EXPERTS | _MLA
_GEMMA_NAMES = {"ffn_norm": "pre_feedforward_layernorm"}
_OSS_NAMES = {"ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"}
# By general.architecture. Mixtral's is llama's with experts, that of DeepSeek-V3 deepseek2 with a sigmoid.
ARCHITECTURES = {
    "llama": Architecture("Llama", "llama", turned=True),
    "mixtral": Architecture(
        "Mixtral",
        "mixtral",
        _DENSE | _LOCAL_EXPERTS,
        Routing(renormalize=True, size_key="feed_forward_length", follows=()),
        turned=True,
    ),
    "gemma3": Architecture(
        "Gemma3",
        "gemma3_text",
        names=_GEMMA_NAMES,
        norm_plus=1,
        window_period=6,
    ),
    "qwen2": Architecture("Qwen2", "qwen2"),
    "qwen3": Architecture("Qwen3", "qwen3"),
    "qwen2moe": Architecture(
        "Qwen2Moe",
        "qwen2_moe",
        _QWEN_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        Routing(),
    ),
    "qwen3moe": Architecture("Qwen3Moe", "qwen3_moe", _QWEN_EXPERTS, Routing(renormalize=True)),
    "olmoe": Architecture("Olmoe", "olmoe", _DENSE | _EXPERTS, Routing(size_key="feed_forward_length")),
    "gpt-oss": Architecture(
        "GptOss",
        "gpt_oss",
        _LOCAL_EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
        Routing(SOFTMAX_OF_SELECTED, activation=MoEActivation.SWIGLUOAI, follows=()),
        names=_OSS_NAMES,
        in_turns=True,
        window_period=2,
    ),
    "deepseek2": Architecture(
        "DeepseekV2", "deepseek_v2", _DEEPSEEK, Routing(follows=(SCALE, GROUPS)), _DEEPSEEK_NAMES
    ),
    "deepseek3": Architecture("DeepseekV3", "deepseek_v3", _DEEPSEEK, Routing(SIGMOID, **_BIASED), _DEEPSEEK_NAMES),
    "glm4moe": Architecture(
        "Glm4Moe", "glm4_moe", _DENSE | _ROUTED, Routing(SIGMOID, renormalize=True, **_BIASED), _SHARED_EXPERTS
    ),
}
# The others have tensors that vLLM's models join otherwise: DeepSeek's kv_b, MTP's blocks.
RUN_IN_VLLM = ("llama", "mixtral", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gemma3", "gpt-oss")
BY_MODEL_TYPE = {each.model_type: each for each in ARCHITECTURES.values()}


def named(keys: Mapping[str, Any]) -> str | None:
    """The key of ARCHITECTURES that a file has, or None.

    Raises:
        CheckpointError: it does not say what it is, or a key that tells is no integer.
    """
    found = Keys(keys)
    name = found.architecture
    if name == "llama" and found.typed("expert_count", int, 0) > 0:
        name = "mixtral"
    if name == "deepseek2":
        # The first files of GLM-4.7-Flash do not say it. llama.cpp knows them by their sizes.
        tokens = keys.get("tokenizer.ggml.tokens", 0)
        words = found.typed("vocab_size", int, tokens if isinstance(tokens, int) else len(tokens))
        flash = words == 154880 and found.typed("block_count", int, 0) in (47, 48)
        if found.typed("expert_gating_func", int, SIGMOID if flash else SOFTMAX) == SIGMOID:
            name = "deepseek3"
    return name if name in ARCHITECTURES else None
