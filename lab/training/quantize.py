"""Round a trained model to int4 and write it as a compressed-tensors checkpoint in format pack-quantized.

    python -m training.quantize    # in lab/

Quantized is what W4A8 checkpoints of large models quantize: the attention projections and every expert. The
embedding, the output layer, the routers and the norms are bfloat16. Rounding is that of ``gptq.py``, calibrated on
training text, or to nearest. ``metrics.json`` beside the checkpoint records what the trained float32 model scores on
the held-out text, next to what is left after rounding.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import data
import torch
from evaluate import CONTEXT, STRIDE, bits_per_byte
from folders import EXAMPLE
from modeling import load_dequantized
from qwen3_moe import quantization_config
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from training import gptq

# Directory of the checkpoint, and its group size.
NAME, GROUP_SIZE = "g32", 32


def round_to_nearest(weight: Tensor, group_size: int | None, candidates: int) -> gptq.Rounded:
    """Every weight by itself; the scales are chosen as in ``gptq.py``, by the error of the weights."""
    return gptq.round_matrix(weight, torch.eye(weight.shape[-1]), group_size, candidates)


def words(codes: Tensor) -> Tensor:
    """uint8 [..., 8 m] to int32 [..., m], the first of eight in the lowest bits."""
    shifted = codes.unflatten(-1, (-1, 8)).long() << torch.arange(0, 32, 4)
    return shifted.sum(-1).to(torch.uint32).view(torch.int32)


def named_matrices(state: dict[str, Tensor], config: Qwen3MoeConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split the state into matrices to quantize, by the name of their Linear, and everything else.

    transformers keeps the experts of a block as two 3-D tensors; checkpoints have one Linear per expert and projection.
    """
    matrices, others = {}, {}
    for name, tensor in state.items():
        block = name.rpartition(".")[0]
        if name.endswith(".experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            for e in range(config.num_experts):
                matrices[f"{block}.{e}.gate_proj"] = gate[e]
                matrices[f"{block}.{e}.up_proj"] = up[e]
        elif name.endswith(".experts.down_proj"):
            for e in range(config.num_experts):
                matrices[f"{block}.{e}.down_proj"] = tensor[e]
        elif name.endswith("_proj.weight"):
            matrices[block] = tensor
        else:
            others[name] = tensor
    return matrices, others


def write_config(directory: Path, source: Path, quantization: dict[str, Any]) -> None:
    """``config.json`` with the names that older and newer versions of transformers and vLLM read."""
    config = json.loads((source / "config.json").read_text())
    config["architectures"] = ["Qwen3MoeForCausalLM"]
    config["dtype"] = config["torch_dtype"] = "bfloat16"
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["num_experts"] = config.pop("num_local_experts")
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_checkpoint(
    directory: Path,
    source: Path,
    matrices: dict[str, Tensor],
    rounded: dict[str, gptq.Rounded],
    others: dict[str, Tensor],
    group_size: int | None,
) -> float:
    """Write one complete checkpoint; returns the root mean square error of its weights relative to the weights."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in others.items()}
    error = energy = 0.0
    for name, weight in matrices.items():
        values, scales = rounded[name]
        tensors[f"{name}.weight_packed"] = words((values + 8).to(torch.uint8))
        tensors[f"{name}.weight_scale"] = scales.contiguous()
        tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
        error += (gptq.dequantize(values, scales) - weight).double().square().sum().item()
        energy += weight.double().square().sum().item()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_config(directory, source, quantization_config(group_size))
    return (error / energy) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXAMPLE / "build", help="output directory of train.py")
    parser.add_argument("--out", type=Path, default=EXAMPLE / "checkpoints")
    parser.add_argument("--search", type=int, default=32, help="scales tried per group; 1 is the one that just covers")
    parser.add_argument("--method", choices=("gptq", "nearest"), default="gptq")
    parser.add_argument("--windows", type=int, default=128, help="windows of training text to calibrate gptq on")
    args = parser.parse_args()

    config = Qwen3MoeConfig.from_pretrained(args.model)
    state = torch.load(args.model / "float32.pt", weights_only=True)
    training = json.loads((args.model / "training.json").read_text())
    text = data.held_out_bytes()

    matrices, others = named_matrices(state, config)
    method: dict[str, Any] = {"method": args.method, "scales_tried_per_group": args.search}
    if args.method == "gptq":
        windows = gptq.calibration_windows(args.windows, CONTEXT)
        method["calibration"] = {"text": "training", "windows": len(windows), "bytes": windows.numel()}
        method["damping"] = gptq.DAMPING

    model = Qwen3MoeForCausalLM(config)
    model.load_state_dict(state)
    float32 = bits_per_byte(model.eval(), text, "float32")
    tqdm.write(f"float32      {float32:.4f} bits per byte")

    started = time.monotonic()
    uncompensated: list[str] = []
    if args.method == "gptq":
        # Rounding happens inside a model that computes with what the checkpoint will hold.
        model.load_state_dict(state | {key: tensor.bfloat16().float() for key, tensor in others.items()})
        rounded, uncompensated = gptq.round_model(model, windows, GROUP_SIZE, args.search)
    else:
        progress = tqdm(matrices.items(), desc=f"round {NAME}", unit="matrix", leave=False)
        rounded = {key: round_to_nearest(weight, GROUP_SIZE, args.search) for key, weight in progress}
    seconds = time.monotonic() - started
    weight_error = write_checkpoint(args.out / NAME, args.model, matrices, rounded, others, GROUP_SIZE)
    bits = bits_per_byte(load_dequantized(args.out / NAME), text, f"{NAME} dequantized")
    size = sum(path.stat().st_size for path in (args.out / NAME).iterdir())
    tqdm.write(f"{NAME:12} {bits:.4f} bits per byte ({bits / float32 - 1:+.2%}), {size:,} bytes, {seconds:.0f} s")
    result = {
        "dequantized_bits_per_byte": round(bits, 5),
        "relative_to_float32": round(bits / float32 - 1, 5),
        "relative_weight_error": round(weight_error, 5),
        "experts_rounded_to_nearest": uncompensated,
        "checkpoint_bytes": size,
    }
    metrics = {
        "held_out": {
            "files": list(data.HELD_OUT),
            "bytes": len(text),
            "sha256": data.held_out_sha256(),
            "python": platform.python_version(),
            "context": CONTEXT,
            "stride": STRIDE,
        },
        "float32_bits_per_byte": round(float32, 5),
        "rounding": method,
        "int4": {NAME: result},
        "training": training,
    }
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")


if __name__ == "__main__":
    main()
