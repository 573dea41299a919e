"""Tiny models of transformers as GGUF files: random blocks, and the model in float32 that they mean.

Names are those of the package `gguf`; what llama.cpp changes when it converts is done here as its scripts do it.
"""

import gguf
import gguf_files
import numpy as np
import torch
import transformers

LAYERS, HEADS, KV_HEADS, HEAD, HIDDEN, INTER, VOCAB, EXPERTS = 2, 4, 2, 64, 256, 512, 96, 4
SIZES = gguf_files.config_sizes(HIDDEN, INTER, LAYERS, HEADS, KV_HEADS, HEAD, VOCAB)
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 32}  # fmt: skip
QWEN = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INTER}
LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
MLA = {"num_key_value_heads": HEADS, "q_lora_rank": HIDDEN, "kv_lora_rank": HIDDEN, "qk_nope_head_dim": HEAD,
       "qk_rope_head_dim": 32, "v_head_dim": HEAD, "head_dim": 32}  # fmt: skip
ROUTED = {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INTER, "n_shared_experts": 2,
          "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}  # fmt: skip
# Name here: architecture in the file, classes of transformers, fields of the config.
MODELS = {
    "llama": ("llama", "Llama", ROPE),
    "llama, tied": ("llama", "Llama", {**ROPE, "tie_word_embeddings": True}),
    "llama, biases": ("llama", "Llama", {**ROPE, "attention_bias": True}),
    "gemma3": ("gemma3", "Gemma3", {
        "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "tie_word_embeddings": True, "sliding_window": 3, "query_pre_attn_scalar": HEAD, "num_hidden_layers": 6,
    }),
    "qwen2": ("qwen2", "Qwen2", ROPE),
    "qwen3": ("qwen3", "Qwen3", ROPE),
    "qwen2moe": ("qwen2moe", "Qwen2Moe", {
        **ROPE, **QWEN, "shared_expert_intermediate_size": 256, "norm_topk_prob": False,
    }),
    "qwen3moe": ("qwen3moe", "Qwen3Moe", {**ROPE, **QWEN, "norm_topk_prob": True}),
    "mixtral": ("llama", "Mixtral", {**ROPE, **LOCAL}),
    "olmoe": ("olmoe", "Olmoe", {
        **ROPE, "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": False,
    }),
    "deepseek-v2": ("deepseek2", "DeepseekV2", {
        **ROPE, **MLA, **ROUTED, "topk_method": "group_limited_greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 4.0,
    }),
    "deepseek-v2-lite": ("deepseek2", "DeepseekV2", {
        **MLA, **ROUTED, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "first_k_dense_replace": 0,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "mscale": 0.707,
                            "mscale_all_dim": 0.707, "original_max_position_embeddings": 32},
    }),
    "deepseek-v3": ("deepseek2", "DeepseekV3", {
        **ROPE, **MLA, **ROUTED, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_mtp_layers": 0,
    }),
    "glm4moe": ("glm4moe", "Glm4Moe", {
        **ROUTED, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "attention_bias": True, "use_qk_norm": True,
        "rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 0.5}, "num_mtp_layers": 0,
        "n_group": 1, "topk_group": 1,
    }),
    "gpt-oss": ("gpt-oss", "GptOss", {**LOCAL, "rope_parameters": YARN, "sliding_window": 3}),
}  # fmt: skip
TYPES = [name for name in sorted(gguf_files.BLOCKS) if name != "NVFP4"]
# Of gate and up, and of down, by layer.
EXPERT_TYPES = [("Q4_K", "Q6_K"), ("MXFP4", "Q5_0")]


def blocks(name, shape, generator):
    """(type, blocks) whose weights have a standard deviation of K^-0.5, and float32 of them."""
    sample = gguf_files.meaning(name, gguf_files.random_blocks(name, (8, shape[-1]), generator, 1.0))
    found = gguf_files.random_blocks(name, shape, generator, shape[-1] ** -0.5 / sample.std().item())
    return (name, found), gguf_files.meaning(name, found)


def turned(rows, heads):
    """What `permute` of llama.cpp's conversion/llama.py does to rows of q and k."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def keys_of(architecture, config):
    """What llama.cpp's scripts write."""
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    keys = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": HEAD, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"], "rope.dimension_count": HEAD, "vocab_size": config.vocab_size,
    }  # fmt: skip
    if rope["rope_type"] != "default":
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if getattr(config, "sliding_window", None):
        keys["attention.sliding_window"] = config.sliding_window
    if "mscale_all_dim" in rope:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if hasattr(config, "num_experts_per_tok"):
        keys |= {"expert_count": EXPERTS, "expert_used_count": 2}
        if architecture not in ("llama", "olmoe"):
            keys["expert_feed_forward_length"] = INTER
    if hasattr(config, "shared_expert_intermediate_size"):
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if hasattr(config, "n_routed_experts"):
        keys |= {
            "expert_shared_count": config.n_shared_experts, "leading_dense_block_count": config.first_k_dense_replace,
            "expert_group_count": config.n_group, "expert_group_used_count": config.topk_group,
            "expert_weights_scale": config.routed_scaling_factor, "expert_weights_norm": config.norm_topk_prob,
            "expert_gating_func": 1 if config.model_type == "deepseek_v2" else 2,
        }  # fmt: skip
    if hasattr(config, "kv_lora_rank"):
        keys |= {
            "attention.head_count_kv": 1, "attention.kv_lora_rank": config.kv_lora_rank,
            "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
            "attention.value_length": config.kv_lora_rank,
            "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length_mla": config.v_head_dim, "rope.dimension_count": config.qk_rope_head_dim,
        }  # fmt: skip
        if config.q_lora_rank is not None:
            keys["attention.q_lora_rank"] = config.q_lora_rank
    if architecture == "glm4moe":
        keys["rope.dimension_count"] = HEAD // 2
    tokens = {"bos": config.bos_token_id, "eos": config.eos_token_id, "padding": config.pad_token_id}
    return {f"{architecture}.{key}": value for key, value in keys.items()} | {
        f"tokenizer.ggml.{name}_token_id": value for name, value in tokens.items()
    }


class TinyModel:
    """One of MODELS.

    Attributes:
        architecture: in the file.
        model: of transformers, float32, with the weights that the file means.
        keys, tensors: of the file, as of `gguf_files.write`.
    """

    def __init__(self, name, seed=0):
        self.architecture, family, fields = MODELS[name]
        config_class = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
        self.model = getattr(transformers, f"{family}ForCausalLM")(config_class(**{**SIZES, **fields})).eval()
        config, self.tensors = self.model.config, {}
        self.keys = keys_of(self.architecture, config)
        generator = np.random.default_rng(seed)
        arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == self.architecture)
        self.names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
        types = iter(TYPES * 10)
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for key, parameter in self.model.named_parameters():
            if ".experts." in key:
                self._put_experts(key, parameter, generator)
                continue
            if key.endswith("kv_b_proj.weight"):
                self._put_kv_b(key, parameter, generator)
                continue
            name = self.name_of(key)
            turn = heads.get(name.split(".")[-2]) if self.architecture == "llama" else None
            if parameter.dim() == 1 or name.endswith(("_inp.weight", "_inp_shexp.weight")):
                values = torch.from_numpy(generator.standard_normal(parameter.shape, np.float32)) / 8
                values = values + (1 if "norm" in name else 0)
                stored = values.squeeze(0) + (1 if self.architecture == "gemma3" and "norm" in name else 0)
                stored = stored if turn is None else turned(stored, turn)
                if self.architecture == "gemma3" and "norm" in name:
                    values = stored - 1
                self.tensors[name] = stored
            else:
                self.tensors[name], meant = blocks(next(types), parameter.shape, generator)
                values = torch.empty(parameter.shape)
                rows = torch.arange(len(meant))
                values[rows if turn is None else turned(rows, turn)] = meant
            parameter.data.copy_(values)
        for key, buffer in self.model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.from_numpy(generator.standard_normal(buffer.shape, np.float32)))
                self.tensors[self.name_of(key.replace("_bias", ".bias"))] = buffer.clone()

    def update(self, keys=(), tensors=()):
        """Puts keys, named without the architecture, and tensors into the file; None takes one out."""
        named = {f"{self.architecture}.{key}": value for key, value in dict(keys).items()}
        self.keys = {key: value for key, value in {**self.keys, **named}.items() if value is not None}
        self.tensors = {key: value for key, value in {**self.tensors, **dict(tensors)}.items() if value is not None}

    @staticmethod
    def has_experts(name):
        """Of MODELS."""
        return "num_experts_per_tok" in MODELS[name][2]

    def name_of(self, key):
        """In the file, of a parameter."""
        stem, _, suffix = key.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, suffix = key, "weight"
        return f"{self.names.get_name(stem)}.{suffix}"

    def _put_kv_b(self, key, parameter, generator):
        """As conversion/deepseek.py does: k_b is transposed, and quantized along the other axis."""
        config = self.model.config
        heads, k, v, rank = HEADS, config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
        name = self.name_of(key).replace("attn_kv_b", "attn_{}")
        self.tensors[name.format("k_b")], k_b = blocks("Q5_0", (heads, rank, k), generator)
        self.tensors[name.format("v_b")], v_b = blocks("Q6_K", (heads, v, rank), generator)
        parameter.data.copy_(torch.cat((k_b.transpose(1, 2), v_b), 1).reshape(parameter.shape))

    def _put_experts(self, key, parameter, generator):
        layer, leaf = int(key.split(".")[2]), key.rpartition(".")[2]
        stacks = ("gate", "up") if leaf.startswith("gate_up") else ("down",)
        oss = self.architecture == "gpt-oss"
        parts = []
        for stack in stacks:
            name = f"blk.{layer}.ffn_{stack}_exps"
            rows, columns = (HIDDEN, INTER) if stack == "down" else (INTER, HIDDEN)
            if leaf.endswith("_bias"):
                self.tensors[f"{name}.bias"] = torch.from_numpy(generator.standard_normal((EXPERTS, rows), np.float32))
                parts.append(self.tensors[f"{name}.bias"])
                continue
            kind = EXPERT_TYPES[layer][stack == "down"]
            self.tensors[f"{name}.weight"], meant = blocks(kind, (EXPERTS, rows, columns), generator)
            parts.append(meant.transpose(1, 2) if oss else meant)
        if len(parts) == 2:  # gpt-oss: in turns, in the last dimension
            parts = [torch.stack(parts, -1).flatten(-2) if oss else torch.cat(parts, 1)]
        parameter.data.copy_(parts[0])

    def write(self, folder, **options):
        """model.gguf in a folder."""
        return gguf_files.write(folder / "model.gguf", self.architecture, self.keys, self.tensors, **options)
