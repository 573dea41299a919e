"""Measure what w4a8.quantize_ costs on a trained model, in bits per byte of text it has not seen.

    python -m training.quantize_accuracy    # in lab/

reads what ``train.py`` wrote (``float32.pt``, ``config.json``), quantizes copies of it to nearest with and without
the search of scales, to each kind of weights, in groups of 32, of 128 and per channel, calibrated with windows of the
training text and with bits, and prints a table: every attention projection and every expert has packed weights, every
activation before them is int8, through the ``w4a8`` ops.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import data
import torch
from evaluate import bits_per_byte
from folders import EXAMPLE
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import w4a8
from training import gptq

# Kind of weights: options of quantize_, and the groups to measure.
KINDS = {
    "int4": ({}, (32, 128, -1)),
    "int4 with zero points": ({"symmetric": False}, (32, 128, -1)),
    "e2m1": ({"values": "e2m1"}, (32,)),
}
# Options of quantize_ that are measured with and without calibration, in groups of 32.
CALIBRATED = {
    "int4, g32, bfloat16 scales": {"scale_dtype": "bfloat16"},
    "zero points, g32, bfloat16 scales": {"scale_dtype": "bfloat16", "symmetric": False},
    "5.0 bits": {"bits": 5.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=EXAMPLE / "build", help="output directory of train.py")
    parser.add_argument("--bytes", type=int, default=0, help="measure on the first so many bytes only; 0 is all")
    args = parser.parse_args()

    model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_pretrained(args.model))
    model.load_state_dict(torch.load(args.model / "float32.pt", weights_only=True))
    model.eval().requires_grad_(False)
    text = data.held_out_bytes()[: args.bytes or None]
    training = json.loads((args.model / "training.json").read_text())
    steps, batch, context = (training[key] for key in ("training_steps", "batch", "context"))
    float32 = bits_per_byte(model, text, "float32")
    print(f"{training['parameters']:,} parameters, {steps} steps of {batch} x {context} bytes")
    print(f"{len(text):,} bytes, sha256 of all held-out text {data.held_out_sha256()[:16]}, {w4a8.active_kernel()}\n")
    print("| weights | effort | bits per byte | to float32 | bytes of weights | seconds to quantize |")
    print("|---|---|---|---|---|---|")
    print(f"| float32 | | {float32:.4f} | | | |")

    def measure(name: str, group_size: int, effort: int, **options: Any) -> None:
        quantized = copy.deepcopy(model)
        started = time.monotonic()
        report = w4a8.quantize_(quantized, group_size, effort=effort, **options)
        seconds = time.monotonic() - started
        bits = bits_per_byte(quantized, text, name)
        cost = f"{bits:.4f} | {bits / float32 - 1:+.2%}"
        print(f"| {name} | {effort} | {cost} | {report.packed_bytes:,} | {seconds:.1f} |", flush=True)

    for kind, (options, groups) in KINDS.items():
        for group_size in groups:
            for effort in (0, 1, 2):
                name = f"{kind}, {f'g{group_size}' if group_size != -1 else 'channelwise'}"
                measure(name, group_size, effort, **options)
    windows = [window[None] for window in gptq.calibration_windows(16, context)]
    for name, options in CALIBRATED.items():
        measure(name, 32, 2, **options)
        measure(f"{name}, calibrated", 32, 2, calibration=windows, **options)

    quantized = copy.deepcopy(model)
    report = w4a8.quantize_(quantized, 32, effort=2)
    head = w4a8.nn.W4A8Linear.from_float(quantized.lm_head, 32, scale_dtype=torch.bfloat16, effort=2)
    quantized.lm_head = head
    bits = bits_per_byte(quantized, text, "lm_head")
    packed = report.packed_bytes + head.packed.numel()
    print(f"| int4, g32, the output layer too | 2 | {bits:.4f} | {bits / float32 - 1:+.2%} | {packed:,} | |")


if __name__ == "__main__":
    main()
