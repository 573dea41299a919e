"""Time one MoE layer of Qwen3-30B-A3B's shape."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling import Int4Matrix
from w4a8 import Activation

HIDDEN = 2048
INTERMEDIATE = 768
EXPERTS = 128
TOP_K = 8
GROUP = 32

# Experts with weights of their own; the others are copies of them, since random numbers take longer than packing.
DISTINCT = 16

# tokens -> calls
PLAN = {1: 50, 128: 10}


@dataclass
class Result:
    """Seconds that one layer takes for ``tokens`` tokens, and the bytes of packed weights that it reads."""

    tokens: int
    seconds: float
    weight_bytes: float


def random_experts(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Packed random matrices [E, bytes] whose products keep roughly the size of their input."""
    nibbles = torch.randint(0, 256, (DISTINCT, rows, columns // 2), dtype=torch.uint8, generator=generator)
    spread = 0.5 + torch.rand(DISTINCT, rows, columns // GROUP, generator=generator)
    # The standard deviation of the integers -8..7 is 4.6.
    packed = Int4Matrix(nibbles, (spread / (4.6 * columns**0.5)).bfloat16()).pack()
    return packed.repeat(EXPERTS // DISTINCT, 1)


@torch.inference_mode()
def measure() -> list[Result]:
    """The least time of each batch size of the plan: other work on the machine makes the rest longer."""
    generator = torch.Generator().manual_seed(1)
    w13 = random_experts(2 * INTERMEDIATE, HIDDEN, generator)
    w2 = random_experts(HIDDEN, INTERMEDIATE, generator)
    bytes_per_expert = (w13.nbytes + w2.nbytes) / EXPERTS
    results = []
    for tokens, calls in PLAN.items():
        times = []
        for _ in range(calls):
            # Softmax and renormalized top-k, new in every call: one token has to fetch its experts from memory.
            x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
            weights, ids = torch.randn(tokens, EXPERTS, generator=generator).softmax(dim=-1).topk(TOP_K, dim=-1)
            weights /= weights.sum(dim=-1, keepdim=True)
            started = time.perf_counter()
            torch.ops.w4a8.dynamic_4bit_int_moe(
                x, ids, weights, w13, w2,
                HIDDEN, INTERMEDIATE, 2 * INTERMEDIATE, GROUP, False, Activation.SILU,
            )  # fmt: skip
            times.append((time.perf_counter() - started, ids.unique().numel() * bytes_per_expert))
        results.append(Result(tokens, *min(times)))
    return results
