"""Architectures of GGUF files: names of keys and tensors in transformers, and differences in storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from w4a8.checkpoint.gguf_features import (
    Feature,
    attention_scale,
    blocks_of_lfm2,
    chunks_of_llama4,
    gated_delta_net,
    gemma4,
    greedy_or_grouped,
    heads,
    heads_in_part,
    indexer,
    interleaved_sections,
    last_layer_of_ernie,
    latent_attention,
    layers_without_keys,
    long_rope,
    mamba,
    nemotron,
    norms_of_heads,
    output_bias,
    output_layer_bias,
    rests_from_rotation,
    rotates_if_finetuned,
    soft_caps,
    temperature_of_mistral,
    two_rotations,
    windows,
    windows_of_exaone4,
    yarn_of_gpt_oss,
)
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.checkpoint.gguf_names import GLM_HEADS, QWEN_HEADS, XIELU, Heads
from w4a8.core.activation import MoEActivation
from w4a8.core.routing import Router, RoutingMethodType

# expert_gating_func in the file (llama_expert_gating_func_type).
SOFTMAX, SIGMOID, SOFTMAX_OF_SELECTED = 1, 2, 3
# Keys of a router that some models follow.
NORM, SCALE, GROUPS = "expert_weights_norm", "expert_weights_scale", "expert_group_count"
KEPT_GROUPS = "expert_group_used_count"

RMS_EPS = "attention.layer_norm_rms_epsilon"
# Keys, after the architecture's name: fields of a config.
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
_ROPE = "type factor attn_factor original_context_length yarn_beta_fast yarn_beta_slow"
# Of every architecture.
ALWAYS_READ = frozenset(SIZES) | {f"rope.scaling.{name}" for name in _ROPE.split()}
ALWAYS_READ |= {"rope.freq_base", "rope.scale_linear", "nextn_predict_layers", "vocab_size", "pooling_type"}
_DENSE = {"feed_forward_length": "intermediate_size"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_QWEN_EXPERTS = _EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
# Tensors that are no weights of a model: the config has the rope_* tensors; the scales belong to a matrix of NVFP4.
BESIDE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", ".scale", ".input_scale")


@dataclass(frozen=True)
class Routing:
    """Routing of layers of experts: llama.cpp's defaults for missing keys, and the choices of the model.

    Attributes:
        gating: ``expert_gating_func``.
        renormalize: ``expert_weights_norm``.
        size_key: of an expert's intermediate size.
        activation: between w13 and w2.
        follows: keys of the router that a file may set freely, and the fields of the config that take their values. Any
            other key of the router must have the model's own value, or the file is refused.
        has_bias: the router has a correction bias.
        on_input: the weights of experts multiply their input.
        in_config: defaults for fields missing in a config.json, by keys, if they differ from the defaults above; and
            values that only a config.json has.
    """

    gating: int = SOFTMAX
    renormalize: bool = False
    size_key: str = "expert_feed_forward_length"
    activation: MoEActivation = MoEActivation.SILU
    follows: Mapping[str, str] = field(default_factory=lambda: {NORM: "norm_topk_prob"})
    has_bias: bool = False
    on_input: bool = False
    in_config: Mapping[str, Any] = field(default_factory=dict)

    def router(self, renormalize: bool, scale: float, groups: int, kept: int) -> Router:
        """The router of a model, by the values of NORM, SCALE, GROUPS and KEPT_GROUPS from keys or a config."""
        if self.gating != SIGMOID:
            renormalizes = renormalize or self.gating == SOFTMAX_OF_SELECTED
            method = RoutingMethodType.Renormalize if renormalizes else RoutingMethodType.Default
        elif self.on_input:
            method = RoutingMethodType.Llama4
        elif not renormalize:
            method = RoutingMethodType.Sigmoid
        else:
            method = RoutingMethodType.DeepSeekV3 if GROUPS in self.follows else RoutingMethodType.MiniMax2
        of_groups = (groups, kept) if groups > 1 else (None, None)
        return Router(method, *of_groups, scale, self.has_bias, self.on_input)

    @property
    def keys(self) -> frozenset[str]:
        """The keys that are read in the file."""
        read = {"expert_count", "expert_used_count", "expert_gating_func", NORM, SCALE, GROUPS, self.size_key}
        return frozenset(read | ({KEPT_GROUPS} if GROUPS in self.follows else set()))


@dataclass(frozen=True)
class Architecture:
    """An architecture that is known here.

    Attributes:
        model: how its classes in transformers begin.
        model_type: in the config.
        keys: fields of the config by keys, beside the fields of every architecture; all keys are needed.
        optional: the same for keys that may be missing.
        constants: fields without a key, since llama.cpp has the values in its code.
        features: more fields (gguf_features.py), in this order.
        routing: of the experts, or None.
        eps: the key of the epsilon of norms, and the field.
        turned: rows of q and k are in ggml's order: in each head the rows that are rotated together are neighbours.
        transposed: stacks of experts are transposed in the model.
        interleaved: gate and up alternate in the last dimension of their stack.
        norm_plus: number that the file adds to the weights of norms.
        tiled: order of the value heads of linear attention: the first of each key head, then the second of each, and so
            on.
        told_by: keys that distinguish architectures of the same name (:func:`named`).
        joined: if queries, keys and values are one matrix in the file, they are one in the model.
        heads: for further tokens (MTP), or None: they are left out everywhere.
        numbers: keys, without the architecture's name in front, with a number for all layers or one for each, which are
            parameters of the model.
    """

    model: str
    model_type: str
    keys: Mapping[str, str] = field(default_factory=lambda: _DENSE)
    routing: Routing | None = None
    optional: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    features: tuple[Feature, ...] = (heads,)
    eps: tuple[str, str] = (RMS_EPS, "rms_norm_eps")
    turned: bool = False
    transposed: bool = False
    interleaved: bool = False
    norm_plus: int = 0
    tiled: bool = False
    joined: bool = False
    told_by: tuple[str, ...] = ()
    heads: Heads | None = None
    numbers: tuple[str, ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        """The keys that are read, without ``<architecture>.``; gguf_key_table.py decides on all others."""
        found = {*ALWAYS_READ, *self.keys, *self.optional, *self.told_by, self.eps[0]}
        found |= {key for each in self.features for key in getattr(each, "keys", ())}
        found |= set() if "intermediate_size" in self.keys.values() else {"feed_forward_length"}
        return frozenset(found | (self.routing.keys if self.routing is not None else set()))


_ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LEADING = {"leading_dense_block_count": "first_k_dense_replace"}
_GROUPED = {SCALE: "routed_scaling_factor", GROUPS: "n_group"}
_BIASED = {"follows": {NORM: "norm_topk_prob", **_GROUPED}, "has_bias": True}
_DEEPSEEK_CONFIG = {NORM: True, SCALE: 2.5, GROUPS: 8, KEPT_GROUPS: 4}
_NO_DENSE = {"first_k_dense_replace": 0}
_NO_MTP = _NO_DENSE | {"num_nextn_predict_layers": 0}
_SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_EPS = ("attention.layer_norm_epsilon", "layer_norm_eps")
_CAPS = {"final_logit_softcapping": "final_logit_softcapping"}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_GRANITE_SHARED = {"expert_shared_feed_forward_length": "shared_intermediate_size"}
_GRANITE_EXPERTS = Routing(renormalize=True, size_key="feed_forward_length", follows={})
_DELTA_NET = (heads_in_part, gated_delta_net)
# By general.architecture, or the name from `named`.
ARCHITECTURES = {
    "llama": Architecture("Llama", "llama", turned=True, told_by=("expert_count",)),
    "mixtral": Architecture(
        "Mixtral",
        "mixtral",
        _DENSE | _LOCAL_EXPERTS,
        Routing(renormalize=True, size_key="feed_forward_length", follows={}),
        turned=True,
    ),
    "gemma2": Architecture(
        "Gemma2",
        "gemma2",
        constants={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        optional=_CAPS | {"attn_logit_softcapping": "attn_logit_softcapping"},
        features=(heads, windows(2, 4096), attention_scale(46)),
        norm_plus=1,
    ),
    "gemma3": Architecture(
        "Gemma3",
        "gemma3_text",
        features=(heads, windows(6), attention_scale(62), soft_caps, two_rotations(10000.0)),
        norm_plus=1,
    ),
    "gemma4": Architecture(
        "Gemma4",
        "gemma4_text",
        {},
        routing=Routing(renormalize=True, activation=MoEActivation.GELU_TANH, follows={}),
        features=(gemma4, soft_caps),
    ),
    "qwen2": Architecture("Qwen2", "qwen2"),
    "qwen3": Architecture("Qwen3", "qwen3"),
    "qwen2moe": Architecture("Qwen2Moe", "qwen2_moe", _QWEN_EXPERTS | _SHARED, Routing()),
    "qwen3moe": Architecture(
        "Qwen3Moe",
        "qwen3_moe",
        _QWEN_EXPERTS,
        Routing(renormalize=True, in_config={NORM: False}),
    ),
    "qwen3next": Architecture(
        "Qwen3Next",
        "qwen3_next",
        _QWEN_EXPERTS | _SHARED,
        Routing(renormalize=True),
        features=_DELTA_NET,
        norm_plus=1,
        joined=True,
    ),
    "qwen35": Architecture(
        "Qwen3_5",
        "qwen3_5_text",
        features=(*_DELTA_NET, interleaved_sections),
        norm_plus=1,
        tiled=True,
        joined=True,
        heads=QWEN_HEADS,
    ),
    "qwen35moe": Architecture(
        "Qwen3_5Moe",
        "qwen3_5_moe_text",
        _QWEN_EXPERTS | _SHARED,
        Routing(renormalize=True, follows={}),
        features=(*_DELTA_NET, interleaved_sections),
        norm_plus=1,
        tiled=True,
        joined=True,
        heads=QWEN_HEADS,
    ),
    "olmoe": Architecture(
        "Olmoe",
        "olmoe",
        _DENSE | _EXPERTS,
        Routing(size_key="feed_forward_length"),
    ),
    "olmo2": Architecture("Olmo2", "olmo2", told_by=("attention.sliding_window",)),
    "olmo3": Architecture("Olmo3", "olmo3", features=(heads, windows(4), two_rotations())),
    "gpt-oss": Architecture(
        "GptOss",
        "gpt_oss",
        _LOCAL_EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
        Routing(SOFTMAX_OF_SELECTED, activation=MoEActivation.SWIGLUOAI, follows={}),
        features=(heads, windows(2), yarn_of_gpt_oss),
        transposed=True,
        interleaved=True,
    ),
    "deepseek2": Architecture(
        "DeepseekV2",
        "deepseek_v2",
        _DENSE | _ROUTED,
        Routing(follows=_GROUPED, in_config={NORM: False}),
        optional=_LEADING,
        constants=_NO_DENSE,
        features=(latent_attention, greedy_or_grouped),
    ),
    "deepseek3": Architecture(
        "DeepseekV3",
        "deepseek_v3",
        _DENSE | _ROUTED,
        Routing(SIGMOID, **_BIASED, in_config=_DEEPSEEK_CONFIG),
        optional=_LEADING,
        constants=_NO_MTP | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        features=(latent_attention,),
    ),
    "glm-dsa": Architecture(
        "GlmMoeDsa",
        "glm_moe_dsa",
        _DENSE | _ROUTED,
        Routing(SIGMOID, **_BIASED),
        optional=_LEADING,
        features=(latent_attention, indexer),
    ),
    "glm4": Architecture("Glm4", "glm4", features=(heads_in_part,)),
    "glm4moe": Architecture(
        "Glm4Moe",
        "glm4_moe",
        _DENSE | _ROUTED,
        Routing(SIGMOID, renormalize=True, **_BIASED),
        optional=_LEADING,
        constants=_NO_MTP,
        features=(heads_in_part, norms_of_heads),
        heads=GLM_HEADS,
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2",
        "minimax_m2",
        _LOCAL_EXPERTS | {"expert_feed_forward_length": "intermediate_size", "rope.dimension_count": "rotary_dim"},
        Routing(SIGMOID, renormalize=True, follows={}, has_bias=True),
        constants={"scoring_func": "sigmoid", "use_routing_bias": True},
        features=(heads_in_part,),
    ),
    "llama4": Architecture(
        "Llama4",
        "llama4_text",
        {"feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size"}
        | _LOCAL_EXPERTS,
        Routing(SIGMOID, follows={}, on_input=True),
        optional={"interleave_moe_layer_step": "interleave_moe_layer_step"},
        features=(heads, chunks_of_llama4),
        transposed=True,
    ),
    "granite": Architecture("Granite", "granite", optional=_GRANITE, turned=True),
    "granitemoe": Architecture(
        "GraniteMoe",
        "granitemoe",
        _DENSE | _LOCAL_EXPERTS,
        _GRANITE_EXPERTS,
        optional=_GRANITE,
        turned=True,
        told_by=tuple(_GRANITE_SHARED),
    ),
    "granitemoeshared": Architecture(
        "GraniteMoeShared",
        "granitemoeshared",
        _DENSE | _LOCAL_EXPERTS | _GRANITE_SHARED,
        _GRANITE_EXPERTS,
        optional=_GRANITE,
        turned=True,
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybrid",
        "granitemoehybrid",
        routing=_GRANITE_EXPERTS,
        optional=_GRANITE | _GRANITE_SHARED | _LOCAL_EXPERTS,
        constants={"num_local_experts": 0},
        features=(mamba(1), layers_without_keys("mamba", "attention"), rotates_if_finetuned),
        turned=True,
    ),
    "lfm2": Architecture(
        "Lfm2",
        "lfm2",
        _DENSE | {"shortconv.l_cache": "conv_L_cache"},
        constants={"block_auto_adjust_ff_dim": False},
        features=(layers_without_keys("conv"), blocks_of_lfm2),
        eps=(RMS_EPS, "norm_eps"),
    ),
    "lfm2moe": Architecture(
        "Lfm2Moe",
        "lfm2_moe",
        _DENSE | _QWEN_EXPERTS | {"shortconv.l_cache": "conv_L_cache"},
        Routing(SIGMOID, renormalize=True, follows={}, has_bias=True),
        optional={"leading_dense_block_count": "num_dense_layers"},
        features=(layers_without_keys("conv"), blocks_of_lfm2),
        eps=(RMS_EPS, "norm_eps"),
    ),
    "nemotron_h": Architecture(
        "NemotronH",
        "nemotron_h",
        {},
        features=(mamba(0), nemotron),
        eps=(RMS_EPS, "layer_norm_epsilon"),
        turned=True,
    ),
    "nemotron_h_moe": Architecture(
        "NemotronH",
        "nemotron_h",
        _ROUTED | {"expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size"},
        Routing(SIGMOID, activation=MoEActivation.RELU2_NO_MUL, **_BIASED),
        optional={"moe_latent_size": "moe_latent_size"},
        features=(mamba(0), nemotron),
        eps=(RMS_EPS, "layer_norm_epsilon"),
        turned=True,
    ),
    "ernie4_5": Architecture("Ernie4_5", "ernie4_5"),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_Moe",
        "ernie4_5_moe",
        _DENSE
        | {"expert_count": "moe_num_experts", "expert_used_count": "moe_k"}
        | {"expert_feed_forward_length": "moe_intermediate_size"},
        Routing(renormalize=True, follows={}, has_bias=True),
        optional={"interleave_moe_layer_step": "moe_layer_interval", "expert_shared_count": "moe_num_shared_experts"}
        | {"leading_dense_block_count": "moe_layer_start_index"},
        constants={"moe_layer_start_index": 0, "moe_num_shared_experts": 0},
        features=(heads, last_layer_of_ernie),
    ),
    "hunyuan-moe": Architecture(
        "HunYuanMoEV1",
        "hunyuan_v1_moe",
        {"expert_count": "num_experts", "expert_used_count": "moe_topk"}
        | {"expert_feed_forward_length": "intermediate_size"},
        Routing(renormalize=True, follows={}),
    ),
    "hunyuan-dense": Architecture("HunYuanDenseV1", "hunyuan_v1_dense"),
    "seed_oss": Architecture("SeedOss", "seed_oss", features=(heads, output_bias)),
    "smollm3": Architecture("SmolLM3", "smollm3", features=(heads, rests_from_rotation(4)), turned=True),
    "phi3": Architecture("Phi3", "phi3", features=(heads_in_part, long_rope), joined=True),
    "phimoe": Architecture(
        "Phimoe",
        "phimoe",
        _DENSE | _LOCAL_EXPERTS,
        Routing(size_key="feed_forward_length", follows={}),
        features=(heads, long_rope, output_layer_bias),
    ),
    "mistral3": Architecture(
        "Ministral3",
        "ministral3",
        features=(heads, temperature_of_mistral),
        constants={"sliding_window": None},
        turned=True,
    ),
    "exaone4": Architecture("Exaone4", "exaone4", features=(heads, windows_of_exaone4)),
    "exaone-moe": Architecture(
        "ExaoneMoe",
        "exaone_moe",
        _DENSE
        | _EXPERTS
        | {"expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "num_shared_experts"},
        Routing(SIGMOID, renormalize=True, **_BIASED),
        optional=_LEADING,
        features=(heads, windows(4, 128)),
    ),
    "apertus": Architecture("Apertus", "apertus", numbers=XIELU),
    "command-r": Architecture(
        "Cohere", "cohere", optional={"logit_scale": "logit_scale"}, eps=_EPS, features=(heads, norms_of_heads)
    ),
    "cohere2": Architecture(
        "Cohere2", "cohere2", optional={"logit_scale": "logit_scale"}, eps=_EPS, features=(heads, windows(4))
    ),
}
# Why vLLM does not run the others on CPUs (0.32).
NOT_IN_VLLM = {"glm-dsa": "its CPU backend has no sparse attention"}
BY_MODEL_TYPE = {each.model_type: each for each in ARCHITECTURES.values()}


def named(keys: Mapping[str, Any]) -> str | None:
    """The key of ARCHITECTURES that a file has, or None.

    Raises:
        CheckpointError: there is no architecture; or a key that must be an integer is not: ``expert_count`` of llama,
            ``vocab_size``, ``block_count`` and ``expert_gating_func`` of deepseek2.
    """
    found = Keys(keys)
    name = found.architecture
    if name == "llama" and found.typed("expert_count", int, 0) > 0:
        name = "mixtral"
    if name == "granitemoe" and found.get("expert_shared_feed_forward_length"):
        name = "granitemoeshared"
    if name == "olmo2" and found.get("attention.sliding_window"):
        name = "olmo3"
    if name == "deepseek2":
        # The first files of GLM-4.7-Flash lack expert_gating_func. llama.cpp recognizes these files by their sizes.
        tokens = keys.get("tokenizer.ggml.tokens", 0)
        words = found.typed("vocab_size", int, tokens if isinstance(tokens, int) else len(tokens))
        flash = words == 154880 and found.typed("block_count", int, 0) in (47, 48)
        if found.typed("expert_gating_func", int, SIGMOID if flash else SOFTMAX) == SIGMOID:
            name = "deepseek3"
    return name if name in ARCHITECTURES else None
