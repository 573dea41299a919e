"""Tiny checkpoints in every format: config.json and safetensors, with what each matrix means by tool_formats.py."""

import copy
import json
from dataclasses import dataclass, field

import torch
from tool_formats import (
    E4M3,
    MXFP4,
    NVFP4,
    floats,
    halves,
    integers,
    least_zero,
    multiplied_out,
    store,
    store_mxfp4,
    store_nvfp4,
)

# The quantization_config of gpt-oss.
GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@dataclass
class Format:
    """How a tool stores a matrix, and what it says of it."""

    form: str  # as tool_formats.py has it
    config: dict  # quantization_config without the group size
    symmetric: bool = True
    stores_zeros: bool = True
    weight_only: bool = True
    bits: int = 4

    @property
    def words(self):
        """N is a multiple of 8."""
        return self.form.startswith(("gptq", "awq", "auto_round"))

    @property
    def block(self):
        """The group size, of floats."""
        return 32 if self.form in MXFP4 else 16 if self.form in NVFP4 else None

    def quantization_config(self, group):
        config = copy.deepcopy(self.config)
        if self.block is not None:
            return config
        if "config_groups" in config:
            weights = config["config_groups"]["group_0"]["weights"]
            weights.update({"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group})
            return config
        return {**config, "group_size": group}

    def random(self, n, k, group, dtype=torch.float16):
        """The tensors of a random matrix."""
        codes = torch.randint(1 << self.bits, (n, k))
        if self.form in MXFP4:
            return store_mxfp4(self.form, codes, torch.randint(110, 124, (n, k // 32)))
        if self.form in NVFP4:
            # A scale for all, of the sizes that tools write, and one of inputs, which nothing reads.
            stored = store_nvfp4(self.form, codes, torch.randint(127, (n, k // 16)), float(10 ** -(6 * torch.rand(()))))
            of_inputs = "input_global_scale" if "weight_packed" in stored else "input_scale"
            return {**stored, of_inputs: torch.ones(1)}
        g = 1 if group == -1 else k // group
        zeros = torch.randint(least_zero(self.form), 1 << self.bits, (n, g))
        if self.symmetric:
            zeros = torch.full((n, g), 1 << self.bits - 1)
        return store(
            self.form, codes, zeros if self.stores_zeros else None, (torch.rand(n, g) / 32).to(dtype), self.bits
        )

    def dequantized(self, tensors):
        """float64 [N, K]; of NVFP4 in one group, for which the operators have one level of scales, in one."""
        one_level = self.form in NVFP4 and tensors["weight_scale"].shape[1] == 1
        return multiplied_out(tensors, self.form, self.bits, one_level)


def _gptq(symmetric, version, bits=4):
    form = "gptq_v2" if version == 2 else "gptq"
    config = {"quant_method": "gptq", "bits": bits, "sym": symmetric, "desc_act": False, "checkpoint_format": form}
    return Format(form, config, symmetric, bits=bits)


def _round(symmetric, packing, bits=4):
    config = {"quant_method": "auto-round", "bits": bits, "sym": symmetric, "data_type": "int"}
    return Format(packing, {**config, "packing_format": packing}, symmetric, bits=bits)


def _compressed(form, symmetric, inputs, bits=4):
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    config = _compressed_config(form, weights, activations if inputs else None)
    return Format(form, config, symmetric, not symmetric, not inputs, bits)


def _compressed_config(form, weights, inputs):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    ignore = ["lm_head", "re:.*gate$"]
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ignore,
    }  # fmt: skip


def _awq(zero_point, stores_zeros=True):
    config = {"quant_method": "awq", "bits": 4, "zero_point": zero_point, "version": "gemm"}
    return Format("awq", config, not zero_point, stores_zeros)


FORMATS = {
    "GPTQ": _gptq(True, 1),
    "GPTQ asymmetric": _gptq(False, 1),
    "GPTQ 2": _gptq(True, 2),
    "GPTQ 2 asymmetric": _gptq(False, 2),
    "AWQ": _awq(True),
    "AWQ zero_point false": _awq(False),
    "AWQ without zero points": _awq(False, stores_zeros=False),
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
# Of NVFP4 in compressed-tensors; what Quark says of a tensor, and of a layer.
NVFP4_ARGS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
MXFP4_ARGS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": False,
}
QUARK_WEIGHT = {
    "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1,
    "is_dynamic": False, "symmetric": None, "scale_type": "float",
}  # fmt: skip
QUARK_LAYER = {
    "weight": QUARK_WEIGHT, "input_tensors": {**QUARK_WEIGHT, "is_dynamic": True}, "output_tensors": None, "bias": None,
}  # fmt: skip
QUARK = {
    "quant_method": "quark", "global_quant_config": QUARK_LAYER, "exclude": ["lm_head", "*.mlp.gate"],
    "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
    "layer_quant_config": {}, "layer_type_quant_config": {},
}  # fmt: skip
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.mlp.gate"]}
FLOATS = {
    "MXFP4 pack": Format("mxfp4-pack-quantized", _compressed_config("mxfp4-pack-quantized", MXFP4_ARGS, None)),
    "MXFP4 Quark": Format("quark", QUARK),
    "NVFP4 modelopt": Format("modelopt-nvfp4", MODELOPT),
    "NVFP4 pack": Format("nvfp4-pack-quantized", _compressed_config("nvfp4-pack-quantized", NVFP4_ARGS, None)),
}
ALL_FORMATS = FORMATS | EIGHT_BITS | FLOATS


@dataclass
class Checkpoint:
    """Tensors, config.json, and what each matrix is: {module: float64 [N, K]}, {module: bias}."""

    tensors: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    meant: dict = field(default_factory=dict)
    biases: dict = field(default_factory=dict)

    def add(self, name, form, n, k, group=-1, bias=False, dtype=torch.float16):
        made = form.random(n, k, group, dtype)
        self.meant[name] = form.dequantized(made)
        if bias:
            made["bias"] = self.biases[name] = torch.randn(n).to(torch.bfloat16)
        self.tensors.update({f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in made.items()})

    def changed(self, key=None, tensor=None, **config):
        """With another tensor (None: without it), or other words in its quantization_config."""
        made = copy.copy(self)
        made.tensors, made.config = dict(made.tensors), copy.deepcopy(made.config)
        if key is not None:
            assert key in made.tensors
            if tensor is None:
                del made.tensors[key]
            else:
                made.tensors[key] = tensor.contiguous()
        made.config["quantization_config"].update(config)
        return made

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
QUERY = "model.layers.0.self_attn.q_proj"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def model_config(quantization, hidden, inter, experts, **changes):
    return {
        "model_type": "qwen3_moe", "hidden_size": hidden, "moe_intermediate_size": inter, "num_experts": experts,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "hidden_act": "silu", "dtype": "float32",
        "quantization_config": quantization, **changes,
    }  # fmt: skip


def experts_checkpoint(form, hidden, inter, group=-1, experts=3, names=PROJECTIONS, **more):
    """One layer of experts; two names: the first is gate and up in one."""
    made = Checkpoint(config=model_config(form.quantization_config(group), hidden, inter, experts))
    for expert in range(experts):
        for name in names:
            rows, columns = (hidden, inter) if name == names[-1] else (inter * (4 - len(names)), hidden)
            made.add(f"{LAYER}.{expert}.{name}", form, rows, columns, group, **more)
    return made


def gpt_oss_checkpoint(hidden, inter):
    """One layer of gpt-oss; ``meant`` has the rows as the file has them, gate and up in turns."""
    experts = 3
    config = model_config(
        GPT_OSS, hidden, inter, experts, model_type="gpt_oss", intermediate_size=inter, num_local_experts=experts,
    )  # fmt: skip
    made, form = Checkpoint(config=config), Format("mxfp4", GPT_OSS)
    for name, rows, columns in (("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)):
        parts = [form.random(rows, columns, 32) for _ in range(experts)]
        for suffix in ("blocks", "scales"):
            made.tensors[f"{LAYER}.{name}_{suffix}"] = torch.stack([part[suffix] for part in parts])
        bias = torch.randn(experts, rows).to(torch.bfloat16)
        made.tensors[f"{LAYER}.{name}_bias"] = bias
        for expert, part in enumerate(parts):
            made.meant[f"{LAYER}.{expert}.{name}"] = form.dequantized(part)
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


def numbers_of(matrix):
    """float64 [N, K]: what a Matrix of w4a8.formats means, by its documentation."""
    codes = matrix.matrix().codes if matrix.kind == "int8" else halves(matrix.matrix().codes)
    scales = matrix.scales.double()
    if matrix.channel_scales is not None:
        scales = E4M3[matrix.scales.long()].double() * matrix.channel_scales.double().unsqueeze(1)
    if matrix.kind == "e2m1":
        return floats(codes, scales)
    middle = 128 if matrix.kind == "int8" else 8
    zeros = torch.full(scales.shape, middle) if matrix.zero_points is None else matrix.zero_points
    return integers(codes, zeros, scales)
