"""A model of transformers with its layers in one call (fuse) beside its own layers, in one process, in turns.

    make bench-decoder [ARGS='--model Gemma-3-270M --rounds 5']

The model is a GGUF file, or SmolLM2-135M (Q4_1) or Gemma-3-270M (Q4_K_M), which are packages of PyPI. Printed are
medians of milliseconds for a token: of the operator alone (embeddings given), of `generate` with fuse, and with
fast_attention, where layers run one by one; the same beside a process that keeps one CPU busy; several rows in a
step; and tokens/s of a prompt. Embeddings and logits are part of all but the first. See benchmarks/README.md.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from trained_models import SOURCES
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import w4a8
from w4a8.integrations.transformers import W4A8Cache, fast_attention, fuse

BEFORE, TOKENS = 16, 64
KNOWN = {source.name: source for source in SOURCES}


@contextmanager
def busy_cpu():
    """A process that computes all the time, at the same priority."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(0.3)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def load(path: Path, dtype: torch.dtype):
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # each answer has the length that is asked for
    return model


def token_ids(model, rows: int, count: int) -> torch.Tensor:
    numbers = torch.arange(1, rows * count + 1).view(rows, count)
    return 7919 * numbers % model.config.get_text_config().vocab_size


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def generate(model, ids: torch.Tensor, count: int) -> None:
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0)


def of_generate(model) -> float:
    """Milliseconds of a token."""
    ids = token_ids(model, 1, BEFORE)
    return (seconds(lambda: generate(model, ids, TOKENS + 1)) - seconds(lambda: generate(model, ids, 1))) / TOKENS * 1e3


def of_operator(model, rows: int) -> float:
    """Milliseconds of a step of so many sequences, without what is around it."""
    stack = vars(model)["forward"].stack
    cache = W4A8Cache(model.config, stack.kind)
    model(token_ids(model, rows, BEFORE), past_key_values=cache, use_cache=True)
    embedded = model.get_input_embeddings()(token_ids(model, rows, TOKENS))
    steps = []
    for i in range(TOKENS):
        step, caches = cache.begin_step(stack.heads, rows, 1, None)
        lengths = torch.full((rows,), BEFORE + i + 1, dtype=torch.int32)
        positions = torch.full((rows,), BEFORE + i)
        steps.append((embedded[:, i], positions, caches, (step.tables[0], lengths, step.tables[2])))
        cache.end_step(1)
    ropes = stack.tables(BEFORE + TOKENS)

    def run() -> None:
        for step in steps:
            stack.decoder.step(*step, ropes)

    run()
    return seconds(run) / TOKENS * 1e3


def of_prompt(model, count: int) -> float:
    """Tokens/s."""
    ids = token_ids(model, 1, count)
    return count / seconds(lambda: generate(model, ids, 1))


def with_help_of(
    speed_up: Callable[..., Callable[[], None]], model, call: Callable[..., float], *args: object
) -> float:
    """What a call gives while ``fuse`` or ``fast_attention`` is in force."""
    undo = speed_up(model)
    try:
        return call(model, *args)
    finally:
        undo()


fused, one_by_one = partial(with_help_of, fuse), partial(with_help_of, fast_attention)


def measure(model, rounds: int, rows: list[int], prompts: list[int]) -> dict[str, list[float]]:
    questions: dict[str, Callable[[], float]] = {
        "ms a token, operator alone": lambda: fused(model, of_operator, 1),
        "ms a token, generate, fused": lambda: fused(model, of_generate),
        "ms a token, generate, layers one by one": lambda: one_by_one(model, of_generate),
    }
    for count in rows:
        questions[f"ms a step of {count} rows, operator alone"] = lambda count=count: fused(model, of_operator, count)
    for count in prompts:
        questions[f"tokens/s, prompt of {count}, fused"] = lambda count=count: fused(model, of_prompt, count)
        questions[f"tokens/s, prompt of {count}, layers one by one"] = lambda count=count: one_by_one(
            model, of_prompt, count
        )
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, question in questions.items():
            times.setdefault(name, []).append(question())
        with busy_cpu():
            for name in list(questions)[:3]:
                times.setdefault(f"{name}, beside a busy process", []).append(questions[name]())
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="SmolLM2-135M", help="a GGUF file, or " + " or ".join(KNOWN))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = KNOWN[args.model].path() if args.model in KNOWN else Path(args.model)
    with torch.inference_mode():
        model = load(path, getattr(torch, args.dtype))
        times = measure(model, args.rounds, args.rows, args.prompts)
    print(f"{path.name}, {args.threads} threads, kernel {w4a8.active_kernel()}, medians of {args.rounds} rounds")
    for name, values in times.items():
        print(f"{statistics.median(values):9.2f}  {name}  [{min(values):.2f} to {max(values):.2f}]")


if __name__ == "__main__":
    main()
