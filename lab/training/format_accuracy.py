"""Measure what each 4-bit checkpoint format costs on a trained model, and what int8 activations cost on top of it.

    python -m training.format_accuracy    # in lab/

reads what ``train.py`` wrote and rounds every attention projection and every expert by the rule of a tool, to nearest,
without calibration: the formats are compared, not the tools. Each result is written as a checkpoint of its format, read
back by ``w4a8.load`` and ``load_linear`` and run by the ``w4a8`` ops, whose activations are int8, and beside it with
float activations: the same weights multiplied out, in a float32 model. Bits per byte of text it has not seen.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data
import torch
from evaluate import bits_per_byte
from folders import EXAMPLE
from modeling import W4A8SparseMoeBlock
from qwen3_moe import quantization_config
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import w4a8
from training.quantize import named_matrices, words, write_config
from w4a8.checkpoint import load_linear

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass
class Codes:
    """A rounded matrix: codes uint8 [N, K], scales [N, G], zero points uint8 [N, G]; float32 numbers of e2m1 codes.

    ``of_all`` is what all scales are multiplied by, float32 [].
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    numbers: Tensor | None = None
    of_all: Tensor | None = None

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        width = self.codes.shape[1] // self.scales.shape[1]
        if self.numbers is not None:
            scales = self.scales if self.of_all is None else self.scales.float() * self.of_all
            return self.numbers * scales.repeat_interleave(width, 1)
        values = self.codes.float() - self.zeros.float().repeat_interleave(width, 1)
        return values * self.scales.float().repeat_interleave(width, 1)


def _integers(groups: Tensor, scales: Tensor, zeros: Tensor) -> Codes:
    """Codes of groups [N, G, g] with the scales as they are stored."""
    codes = (groups / scales.float().unsqueeze(-1)).round_() + zeros.unsqueeze(-1)
    return Codes(codes.clamp_(0, 15).to(torch.uint8).flatten(1), scales, zeros.to(torch.uint8))


def symmetric(groups: Tensor, dtype: torch.dtype = torch.float16) -> Codes:
    """GPTQ's and compressed-tensors' rule: the largest magnitude is 7.5 scales."""
    scales = (groups.abs().amax(-1) / 7.5).clamp(min=1e-6).to(dtype)
    return _integers(groups, scales, torch.full(scales.shape, 8.0))


def asymmetric(groups: Tensor, dtype: torch.dtype = torch.float16) -> Codes:
    """GPTQ's and AWQ's rule: 15 scales from the least weight to the largest, 0 among them."""
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6).to(dtype)
    return _integers(groups, scales, (-low / scales.float()).round_().clamp_(0, 15))


def signed(groups: Tensor, dtype: torch.dtype = torch.float16) -> Codes:
    """AutoRound's symmetric rule: the weight of the largest magnitude is -8 scales, whatever its sign."""
    low, high = groups.amin(-1), groups.amax(-1)
    largest = torch.where(high > -low, high, low)
    scales = torch.where(largest == 0, torch.full_like(largest, 1e-6), -largest / 8).to(dtype)
    return _integers(groups, scales, torch.full(scales.shape, 8.0))


def mxfp4(groups: Tensor) -> Codes:
    """The OCP rule: a power of two such that the largest magnitude is in [4, 8); what is beyond 6 becomes 6."""
    exponents = torch.frexp(groups.abs().amax(-1))[1].float() - 3  # 2^e <= largest / 4 < 2^(e + 1)
    scales = torch.ldexp(torch.ones(()), exponents)
    codes, numbers = _e2m1(groups / scales.unsqueeze(-1))
    return Codes(codes, scales, torch.zeros(scales.shape), numbers)


def nvfp4(groups: Tensor) -> Codes:
    """The largest magnitude of a matrix is 6 times 448 times its scale; that of a group 6 times the two scales."""
    of_all = groups.abs().amax() / (6 * 448)
    scales = (groups.abs().amax(-1) / 6 / of_all).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    codes, numbers = _e2m1(groups / (scales.float() * of_all).unsqueeze(-1))
    return Codes(codes, scales, torch.zeros(scales.shape), numbers, of_all)


def _e2m1(ratios: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and numbers [N, K] of [N, G, g], to nearest."""
    nearest = (ratios.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    codes = nearest + 8 * (ratios < 0)
    numbers = E2M1[nearest] * torch.where(ratios < 0, -1.0, 1.0)
    return codes.to(torch.uint8).flatten(1), numbers.flatten(1)


def gptq_tensors(matrix: Codes) -> dict[str, Tensor]:
    """Version 1: zero points less one."""
    return {"qweight": words(matrix.codes).T, "qzeros": words((matrix.zeros - 1).T & 15), "scales": matrix.scales.T}


def awq_tensors(matrix: Codes) -> dict[str, Tensor]:
    """Words of output features in AWQ's order."""

    def in_order(features: Tensor) -> Tensor:
        return words(features.unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2))

    return {"qweight": in_order(matrix.codes.T), "qzeros": in_order(matrix.zeros.T), "scales": matrix.scales.T}


def compressed_tensors(matrix: Codes) -> dict[str, Tensor]:
    """Symmetric, pack-quantized."""
    shape = torch.tensor(matrix.codes.shape)
    return {"weight_packed": words(matrix.codes), "weight_scale": matrix.scales, "weight_shape": shape}


def mxfp4_tensors(matrix: Codes) -> dict[str, Tensor]:
    """Blocks of 32 codes, low nibble first, and exponents."""
    blocks = (matrix.codes[:, ::2] | matrix.codes[:, 1::2] << 4).unflatten(1, (-1, 16))
    return {"blocks": blocks, "scales": (torch.frexp(matrix.scales)[1] + 126).to(torch.uint8)}


def nvfp4_tensors(matrix: Codes) -> dict[str, Tensor]:
    """As nvidia-modelopt has it: low nibble first."""
    packed = matrix.codes[:, ::2] | matrix.codes[:, 1::2] << 4
    return {"weight": packed, "weight_scale": matrix.scales, "weight_scale_2": matrix.of_all}


@dataclass
class Format:
    """A format: how it rounds groups, what it stores, what config.json says."""

    group: int
    rounded: Callable[[Tensor], Codes]
    tensors: Callable[[Codes], dict[str, Tensor]]
    config: dict[str, Any]
    experts_only: bool = False


def _gptq(symmetric_: bool, group: int) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric_, "desc_act": False}


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
FORMATS = {
    "W4A8 (compressed-tensors), symmetric, g128": Format(
        128, lambda groups: symmetric(groups, torch.bfloat16), compressed_tensors, quantization_config(128)
    ),
    "GPTQ, symmetric, g128": Format(128, symmetric, gptq_tensors, _gptq(True, 128)),
    "GPTQ, asymmetric, g128": Format(128, asymmetric, gptq_tensors, _gptq(False, 128)),
    "AWQ, asymmetric, g128": Format(
        128, asymmetric, awq_tensors, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    ),
    "AutoRound, symmetric, g128": Format(
        128, signed, gptq_tensors, {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    ),
    "AutoRound, asymmetric, g128 (packed as AWQ)": Format(
        128,
        asymmetric,
        awq_tensors,
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "sym": False,
            "packing_format": "auto_round:auto_awq",
        },
    ),
    "W4A8 (compressed-tensors), symmetric, g32": Format(
        32, lambda groups: symmetric(groups, torch.bfloat16), compressed_tensors, quantization_config(32)
    ),
    "GPTQ, asymmetric, g32": Format(32, asymmetric, gptq_tensors, _gptq(False, 32)),
    "NVFP4, g16": Format(16, nvfp4, nvfp4_tensors, MODELOPT),
    "NVFP4, g16, experts only": Format(16, nvfp4, nvfp4_tensors, MODELOPT, experts_only=True),
    "MXFP4, g32, experts only": Format(32, mxfp4, mxfp4_tensors, {"quant_method": "mxfp4"}, experts_only=True),
    "GPTQ, symmetric, g32, experts only": Format(32, symmetric, gptq_tensors, _gptq(True, 32), experts_only=True),
}


def chosen(matrices: dict[str, Tensor], form: Format) -> dict[str, Codes]:
    """The rounded matrices of a format."""
    names = [name for name in matrices if ".experts." in name or not form.experts_only]
    return {name: form.rounded(matrices[name].unflatten(1, (-1, form.group))) for name in names}


def file_tensors(rounded: dict[str, Codes], form: Format) -> dict[str, Tensor]:
    """What a checkpoint has of them; MXFP4 has one tensor for all experts, gate and up in it."""
    made = {name: form.tensors(matrix) for name, matrix in rounded.items()}
    if form.config["quant_method"] != "mxfp4":
        return {f"{name}.{suffix}": tensor for name, parts in made.items() for suffix, tensor in parts.items()}
    stacked: dict[str, list[Tensor]] = {}
    for name, parts in made.items():
        experts, _, projection = name.rpartition(".")
        if projection == "up_proj":
            continue
        layer = experts.rpartition(".")[0]
        if projection == "gate_proj":
            up = made[f"{experts}.up_proj"]
            parts, projection = (
                {suffix: torch.cat((tensor, up[suffix])) for suffix, tensor in parts.items()},
                "gate_up_proj",
            )
        for suffix, tensor in parts.items():
            stacked.setdefault(f"{layer}.{projection}_{suffix}", []).append(tensor)
    return {name: torch.stack(tensors) for name, tensors in stacked.items()}


def float_state(state: dict[str, Tensor], rounded: dict[str, Codes]) -> dict[str, Tensor]:
    """The state of the float32 model that has the rounded weights, and all others as a checkpoint has them."""
    twin = {name: tensor.bfloat16().float() for name, tensor in state.items()}
    for name, matrix in rounded.items():
        experts, _, projection = name.rpartition(".")
        if ".experts." not in name:
            twin[f"{name}.weight"] = matrix.dequantize()
            continue
        layer, _, expert = experts.rpartition(".")
        stack = twin[f"{layer}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"][int(expert)]
        if projection != "down_proj":
            stack = stack.chunk(2)[projection == "up_proj"]
        stack.copy_(matrix.dequantize())
    return twin


def load_packed(model: Qwen3MoeForCausalLM, directory: Path) -> None:
    """Puts the layers of a checkpoint into a float model, in the place of the float ones."""
    for name, experts in w4a8.load(directory).items():
        block = name.removesuffix(".experts")
        model.set_submodule(block, W4A8SparseMoeBlock(model.get_submodule(block).gate, experts))
    for name, linear in load_linear(directory).items():
        model.set_submodule(name, linear)


def measured(
    config: Qwen3MoeConfig, source: Path, state: dict[str, Tensor], form: Format, name: str, text: bytes
) -> tuple[float, float]:
    """Bits per byte with float and with int8 activations."""
    matrices, _ = named_matrices(state, config)
    rounded = chosen(matrices, form)
    model = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    model.load_state_dict(float_state(state, rounded))
    floats = bits_per_byte(model, text, f"{name}, float")
    with tempfile.TemporaryDirectory() as directory:
        tensors = {key: tensor.contiguous() for key, tensor in file_tensors(rounded, form).items()}
        save_file(tensors, Path(directory) / "model.safetensors", metadata={"format": "pt"})
        write_config(Path(directory), source, form.config)
        load_packed(model, Path(directory))
    return floats, bits_per_byte(model, text, f"{name}, int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXAMPLE / "build", help="output directory of train.py")
    parser.add_argument("--bytes", type=int, default=0, help="measure on the first so many bytes only; 0 is all")
    parser.add_argument("--only", default="", help="formats whose name contains this")
    args = parser.parse_args()

    config = Qwen3MoeConfig.from_pretrained(args.model)
    state = torch.load(args.model / "float32.pt", weights_only=True)
    text = data.held_out_bytes()[: args.bytes or None]
    model = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    model.load_state_dict(state)
    float32 = bits_per_byte(model, text, "float32")
    training = json.loads((args.model / "training.json").read_text())
    print(f"{training['training_steps']} steps of {training['batch']} x {training['context']} bytes", end="")
    print(f" from {training['start']}" if training.get("start") else "")
    print(f"{len(text):,} bytes, sha256 of all held-out text {data.held_out_sha256()[:16]}, {w4a8.active_kernel()}")
    print(f"float32: {float32:.4f} bits per byte\n")
    print("| format | float activations | int8 activations | cost of int8 activations |")
    print("|---|---|---|---|")
    for name, form in FORMATS.items():
        if args.only in name:
            floats, integers = measured(config, args.model, state, form, name, text)
            cells = f"{floats:.4f} ({floats / float32 - 1:+.2%}) | {integers:.4f} ({integers / float32 - 1:+.2%})"
            print(f"| {name} | {cells} | {integers / floats - 1:+.3%} |", flush=True)


if __name__ == "__main__":
    main()
