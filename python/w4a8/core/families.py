"""Families of models whose layers run in one call (docs/decoder.md): names of classes and attributes.

Unless noted otherwise, attributes of a layer and of its parts have the same names in vLLM and in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Pairs: field of ``Decoder.add_layer``, attribute of a layer.
Norms = tuple[tuple[str, str], ...]
_TWO: Norms = (("input_norm", "input_layernorm"), ("mlp_input_norm", "post_attention_layernorm"))
_FOUR: Norms = (
    ("input_norm", "input_layernorm"),
    ("attention_norm", "post_attention_layernorm"),
    ("mlp_input_norm", "pre_feedforward_layernorm"),
    ("mlp_norm", "post_feedforward_layernorm"),
)
_TWO_OF_LFM2: Norms = (("input_norm", "operator_norm"), ("mlp_input_norm", "ffn_norm"))
_TWO_OF_APERTUS: Norms = (("input_norm", "attention_layernorm"), ("mlp_input_norm", "feedforward_layernorm"))
_ONE: Norms = _TWO[:1]
_TWO_OF_BAMBA: Norms = (("input_norm", "input_layernorm"), ("mlp_input_norm", "pre_ff_layernorm"))
_BEHIND: Norms = (("attention_norm", "post_attention_layernorm"), ("mlp_norm", "post_feedforward_layernorm"))
_FOUR_OF_GLM: Norms = (
    ("input_norm", "input_layernorm"),
    ("attention_norm", "post_self_attn_layernorm"),
    ("mlp_input_norm", "post_attention_layernorm"),
    ("mlp_norm", "post_mlp_layernorm"),
)


@dataclass(frozen=True)
class Family:
    """How the layers of a family differ from Llama's.

    A vLLM class without a dot is the end of a name that begins with ``vllm``; one with a dot is module and name.

    Attributes:
        vllm: module and beginning of the names of vLLM's classes, or of transformers' where vLLM runs those; the
            model's class ends with "Model". "": there is no table for vLLM.
        mlps: classes in vLLM of dense MLPs and of experts that all tokens share.
        experts: class in vLLM with a router and experts; "": none.
        layer, attention: classes in vLLM.
        more_layers: classes in vLLM of layers with other parts.
        attention_at, mlp_at: attributes of a layer in vLLM; in transformers "self_attn" and, if there is one, "mlp".
        nothing: attributes of a layer or of its attention in vLLM that must be None or False.
        refuses: fields of the config that must not be set.
        refuses_values: fields of the config, and a value that they must not have.
        norms: the norms of a layer.
        linear_norms: those of a layer with linear attention; (): the same.
        one_more: a norm multiplies by 1 + weight. vLLM has a class for such norms.
        centered: norms subtract the mean (LayerNorm).
        parallel: the MLP takes the normed rows that attention takes, and is added together with attention.
        interleaved: channels of a head that are turned together are neighbours, not in two halves. vLLM's layers say so
            themselves.
        turn_first: norms of queries and keys are behind the rotation.
        gated: behind each head of queries are as many numbers, whose sigmoid multiplies the head's result.
        turns_windows_alone: if some layers have a window, the others have no rotary embeddings. In transformers.
        router: the router's attribute in the module with experts, or with a dot its matrix's; in transformers
            "router", if there is one.
        scoring: the router's ``scoring_func`` of ``topk_routing``, if neither the config nor vLLM's layer says.
        shared: attributes of the module with experts in transformers: the shared expert and its gate; "": none.
        part: attribute of a layer that is attention, linear attention, an MLP or experts alone, behind a norm; "": a
            layer has attention or linear attention, then an MLP or experts.
        names: names of modules that differ from Llama's, by these. Of MLPs, vLLM joins gate and up.
        activation: of MLPs, by its name in transformers, where the config does not say; "": the config does.
        beside: attribute of a layer with an MLP beside ``mlp_at``, whose outputs are added, or in its place; "": none.
        scaled: the config has factors of products (w4a8/core/product_factors.py); in transformers, embeddings that are
            given are not multiplied by ``embedding_multiplier``.
        is_latent: attention is latent (MLA).
        expert_norms: fields of ``Decoder.add_experts`` and attributes of a layer: norms of experts that are, with their
            router, parts of the layer beside its MLP, which all tokens share. The router has factors of its rows and of
            each expert's weight.
        layer_input: attributes of a layer whose tokens have numbers of their own for each layer: gate, projection and
            norm; (): none. The model makes the numbers by ``get_per_layer_inputs`` and ``project_per_layer_inputs``.
        output_scale: attribute of a layer, a factor of its output; "": none.
        head: class in vLLM of a head for further tokens (MTP), without its output layer; "": none is known.
    """

    vllm: str = ""
    mlps: tuple[str, ...] = ("MLP",)
    experts: str = ""
    layer: str = "DecoderLayer"
    attention: str = "Attention"
    attention_at: str = "self_attn"
    mlp_at: str = "mlp"
    nothing: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    refuses_values: Mapping[str, str] = field(default_factory=dict)
    norms: Norms = _TWO
    linear_norms: Norms = ()
    one_more: bool = False
    centered: bool = False
    parallel: bool = False
    interleaved: bool = False
    turn_first: bool = False
    gated: bool = False
    turns_windows_alone: bool = False
    router: str = "gate"
    scoring: str = ""
    shared: tuple[str, str] = ("", "")
    more_layers: tuple[str, ...] = ()
    part: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    activation: str = ""
    beside: str = ""
    scaled: bool = False
    is_latent: bool = False
    expert_norms: Norms = ()
    layer_input: tuple[str, ...] = ()
    output_scale: str = ""
    head: str = ""

    def refusal(self, config: Any) -> str | None:
        """What a config has that a Decoder does not compute, or None."""
        for name in self.refuses:
            if getattr(config, name, None):
                return f"config.{name} is set"
        for name, value in self.refuses_values.items():
            if getattr(config, name, None) == value:
                return f"config.{name} is {value!r}"
        return None

    def name(self, usual: str) -> str:
        """The name of what Llama calls ``usual``."""
        return self.names.get(usual, usual)

    def classes(self, *ends: str) -> tuple[str, ...]:
        """Module and name of vLLM's classes, by the ends of their names; an empty end is left out."""
        return tuple(end if "." in end else self.vllm + end for end in ends if end)


_GRANITE_MLP = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}
_COHERE = Family("commandr.Cohere", norms=_ONE, centered=True, parallel=True, interleaved=True)
_NAMES_OF_BAMBA = {"norm": "final_layernorm", "mlp": "feed_forward"}
_LFM2 = Family(
    "lfm2.Lfm2",
    layer="AttentionDecoderLayer",
    more_layers=("ShortConvDecoderLayer",),
    mlp_at="feed_forward",
    norms=_TWO_OF_LFM2,
    names={
        "norm": "embedding_norm", "mlp": "feed_forward", "gate_proj": "w1", "up_proj": "w3", "gate_up_proj": "w13",
        "down_proj": "w2", "o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm",
    },
    activation="silu",
)  # fmt: skip
_QWEN3_NEXT = Family(
    "qwen3_next.Qwen3Next",
    ("qwen2_moe.Qwen2MoeMLP",),
    "SparseMoeBlock",
    nothing=("layer_scale", "dual_chunk_attention_config"),
    one_more=True,
    gated=True,
    shared=("shared_expert", "shared_expert_gate"),
)
_QWEN3_5 = replace(
    _QWEN3_NEXT,
    vllm="qwen3_5.Qwen3_5",
    experts="qwen3_next.Qwen3NextSparseMoeBlock",
    attention="qwen3_next.Qwen3NextAttention",
    head="qwen3_5_mtp.Qwen3_5MultiTokenPredictor",
)


def _of_transformers(model_type: str, name: str) -> str:
    return f"transformers.models.{model_type}.modeling_{model_type}.{name}"


_HUNYUAN = Family(
    _of_transformers("hunyuan_v1_dense", "HunYuanDenseV1"),
    turn_first=True,
    names={"q_norm": "query_layernorm", "k_norm": "key_layernorm"},
)
_CHUNKED = ("dual_chunk_attention_config",)
# By transformers' model_type.
FAMILIES = {
    "llama": Family("llama.Llama"),
    "mistral": Family(
        "mistral.Mistral", ("llama.LlamaMLP", "MLP"), nothing=("do_llama_4_scaling", "ada_rms_norm_t_cond")
    ),
    "llama4_text": Family(
        "llama4.Llama4",
        ("llama.LlamaMLP",),
        "MoE",
        mlp_at="feed_forward",
        router="router",
        scoring="sigmoid",
        interleaved=True,
        turn_first=True,
        shared=("shared_expert", ""),
        names={"mlp": "feed_forward", "q_norm": "qk_norm", "k_norm": "qk_norm"},
    ),
    "qwen2": Family("qwen2.Qwen2", nothing=_CHUNKED),
    "qwen3": Family("qwen3.Qwen3", ("qwen2.Qwen2MLP",), nothing=_CHUNKED),
    "qwen2_moe": Family(
        "qwen2_moe.Qwen2Moe",
        experts="SparseMoeBlock",
        nothing=_CHUNKED,
        shared=("shared_expert", "shared_expert_gate"),
    ),
    "qwen3_moe": Family("qwen3_moe.Qwen3Moe", experts="SparseMoeBlock", nothing=_CHUNKED),
    "mixtral": Family("mixtral.Mixtral", (), "MoE", mlp_at="block_sparse_moe"),
    "olmoe": Family("olmoe.Olmoe", (), "MoE", refuses=("clip_qkv",)),
    "gpt_oss": Family(
        "gpt_oss.GptOss",
        (),
        "gpt_oss.MLPBlock",
        "gpt_oss.TransformerBlock",
        "gpt_oss.OAIAttention",
        "attn",
        router="router",
    ),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "gemma2": Family("gemma2.Gemma2", norms=_FOUR, one_more=True),
    "gemma3_text": Family("gemma3.Gemma3", refuses=("use_bidirectional_attention",), norms=_FOUR, one_more=True),
    "dots1": Family(shared=("shared_experts", "")),
    "gemma4_text": Family(
        "gemma4.Gemma4",
        norms=_FOUR,
        refuses_values={"use_bidirectional_attention": "all"},  # "vision": of pictures alone
        router="router.proj",
        scoring="softmax",
        expert_norms=(
            ("input_norm", "pre_feedforward_layernorm_2"),
            ("output_norm", "post_feedforward_layernorm_2"),
            ("shared_norm", "post_feedforward_layernorm_1"),
        ),
        layer_input=("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"),
        output_scale="layer_scalar",
    ),
    "ernie4_5": Family(interleaved=True),
    "ernie4_5_moe": Family("ernie45_moe.Ernie4_5_Moe", experts="MoE", interleaved=True, shared=("shared_experts", "")),
    "exaone4": Family("exaone4.Exaone4", ("GatedMLP",), norms=_BEHIND, turns_windows_alone=True),
    "exaone_moe": Family(
        "exaone_moe.ExaoneMoe",
        ("exaone4.Exaone4GatedMLP",),
        "exaone_moe.ExaoneMoe",
        turns_windows_alone=True,
        shared=("shared_experts", ""),
    ),
    "glm4": Family("glm4.Glm4", ("llama.LlamaMLP",), norms=_FOUR_OF_GLM, interleaved=True),
    "granite": Family("granite.Granite"),
    "granitemoe": Family("granitemoe.GraniteMoe", (), "MoE", mlp_at="block_sparse_moe"),
    "granitemoeshared": Family(
        "granitemoeshared.GraniteMoeShared",
        experts="granitemoe.GraniteMoeMoE",
        attention="granitemoe.GraniteMoeAttention",
        mlp_at="block_sparse_moe",
        names=_GRANITE_MLP,
        beside="shared_mlp",
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid.GraniteMoeHybrid",
        ("granitemoeshared.GraniteMoeSharedMLP",),
        "granitemoe.GraniteMoeMoE",
        "AttentionDecoderLayer",
        more_layers=("MambaDecoderLayer",),
        mlp_at="block_sparse_moe",
        names=_GRANITE_MLP,
        beside="shared_mlp",
    ),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, turns_windows_alone=True),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": replace(
        _HUNYUAN,
        vllm=_of_transformers("hunyuan_v1_moe", "HunYuanMoEV1"),
        experts="Moe",
        router="gate.wg",
        shared=("shared_mlp", ""),
    ),
    "lfm2": _LFM2,
    "lfm2_moe": replace(
        _LFM2,
        vllm="lfm2_moe.Lfm2Moe",
        mlps=("Mlp",),
        experts="SparseMoeBlock",
        names={**_LFM2.names, "rotary_emb": "pos_emb"},
    ),
    "nemotron_h": Family(
        "nemotron_h.NemotronH",
        experts="MoE",
        layer="AttentionDecoderLayer",
        more_layers=("MambaDecoderLayer", "MoEDecoderLayer", "MLPDecoderLayer"),
        refuses=("moe_latent_size",),
        part="mixer",
        names={"norm": "norm_f", "hidden_act": "mlp_hidden_act"},
        shared=("shared_experts", ""),
    ),
    "bamba": Family(norms=_TWO_OF_BAMBA, names=_NAMES_OF_BAMBA),
    "falcon_h1": Family(
        "falcon_h1.FalconH1",
        layer="ParallelHybrid",
        attention="AttentionDecoderLayer",
        mlp_at="feed_forward",
        refuses=("attention_bias", "mamba_proj_bias"),
        norms=_TWO_OF_BAMBA,
        names=_NAMES_OF_BAMBA,
        scaled=True,
    ),
    "minimax_m2": Family("minimax_m2.MiniMaxM2", (), "MoE", mlp_at="block_sparse_moe"),
    "ministral3": Family(),
    "apertus": Family("apertus.Apertus", norms=_TWO_OF_APERTUS),
    "olmo2": Family(_of_transformers("olmo2", "Olmo2"), norms=_BEHIND),
    "olmo3": Family(_of_transformers("olmo3", "Olmo3"), norms=_BEHIND),
    "olmo_hybrid": Family(norms=_BEHIND, linear_norms=_TWO),
    "phi3": Family(),
    "phimoe": Family(
        "phimoe.PhiMoE",
        (),
        "phimoe.PhiMoE",
        mlp_at="block_sparse_moe",
        centered=True,
        scoring="sparsemixer",
    ),
    "seed_oss": Family(_of_transformers("seed_oss", "SeedOss")),
    "smollm3": Family(_of_transformers("smollm3", "SmolLM3")),
    "glm4_moe": Family(
        "glm4_moe.Glm4Moe",
        experts="glm4_moe.Glm4MoE",
        shared=("shared_experts", ""),
        head="glm4_moe_mtp.Glm4MoeMultiTokenPredictor",
    ),
    "deepseek_v2": Family(
        "deepseek_v2.DeepseekV2",
        experts="MoE",
        attention="MLAAttention",
        refuses=("llama_4_scaling",),
        shared=("shared_experts", ""),
        is_latent=True,
    ),
    "deepseek_v3": Family(shared=("shared_experts", ""), is_latent=True),
    "kimi_linear": Family(shared=("shared_experts", ""), is_latent=True),
    "glm4_moe_lite": Family(
        "glm4_moe_lite.Glm4MoeLite",
        ("MLP", "glm4_moe.Glm4MoeMLP"),
        "glm4_moe_lite.Glm4MoeLite",
        attention="MLAAttention",
        shared=("shared_experts", ""),
        is_latent=True,
    ),
}
