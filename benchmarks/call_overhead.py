#!/usr/bin/env python3
"""Microseconds of one call of the fused operator where there is nothing to compute, beside torch.add (medians).

Then those of routing, beside the same in PyTorch's operators (a stable sort, softmax of the selected).
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import w4a8  # noqa: F401, registers the operators

HIDDEN, INTERMEDIATE, EXPERTS = 64, 32, 4
ROUTED, TOP_K = 128, 8  # of Qwen3-30B-A3B


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


def routed_by_torch(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :TOP_K]
    return torch.softmax(logits.gather(1, ids), dim=-1), ids.to(torch.int32)


def routing(repeats: int) -> None:
    """Prints a line for each number of tokens, in turns with PyTorch's operators."""
    for tokens in (1, 8, 512, 2048):
        logits = torch.randn(tokens, ROUTED)
        calls = max(10, repeats // tokens)
        ours = microseconds(lambda: torch.ops.w4a8.topk_routing(logits, TOP_K, True), calls)  # noqa: B023
        theirs = microseconds(lambda: routed_by_torch(logits), max(5, calls // 10))  # noqa: B023
        shape = f"{tokens} tokens, {TOP_K} of {ROUTED}"
        print(f"topk_routing, {shape}: {ours:.1f} us; in torch's operators: {theirs:.1f} us")


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
    routing(repeats)


if __name__ == "__main__":
    main()
