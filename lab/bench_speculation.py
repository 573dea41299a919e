#!/usr/bin/env python3
"""Guessed tokens in vLLM: how often must guesses be right to pay (lab/README.md)?

    .venv-vllm/bin/python lab/bench_speculation.py MODEL.gguf [--guesses 1,3,5,7] [--right 0.5,0.7,0.9] [--answers 1,4]
    .venv-vllm/bin/python lab/bench_speculation.py MODEL.gguf --mtp [--guesses 1,2,3]

A stub knows the answer and guesses each next token rightly with a given probability. It stands in for vLLM's n-gram
proposer and costs nothing. With --mtp the model's own head for further tokens runs, and the stub then replaces what the
head guessed. The rate without guesses is that of a second engine, which cannot guess. The questions to both take turns,
and the answers of all must be the same tokens.
"""

import argparse
import os
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders  # noqa: F401, which puts benchmarks/ on the path
import torch
from bench_vllm import Engine

PROMPT = 16
NGRAM = {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}


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

    def behind(self, propose: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """In the place of ``GPUModelRunner.propose_draft_token_ids``, which runs before."""

        def replaced(runner: Any, scheduled: Any, sampled: torch.Tensor, *given: Any) -> torch.Tensor:
            scheduled.num_spec_tokens_to_schedule = self.guesses
            found = propose(runner, scheduled, sampled, *given)
            ids = [[token for token in row if token >= 0] for row in sampled.tolist()]  # -1: a guess that was wrong
            batch = runner.input_batch  # which does not have these tokens yet
            lengths = [batch.num_tokens_no_spec[i] + len(row) for i, row in enumerate(ids)]
            for row, guesses in zip(found, self.propose(self.guesses, ids, lengths, batch.token_ids_cpu)):
                row[: len(guesses)] = torch.tensor(guesses)
            return found

        return replaced


def measure(plain: Engine, guessing: Engine, stub: Stub, args: argparse.Namespace) -> None:
    for batch in args.answers:
        plain.decode(batch, args.tokens, PROMPT)
        stub.answers = plain.answers
        questions = [(guesses, right) for right in args.right for guesses in args.guesses]
        rates: dict[tuple[int, float], list[float]] = {question: [] for question in questions}
        alone: list[float] = []
        for counts in (False, *[True] * args.rounds):  # the first round warms up
            alone += [plain.decode(batch, args.tokens, PROMPT)] * counts
            if plain.answers != stub.answers:
                sys.exit("error: the same questions got other answers, without guesses")
            for question in questions:
                stub.guesses, stub.right = question
                rates[question] += [guessing.decode(batch, args.tokens, PROMPT)] * counts
                if guessing.answers != stub.answers:
                    sys.exit(f"error: guesses changed the tokens: {question}")
        rate = statistics.median(alone)
        print(f"\n{batch} at once, no guesses: {rate:.1f} tokens/s ({min(alone):.1f} to {max(alone):.1f});")
        print("times as fast with guesses:\nright  " + "".join(f"{guesses:>8}" for guesses in args.guesses))
        for right in args.right:
            cells = (statistics.median(rates[guesses, right]) / rate for guesses in args.guesses)
            print(f"{right:<7}" + "".join(f"{cell:8.2f}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    for name, kind, default in (("guesses", int, None), ("right", float, "0.5,0.7,0.9"), ("answers", int, "1,4")):
        parser.add_argument(f"--{name}", type=lambda text, kind=kind: list(map(kind, text.split(","))), default=default)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mtp", action="store_true", help="run the model's own head for further tokens")
    args = parser.parse_args()
    args.guesses = args.guesses or ([1, 2, 3] if args.mtp else [1, 3, 5, 7])
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    plain = Engine(str(args.model), "auto")
    speculation = {**({"method": "mtp"} if args.mtp else NGRAM), "num_speculative_tokens": max(args.guesses)}
    guessing = Engine(str(args.model), "auto", speculative_config=speculation)
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    stub = Stub()
    if args.mtp:
        GPUModelRunner.propose_draft_token_ids = stub.behind(GPUModelRunner.propose_draft_token_ids)
    else:
        NgramProposer.propose = lambda _, *given, **more: stub.propose(*given, **more)
    measure(plain, guessing, stub, args)


if __name__ == "__main__":
    main()
