"""Tokens per second in transformers: its own bfloat16 beside W4A8Config, on one model's shapes; or, with --packed, a
packed directory whose files are mapped beside the same with W4A8_MEMORY=copy.

    .venv/bin/python benchmarks/bench_transformers.py [--layers 4] [--rounds 5] [--group 32] [--packed]

The model has the layers of Qwen3-30B-A3B (hidden 2048, 128 experts of 768, top-8) but few of them, and random weights,
which are written to a folder and loaded in both ways. Both are loaded first and take turns, so that a change of the
machine's clock or load meets both. At the default of 4 layers: about 5 GB on disk and 7 GB of memory. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from qwen3_moe import Shapes

import w4a8
from w4a8.command.timing import START, Case, TimedModel
from w4a8.integrations.transformers import W4A8Config
from w4a8.nn import W4A8Experts

GOALS = {"x86_amx": 1.3}  # of another kernel: 3


def write_checkpoint(directory: Path, layers: int) -> None:
    """Random weights in the shapes of the model."""
    shapes = Shapes.cut(layers, scheme="bfloat16", positions=4096)
    config = transformers.Qwen3MoeConfig(**{**shapes.config(), "eos_token_id": None})
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
    model.save_pretrained(directory, max_shard_size="1GB")


class Model(TimedModel):
    """One way to run it."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(transformers.AutoModelForCausalLM.from_pretrained(directory, **options))

    def experts(self, tokens: int) -> float:
        """The same of the experts alone, one token after another, 8 of 128 drawn anew in each layer."""
        layers = [module for module in self.model.modules() if isinstance(module, W4A8Experts)]
        draw, x, weights = torch.Generator().manual_seed(tokens), torch.randn(1, 2048), torch.full((1, 8), 0.125)
        chosen = [torch.randperm(128, generator=draw)[None, :8] for _ in range(tokens * len(layers))]
        begin = time.perf_counter()
        with torch.inference_mode():
            for i, ids in enumerate(chosen):
                layers[i % len(layers)](x, ids, weights)
        return tokens / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--packed", action="store_true", help="a packed directory, mapped beside copied")
    parser.add_argument("--experts", help="experts_implementation of transformers' own; its default if not given")
    parser.add_argument("--folder", type=Path, help="for the checkpoint; it is kept and used again")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)) / f"qwen3-{args.layers}-layers"
        if not (folder / "config.json").exists():
            write_checkpoint(folder, args.layers)
        if args.packed:
            models = packed_ways(folder, args.group)
        else:
            theirs = {"experts_implementation": args.experts} if args.experts else {}
            models = {
                "bf16": Model(folder, **theirs),
                "w4a8": Model(folder, quantization_config=W4A8Config(args.group)),
            }
        measure(models, args)


def packed_ways(folder: Path, group: int) -> dict[str, Model]:
    """A packed directory, mapped and copied."""
    packed = folder.with_name(f"{folder.name}-packed-g{group}")
    if not (packed / "config.json").exists():
        options = {"quantization_config": W4A8Config(group)}
        transformers.AutoModelForCausalLM.from_pretrained(folder, **options).save_pretrained(packed)
    models = {}
    for way, value in (("mapped", ""), ("copied", "copy")):
        os.environ["W4A8_MEMORY"] = value
        models[way] = Model(packed)
    return models


def measure(models: dict[str, Model], args: argparse.Namespace) -> None:
    """Prints the table: the second way as a multiple of the first."""
    questions = {
        case.name: lambda model, case=case: model.run(case)
        for case in (
            Case("decode, batch 1", 1, START, 32),
            Case("decode, batch 8", 8, START, 16),
            Case("prefill, 512 tokens", 1, 512, 0),
        )
    }
    first, second = models
    if args.packed:
        questions["experts alone, batch 1"] = lambda model: model.experts(200)
    experts = getattr(models[first].model.config, "_experts_implementation", None)
    print(
        f"w4a8 {w4a8.__version__}, kernel {w4a8.active_kernel()}; transformers {transformers.__version__} (experts: "
        f"{experts}), torch {torch.__version__}, {args.threads} threads; {args.layers} layers, group {args.group}, "
        f"median (least to most) of {args.rounds} rounds in turns, tokens/s"
    )
    goal = GOALS.get(w4a8.active_kernel(), 3.0)
    for ask in questions.values():  # pages, caches
        for model in models.values():
            ask(model)
    for name, ask in questions.items():
        found: dict[str, list[float]] = {way: [] for way in models}
        for _ in range(args.rounds):
            for way, model in models.items():
                found[way].append(ask(model))
        cells = [f"{way} {statistics.median(v):8.1f} ({min(v):.1f} to {max(v):.1f})" for way, v in found.items()]
        ratio = statistics.median(found[second]) / statistics.median(found[first])
        print(f"{name:22} {'   '.join(cells)}   {ratio:.2f} x{'' if args.packed else f', goal {goal} x'}", flush=True)


if __name__ == "__main__":
    main()
