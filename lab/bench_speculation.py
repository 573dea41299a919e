#!/usr/bin/env python3
"""Guessed tokens in vLLM, guessed by a stub: how often must guesses be right to pay (lab/README.md)?

    .venv-vllm/bin/python lab/bench_speculation.py MODEL.gguf [--guesses 1,3,5,7] [--right 0.5,0.7,0.9] [--answers 1,4]

The stub stands in for vLLM's n-gram proposer. It knows the answer, guesses each next token rightly with a given
probability, and costs nothing. A question of no guesses is the rate that the others are divided by: all questions take
turns in one engine. The answers of all questions must be the same tokens.
"""

import argparse
import os
import random
import statistics
import sys
from pathlib import Path

import folders  # noqa: F401, which puts benchmarks/ on the path
from bench_vllm import Engine

PROMPT = 16


class Stub:
    """Guesses for the requests whose prompts begin with known tokens."""

    def __init__(self) -> None:
        self.answers: dict[int, list[int]] = {}  # by the first token of the prompt
        self.guesses, self.right = 0, 0.0
        self.random = random.Random(0)

    def propose(self, most, sampled, lengths, tokens, **_):
        """In the place of ``NgramProposer.propose``."""
        return [self._of(tokens[i, 0], lengths[i], most) if ids else [] for i, ids in enumerate(sampled)]

    def _of(self, first, length, most):
        begin = length - PROMPT
        rest = self.answers.get(int(first), [])[begin : begin + min(self.guesses, most)]
        return [token if self.random.random() < self.right else (token + 1) % 1000 for token in rest]


def measure(engine: Engine, stub: Stub, args: argparse.Namespace) -> None:
    for batch in args.answers:
        stub.guesses = 0
        engine.decode(batch, args.tokens, PROMPT)
        stub.answers = engine.answers
        questions = [(0, 0.0), *((guesses, right) for right in args.right for guesses in args.guesses)]
        rates: dict[tuple[int, float], list[float]] = {question: [] for question in questions}
        for _ in range(args.rounds):
            for question in questions:
                stub.guesses, stub.right = question
                rates[question].append(engine.decode(batch, args.tokens, PROMPT))
                if engine.answers != stub.answers:
                    sys.exit(f"error: guesses changed the tokens: {question}")
        plain = statistics.median(rates[0, 0.0])
        print(f"\n{batch} at once, no guesses: {plain:.1f} tokens/s; times as fast with guesses:")
        print("right  " + "".join(f"{guesses:>8}" for guesses in args.guesses))
        for right in args.right:
            cells = (statistics.median(rates[guesses, right]) / plain for guesses in args.guesses)
            print(f"{right:<7}" + "".join(f"{cell:8.2f}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    for name, kind, default in (("guesses", int, "1,3,5,7"), ("right", float, "0.5,0.7,0.9"), ("answers", int, "1,4")):
        parser.add_argument(f"--{name}", type=lambda text, kind=kind: list(map(kind, text.split(","))), default=default)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="an engine without guessing alone")
    args = parser.parse_args()
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    most, ngram = max(args.guesses), {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    speculation = None if args.plain else {**ngram, "num_speculative_tokens": most}
    engine = Engine(str(args.model), "auto", speculative_config=speculation)
    if args.plain:
        for batch in args.answers:
            rates = [engine.decode(batch, args.tokens, PROMPT) for _ in range(args.rounds + 1)][1:]
            print(f"{batch} at once, an engine without guessing: {statistics.median(rates):.1f} tokens/s")
        return
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    stub = Stub()
    NgramProposer.propose = lambda _, *given, **more: stub.propose(*given, **more)
    measure(engine, stub, args)


if __name__ == "__main__":
    main()
