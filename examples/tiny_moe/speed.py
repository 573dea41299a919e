"""Time one MoE layer of Qwen3-30B-A3B's shape: the fused op against the same layer composed from ATen's int4 ops."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from modeling import Int4Matrix
from w4a8 import Activation

HIDDEN = 2048
INTERMEDIATE = 768
EXPERTS = 128
TOP_K = 8
GROUP = 32

# ATen's x86 code is bound by arithmetic, so it may reuse a few experts: the time is the same, and setting up all of
# them would take gigabytes (it stores a float per packed byte there). The fused op always has all of its experts.
ATEN_EXPERTS = 16

# tokens -> (rounds, calls of the fused op per round); a round calls ATen once.
PLAN = {1: (7, 20), 128: (3, 5)}

# A batch size ends early once ATen has taken this many seconds of it: slow or busy machines get fewer rounds.
PATIENCE = 30.0


@dataclass
class Result:
    """Median seconds for one layer and ``tokens`` tokens."""

    tokens: int
    fused: float
    aten: float | None
    # Bytes of packed weights that one call reads, averaged over the calls.
    weight_bytes: float


@dataclass
class Call:
    """One batch: x bf16 [T, H], ids int64 [T, k], weights float32 [T, k]."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def random_experts(rows: int, columns: int, generator: torch.Generator) -> Int4Matrix:
    """A stack of random matrices whose products keep roughly the size of their input."""
    nibbles = torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8, generator=generator)
    spread = 0.5 + torch.rand(EXPERTS, rows, columns // GROUP, generator=generator)
    # The standard deviation of the integers -8..7 is 4.6.
    return Int4Matrix(nibbles, (spread / (4.6 * columns**0.5)).bfloat16())


def random_call(tokens: int, experts: int, generator: torch.Generator) -> Call:
    """A batch that is routed at random, as softmax and renormalized top-k would."""
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    probabilities = torch.randn(tokens, experts, generator=generator).softmax(dim=-1)
    weights, ids = probabilities.topk(TOP_K, dim=-1)
    return Call(x, ids, weights / weights.sum(dim=-1, keepdim=True))


class FusedLayer:
    """All experts in one call of ``w4a8.dynamic_4bit_int_moe``."""

    def __init__(self, w13: Int4Matrix, w2: Int4Matrix) -> None:
        self.w13, self.w2 = w13.pack(), w2.pack()
        self.bytes_per_expert = (self.w13.nbytes + self.w2.nbytes) / EXPERTS

    def __call__(self, call: Call) -> Tensor:
        return torch.ops.w4a8.dynamic_4bit_int_moe(
            call.x, call.ids, call.weights, self.w13, self.w2,
            HIDDEN, INTERMEDIATE, 2 * INTERMEDIATE, GROUP, False, Activation.SILU,
        )  # fmt: skip


class AtenLayer:
    """The same layer, expert by expert, from the two int4 ops that PyTorch itself has.

    Only ``ATEN_EXPERTS`` of them are packed; the others alias these.
    """

    def __init__(self, w13: Int4Matrix, w2: Int4Matrix) -> None:
        self.w13 = [self._pack(w13, e) for e in range(ATEN_EXPERTS)]
        self.w2 = [self._pack(w2, e) for e in range(ATEN_EXPERTS)]

    @staticmethod
    def _pack(stack: Int4Matrix, expert: int) -> Tensor:
        return torch.ops.aten._dyn_quant_pack_4bit_weight(
            stack.nibbles[expert], stack.scales[expert], None, GROUP, stack.in_features, stack.out_features
        )

    def __call__(self, call: Call) -> Tensor:
        matmul = torch.ops.aten._dyn_quant_matmul_4bit
        x = call.x.float()  # with groups ATen takes float32 activations only
        output = torch.zeros_like(x)
        for expert in call.ids.unique().tolist():
            token, slot = torch.where(call.ids == expert)
            held = expert % ATEN_EXPERTS
            both = matmul(x[token], self.w13[held], GROUP, HIDDEN, 2 * INTERMEDIATE)
            gate, up = both.chunk(2, dim=-1)
            hidden = torch.nn.functional.silu(gate) * up
            y = matmul(hidden, self.w2[held], GROUP, INTERMEDIATE, HIDDEN)
            output.index_add_(0, token, y * call.weights[token, slot, None])
        return output.to(call.x.dtype)


def seconds(layer: Callable[[Call], Tensor], call: Call) -> float:
    started = time.perf_counter()
    layer(call)
    return time.perf_counter() - started


def relative_difference(fused: FusedLayer, aten: AtenLayer, generator: torch.Generator) -> float:
    """||fused - ATen|| / ||ATen|| for a batch routed to the experts both hold."""
    call = random_call(4, ATEN_EXPERTS, generator)
    ours, theirs = fused(call).float(), aten(call).float()
    return float((ours - theirs).norm() / theirs.norm())


@torch.inference_mode()
def measure() -> tuple[list[Result], float | None]:
    """Time every batch size of the plan; also returns how far fused op and ATen differ (None without ATen's ops)."""
    generator = torch.Generator().manual_seed(1)
    with tqdm(total=4, desc="pack 128 experts", unit="step", leave=False) as bar:
        w13 = random_experts(2 * INTERMEDIATE, HIDDEN, generator)
        bar.update()
        w2 = random_experts(HIDDEN, INTERMEDIATE, generator)
        bar.update()
        fused = FusedLayer(w13, w2)
        bar.update()
        try:
            aten = AtenLayer(w13, w2)
            aten(random_call(1, ATEN_EXPERTS, generator))
        except (AttributeError, RuntimeError) as error:
            # Older versions of PyTorch lack the ops, and not every platform has a kernel behind them.
            tqdm.write(f"ATen's int4 ops do not run here: {error}", file=sys.stderr)
            aten = None
        bar.update()
    del w13, w2
    difference = None if aten is None else relative_difference(fused, aten, generator)

    results = []
    for tokens, (rounds, repeats) in PLAN.items():
        fused(random_call(tokens, EXPERTS, generator))
        fused_times, aten_times, experts_read = [], [], []
        # Rounds alternate between the two, so that a slow spell of the machine hits both.
        for _ in tqdm(range(rounds), desc=f"{tokens} tokens", unit="round", leave=False):
            # New routing in every call: decode has to fetch its experts from memory.
            calls = [random_call(tokens, EXPERTS, generator) for _ in range(repeats)]
            fused_times += [seconds(fused, call) for call in calls]
            experts_read += [call.ids.unique().numel() for call in calls]
            if aten is not None:
                aten_times.append(seconds(aten, calls[0]))
                if sum(aten_times) > PATIENCE:
                    break
        results.append(
            Result(
                tokens,
                statistics.median(fused_times),
                statistics.median(aten_times) if aten_times else None,
                statistics.mean(experts_read) * fused.bytes_per_expert,
            )
        )
    return results, difference
