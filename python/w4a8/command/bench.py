"""how fast MODEL reads prompts and decodes here, by transformers or vLLM

    w4a8 bench MODEL --threads 1,2,4 --json
    w4a8 bench MODEL --vllm --plot FILE.png

Each case runs once unmeasured, then --repetitions times. Floats are rounded while they are loaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import w4a8
from w4a8.command import extras, machine, model_loading, plot, serve
from w4a8.command.contents import of_model, of_packed
from w4a8.command.doctor import VLLM, installed
from w4a8.command.headers import read_headers
from w4a8.command.inspect import token_bytes
from w4a8.command.model import HELP, find
from w4a8.command.report import UsageError, add_json, labelled, number, show, table
from w4a8.command.timing import START, Case, TimedEngine, TimedModel, Timer, stdout_to_stderr
from w4a8.core.words import gigabytes, plural
from w4a8.formats.packed_directory import METHOD
from w4a8.progress import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``w4a8 bench``."""
    parser.add_argument("model", metavar="MODEL", help=HELP)
    for name, default, text in (
        ("--prompts", "512,2048", "tokens of the prompts (%(default)s)"),
        ("--decode", "128", "tokens to decode (%(default)s)"),
        ("--behind", "4096", "tokens before those that are decoded (%(default)s)"),
        ("--batch", "8", "sequences that are decoded at a time (%(default)s)"),
        ("--threads", None, "of torch; the default is one per core"),
    ):
        parser.add_argument(name, type=_counts, default=default, metavar="N,...", help=text)
    parser.add_argument("--repetitions", type=number(int, 1), default=5, help="of each case (%(default)s)")
    parser.add_argument("--vllm", action="store_true", help="ask an engine of vLLM, in the environment that has vLLM")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the speeds as well: .png, .svg or .pdf")
    add_json(parser)
    model_loading.add_options(parser)


def _counts(text: str) -> list[int]:
    """The ``type`` of an argument: whole numbers from 1 on, with commas between them; none in an empty text."""
    return list(dict.fromkeys(map(number(int, 1), filter(None, text.split(",")))))


_counts.__name__ = "list of whole numbers"  # argparse shows this name


def cases(args: argparse.Namespace) -> list[Case]:
    """The cases that the options ask for.

    Raises:
        UsageError: they ask for none.
    """
    prompts = (Case(f"prompt of {count}", 1, count, 0) for count in args.prompts)
    alone = (Case(f"decode {count}", 1, START, count) for count in args.decode)
    behind = (Case(f"decode {count} behind {far}", 1, far, count) for far in args.behind for count in args.decode)
    batches = (
        Case(f"decode {count}, batch {batch}", batch, START, count)
        for batch in args.batch
        for count in args.decode
        if batch > 1
    )
    found = [*chain(prompts, alone, behind, batches)]
    if not found:
        raise UsageError("nothing is asked for: --prompts and --decode are empty")
    return found


def run(args: argparse.Namespace) -> int:
    """Loads the model, measures it and prints the answer.

    Raises:
        UsageError: options that do not go together.
        ImportError: --vllm or --plot need a package that is not installed.
    """
    asked = cases(args)
    if args.plot is not None:
        plot.check(args.plot)
    if args.vllm:
        with stdout_to_stderr():  # vLLM's log goes there
            answer = of_vllm(args, asked)
    else:
        answer = of_transformers(args, asked)
    if args.plot is not None:
        plot.bars(args.plot, answer)
    show(answer, text_of(answer), args.json)
    return 0


def of_transformers(args: argparse.Namespace, asked: list[Case]) -> dict[str, Any]:
    """The answer of ``w4a8 bench``, in types of JSON.

    Args:
        args: with MODEL and the options of loading.
        asked: the cases.
    """
    before = torch.get_num_threads()
    threads = args.threads or [before]
    try:
        torch.set_num_threads(max(threads))  # loading takes them
        path = find(args.model)
        model, report = model_loading.load(path, args)
        token = _token_bytes(path, model, report)
        notes = model_loading.speed_up(model)
        context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        fit = [case for case in asked if context is None or case.length <= context]
        timed, measured, speeds = TimedModel(model), [], []
        with _progress(len(threads) * len(fit), args) as advance:
            for count in threads:
                torch.set_num_threads(count)
                memory = machine.read_speed()
                speeds.append({"threads": count, "bytes_per_second": round(memory)})
                for case in fit:
                    found = _measure(timed, case, args.repetitions, advance)
                    # A prompt, and a batch, read other bytes for each token.
                    alone = case.decode and case.batch == 1
                    share = found["tokens_per_second"] * token / memory if alone else None
                    measured.append({**found, "threads": count, "memory_share": share})
    finally:
        torch.set_num_threads(before)
    more = {"token_bytes": token, "memory": speeds, "notes": notes}
    return {**_about(args, "transformers", context, measured), **more, "left_out": _left_out(asked, fit)}


def of_vllm(args: argparse.Namespace, asked: list[Case]) -> dict[str, Any]:
    """The same of an engine that is started as ``w4a8 serve`` does it. Floats are rounded, as in transformers.

    Raises:
        UsageError: options of transformers.
        ImportError: vLLM is not installed in this environment.
    """
    if args.threads or any(getattr(args, name) is not None for name in vars(model_loading.DEFAULTS)):
        raise UsageError(
            "--vllm goes without --threads and options of rounding: variables of the environment say both "
            "(docs/vllm.md)"
        )
    name = next((each for each in VLLM if installed(each) is not None), None)
    if name is None:
        raise ImportError(f"--vllm needs vLLM in this environment: {extras.TO_GET_VLLM}")
    path = find(args.model)
    sizes = serve.sizes_of(path)
    context = sizes["longest"]
    # The last new token counts, though it is not read.
    fit = [case for case in asked if context is None or case.length + 1 <= context]
    measured = []
    if fit:
        rounds = ["--quantization", METHOD] if model_loading.is_rounded(path) else []
        tokens = max(case.batch * (case.length + 1) for case in fit)
        os.environ.update(serve.variables_of(path, sizes, tokens, rounds))
        longest, most = max(case.length + 1 for case in fit), max(case.batch for case in fit)
        timed = TimedEngine(str(path), longest, most, **({"quantization": METHOD} if rounds else {}))
        try:
            with _progress(len(fit), args) as advance:
                measured = [_measure(timed, case, args.repetitions, advance) for case in fit]
        finally:
            timed.close()
    return {**_about(args, name, context, measured), "left_out": _left_out(asked, fit, 1)}


def _progress(measured: int, args: argparse.Namespace) -> Any:
    return progress_bar(measured * (1 + args.repetitions), sys.stderr.isatty(), "run", "measuring")


def _measure(timed: Timer, case: Case, repetitions: int, advance: Callable[[], object]) -> dict[str, Any]:
    """Tokens per second of a case: the median, the least, the most."""
    found = []
    for _ in range(1 + repetitions):  # the first one meets new pages and caches
        found.append(timed.run(case))
        advance()
    del found[0]
    median, least, most = statistics.median(found), min(found), max(found)
    return {"case": case.name, "tokens_per_second": median, "least": least, "most": most}


def _about(args: argparse.Namespace, package: str, context: int | None, measured: list[Any]) -> dict[str, Any]:
    return {
        "model": args.model,
        "w4a8": w4a8.__version__,
        "runs_in": f"{package} {installed(package)}",
        "kernel": w4a8.active_kernel(),
        "cpu": machine.cpu_model(),
        "repetitions": args.repetitions,
        "context": context,
        "measured": measured,
    }


def _left_out(asked: list[Case], fit: list[Case], more: int = 0) -> list[dict[str, Any]]:
    return [{"case": case.name, "tokens": case.length + more} for case in asked if case not in fit]


def _token_bytes(path: Path, model: Any, report: Any) -> int:
    """Bytes of weights that a token reads, as ``w4a8 inspect`` counts them; call before ``fuse``."""
    layers = [*of_packed(read_headers(path))] if report is None else of_model(model, report)
    text = model.config.get_text_config(decoder=True)
    return token_bytes(layers, model_loading.top_k(lambda name: getattr(text, name, None)))


def text_of(answer: dict[str, Any]) -> list[str]:
    """The answer in lines."""
    rows = [("case", "threads", "tokens/s", "least to most", "of the memory's speed")]
    for each in answer["measured"]:
        share, threads = each.get("memory_share"), each.get("threads")
        rows.append(
            (
                each["case"],
                "vLLM's" if threads is None else str(threads),
                f"{each['tokens_per_second']:.1f}",
                f"{each['least']:.1f} to {each['most']:.1f}",
                "" if share is None else f"{share:.0%}",
            )
        )
    above = [
        ("model", answer["model"]),
        ("w4a8", f"{answer['w4a8']}, kernel {answer['kernel']}; in {answer['runs_in']}"),
        ("CPU", answer["cpu"]),
    ]
    if "memory" in answer:
        memory = (
            f"{each['bytes_per_second'] / 1e9:.1f} GB/s ({plural(each['threads'], 'thread')})"
            for each in answer["memory"]
        )
        above.append(("memory", ", ".join(memory)))
        above.append(("a token", f"reads {gigabytes(answer['token_bytes'])} of weights"))
    above.append(("speed", f"median, least and most of {answer['repetitions']}"))
    left = [
        ("left out", f"{each['case']}: {each['tokens']} tokens, the model's context is {answer['context']}")
        for each in answer["left_out"]
    ]
    notes = [("note", each) for each in answer.get("notes", [])]
    return [*labelled(above), *table(rows), *labelled([*left, *notes])]
