"""how fast MODEL reads prompts and decodes here, by transformers

    w4a8 bench MODEL --threads 1,2,4 --json

Each case runs once unmeasured, then --repetitions times. Floats are rounded while they are loaded.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

import w4a8
from w4a8.command import machine, model_loading
from w4a8.command.contents import of_model, of_packed
from w4a8.command.headers import read_headers
from w4a8.command.inspect import token_bytes
from w4a8.command.model import HELP, find
from w4a8.command.report import UsageError, add_json, labelled, number, show, table
from w4a8.core.words import gigabytes, plural
from w4a8.progress import progress_bar

_START = 8  # tokens of the prompt before decoding, if it is not asked for behind more


class Case(NamedTuple):
    """One question.

    Attributes:
        name: in words.
        batch: sequences.
        prompt: tokens of each sequence's prompt.
        decode: tokens that are decoded behind the prompt, of each sequence; 0: the prompt is measured instead.
    """

    name: str
    batch: int
    prompt: int
    decode: int

    @property
    def length(self) -> int:
        """Tokens of a sequence in all."""
        return self.prompt + self.decode


class Timed:
    """Runs cases on a model whose ``generate`` is called. The model's own settings of generation are replaced.

    Args:
        model: of transformers, on a CPU.
    """

    def __init__(self, model: Any) -> None:
        from transformers import GenerationConfig

        from w4a8.integrations.transformers.kept_text import KeptText

        # Greedy, and without tokens that end a text.
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self._kept, self._model = KeptText(model), model
        self._vocabulary = model.config.get_text_config(decoder=True).vocab_size

    def run(self, case: Case) -> float:
        """Tokens per second of a case, of all its sequences together."""
        begin, *came = self._times(case)
        if not case.decode:
            return case.batch * case.prompt / (came[0] - begin)
        return case.batch * case.decode / (came[-1] - came[0])

    def _times(self, case: Case) -> list[float]:
        """Seconds: when the prompt was given, and when each token came."""
        from transformers import StoppingCriteriaList

        times: list[float] = []

        def clock(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        rows = [[(7919 * (i + 1) * (b + 1)) % self._vocabulary for i in range(case.prompt)] for b in range(case.batch)]
        ids, count = torch.tensor(rows), case.decode + 1  # the first new token is of the prompt's pass
        options = {"max_new_tokens": count, "stopping_criteria": StoppingCriteriaList([clock])}
        times.append(time.perf_counter())
        if case.decode and case.batch == 1:  # what is before is read once, and kept
            self._kept.generate(ids, case.prompt - 1, **options)
        else:
            self._kept.clear()
            self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        if len(times) != 1 + count:
            raise ValueError(f"transformers wrote {len(times) - 1} tokens, expected {count}")
        return times


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
    alone = (Case(f"decode {count}", 1, _START, count) for count in args.decode)
    behind = (Case(f"decode {count} behind {far}", 1, far, count) for far in args.behind for count in args.decode)
    batches = (
        Case(f"decode {count}, batch {batch}", batch, _START, count)
        for batch in args.batch
        for count in args.decode
        if batch > 1
    )
    found = [*chain(prompts, alone, behind, batches)]
    if not found:
        raise UsageError("nothing is asked for: --prompts and --decode are empty")
    return found


def run(args: argparse.Namespace) -> int:
    """Loads the model, measures it and prints the answer."""
    asked, threads = cases(args), args.threads or [torch.get_num_threads()]
    before = torch.get_num_threads()
    torch.set_num_threads(max(threads))  # loading takes them
    try:
        answer = examine(args, asked, threads)
    finally:
        torch.set_num_threads(before)
    show(answer, text_of(answer), args.json)
    return 0


def examine(args: argparse.Namespace, asked: list[Case], threads: list[int]) -> dict[str, Any]:
    """The answer of ``w4a8 bench``, in types of JSON.

    Args:
        args: with MODEL and the options of loading.
        asked: the cases.
        threads: numbers of torch's threads to measure with.
    """
    path = find(args.model)
    model, report = model_loading.load(path, args)
    token = _token_bytes(path, model, report)
    notes = model_loading.speed_up(model)
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    fit = [case for case in asked if context is None or case.length <= context]
    timed, measured, speeds = Timed(model), [], []
    runs = len(threads) * len(fit) * (1 + args.repetitions)
    with progress_bar(runs, sys.stderr.isatty(), "run", "measuring") as advance:

        def run(case: Case) -> float:
            speed = timed.run(case)
            advance()
            return speed

        for count in threads:
            torch.set_num_threads(count)
            memory = machine.read_speed()
            speeds.append({"threads": count, "bytes_per_second": round(memory)})
            for case in fit:
                run(case)  # which meets new pages and caches
                found = [run(case) for _ in range(args.repetitions)]
                median = statistics.median(found)
                # A prompt, and a batch, read other bytes for each token.
                share = median * token / memory if case.decode and case.batch == 1 else None
                measured.append(
                    {
                        "case": case.name,
                        "threads": count,
                        "tokens_per_second": median,
                        "least": min(found),
                        "most": max(found),
                        "memory_share": share,
                    }
                )
    return {
        "model": args.model,
        "w4a8": w4a8.__version__,
        "kernel": w4a8.active_kernel(),
        "cpu": machine.cpu_model(),
        "repetitions": args.repetitions,
        "token_bytes": token,
        "context": context,
        "memory": speeds,
        "measured": measured,
        "left_out": [{"case": case.name, "tokens": case.length} for case in asked if case not in fit],
        "notes": notes,
    }


def _token_bytes(path: Path, model: Any, report: Any) -> int:
    """Bytes of weights that a token reads, as ``w4a8 inspect`` counts them; call before ``fuse``."""
    layers = [*of_packed(read_headers(path))] if report is None else of_model(model, report)
    text = model.config.get_text_config(decoder=True)
    return token_bytes(layers, model_loading.top_k(lambda name: getattr(text, name, None)))


def text_of(answer: dict[str, Any]) -> list[str]:
    """The answer in lines."""
    memory = ", ".join(
        f"{each['bytes_per_second'] / 1e9:.1f} GB/s ({plural(each['threads'], 'thread')})" for each in answer["memory"]
    )
    rows = [("case", "threads", "tokens/s", "least to most", "of the memory's speed")]
    for each in answer["measured"]:
        share = each["memory_share"]
        rows.append(
            (
                each["case"],
                str(each["threads"]),
                f"{each['tokens_per_second']:.1f}",
                f"{each['least']:.1f} to {each['most']:.1f}",
                "" if share is None else f"{share:.0%}",
            )
        )
    above = [
        ("model", answer["model"]),
        ("w4a8", f"{answer['w4a8']}, kernel {answer['kernel']}"),
        ("CPU", answer["cpu"]),
        ("memory", memory),
        ("a token", f"reads {gigabytes(answer['token_bytes'])} of weights"),
        ("speed", f"median, least and most of {answer['repetitions']}"),
    ]
    left = [
        ("left out", f"{each['case']}: {each['tokens']} tokens, the model's context is {answer['context']}")
        for each in answer["left_out"]
    ]
    notes = [("note", each) for each in answer["notes"]]
    return [*labelled(above), *table(rows), *labelled([*left, *notes])]
