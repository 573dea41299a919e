#!/usr/bin/env python3
"""Perplexity, KL and agreement of real language models with fewer bits, beside the same models in float32."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from accuracy import in_attention, in_llama, in_tools, report, text
from accuracy.score import Reference
from accuracy.ways import SECTIONS, Case, Way, activation_ways, file_ways, head_ways, logits_of
from folders import ACCURACY_RESULTS, RECORDS
from peers.environments import Unavailable, own_version
from peers.ggml import ENVIRONMENT
from peers.options import chosen, names
from peers.report import machine, now
from trained_models import FOLDER, SOURCES, Source

from w4a8.quantization.texts import PYDOC, text_of, windows


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=names, default=[], help="parts of names (default: all)")
    parser.add_argument("--ways", type=names, default=[], help=f"parts of titles or of {', '.join(SECTIONS)}")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text (default: 2048)")
    parser.add_argument("--text", type=Path, help="a file (default: documentation of Python and PyTorch)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-llama", action="store_true", help="leave out llama.cpp, which is compiled first")
    parser.add_argument("--add", action="store_true", help="keep the other rows that the file has")
    parser.add_argument("--output", default="accuracy", help="name of the files in benchmarks/results")
    return parser.parse_args()


def ways(case: Case) -> Iterator[Way]:
    """All but those of llama.cpp and of other tools."""
    yield from activation_ways(case)
    yield from head_ways(case)
    yield from in_attention.ways(case)
    yield from file_ways(case)


def rows(case: Case, llama: bool, notes: list[str]) -> Iterator[Way]:
    yield from ways(case)
    try:
        yield from in_llama.ways(case) if llama else ()
    except Unavailable as error:
        notes.append(f"llama.cpp: {error}")
    yield from in_tools.ways(case)


def kept(before: dict, found: dict) -> list[dict]:
    """The rows that were measured earlier, if the float model said the same of the same text."""
    same = all(before.get(key) == found[key] for key in ("packages", "tokens", "text"))
    return before["ways"] if same and abs(before["float"] - found["float"]) < 1e-3 else []


def name_of(record: dict) -> tuple[str, str, str]:
    return record["section"], record["title"], record["activations"]


def place(records: list[dict], record: dict, order: list[tuple[str, str, str]]) -> None:
    """Puts a row in place of an earlier one of its name, or where its name stands in `order`; other names are last."""
    records[:] = [each for each in records if name_of(each) != name_of(record)] + [record]
    places = {name: i for i, name in enumerate(order)}
    records.sort(key=lambda each: places.get(name_of(each), len(order)))


def measure(source: Source, args: argparse.Namespace, before: dict) -> Iterator[dict]:
    """What is known of a model, after each of its rows. `before` is what was known earlier."""
    print(f"== {source.name}: float32", file=sys.stderr, flush=True)
    model = source.float_model()
    own = text.text() if args.text is None else args.text.read_text()
    tokenizer = source.tokenizer()
    measured = text.read(tokenizer, own, args.tokens)
    calibration = windows(tokenizer, text_of(PYDOC))
    reference = Reference(logits_of(model), measured, FOLDER / "reference.npy")
    found = {
        "packages": [wheel.requirement for wheel in source.wheels],
        "float": reference.perplexity,
        "tokens": sum(len(ids) for ids in measured),
        "text": text.digest(own),
        "notes": [],
        "ways": [],
    }
    if args.add:
        found["ways"] = kept(before, found)
    length = min(text.PROMPT, model.config.max_position_embeddings)
    (prompt,) = text.read(tokenizer, text.text(), length, length)
    case = Case(source, model, reference, calibration, args.threads, prompt)
    order = [(way.section, way.title, way.activations) for way in ways(case)]
    for way in rows(case, not args.no_llama, found["notes"]):
        name = f"{way.section}: {way.title}, {way.activations}"
        if not chosen(name, args.ways):
            continue
        exact = reference if way.reference is None else way.reference()
        try:
            with way.start() as running:
                score = exact.score(running.logits)
        except Unavailable as error:
            found["notes"].append(f"{name}: {error}")
            continue
        record = {"section": way.section, "title": way.title, "activations": way.activations}
        record |= {"arithmetic": running.arithmetic, "bits": running.bits, "prefill": running.prefill}
        record |= score.record()
        record["date"] = now()
        place(found["ways"], record, order)
        print(report.row(record), file=sys.stderr, flush=True)
        yield found


def main() -> None:
    args = options()
    torch.set_num_threads(args.threads)
    versions = {name: own_version(name) for name in ("w4a8", "torch", "transformers")}
    versions["llama-cpp-python"] = ENVIRONMENT.requirements[-1].rpartition("==")[2]
    records, path = RECORDS / f"{args.output}.json", ACCURACY_RESULTS / f"{args.output}.md"
    if args.add and not records.exists():
        sys.exit(f"error: --add keeps the rows of {records}, which is not there")
    records.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(records.read_text())["models"] if args.add else {}
    found = {**machine(versions), "threads": args.threads, "models": dict(before)}
    for source in SOURCES:
        if chosen(source.name, args.models):
            for measured in measure(source, args, before.get(source.name, {})):
                found["models"][source.name] = measured
                records.write_text(json.dumps(found, indent=1) + "\n")
    path.write_text(report.document(found))
    report.plot(found, path.with_suffix(".png"))
    print(report.document(found))


if __name__ == "__main__":
    main()
