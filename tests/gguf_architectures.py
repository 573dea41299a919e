"""Tiny models of transformers, one for each architecture of GGUF files or more, and the files that they make: GGUF's,
and safetensors of int4.

gguf_architectures.json has what llama.cpp's own script (convert_hf_to_gguf.py of llama-cpp-python 0.3.36) wrote for
each of them: all keys, and a digest of the names, shapes and values of all tensors. The writer here makes the same.
"""

import copy
import hashlib
import json
import re
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import tool_formats
import torch
import transformers
from safetensors.torch import load_file, save_file

from w4a8.checkpoint.gguf_architectures import NOT_IN_VLLM

HIDDEN, INTER, VOCAB, LAYERS, HEADS, KV_HEADS, HEAD, EXPERTS = 64, 96, 96, 4, 4, 2, 32, 4
SIZES = gguf_files.config_sizes(HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, HEAD, VOCAB)
_ROPE = {"rope_type": "default", "rope_theta": 5000.0}
ROPE = {"rope_parameters": _ROPE}
IN_PART = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}
SECTIONS = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3],
                                "mrope_interleaved": True}}  # fmt: skip
QUARTER = {"full_attention": {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
           "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
QWEN = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INTER}
LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
MLA = {"num_key_value_heads": HEADS, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": HEAD,
       "qk_rope_head_dim": 64, "v_head_dim": HEAD, "head_dim": 64}  # fmt: skip
ROUTED = {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INTER, "n_shared_experts": 2,
          "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}  # fmt: skip
LINEAR = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
          "linear_num_key_heads": 2, "linear_num_value_heads": 4, "shared_expert_intermediate_size": INTER,
          "layer_types": ["linear_attention"] * 3 + ["full_attention"]}  # fmt: skip
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
FEW = {"num_attention_heads": 2, "num_key_value_heads": 1}  # so that heads of 32 fill the hidden size
# vLLM takes RMS norms if there is an epsilon of such.
COHERE = {**FEW, "logit_scale": 0.0625, "layer_norm_eps": 2.0**-18, "rms_norm_eps": None, "tie_word_embeddings": True}
GRANITE = {**ROPE, **FEW, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22,
           "attention_multiplier": 0.1}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2,
         "mamba_d_conv": 4}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 5000.0, "original_max_position_embeddings": 128,
        "short_factor": [1 + i / 8 for i in range(16)], "long_factor": [2 + i / 2 for i in range(16)]}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}  # fmt: skip
# How the classes of transformers begin, and fields of the config. A name is an architecture's, and what is special.
MODELS = {
    "qwen3next": ("Qwen3Next", {**IN_PART, **QWEN, **LINEAR, "norm_topk_prob": True}),
    "qwen35": ("Qwen3_5", {**SECTIONS, **LINEAR}),
    "qwen35moe": ("Qwen3_5Moe", {**SECTIONS, **QWEN, **LINEAR}),
    "gemma2": ("Gemma2", {
        "rope_parameters": {**_ROPE, "rope_theta": 10000.0}, "sliding_window": 8, "query_pre_attn_scalar": HEAD,
        "tie_word_embeddings": True, "attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0,
    }),
    "gemma4": ("Gemma4", {
        **WINDOWS, "rope_parameters": QUARTER, "tie_word_embeddings": True, "global_head_dim": 64,
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 30.0,
    }),
    "gemma4, experts": ("Gemma4", {
        **WINDOWS, "rope_parameters": QUARTER, "tie_word_embeddings": True, "global_head_dim": 64,
        "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2, "moe_intermediate_size": INTER,
    }),
    "glm4": ("Glm4", {**IN_PART, "attention_bias": True}),
    "glm-dsa": ("GlmMoeDsa", {
        **ROPE, **MLA, **ROUTED, "routed_scaling_factor": 2.5, "index_topk": 8, "index_head_dim": 64,
        "index_n_heads": 2,
    }),
    "deepseek2, GLM-4.7-Flash": ("Glm4MoeLite", {**ROPE, **MLA, **ROUTED, "routed_scaling_factor": 2.5}),
    "minimax-m2": ("MiniMaxM2", {**IN_PART, **LOCAL}),
    "llama4": ("Llama4", {**ROPE, **LOCAL, **FEW, "num_experts_per_tok": 1, "intermediate_size_mlp": 128,
                          "interleave_moe_layer_step": 2}),
    "granite": ("Granite", GRANITE),
    "granitemoe": ("GraniteMoe", {**GRANITE, **LOCAL}),
    "granitemoe, shared": ("GraniteMoeShared", {**GRANITE, **LOCAL, "shared_intermediate_size": 64}),
    "granitehybrid": ("GraniteMoeHybrid", {
        **GRANITE, **LOCAL, **MAMBA, "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"] * 2,
        "position_embedding_type": None,
    }),
    "lfm2": ("Lfm2", {**ROPE, **FEW, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3,
                      "block_auto_adjust_ff_dim": False, "norm_eps": 2.0**-18}),
    "lfm2moe": ("Lfm2Moe", {
        **ROPE, **QWEN, **FEW, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "norm_eps": 2.0**-18,
        "num_dense_layers": 1, "tie_word_embeddings": True, "norm_topk_prob": True,
    }),
    "nemotron_h_moe": ("NemotronH", {
        **ROUTED, "layers_block_type": ["mamba", "attention", "moe", "mamba"], "mamba_num_heads": 4,
        "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "conv_kernel": 4, "expand": 2,
        "moe_shared_expert_intermediate_size": 128, "routed_scaling_factor": 2.5, "layer_norm_epsilon": 2.0**-18,
        "n_shared_experts": 1,
    }),
    "ernie4_5": ("Ernie4_5", ROPE),
    "ernie4_5-moe": ("Ernie4_5_Moe", {
        **ROPE, "moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": INTER, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 3,
    }),
    "hunyuan-moe": ("HunYuanMoEV1", {**ROPE, "num_experts": EXPERTS, "moe_topk": 2}),
    "hunyuan-dense": ("HunYuanDenseV1", ROPE),
    "seed_oss": ("SeedOss", {**ROPE, "attention_bias": True, "attention_out_bias": False}),
    "smollm3": ("SmolLM3", {**ROPE, "no_rope_layers": [1, 1, 1, 0]}),
    "olmo2": ("Olmo2", ROPE),
    "olmo2, OLMo 3": ("Olmo3", {**WINDOWS, "rope_parameters": dict.fromkeys(QUARTER, _ROPE)}),
    "phi3": ("Phi3", {**ROPE, **FEW, "original_max_position_embeddings": 128, "sliding_window": None}),
    "phi3, long": ("Phi3", {
        "rope_parameters": LONG, **FEW, "original_max_position_embeddings": 128, "sliding_window": None,
        "max_position_embeddings": 256,
    }),
    "phimoe": ("Phimoe", {
        **ROPE, **LOCAL, **FEW, "attention_bias": True, "lm_head_bias": True, "sliding_window": None,
    }),
    "mistral3": ("Ministral3", {"rope_parameters": YARN, "sliding_window": None}),
    "exaone4": ("Exaone4", {**ROPE, **WINDOWS, "sliding_window_pattern": 4}),
    "exaone-moe": ("ExaoneMoe", {
        **ROPE, **QWEN, **WINDOWS, "num_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    }),
    "apertus": ("Apertus", ROPE),
    "command-r": ("Cohere", {**ROPE, **COHERE}),
    "cohere2": ("Cohere2", {**ROPE, **COHERE, **WINDOWS}),
}  # fmt: skip
# Besides, as safetensors of int4; gguf_models.py has their GGUF files.
INT4 = MODELS | {
    "llama": ("Llama", ROPE),
    "mixtral": ("Mixtral", {**ROPE, **LOCAL}),
    "gemma3": ("Gemma3", {
        **WINDOWS, "rope_parameters": dict.fromkeys(QUARTER, _ROPE), "tie_word_embeddings": True,
        "query_pre_attn_scalar": HEAD,
    }),
    "gemma4, values are keys": ("Gemma4", {  # as 31B
        **WINDOWS, "rope_parameters": QUARTER, "tie_word_embeddings": True, "global_head_dim": 512,
        "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
    }),
    "gemma4, shared keys": ("Gemma4", {  # as E2B and E4B
        **WINDOWS, "rope_parameters": QUARTER, "tie_word_embeddings": True, "global_head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    }),
    "granite, 4": ("GraniteMoeHybrid", {  # of Granite 4 that without experts and without Mamba
        **GRANITE, "num_local_experts": 0, "shared_intermediate_size": INTER, "layer_types": ["attention"] * 4,
        "position_embedding_type": "rope",
    }),
    "command-r, norms of heads": ("Cohere", {**ROPE, **COHERE, "use_qk_norm": True}),
    "dots1": ("Dots1", {
        **ROPE, **ROUTED, "routed_scaling_factor": 2.5, "sliding_window": 8, "max_window_layers": 2,
    }),
    "hunyuan-dense, dynamic": ("HunYuanDenseV1", {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 5000.0, "alpha": 50.0, "factor": 1.0},
    }),
    "bamba": ("Bamba", {**IN_PART, **FEW, **MAMBA, "attn_layer_indices": [1, 3]}),
    "falcon-h1": ("FalconH1", {  # powers of two are exact, of inputs as of results: others would make ties
        **ROPE, **FEW, **MAMBA, "mamba_d_ssm": 128, "embedding_multiplier": 8.0, "lm_head_multiplier": 0.25,
        "key_multiplier": 0.5, "attention_in_multiplier": 0.25, "attention_out_multiplier": 2.0,
        "ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.25, "ssm_multipliers": [0.5, 0.25, 2.0, 0.25, 4.0],
        "mlp_multipliers": [0.5, 0.25],
    }),
    "olmo-hybrid": ("OlmoHybrid", {**LINEAR, "linear_key_head_dim": 48, "linear_value_head_dim": 96,
                                   "rope_parameters": None}),
    "olmo-hybrid, rotation": ("OlmoHybrid", {**ROPE, **LINEAR, "linear_allow_neg_eigval": False}),
    "kimi-linear": ("KimiLinear", {
        **MLA, **ROUTED, "q_lora_rank": None, "n_shared_experts": 1, "linear_num_heads": 2, "linear_head_dim": 32,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "routed_scaling_factor": 2.5, "bos_token_id": 1, "eos_token_id": 2,
    }),
    "qwen2": ("Qwen2", {**ROPE, **FEW}),
    "qwen3": ("Qwen3", ROPE),
    "qwen2moe": ("Qwen2Moe", {**ROPE, **QWEN, **FEW, "shared_expert_intermediate_size": 64, "norm_topk_prob": False}),
    "qwen3moe": ("Qwen3Moe", {**ROPE, **QWEN, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {**ROPE, **FEW, "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": False}),
    "deepseek2, V2": ("DeepseekV2", {
        **ROPE, **MLA, **ROUTED, "topk_method": "group_limited_greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 4.0,
    }),
    "deepseek2, V3": ("DeepseekV3", {**ROPE, **MLA, **ROUTED, "routed_scaling_factor": 2.5, "num_mtp_layers": 0}),
    "glm4moe": ("Glm4Moe", {**IN_PART, **ROUTED, "routed_scaling_factor": 2.5, "use_qk_norm": True}),
}  # fmt: skip
# Whose experts are one tensor in safetensors, too: int4 formats have none for that.
STACKED = {"gemma4, experts", "llama4", "granitemoe", "granitemoe, shared", "granitehybrid"}
# Architectures that vLLM does not run from int4; docs/formats.md says why.
# Of which vLLM 0.32 has no model, or one for GPUs alone.
NO_MODEL_IN_VLLM = {"bamba", "dots1", "kimi-linear", "olmo-hybrid", "olmo-hybrid, rotation"}
NOT_INT4_IN_VLLM = NOT_IN_VLLM.keys() | NO_MODEL_IN_VLLM | {"granitemoe", "granitehybrid", "phimoe"}
STEP = 2.0**-5  # of matrices: whole numbers from -8 to 7 times this, which blocks of any type hold
WRITTEN = Path(__file__).with_suffix(".json")


def written_by_llama_cpp(name):
    """``architecture``, ``keys`` and ``digest`` of the file that llama.cpp's script makes of a model."""
    return json.loads(WRITTEN.read_text())[name]


def model_of(name, **others):
    """A model with numbers that are the same everywhere; others: fields of the config."""
    family, fields = copy.deepcopy(INT4[name])
    made = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(made(**{**SIZES, **fields, **others})).eval()
    generator = np.random.default_rng(len(name))
    for key, tensor in model.state_dict().items():
        if tensor.dim() == 0:  # a constant
            continue
        codes = torch.from_numpy(generator.integers(-8, 8, tensor.shape, np.int8)).float()
        is_norm = "norm" in key and key.endswith("weight")
        vector = (codes.abs() if "A_log" in key or "scale" in key else codes) / 16 + is_norm
        sharp = name.startswith("gemma4") and "q_norm" in key  # its attention has no other scale
        tensor.copy_(codes * STEP if tensor.dim() > 1 else vector / 8 if sharp else vector)
    model.tie_weights()
    return model


# ---- what llama.cpp's scripts make of names and values ----

_STACKED = re.compile(r"(.+)\.experts\.(gate_up_proj|up_proj|down_proj)")
# Names of modules that the package gguf does not know.
_RENAMED = (
    (r"(mlp|feed_forward|block_sparse_moe|mixer)(\.gate)?(\.moe_statics)?\.(e_score_correction_bias|expert_bias)",
     "exp_probs_b.bias"),
    (r"\.dt_bias", ".ssm_dt.bias"), (r"\.A_log", ".ssm_a"), (r"\.D$", ".ssm_d"),
    (r"router\.scale", "ffn_gate_inp.scale"), (r"router\.per_expert_scale", "ffn_down_exps.scale"),
)  # fmt: skip
_TURNED = ("llama", "granite", "granitemoe", "granitehybrid", "mistral3", "smollm3", "nemotron_h_moe")


def _turned(rows, heads):
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class Written:
    """The tensors of a file, float32."""

    def __init__(self, model, architecture):
        self.config, self.architecture, self.tensors = model.config, architecture, {}
        arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
        names = gguf.TensorNameMap(arch, LAYERS).mapping
        self.names = {key: value for key, (_, value) in names.items()}
        tied = set(model.all_tied_weights_keys)
        for key, tensor in model.state_dict().items():
            if key not in tied and ".act_fn." not in key:  # these become keys
                self.put(key, tensor)

    def put(self, key, tensor):
        """A parameter of the model."""
        found = re.search(r"layers\.(\d+)\.(.+)", key)
        layer, rest = (f"blk.{found[1]}.", found[2]) if found else ("", key)
        stacked = _STACKED.fullmatch(rest)
        if stacked:
            self.experts(layer, stacked[2], tensor)
        elif rest.endswith("kv_b_proj.weight"):
            parts = tensor.view(HEADS, -1, tensor.shape[1]).split([HEAD, HEAD], 1)
            self.tensors[f"{layer}attn_k_b.weight"] = parts[0].transpose(1, 2)
            self.tensors[f"{layer}attn_v_b.weight"] = parts[1]
        elif rest.endswith("in_proj_qkvz.weight"):
            heads = self.config.linear_num_key_heads
            width, key = len(tensor) // heads, self.config.linear_key_head_dim
            sizes = [key, key, width // 2 - key, width // 2 - key]
            *qkv, z = (part.flatten(0, 1) for part in tensor.view(heads, width, -1).split(sizes, 1))
            self.tensors |= {f"{layer}attn_qkv.weight": torch.cat(qkv), f"{layer}attn_gate.weight": z}
        elif rest.endswith("shared_mlp.input_linear.weight"):
            gate, up = tensor.chunk(2)
            self.tensors |= {f"{layer}ffn_gate_shexp.weight": gate, f"{layer}ffn_up_shexp.weight": up}
        else:
            self.other(key, layer, rest, tensor)

    def experts(self, layer, leaf, tensor):
        """A stack of both projections, or of one."""
        tensor = tensor.transpose(1, 2) if self.architecture == "llama4" else tensor
        if leaf != "gate_up_proj":
            self.tensors[f"{layer}ffn_{leaf.removesuffix('_proj')}_exps.weight"] = tensor
        elif self.architecture == "gemma4":
            self.tensors[f"{layer}ffn_gate_up_exps.weight"] = tensor
        else:
            names = (f"{layer}ffn_{each}_exps.weight" for each in ("gate", "up"))
            self.tensors |= dict(zip(names, tensor.chunk(2, 1)))

    def other(self, key, layer, rest, tensor):
        """One tensor, renamed, its values or its rows changed."""
        name = next((layer + new.lstrip(".") for old, new in _RENAMED if re.search(old, rest)), None)
        if name is None:
            stem, _, suffix = key.rpartition(".") if key.endswith((".weight", ".bias")) else (key, "", "weight")
            others = {"model.": "backbone.", "mlp.": "block_sparse_moe.", ".router": ".router.layer"}
            spellings = (stem, *(stem.replace(old, new) for old, new in others.items()))
            name = next(f"{self.names[each]}.{suffix}" for each in spellings if each in self.names)
        leaf = name.split(".")[2] if layer else name
        if self.architecture in _TURNED and leaf in ("attn_q", "attn_k"):
            config = self.config
            tensor = _turned(tensor, config.num_attention_heads if leaf == "attn_q" else config.num_key_value_heads)
        if self.architecture.startswith("qwen35"):
            tensor = self.tiled(leaf, tensor)
        plus = self.architecture.startswith(("qwen3next", "qwen35", "gemma2"))
        if plus and name.endswith("norm.weight") and leaf != "ssm_norm":
            tensor = tensor + 1
        if leaf == "ssm_a":
            tensor = -tensor.exp()
        if key.endswith((".conv.weight", ".conv1d.weight")):
            tensor = tensor.squeeze(1)
        if not self.architecture.startswith("qwen3") and leaf in ("ssm_a", "ssm_d"):
            tensor = tensor[:, None]
        if leaf == "ssm_norm" and not self.architecture.startswith("qwen3"):
            tensor = tensor.view(self.config.n_groups if hasattr(self.config, "n_groups") else 1, -1)
        self.tensors[name] = tensor

    def tiled(self, leaf, tensor):
        """Heads of values of Qwen 3.5: the first of each head of keys, then the second of each."""
        keys, values = self.config.linear_num_key_heads, self.config.linear_num_value_heads

        def moved(rows):
            return rows.reshape(keys, values // keys, -1).transpose(0, 1).reshape(rows.shape)

        if leaf in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
            return moved(tensor)
        if leaf in ("attn_qkv", "ssm_conv1d"):
            of_keys = 2 * keys * self.config.linear_key_head_dim
            return torch.cat((tensor[:of_keys], moved(tensor[of_keys:])))
        return moved(tensor.T).T if leaf == "ssm_out" else tensor


def beside(name):
    """Tensors that are no parameters."""
    if name.startswith("gemma4"):
        return {"rope_freqs.weight": torch.cat((torch.ones(8), torch.full((24,), 1e30)))}
    if name == "phi3, long":
        return {f"rope_factors_{each}.weight": torch.tensor(LONG[f"{each}_factor"]) for each in ("long", "short")}
    return {}


def digest_of(tensors):
    """Of names, shapes and values; logarithms and what comes of them differ in their last bits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = torch.as_tensor(np.asarray(tensors[name])).float().contiguous()
        tensor = (tensor * 1024).round() if name.endswith(".ssm_a") else tensor
        digest.update(f"{name} {tuple(tensor.shape)} ".encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


# ---- blocks ----


def blocks(tensor, kind, step=STEP):
    """(type, blocks) of a tensor of multiples of a power of two: exactly these numbers."""
    codes = (tensor / step).to(torch.int8).numpy()
    codes = codes.reshape(*codes.shape[:-1], -1, gguf_files.BLOCKS[kind])
    scale = np.full((*codes.shape[:-1], 1), step, np.float16).view(np.uint8)
    ones, parts = np.ones((*codes.shape[:-1], 4), np.uint8), codes.reshape(*codes.shape[:-1], -1, 32)
    if kind == "Q8_0":
        data = scale, codes.view(np.uint8)
    elif kind == "Q4_0":
        low, high = np.split((codes + 8).astype(np.uint8), 2, -1)
        data = scale, low | high << 4
    elif kind == "Q4_K":  # scales 1 and minimums 8 of eight groups, in six bits each
        nibbles = (parts + 8).astype(np.uint8)
        nibbles = (nibbles[..., ::2, :] | nibbles[..., 1::2, :] << 4).reshape(*codes.shape[:-1], -1)
        data = scale, scale, ones, 8 * ones, (1 | 8 << 4) * ones, nibbles
    else:  # Q6_K: scales 1 of sixteen groups
        sixes = (parts + 32).astype(np.uint8).reshape(*codes.shape[:-1], 2, 4, 32)
        low = (sixes[..., :2, :] & 15 | sixes[..., 2:, :] << 4).reshape(*codes.shape[:-1], -1)
        high = sum(sixes[..., each, :] >> 4 << 2 * each for each in range(4)).reshape(*codes.shape[:-1], -1)
        data = low, high, *4 * (ones,), scale
    return kind, np.concatenate(data, -1).reshape(*tensor.shape[:-1], -1)


def write(name, model, folder, quantized=False, change=dict, types=("Q4_0", "Q8_0"), **keys):
    """model.gguf in a folder, with the keys of llama.cpp's script.

    Args:
        name: of MODELS.
        model: of `model_of`.
        folder: that the file is put in.
        quantized: matrices of linear layers and experts are in blocks.
        change: of the tensors, before they become blocks.
        types: of the blocks, in turns.
        keys: others than those of the script.
    """
    found = written_by_llama_cpp(name)
    tensors = change(Written(model, found["architecture"]).tensors | beside(name))
    return put(folder, found["architecture"], found["keys"] | keys, tensors, quantized, types)


def put(folder, architecture, keys, tensors, quantized=True, types=("Q4_0", "Q8_0"), **steps):
    """model.gguf in a folder, as `write`; steps: of tensors that are other multiples than those of STEP."""
    kinds = 0
    for key, tensor in tensors.items():
        is_whole = tensor.shape[-1] % gguf_files.BLOCKS[types[0]] == 0
        is_matrix = tensor.dim() > 1 and is_whole and not key.endswith(("_inp.weight", "conv.weight"))
        if quantized and is_matrix and key.endswith(".weight") and "indexer" not in key and "ssm_norm" not in key:
            kinds += "_up_" not in key  # gate and up of experts are of one type
            tensors[key] = blocks(tensor, types[kinds % 2], steps.get(key.removesuffix(".weight"), STEP))
    return gguf_files.write(folder / "model.gguf", architecture, keys, tensors)


# Linear layers that files of int4 leave as floats, by the names in a checkpoint.
_FLOATS = re.compile(
    r"embed|norm|conv1d|conv\.conv|router|(^|\.)gate$|gate\.wg|indexer|lm_head|_gate$|kv_b_proj|per_layer|visual"
)


# Fields of config.json on the Hub that transformers does not write, by the type of a model.
ON_THE_HUB = {
    "minimax_m2": {"rotary_dim": HEAD // 2, "scoring_func": "sigmoid", "use_routing_bias": True},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "lfm2": {"conv_dim": HIDDEN, "block_dim": HIDDEN, "block_ff_dim": INTER},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
}


def write_int4(model, folder):
    """A checkpoint as llm-compressor writes it: W4A16 in groups of 32, with exactly the weights of `model_of`."""
    model.save_pretrained(folder)
    tensors, ignored = {}, []
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, is_matrix = name.removesuffix(".weight"), name.endswith(".weight") and tensor.dim() == 2
        if is_matrix and not _FLOATS.search(module):
            codes, scales = (tensor / STEP).int() + 8, torch.full((len(tensor), tensor.shape[1] // 32), STEP)
            stored = tool_formats.store("pack-quantized", codes, None, scales)
            tensors |= {f"{module}.{suffix}": each.contiguous() for suffix, each in stored.items()}
        else:
            tensors[name] = tensor
            ignored += [module] * is_matrix
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | ON_THE_HUB.get(model.config.model_type, {})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ignored,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
