"""Writes a model of the shapes of Qwen3-30B-A3B or of a hybrid with random weights (lab/README.md).

Nothing is downloaded. FOLDER gets a folder per format: w4a8 (compressed-tensors, pack-quantized), w4a16 (the same
files, another config.json), bfloat16 (the same weights multiplied out), gguf/model.gguf (Q4_0, the same weights), and
gguf-q4_k_m/model.gguf (random blocks of Q4_K and Q6_K, as that mix has them).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from real_size.architectures import MODELS
from real_size.write import FORMATS, NotEnoughSpace, write


def main() -> None:
    parser = argparse.ArgumentParser(prog="real_size", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=MODELS, default="qwen3moe", help="the others have gguf-q4_k_m alone")
    parser.add_argument("--mtp", action="store_true", help="with the layer of qwen35moe that guesses further tokens")
    parser.add_argument("--layers", type=int, help="default: all; 48 are 16.7 GB in groups of 128")
    parser.add_argument("--group", type=int, help="int4 weights per scale (default: 128)")
    parser.add_argument("--vocabulary", type=int, help="default: the model's")
    parser.add_argument(
        "--formats",
        type=lambda text: text.split(","),
        default=["w4a8"],
        help=f"of {','.join(FORMATS)} (default: w4a8)",
    )
    args = parser.parse_args()
    if args.mtp and args.model != "qwen35moe":
        parser.error("--mtp is given, expected with --model qwen35moe")
    try:
        sizes = {"layers": args.layers, "vocabulary": args.vocabulary, "group": args.group}
        sizes["guessing"] = int(args.mtp) or None
        made = {name: size for name, size in sizes.items() if size is not None}
        write(MODELS[args.model](**made), args.folder, args.formats)
    except (NotEnoughSpace, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
