#!/usr/bin/env python3
"""Microseconds of one call of the fused operator where there is nothing to compute, beside torch.add (medians)."""

import argparse
import statistics
import time
from typing import Callable

import torch

import w4a8  # noqa: F401, registers the operators

HIDDEN, INTERMEDIATE, EXPERTS = 64, 32, 4


def microseconds(call: Callable[[], object], repeats: int, rounds: int = 21) -> float:
    samples = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        samples.append((time.perf_counter() - start) / repeats * 1e6)
    return statistics.median(samples)


def packed(n: int, k: int) -> torch.Tensor:
    weights = torch.full((EXPERTS, n, k // 2), 0x97, dtype=torch.uint8)
    scales = torch.full((EXPERTS, n, k // 32), 0.01, dtype=torch.bfloat16)
    return torch.ops.w4a8.dyn_quant_pack_4bit_weight(weights, scales, None, 32, k, n)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000, help="calls per sample (default: 2000)")
    repeats = parser.parse_args().repeats
    x = torch.randn(1, HIDDEN, dtype=torch.bfloat16)
    ids = torch.tensor([[1]])
    weights = torch.ones(1, 1)
    w13, w2 = packed(2 * INTERMEDIATE, HIDDEN), packed(HIDDEN, INTERMEDIATE)
    moe = torch.ops.w4a8.dynamic_4bit_int_moe
    ours = microseconds(
        lambda: moe(x, ids, weights, w13, w2, HIDDEN, INTERMEDIATE, 2 * INTERMEDIATE, 32, False, 0), repeats
    )
    add = microseconds(lambda: torch.add(x, x), repeats)
    print(f"one token, H {HIDDEN}, I {INTERMEDIATE}, one expert: {ours:.2f} us a call; torch.add: {add:.2f} us")


if __name__ == "__main__":
    main()
