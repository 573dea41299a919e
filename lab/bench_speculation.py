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
import time
from pathlib import Path

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


def engine(path: Path, most: int):
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")
    from vllm import LLM

    speculation = {"method": "ngram", "num_speculative_tokens": most, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    return LLM(
        str(path),
        tokenizer=str(path.parent),
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
        seed=0,
        speculative_config=speculation if most else None,
    )


def answer(llm, batch: int, count: int) -> tuple[float, list[list[int]]]:
    """Tokens/s behind the first token of each, and the tokens."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompts = [[1000 + b, *(7919 * (i + 1) * (b + 1) % vocabulary for i in range(PROMPT - 1))] for b in range(batch)]
    for b, ids in enumerate(prompts):
        llm.llm_engine.add_request(str(b), {"prompt_token_ids": ids}, parameters)
    found, begin, already = {}, time.perf_counter(), 0
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            found[int(output.request_id)] = list(output.outputs[0].token_ids)
        if already == 0 and len(found) == batch:
            begin, already = time.perf_counter(), sum(map(len, found.values()))
    rate = (batch * count - already) / (time.perf_counter() - begin)
    return rate, [found[b] for b in range(batch)]


def measure(llm, stub: Stub, args: argparse.Namespace) -> None:
    for batch in args.answers:
        stub.guesses = 0
        _, expected = answer(llm, batch, args.tokens)
        stub.answers = {1000 + b: tokens for b, tokens in enumerate(expected)}
        questions = [(0, 0.0), *((guesses, right) for right in args.right for guesses in args.guesses)]
        rates: dict[tuple[int, float], list[float]] = {question: [] for question in questions}
        for _ in range(args.rounds):
            for question in questions:
                stub.guesses, stub.right = question
                rate, tokens = answer(llm, batch, args.tokens)
                if tokens != expected:
                    sys.exit(f"error: guesses changed the tokens: {question}")
                rates[question].append(rate)
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
    llm = engine(args.model, 0 if args.plain else max(args.guesses))
    if args.plain:
        for batch in args.answers:
            rates = [answer(llm, batch, args.tokens)[0] for _ in range(args.rounds + 1)][1:]
            print(f"{batch} at once, an engine without guessing: {statistics.median(rates):.1f} tokens/s")
        return
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    stub = Stub()
    NgramProposer.propose = lambda _, *given, **more: stub.propose(*given, **more)
    measure(llm, stub, args)


if __name__ == "__main__":
    main()
