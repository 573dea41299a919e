"""Writes a model of the shapes of Qwen3-30B-A3B with random weights: nothing is downloaded (lab/README.md).

FOLDER gets a folder per format: w4a8 (compressed-tensors, pack-quantized), w4a16 (the same files, another config.json),
bfloat16 (the same weights multiplied out), gguf/model.gguf (Q4_0, the same weights), and
gguf-q4_k_m/model.gguf (random blocks of Q4_K and Q6_K, as that mix has them).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from qwen3_moe import Shapes

from real_size.qwen35 import HybridShapes
from real_size.write import FORMATS, NotEnoughSpace, write


def main() -> None:
    parser = argparse.ArgumentParser(prog="real_size", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hybrid", action="store_true", help="Qwen3.5-35B-A3B, of gguf-q4_k_m alone")
    parser.add_argument("--mtp", action="store_true", help="with the layer of --hybrid that guesses further tokens")
    parser.add_argument("--layers", type=int, help="default: all 48, 16.7 GB in groups of 128")
    parser.add_argument("--group", type=int, default=128, help="int4 weights per scale (default: 128)")
    parser.add_argument("--vocabulary", type=int, help="default: 151936")
    parser.add_argument(
        "--formats",
        type=lambda text: text.split(","),
        default=["w4a8"],
        help=f"of {','.join(FORMATS)} (default: w4a8)",
    )
    args = parser.parse_args()
    if args.mtp and not args.hybrid:
        parser.error("--mtp is given, expected with --hybrid")
    try:
        sizes = {"layers": args.layers, "vocabulary": args.vocabulary, "group": args.group}
        made = {name: size for name, size in sizes.items() if size is not None}
        shapes = HybridShapes(**made, guessing=int(args.mtp)) if args.hybrid else Shapes(**made)
        write(shapes, args.folder, args.formats)
    except (NotEnoughSpace, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
