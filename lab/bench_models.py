#!/usr/bin/env python3
"""A model of real size in vLLM with the plugin, in stock vLLM and in llama.cpp (lab/README.md)."""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

from folders import ROOT
from models import base, in_llama, in_vllm, report, serving
from peers.environments import Unavailable
from peers.options import chosen, names
from peers.report import Collected, goals_table
from peers.session import Failed, Worker
from real_size.architectures import MODELS
from real_size.write import NotEnoughSpace, write

ENTRIES = [*in_vllm.ENTRIES, *in_llama.ENTRIES]


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen3moe", help="the others are hybrids, of one GGUF file")
    parser.add_argument("--layers", type=int, default=4, help="the first (default: 4, and so much of the vocabulary)")
    parser.add_argument("--folder", type=Path, help="of the models (default: build/models/LAYERS-layers)")
    parser.add_argument("--ways", type=names, default=[], help="parts of names, e.g. w4a8,llama (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="each starts every way once (default: 3)")
    parser.add_argument("--repeats", type=int, default=3, help="of a question, in each round (default: 3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--memory", type=float, default=memory_gigabytes(), help="GB of this machine")
    parser.add_argument("--tokens", type=int, default=32, help="decoded in a question (default: 32)")
    parser.add_argument("--prompts", type=numbers, default=[512, 2048], help="lengths read (default: 512,2048)")
    parser.add_argument("--behind", type=numbers, default=[], help="lengths in front of an answer, e.g. 4096,16384")
    parser.add_argument("--no-serve", action="store_true", help="leave out the served load")
    parser.add_argument("--output", help="name of the files in lab/results (default: models-LAYERS, with the model)")
    found = parser.parse_args()
    kind = "" if found.model == "qwen3moe" else f"{found.model}-"
    found.folder = found.folder or ROOT / f"build/models/{kind}{found.layers}-layers"
    found.output = found.output or f"models-{kind}{found.layers}"
    return found


def memory_gigabytes() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def ask_rates(worker: Worker, record: dict, args: argparse.Namespace) -> None:
    """All rates: once to warm up (with two tokens of answer, not behind long prompts), `repeats` times to count."""
    for title, (method, arguments) in report.questions(args.prompts, args.behind, args.tokens).items():
        if method == "prefill":
            worker.ask(do="ask", method=method, arguments=[min(2048, arguments[0])])
        elif len(arguments) == 2:
            worker.ask(do="ask", method=method, arguments=[arguments[0], 2])
        rates = [worker.ask(do="ask", method=method, arguments=arguments)["value"] for _ in range(args.repeats)]
        record["rates"].setdefault(title, []).extend(rates)
        found = ", ".join(f"{rate:.1f}" for rate in rates)
        print(f"  {record['entry']}: {title}: {found} tokens/s", file=sys.stderr, flush=True)


def run_once(entry: type[base.Model], record: dict, args: argparse.Namespace, versions: dict[str, str]) -> None:
    """One process from its start to its end; what fails is the record's note."""
    print(f"{entry.name}: starting", file=sys.stderr, flush=True)
    worker = None
    try:
        worker = Worker(entry, args.folder / entry.format, args.threads, patience=3600)
        versions.update(worker.versions)
        loading = worker.ask(do="ask", method="loading", arguments=[])["value"]
        record["load_seconds"].append(loading["seconds"])
        record["load_peak"] = max(record["load_peak"] or 0, loading["peak"])
        for key in ("weights_seconds", "weights_peak", "weights_bytes", "ran"):
            record[key] = loading.get(key)
        ask_rates(worker, record, args)
        peak = worker.ask(do="ask", method="peak", arguments=[])["value"]
        record["peak"] = max(record["peak"] or 0, peak)
    except (Failed, Unavailable) as error:
        record["note"] = str(error).splitlines()[0]
    finally:
        if worker is not None:
            worker.close()


def draw(collected: Collected, checkpoint: bool) -> None:
    """The pictures of a run; of hybrids one of all their runs. Prints their names, or None for lack of rates."""
    path, records, versions = collected.path, collected.records, collected.versions
    print(report.plot(records, path.with_suffix(".png"), versions))
    runs, name = {report.title_of(records): records}, f"{path.stem}-one-file.png"
    if not checkpoint:
        runs, name = report.saved_hybrids(collected.json.parent), "models-hybrids.png"
    print(report.picture(runs, path.with_name(name), versions))
    print(report.prompts_picture(records, path.with_name(f"{path.stem}-prompts.png"), versions))


def main() -> None:
    args = options()
    # Prompt and answer of the longest question, or of eight short ones that share a cache.
    longest = max([2048, *args.prompts, *args.behind]) + 256
    os.environ[base.POSITIONS_VARIABLE] = str(longest)
    shapes = MODELS[args.model].cut(args.layers)
    entries = [entry for entry in ENTRIES if chosen(entry.name, args.ways)]
    if not shapes.checkpoint:
        entries = [entry for entry in entries if entry.format == "gguf-q4_k_m"]
    records = {
        entry: {
            "entry": entry.name,
            "architecture": args.model,
            **asdict(shapes),
            "threads": args.threads,
            "note": entry.refuses(args.layers, args.memory),
            "load_seconds": [],
            "load_peak": None,
            "peak": None,
            "rates": {},
            "served": {},
        }
        for entry in entries
    }
    able = [entry for entry in entries if records[entry]["note"] is None]
    try:
        write(shapes, args.folder, sorted({entry.format for entry in able}))
    except (NotEnoughSpace, ValueError) as error:
        sys.exit(f"error: {error}")
    collected = Collected(args.output, report.document)
    collected.records = list(records.values())
    for _ in range(args.rounds):
        for entry in able:
            if records[entry]["note"] is None:
                run_once(entry, records[entry], args, collected.versions)
                collected.save()
    for entry in able:
        if not args.no_serve and issubclass(entry, in_vllm.Vllm) and records[entry]["note"] is None:
            try:
                records[entry]["served"] = serving.measure(entry, args.folder / entry.format, args.threads, 3600)
            except Failed as failure:
                records[entry]["note"] = str(failure)
    print(report.tables(collected.records))
    reached = report.goals(collected.records)
    print(goals_table(reached))
    path = collected.save(goals=reached)
    print(f"\n{path}")
    draw(collected, shapes.checkpoint)


if __name__ == "__main__":
    main()
