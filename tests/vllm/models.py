"""Tiny models with random weights, quantized by the real compressed-tensors package or written by tool_formats.py.

`write(case, directory)` makes two directories: `checkpoint` is what vLLM loads; `reference` holds the same weights
multiplied out in float32, for transformers.
"""

import json
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import multiplied_out
import tool_formats
import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

VOCAB = 160
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
QWEN = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,  # with the next, the one size of vLLM's attention for it on CPUs
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}

# transformers' class, what its configuration adds, what is not quantized besides lm_head
MODELS = {
    "qwen3": ("Qwen3", {"head_dim": 32, "intermediate_size": 256}, []),
    "qwen2": ("Qwen2", {"intermediate_size": 256}, []),
    "llama": ("Llama", {"intermediate_size": 256, "head_dim": 32, "attention_bias": True}, []),
    "mistral": ("Mistral", {"intermediate_size": 256, "head_dim": 32, "sliding_window": 16}, []),
    "olmoe": (
        "Olmoe",
        {"intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False},
        ["re:.*mlp.gate$"],
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        },
        ["re:.*mlp.gate$"],
    ),
    "qwen3_moe": ("Qwen3Moe", {**QWEN, "norm_topk_prob": True, "intermediate_size": 256}, ["re:.*mlp.gate$"]),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 192,
            "intermediate_size": 256,
            "norm_topk_prob": False,
        },
        ["re:.*mlp.gate$", "re:.*shared_expert_gate$"],
    ),
    "mixtral": (
        "Mixtral",
        {"intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
        ["re:.*gate$"],
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
        },
        ["re:.*mlp.gate$"],
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "q_lora_rank": 64,
            "topk_method": "noaux_tc",  # this and the next are in the configurations of the hub, for vLLM
            "scoring_func": "sigmoid",
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        ["re:.*mlp.gate$"],
    ),
    "glm4_moe_lite": (  # GLM-4.7-Flash
        "Glm4MoeLite",
        {**DEEPSEEK, "q_lora_rank": 64, "norm_topk_prob": True, "routed_scaling_factor": 1.8},
        ["re:.*mlp.gate$"],
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 32,
            "intermediate_size": 128,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
        },
        ["re:.*router$"],
    ),
}


@dataclass(frozen=True)
class Case:
    """One checkpoint.

    Attributes:
        model: key of MODELS.
        group: int4 weights per scale; -1 is channelwise.
        format: ``int-quantized`` or ``pack-quantized``, or one of tool_formats.FORMS, which are weight-only.
        dtype: of the model.
        inputs: what the checkpoint says of the inputs: symmetric, asymmetric, or none (weight-only).
        attention: of the linear layers of attention: w4a8, w8a8, w8a16 (mixed checkpoints) or float.
        eight_bits: pattern of the names of other modules that have 8 bits.
        symmetric: of the weights; otherwise they have zero points.
        lm_head: is quantized as well.
        tool: the folder of tests/tool_written/ that is the checkpoint; only its weights multiplied out are written.
        changes: of the model's configuration.
    """

    model: str
    group: int = 32
    format: str = "int-quantized"
    dtype: str = "bfloat16"
    inputs: str = "symmetric"
    attention: str = "w4a8"
    eight_bits: str = ""
    symmetric: bool = True
    lm_head: bool = False
    tool: str = ""
    changes: dict = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        group = "channel" if self.group == -1 else f"g{self.group}"
        form = self.format.removesuffix("-quantized").replace(":", "_")
        parts = [self.model, group, form, self.dtype, self.inputs, self.attention]
        parts += [] if self.symmetric else ["zeros"]
        parts += ["lm_head"] if self.lm_head else []
        parts += ["8_bits_" + re.sub(r"\W+", "_", self.eight_bits)] if self.eight_bits else []
        parts += [f"by_{self.tool}"] if self.tool else []
        return "-".join(parts) + "".join(f"-{key}{value}" for key, value in self.changes.items())

    @property
    def share_of_an_expert(self) -> float:
        """Of the positions, in one layer, if all experts are equally likely."""
        config = {**COMMON, **MODELS[self.model][1], **self.changes}
        names = [key for key in ("num_experts", "n_routed_experts", "num_local_experts") if key in config]
        return config["num_experts_per_tok"] / config[names[0]] if names else 1.0


def _random_weights(model: torch.nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Weights at which every part of the model matters; each is a value of `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight") or "layernorm" in name:
            value = 1 + 0.1 * noise
        elif name.endswith("experts.down_proj_bias"):
            value = noise  # large enough to be seen if two ranks both add it
        elif parameter.dim() == 1 or "bias" in name:
            value = 0.2 * noise  # biases, sinks
        elif "embed" in name:
            value = noise
        else:
            # gpt-oss keeps its experts as [in, out].
            transposed = "gpt_oss" in type(model).__module__ and "experts" in name
            value = noise * (1.5 / parameter.shape[-2 if transposed else -1] ** 0.5)
        parameter.data.copy_(value.to(dtype))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def hub_tensors(model: torch.nn.Module, directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a model as checkpoints name them: one matrix per expert and projection."""
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if re.search(r"\.experts\.(gate_up|down)_proj(_bias)?$", name)]:  # gpt-oss
        stack = tensors.pop(name)
        prefix, _, projection = name.rpartition(".")
        for expert, part in enumerate(stack):
            if name.endswith("_bias"):
                tensors[f"{prefix}.{expert}.{projection.removesuffix('_bias')}.bias"] = part.clone()
            else:
                tensors[f"{prefix}.{expert}.{projection}.weight"] = part.T.contiguous()
    return tensors


def _skeleton(tensors: dict[str, torch.Tensor], quantized: list[str], dtype: torch.dtype) -> torch.nn.Module:
    """A tree of Linear modules for the matrices to quantize."""
    root = torch.nn.Module()
    for name in quantized:
        path = name.split(".")[:-1]
        parent = root
        for part in path[:-1]:
            if part not in parent._modules:
                parent.add_module(part, torch.nn.Module())
            parent = parent._modules[part]
        weight = tensors[name]
        bias = tensors.get(".".join([*path, "bias"]))
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=dtype)
        linear.weight.data.copy_(weight)
        if bias is not None:
            linear.bias.data.copy_(bias)
        parent.add_module(path[-1], linear)
    return root


def _quantization_config(case: Case, ignore: list[str]) -> QuantizationConfig:
    weights = QuantizationArgs(
        num_bits=4,
        symmetric=case.symmetric,
        strategy="channel" if case.group == -1 else "group",
        group_size=None if case.group == -1 else case.group,
    )
    inputs = None
    if case.inputs != "none":
        inputs = QuantizationArgs(num_bits=8, symmetric=case.inputs == "symmetric", strategy="token", dynamic=True)
    groups = {}
    if case.attention == "w8a8":
        eight = QuantizationArgs(num_bits=8, symmetric=True, strategy="channel")
        tokens = QuantizationArgs(num_bits=8, symmetric=True, strategy="token", dynamic=True)
        groups["group_1"] = QuantizationScheme(
            targets=["re:.*self_attn.*_proj$"], weights=eight, input_activations=tokens, format="int-quantized"
        )
    elif case.attention == "w8a16":
        eight = weights.model_copy(update={"num_bits": 8})
        groups["group_1"] = QuantizationScheme(targets=["re:.*self_attn.*_proj$"], weights=eight, format=case.format)
    elif case.attention == "float":
        ignore = [*ignore, "re:.*self_attn.*"]
    if case.eight_bits:
        eight = weights.model_copy(update={"num_bits": 8})
        target = rf"re:{case.eight_bits}.*[.](\w+_proj|w[123])$"
        groups["group_2"] = QuantizationScheme(targets=[target], weights=eight, format=case.format)
    groups["group_0"] = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=inputs, format=case.format
    )
    return QuantizationConfig(config_groups=groups, ignore=["lm_head", *ignore])


def _quantize(skeleton: torch.nn.Module, config: QuantizationConfig) -> tuple[ModelCompressor, dict]:
    """Rounds to nearest and compresses in place; returns the compressor and the weights multiplied out, by name."""
    apply_quantization_config(skeleton, config)
    zeros: dict[str, torch.Tensor] = {}
    modules = {name: m for name, m in skeleton.named_modules() if hasattr(m, "quantization_scheme")}
    for name, module in modules.items():
        args, weight = module.quantization_scheme.weights, module.weight.data.float()
        grouped = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
        module.weight_scale.data.copy_(scale)
        if not args.symmetric:
            module.weight_zero_point.data.copy_(zero)
            zeros[name] = zero.float()
    compressor = ModelCompressor.from_pretrained_model(skeleton)
    compressor.compress_model(skeleton)
    plain = {}
    for name, module in modules.items():
        scale = module.weight_scale.data.float()
        if hasattr(module, "weight_packed"):
            words = module.weight_packed.data.to(torch.int64)
            bits = module.quantization_scheme.weights.num_bits
            codes = [words >> bits * i & (1 << bits) - 1 for i in range(32 // bits)]
            values = torch.stack(codes, -1).flatten(1) - (1 << bits - 1)
            values = values[:, : int(module.weight_shape[1])]
        else:
            values = module.weight.data
        grouped = values.float().unflatten(1, (scale.shape[1], -1))
        grouped = grouped - zeros.get(name, torch.zeros(())).unsqueeze(-1)
        plain[f"{name}.weight"] = (grouped * scale.unsqueeze(-1)).flatten(1)
    return compressor, plain


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse of what hub_tensors does to gpt-oss."""
    if not any(".experts.0.gate_up_proj." in name for name in tensors):
        return tensors
    found: dict[str, dict[int, torch.Tensor]] = {}
    rest = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*experts)\.(\d+)\.(gate_up_proj|down_proj)\.(weight|bias)", name)
        if match is None:
            rest[name] = tensor
            continue
        prefix, expert, projection, kind = match.groups()
        stack = f"{prefix}.{projection}" + ("_bias" if kind == "bias" else "")
        found.setdefault(stack, {})[int(expert)] = tensor.T if kind == "weight" else tensor
    for stack, parts in found.items():
        rest[stack] = torch.stack([parts[expert] for expert in range(len(parts))]).contiguous()
    return rest


def _compressed(case: Case, tensors: dict, ignore: list[str], dtype: torch.dtype) -> tuple[dict, dict, dict]:
    """What compressed-tensors stores, the weights multiplied out, and its quantization_config."""
    quantization = _quantization_config(case, ignore)
    skeleton = _skeleton(tensors, _matrices(tensors, quantization.ignore), dtype)
    compressor, plain = _quantize(skeleton, quantization)
    stored = dict(skeleton.state_dict())
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text("{}")
        compressor.update_config(directory)
        config = json.loads(path.read_text())["quantization_config"]
    # The package saw only what is quantized, so it does not know what to ignore.
    return stored, plain, {**config, "ignore": quantization.ignore}


def _of_a_tool(case: Case, tensors: dict, ignore: list[str], dtype: torch.dtype) -> tuple[dict, dict, dict]:
    """As `_compressed`, by tool_formats.py."""
    stored, plain, eight = {}, {}, []
    skipped = [] if case.lm_head else ["lm_head"]
    ignore = [*ignore, "re:.*self_attn.*"] if case.attention == "float" else ignore
    if case.format == "mxfp4":
        for name in [name for name in tensors if re.search(r"\.experts\.\d+\.\w+\.weight$", name)]:
            prefix, _, rest = name.partition(".experts.")
            expert, projection, _ = rest.split(".")
            parts, plain[name] = tool_formats.rounded(tensors[name], "mxfp4")
            for suffix, part in parts.items():
                stored.setdefault(f"{prefix}.experts.{projection}_{suffix}", {})[int(expert)] = part
            bias = tensors[name.removesuffix("weight") + "bias"]
            stored.setdefault(f"{prefix}.experts.{projection}_bias", {})[int(expert)] = bias.to(dtype)
        stored = {name: torch.stack([parts[e] for e in range(len(parts))]) for name, parts in stored.items()}
    else:
        for name in _matrices(tensors, skipped + ignore):
            bits = 8 if case.attention == "w8a16" and ".self_attn." in name else 4
            bits = 8 if case.eight_bits and re.match(case.eight_bits, name) else bits
            parts, plain[name] = tool_formats.rounded(tensors[name], case.format, case.group, case.symmetric, bits)
            eight += [name.removesuffix(".weight")] * (bits == 8)
            stored.update({f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()})
    skipped = [name.removesuffix(".weight") for name in _matrices(tensors, []) if name not in plain]
    return stored, plain, tool_formats.config(case.format, case.group, case.symmetric, skipped, case.lm_head, eight)


def _matrices(tensors: dict[str, torch.Tensor], ignore: list[str]) -> list[str]:
    """Names of the weights of linear modules that no entry matches: a name, or ``re:`` and a pattern."""
    patterns = [re.compile(entry[3:] if entry.startswith("re:") else re.escape(entry) + "$") for entry in ignore]
    return [
        name
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2 and "embed" not in name
        if not any(pattern.match(name.removesuffix(".weight")) for pattern in patterns)
    ]


def write(case: Case, directory: Path, seed: int = 0) -> Path:
    """Makes `directory`/checkpoint and `directory`/reference; returns `directory`."""
    if case.tool:
        (directory / "checkpoint").symlink_to(multiplied_out.TOOL_WRITTEN / case.tool)
        multiplied_out.write(directory / "checkpoint", directory / "reference")
        return directory
    family, changes, ignore = MODELS[case.model]
    dtype = getattr(torch, case.dtype)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **changes, **case.changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    _random_weights(model, dtype, seed)
    tensors = hub_tensors(model, directory / "float")
    if case.format in (*tool_formats.FORMS, *tool_formats.NVFP4):
        stored, plain, quantization = _of_a_tool(case, tensors, ignore, dtype)
    else:
        stored, plain, quantization = _compressed(case, tensors, ignore, dtype)

    keep_float32 = ("e_score_correction_bias",)
    for name, tensor in tensors.items():
        stacked = case.format == "mxfp4" and ".experts." in name
        if name not in plain and not stacked:
            stored[name] = tensor if name.endswith(keep_float32) else tensor.to(dtype)
    checkpoint, reference = directory / "checkpoint", directory / "reference"
    settings = json.loads((directory / "float" / "config.json").read_text())
    stored = {name: tensor.contiguous() for name, tensor in stored.items()}
    for path, content in ((checkpoint, stored), (reference, _stacked({**tensors, **plain}))):
        path.mkdir()
        save_file(content, path / "model.safetensors", metadata={"format": "pt"})
        settings["dtype"] = case.dtype if path is checkpoint else "float32"
        (path / "config.json").write_text(json.dumps(settings))
    settings.update(dtype=case.dtype, quantization_config=quantization)
    (checkpoint / "config.json").write_text(json.dumps(settings))
    return directory
