"""Tiny checkpoints in every format: config.json and safetensors, with what each matrix means by the tools' formulas."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from format_writers import (
    dequantized_awq,
    dequantized_gptq,
    dequantized_int,
    dequantized_mxfp4,
    dequantized_pack,
    write_awq,
    write_gptq,
    write_int_quantized,
    write_mxfp4,
    write_pack_quantized,
)


@dataclass
class Format:
    """How a tool stores a matrix, and what it says of it."""

    config: dict  # quantization_config without the group size
    write: Callable  # codes [N, K], zeros [N, G], scales [N, G] -> tensors
    dequantized: Callable  # tensors -> float64 [N, K]
    symmetric: bool = True
    lowest_zero: int = 0
    words: bool = True  # N is a multiple of 8
    weight_only: bool = True
    bits: int = 4

    def quantization_config(self, group):
        if "config_groups" in self.config:
            config = json.loads(json.dumps(self.config))
            weights = config["config_groups"]["group_0"]["weights"]
            weights.update({"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group})
            return config
        return {**self.config, "group_size": group}


def _gptq(symmetric, version, bits=4):
    config = {"quant_method": "gptq", "bits": bits, "sym": symmetric, "desc_act": False}
    config["checkpoint_format"] = "gptq_v2" if version == 2 else "gptq"
    how = {"version": version, "bits": bits}
    write, read = partial(write_gptq, **how), partial(dequantized_gptq, **how)
    return Format(config, write, read, symmetric, lowest_zero=2 - version, bits=bits)


def _round(symmetric, packing, bits=4):
    config = {
        "quant_method": "auto-round",
        "bits": bits,
        "sym": symmetric,
        "data_type": "int",
        "packing_format": packing,
    }
    if "awq" in packing:
        return Format(config, write_awq, dequantized_awq, symmetric)

    def write(codes, zeros, scales):
        tensors = write_gptq(codes, zeros, scales, 1, bits)
        del tensors["g_idx"]
        return tensors

    return Format(config, write, partial(dequantized_gptq, version=1, bits=bits), symmetric, lowest_zero=1, bits=bits)


def _compressed(format_, symmetric, inputs, bits=4):
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations if inputs else None}
    config = {
        "quant_method": "compressed-tensors", "format": format_, "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
    }  # fmt: skip
    kinds = {
        "int-quantized": (write_int_quantized, dequantized_int),
        "pack-quantized": (partial(write_pack_quantized, bits=bits), partial(dequantized_pack, bits=bits)),
    }
    write, read = kinds[format_]

    def written(codes, zeros, scales):
        return write(codes, None if symmetric else zeros, scales)

    return Format(config, written, read, symmetric, words=False, weight_only=not inputs, bits=bits)


def _awq(zero_point):
    config = {"quant_method": "awq", "bits": 4, "zero_point": zero_point, "version": "gemm"}
    return Format(config, write_awq, dequantized_awq, not zero_point)


def _awq_without_zeros():
    def write(codes, zeros, scales):
        tensors = write_awq(codes, zeros, scales)
        del tensors["qzeros"]
        return tensors

    return Format(_awq(False).config, write, dequantized_awq)


FORMATS = {
    "GPTQ": _gptq(True, 1),
    "GPTQ asymmetric": _gptq(False, 1),
    "GPTQ 2": _gptq(True, 2),
    "GPTQ 2 asymmetric": _gptq(False, 2),
    "AWQ": _awq(True),
    "AWQ zero_point false": _awq(False),
    "AWQ without zero points": _awq_without_zeros(),
    "AutoRound": _round(True, "auto_round:auto_gptq"),
    "AutoRound asymmetric": _round(False, "auto_round:auto_gptq"),
    "AutoRound as AWQ": _round(False, "auto_round:auto_awq"),
    "W4A8 int": _compressed("int-quantized", True, True),
    "W4A8 pack": _compressed("pack-quantized", True, True),
    "W4A8 pack asymmetric": _compressed("pack-quantized", False, True),
    "W4A16 pack": _compressed("pack-quantized", True, False),
    "W4A16 pack asymmetric": _compressed("pack-quantized", False, False),
    "W4A16 int asymmetric": _compressed("int-quantized", False, False),
}
EIGHT_BITS = {
    "GPTQ, 8 bits": _gptq(True, 1, 8),
    "GPTQ asymmetric, 8 bits": _gptq(False, 1, 8),
    "GPTQ 2, 8 bits": _gptq(True, 2, 8),
    "GPTQ 2 asymmetric, 8 bits": _gptq(False, 2, 8),
    "AutoRound, 8 bits": _round(True, "auto_round:auto_gptq", 8),
    "AutoRound asymmetric, 8 bits": _round(False, "auto_round:auto_gptq", 8),
    "W8A16 pack": _compressed("pack-quantized", True, False, 8),
    "W8A16 pack asymmetric": _compressed("pack-quantized", False, False, 8),
}


def random_matrix(form, n, k, group, dtype=torch.float16):
    """The tensors of a matrix in a format."""
    g = 1 if group == -1 else k // group
    codes = torch.randint(1 << form.bits, (n, k)).numpy()
    zeros = np.full((n, g), 1 << form.bits - 1)
    if not form.symmetric:
        zeros = torch.randint(form.lowest_zero, 1 << form.bits, (n, g)).numpy()
    return form.write(codes, zeros, (torch.rand(n, g) / 32).to(dtype))


@dataclass
class Checkpoint:
    """Tensors, config.json, and what each matrix is: {module: float64 [N, K]}, {module: bias}."""

    tensors: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    meant: dict = field(default_factory=dict)
    biases: dict = field(default_factory=dict)

    def add(self, name, form, n, k, group, bias=False, dtype=torch.float16):
        made = random_matrix(form, n, k, group, dtype)
        self.meant[name] = form.dequantized(made)
        if bias:
            made["bias"] = self.biases[name] = torch.randn(n).to(torch.bfloat16)
        self.tensors.update({f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in made.items()})

    def write(self, path, files=1):
        from safetensors.torch import save_file

        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(self.config))
        if files == 1:
            save_file(self.tensors, path / "model.safetensors")
            return path
        weight_map = {}
        for i in range(files):
            name = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
            part = {key: self.tensors[key] for key in sorted(self.tensors)[i::files]}
            save_file(part, path / name)
            weight_map.update(dict.fromkeys(part, name))
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return path


LAYER = "model.layers.0.mlp.experts"


def model_config(quantization, hidden, inter, experts, **changes):
    return {
        "model_type": "qwen3_moe", "hidden_size": hidden, "moe_intermediate_size": inter, "num_experts": experts,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "hidden_act": "silu", "dtype": "float32",
        "quantization_config": quantization, **changes,
    }  # fmt: skip


def experts_checkpoint(form, hidden, inter, group, experts=3, names=("gate_proj", "up_proj", "down_proj"), **more):
    """One layer of experts; two names: the first is gate and up in one."""
    made = Checkpoint(config=model_config(form.quantization_config(group), hidden, inter, experts))
    for expert in range(experts):
        for name in names:
            rows, columns = (hidden, inter) if name == names[-1] else (inter * (4 - len(names)), hidden)
            made.add(f"{LAYER}.{expert}.{name}", form, rows, columns, group, **more)
    return made


def random_mxfp4(n, k):
    return write_mxfp4(torch.randint(16, (n, k)).numpy(), torch.randint(110, 124, (n, k // 32)).numpy())


def gpt_oss_checkpoint(hidden, inter, experts=3):
    """One layer of gpt-oss; ``meant`` has the rows as the file has them, gate and up in turns."""
    config = model_config(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        hidden, inter, experts, model_type="gpt_oss", intermediate_size=inter, num_local_experts=experts,
    )  # fmt: skip
    made = Checkpoint(config=config)
    for name, rows, columns in (("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)):
        parts = [random_mxfp4(rows, columns) for _ in range(experts)]
        for suffix in ("blocks", "scales"):
            made.tensors[f"{LAYER}.{name}_{suffix}"] = torch.stack([part[suffix] for part in parts])
        bias = torch.randn(experts, rows).to(torch.bfloat16)
        made.tensors[f"{LAYER}.{name}_bias"] = bias
        for expert, part in enumerate(parts):
            made.meant[f"{LAYER}.{expert}.{name}"] = dequantized_mxfp4(part)
            made.biases[f"{LAYER}.{expert}.{name}"] = bias[expert]
    return made


def damages(tensors, count):
    """(key, tensor) of a checkpoint, one after the other of another shape or dtype, or with other bits."""
    generator = torch.Generator().manual_seed(4)
    keys = sorted(tensors)
    kinds = [torch.int8, torch.uint8, torch.int32, torch.int64, torch.float32, torch.bool]
    for number in range(count):
        key = keys[int(torch.randint(len(keys), (1,), generator=generator))]
        old = tensors[key]
        if number % 4 == 0:
            sizes = torch.randint(0, 70, (int(torch.randint(0, 4, (1,), generator=generator)),), generator=generator)
            new = torch.zeros(sizes.tolist(), dtype=old.dtype)
        elif number % 4 == 1:
            is_float8 = str(old.dtype).startswith("torch.float8")  # which becomes floats alone
            new = (old.float() if is_float8 else old).to(kinds[number // 4 % len(kinds)])
        elif number % 4 == 2:
            new = torch.randint(-128, 128, old.shape, generator=generator).float().to(old.dtype)
        else:
            new = old.flatten()[: old.numel() // 2]
        yield key, new.contiguous()
