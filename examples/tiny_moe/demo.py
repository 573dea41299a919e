"""See W4A8 at work: text from a small Mixture-of-Experts model, what int4 and int8 cost it, and how fast the op is.

    python demo.py

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

PROMPTS = ("import os\n\n\nclass ", "def ")
SCHEMES = ("g32", "channelwise")

# What w4a8.quantize_ does to the g32 model in floats: row of the table -> options.
KINDS = {
    "int4, g128": {"group_size": 128},
    "int4 with zero points, g128": {"group_size": 128, "symmetric": False},
    "int4 with zero points, g32": {"group_size": 32, "symmetric": False},
    "e2m1 (MXFP4's numbers), g32": {"group_size": 32, "values": "e2m1"},
}

# Int8 activations, and rounding to nearest, may cost this much of the bits per byte of the same model in floats.
TOLERANCE = 0.02
# Both sides of the speed comparison quantize alike; what is left is rounding.
ATEN_TOLERANCE = 0.02


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def show_text(directory: Path, args: argparse.Namespace) -> None:
    """Generate from every prompt through the ops."""
    model = modeling.load_w4a8(directory)
    heading(f"Generated with int4 weights (g32) and int8 activations, temperature {args.temperature}")
    for prompt in PROMPTS:
        text = generate(model, prompt, args.bytes, args.temperature, args.seed)
        print("\n".join(f"  | {line}" for line in text.splitlines()) + "\n")


def relative(value: float, reference: float | None) -> str:
    return "" if reference is None else f" ({value / reference - 1:+.2%})"


def show_quality(directory: Path, metrics: dict[str, Any]) -> list[str]:
    """Print the table of bits per byte and the memory of the experts; returns what is wrong."""
    text = data.held_out_bytes()
    recorded = metrics["held_out"]
    same_text = data.held_out_sha256() == recorded["sha256"]
    float32 = metrics["float32_bits_per_byte"]
    problems, rows, memory = [], {}, {}
    for scheme in SCHEMES:
        model = modeling.load_dequantized(directory / scheme)
        dequantized = bits_per_byte(model, text, f"{scheme} dequantized")
        model = modeling.load_w4a8(directory / scheme)
        memory[scheme] = modeling.expert_bytes(model)
        quantized = bits_per_byte(model, text, f"{scheme} W4A8")
        rows[scheme] = dequantized, quantized
        if not abs(quantized / dequantized - 1) <= TOLERANCE:
            problems.append(f"{scheme}: W4A8 needs {quantized:.4f} bits per byte, dequantized {dequantized:.4f}")

    heading(f"Bits per byte on {len(text):,} held-out bytes of Python's standard library, lower is better")
    reference = float32 if same_text else None
    print(f"{'weights':8} {'activations':14}" + "".join(f"{scheme:>22}" for scheme in SCHEMES))
    if same_text:
        print(f"{'float32':8} {'float32':14}" + f"{f'{float32:.4f}':>22}" * 2 + "   recorded after training")
    for index, activations in enumerate(("float32", "int8 (W4A8)")):
        cells = [f"{rows[scheme][index]:.4f}{relative(rows[scheme][index], reference)}" for scheme in SCHEMES]
        print(f"{'int4':8} {activations:14}" + "".join(f"{cell:>22}" for cell in cells))
    cells = [f"{rows[scheme][1] / rows[scheme][0] - 1:+.3%}" for scheme in SCHEMES]
    print(f"{'cost of int8 alone':23}" + "".join(f"{cell:>22}" for cell in cells))
    if not same_text:
        print(
            f"The held-out text of this Python is not the one of Python {recorded['python']} on which the float32 "
            f"model was measured\n(recorded: {float32:.4f} bits per byte on {recorded['bytes']:,} bytes), so that "
            "figure cannot be compared with these.\nBoth int4 rows were measured here, on the same text."
        )

    heading("Memory of the expert weights")
    for scheme, (packed, bf16) in memory.items():
        ratio = f"{bf16 / packed:.2f} times smaller"
        print(f"{scheme:12} {packed / 1e6:6.2f} MB packed, {bf16 / 1e6:6.2f} MB in bf16: {ratio}")
        if packed >= 0.4 * bf16:
            problems.append(f"{scheme}: packed experts take {packed} bytes, bf16 would take {bf16}")
    return problems


def show_kinds(directory: Path) -> list[str]:
    """Print what each kind of 4-bit weights costs when w4a8.quantize_ rounds to it; returns what is wrong."""
    text = data.held_out_bytes()
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


def show_speed() -> list[str]:
    """Print the times of one large layer; returns what is wrong."""
    results, difference = speed.measure()
    heading(
        f"One MoE layer shaped like Qwen3-30B-A3B: H {speed.HIDDEN}, I {speed.INTERMEDIATE}, {speed.EXPERTS} experts, "
        f"top-{speed.TOP_K}, group {speed.GROUP}, bf16"
    )
    print(f"{'tokens':>6} {'w4a8 fused':>14} {'ATen composed':>16} {'ratio':>10} {'weights read':>14}")
    for result in results:
        aten = "not available" if result.aten is None else f"{result.aten * 1e3:,.1f} ms"
        ratio = "" if result.aten is None else f"{result.aten / result.fused:.0f}x"
        rate = f"{result.weight_bytes / result.fused / 1e9:.1f} GB/s"
        print(f"{result.tokens:>6} {f'{result.fused * 1e3:.2f} ms':>14} {aten:>16} {ratio:>10} {rate:>14}")
    if difference is None:
        return []
    print(f"Outputs of the two differ by {difference:.2e} (relative norm).")
    if not difference <= ATEN_TOLERANCE:
        return [f"the fused op differs from ATen by {difference:.2e}"]
    return []


def main() -> int:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, default=here / "checkpoints")
    parser.add_argument("--bytes", type=int, default=400, help="bytes to generate per prompt")
    parser.add_argument("--temperature", type=float, default=0.5, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip-speed", action="store_true", help="leave out the large layer (needs 1.3 GB of memory)")
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
    problems = show_quality(args.checkpoints, metrics)
    problems += show_kinds(args.checkpoints / "g32")
    if not args.skip_speed:
        problems += show_speed()
    for problem in problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
