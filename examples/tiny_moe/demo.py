"""See W4A8 at work: text from a small Mixture-of-Experts model, its score beside floats, and how fast the op is.

    python demo.py          # seconds; --all: minutes

The exit status is non-zero if a result is wrong. Times are shown and never judged.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import data
import modeling
import speed
import w4a8
from evaluate import bits_per_byte, generate

# What `make bench-accuracy` wrote: trained language models.
ACCURACY = Path(__file__).parents[2] / "benchmarks/results/accuracy.md"
# Held-out bytes that are scored without --all.
SAMPLE = 16384
PROMPTS = ("import os\n\n\nclass ", "def ")

# What w4a8.quantize_ does to the g32 model in floats: row of the table -> options.
KINDS = {
    "int4, g128": {"group_size": 128},
    "int4 with zero points, g128": {"group_size": 128, "symmetric": False},
    "int4 with zero points, g32": {"group_size": 32, "symmetric": False},
    "e2m1 (MXFP4's numbers), g32": {"group_size": 32, "values": "e2m1"},
}

# Int8 activations, and rounding to nearest, may cost this much of the bits per byte of the same model in floats.
TOLERANCE = 0.02


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def show_text(directory: Path, args: argparse.Namespace) -> None:
    """Let the model continue every prompt through the ops, shown byte by byte as it writes."""
    model = modeling.load_w4a8(directory)
    heading(f"Written with int4 weights (g32) and int8 activations, temperature {args.temperature}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one token of so small a model is not worth two
    for prompt in PROMPTS:
        indent = "\n  | "
        print("  | " + prompt.replace("\n", indent), end="", flush=True)
        for piece in generate(model, prompt, args.bytes, args.temperature, args.seed):
            print(piece.replace("\n", indent), end="", flush=True)
        print("\n")
    torch.set_num_threads(threads)


def relative(value: float, reference: float | None) -> str:
    return "" if reference is None else f" ({value / reference - 1:+.2%})"


def show_quality(directory: Path, text: bytes, metrics: dict[str, Any]) -> list[str]:
    """Print the bits per byte of ``text`` and the memory of the experts; returns what is wrong."""
    recorded = metrics["held_out"]
    # What was measured after training holds for that text only.
    complete = len(text) == len(data.held_out_bytes())
    same_text = complete and data.held_out_sha256() == recorded["sha256"]
    reference = metrics["float32_bits_per_byte"] if same_text else None
    problems = []
    dequantized = bits_per_byte(modeling.load_dequantized(directory), text, "dequantized")
    model = modeling.load_w4a8(directory)
    quantized = bits_per_byte(model, text, "W4A8")
    packed, bf16 = modeling.expert_bytes(model)
    table = {
        "int4, float32 activations": f"{dequantized:.4f}{relative(dequantized, reference)}",
        "int4, int8 activations": f"{quantized:.4f}{relative(quantized, reference)}",
        "difference": f"{quantized / dequantized - 1:+.3%}",
        "experts, packed": f"{packed / 1e6:.2f} MB",
        "experts in bfloat16": f"{bf16 / 1e6:.2f} MB",
    }
    if not abs(quantized / dequantized - 1) <= TOLERANCE:
        problems.append(f"W4A8 needs {quantized:.4f} bits per byte, dequantized {dequantized:.4f}")
    if packed >= 0.4 * bf16:
        problems.append(f"packed experts take {packed} bytes, bf16 would take {bf16}")

    heading(f"Bits per byte on {len(text):,} held-out bytes of Python's standard library, lower is better")
    if reference is not None:
        print(f"{'float32':26}{reference:>20.4f}   recorded after training")
    for row, value in table.items():
        print(f"{row:26}{value:>20}")
    if complete and not same_text:
        print(f"The float32 model was measured on the text of Python {recorded['python']}, not on this one.")
    print("The difference shows that the operators compute right. A model of bytes has no outliers in its activations:")
    print("what int8 costs a language model is below.")
    return problems


def show_language_models() -> None:
    """Print what int8 activations alone cost trained language models, as it was measured."""
    heading("KL divergence of trained language models from themselves in float32: int8 activations, float weights")
    columns = ("per token", "groups of 64", "groups of 32")
    print(f"{'':26}" + "".join(f"{column:>20}" for column in columns))
    for model in ACCURACY.read_text().split("\n## ")[1:]:
        _, _, rows = model.partition("**activations alone**")
        cells = [line.split(" | ") for line in rows.partition("\n| **")[0].splitlines()[1:]]
        divergences = {row[1]: row[6].partition(" ")[0] for row in cells}
        print(f"{model.splitlines()[0]:26}" + "".join(f"{divergences.get(column, ''):>20}" for column in columns))
    print("Measured by `make bench-accuracy`; 4-bit weights: benchmarks/results/accuracy.md.")
    print("Files made for float activations and w4a8.quantize_ get groups of 32, W4A8 files a scale per token.")


def show_kinds(directory: Path, text: bytes) -> list[str]:
    """Print what each kind of 4-bit weights costs when w4a8.quantize_ rounds to it; returns what is wrong."""
    floats = modeling.load_dequantized(directory)
    reference = bits_per_byte(floats, text, "floats")
    heading("Bits per byte after w4a8.quantize_, to nearest, in one call")
    print(f"{'weights':28} {'activations':14}{'bits per byte':>18}{'bytes':>14}")
    print(f"{'float32':28} {'float32':14}{reference:>18.4f}{'':>14}")
    problems = []
    for name, options in KINDS.items():
        model = copy.deepcopy(floats)
        packed = w4a8.quantize_(model, **options).packed_bytes
        bits = bits_per_byte(model, text, name)
        print(f"{name:28} {'int8':14}{f'{bits:.4f}{relative(bits, reference)}':>18}{packed:>14,}")
        if not abs(bits / reference - 1) <= TOLERANCE:
            problems.append(f"{name}: {bits:.4f} bits per byte, the same model in floats {reference:.4f}")
    print("float32 is the g32 checkpoint above, multiplied out: its weights are int4 times a scale per 32 already.")
    return problems


def show_speed() -> None:
    """Print the times of one large layer."""
    one, many = speed.measure()
    heading(
        f"One MoE layer of Qwen3-30B-A3B's shape: {speed.EXPERTS} experts, top-{speed.TOP_K}, groups of {speed.GROUP}"
    )
    print(
        f"{one.tokens} token {one.seconds * 1e3:.2f} ms, reading its {one.weight_bytes / 1e6:.0f} MB of weights at "
        f"{one.weight_bytes / one.seconds / 1e9:.0f} GB/s; {many.tokens} tokens {many.seconds * 1e3:.0f} ms "
        f"({torch.get_num_threads()} threads; other libraries: docs/performance.md)"
    )


def main() -> int:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="score both checkpoints and quantize_ on all held-out bytes")
    parser.add_argument("--checkpoints", type=Path, default=here / "checkpoints")
    parser.add_argument("--bytes", type=int, default=400, help="bytes to generate per prompt")
    parser.add_argument("--temperature", type=float, default=0.5, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip-speed", action="store_true", help="leave out the large layer (needs 0.8 GB of memory)")
    args = parser.parse_args()

    metrics = json.loads((args.checkpoints / "metrics.json").read_text())
    print(
        f"w4a8 {w4a8.__version__}, kernel {w4a8.active_kernel()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {torch.get_num_threads()} threads"
    )
    parameters = metrics["training"]["parameters"]
    minutes = metrics["training"]["training_seconds"] / 60
    print(f"A Qwen3-MoE of {parameters:,} parameters, trained for {minutes:.0f} minutes on Python's standard library")

    show_text(args.checkpoints / "g32", args)
    text = data.held_out_bytes()
    if args.all:
        problems = show_quality(args.checkpoints / "g32", text, metrics)
        problems += show_kinds(args.checkpoints / "g32", text)
    else:
        problems = show_quality(args.checkpoints / "g32", text[:SAMPLE], metrics)
    show_language_models()
    if not args.skip_speed:
        show_speed()
    if not args.all:
        print("\nmake demo ARGS=--all scores more kinds of weights, on all held-out text. It takes minutes.")
    for problem in problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
