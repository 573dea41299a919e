"""Checkpoints for the tests, written by the real compressed-tensors package."""

import format_checkpoints
import torch
from moe_build import Stack

HIDDEN, INTER, EXPERTS = 128, 256, 8
LAYER = "model.layers.{}.mlp.experts"
FIRST = LAYER.format(0)


def model_config(quantization, **changes):
    """config.json of a small Qwen3-MoE."""
    changes = {"num_experts_per_tok": 3, **changes}
    config = format_checkpoints.model_config(quantization, HIDDEN, INTER, EXPERTS, **changes)
    return {key: value for key, value in config.items() if key != "quantization_config" or value is not None}


class _Expert(torch.nn.Module):
    def __init__(self, bias, gated):
        super().__init__()
        if gated:
            self.gate_proj = torch.nn.Linear(HIDDEN, INTER, bias=bias)
        self.up_proj = torch.nn.Linear(HIDDEN, INTER, bias=bias)
        self.down_proj = torch.nn.Linear(INTER, HIDDEN, bias=bias)


class _Layer(torch.nn.Module):
    def __init__(self, bias, gated):
        super().__init__()
        self.self_attn = torch.nn.Module()
        self.self_attn.q_proj = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp = torch.nn.Module()
        self.mlp.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.mlp.experts = torch.nn.ModuleList([_Expert(bias, gated) for _ in range(EXPERTS)])


def write_with_compressed_tensors(path, group_size, format_, bias=False, gated=True, weight_only=False, layers=1):
    """A model quantized, compressed and described by compressed-tensors, with attention in W8A8.

    Returns:
        The weights as the package itself decompresses them: {module: float32 [N, K]}.
    """
    from compressed_tensors.compressors import BaseCompressor, ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.layers = torch.nn.ModuleList([_Layer(bias, gated) for _ in range(layers)])
    model = model.to(torch.bfloat16)
    channel = group_size == -1
    weights = QuantizationArgs(
        num_bits=4,
        symmetric=True,
        strategy="channel" if channel else "group",
        group_size=None if channel else group_size,
    )
    tokens = QuantizationArgs(num_bits=8, symmetric=False, strategy="token", dynamic=True)
    eight = QuantizationArgs(num_bits=8, symmetric=True, strategy="channel")
    config = QuantizationConfig(
        config_groups={
            "group_0": QuantizationScheme(
                targets=["re:.*self_attn.*"], weights=eight, input_activations=tokens, format="int-quantized"
            ),
            "group_1": QuantizationScheme(
                targets=["Linear"], weights=weights, input_activations=None if weight_only else tokens, format=format_
            ),
        },
        ignore=["lm_head", "re:.*mlp.gate$"],
    )
    apply_quantization_config(model, config)
    quantized = {name: module for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
    for module in quantized.values():
        args, weight = module.quantization_scheme.weights, module.weight.float()
        grouped = weight.view(len(weight), -1, args.group_size or weight.shape[1])
        module.weight_scale.data.copy_(calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)[0])
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    format_checkpoints.Checkpoint(tensors, model_config(None)).write(path)
    compressor.update_config(str(path))
    decompressed = {}
    for name, module in quantized.items():
        scheme = module.quantization_scheme
        state = {key: tensor.detach() for key, tensor in module.state_dict().items()}
        state["weight_scale"] = state["weight_scale"].float()
        tool = BaseCompressor.get_value_from_registry(scheme.format.value)
        decompressed[name] = tool.decompress(state, scheme)["weight"].float()
    return decompressed


def read_stacks(path, group_size, layer=FIRST, gated=True):
    """What a checkpoint holds for a layer, as stacks, read without the package under test."""
    from safetensors.torch import load_file

    tensors = load_file(path / "model.safetensors")

    def weight(module):
        if f"{module}.weight" in tensors:
            return tensors[f"{module}.weight"]
        words = tensors[f"{module}.weight_packed"].to(torch.int64)
        nibbles = torch.stack([(words >> 4 * i) & 15 for i in range(8)], -1).flatten(1)
        return (nibbles[:, : int(tensors[f"{module}.weight_shape"][1])] - 8).to(torch.int8)

    def stack(names):
        modules = [[f"{layer}.{expert}.{name}" for name in names] for expert in range(EXPERTS)]
        values = torch.stack([torch.cat([weight(m) for m in row]) for row in modules])
        scales = torch.stack([torch.cat([tensors[f"{m}.weight_scale"] for m in row]) for row in modules])
        bias = None
        if f"{modules[0][0]}.bias" in tensors:
            bias = torch.stack([torch.cat([tensors[f"{m}.bias"] for m in row]) for row in modules])
        return Stack(values, scales, bias)

    return stack(["gate_proj", "up_proj"] if gated else ["up_proj"]), stack(["down_proj"])
