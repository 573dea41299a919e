"""What the self-tests of the plugins have in common: looking at interfaces, and whether the operators are right."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

import torch

from w4a8.ops import Activation, dyn_quant_matmul_4bit, dyn_quant_pack_4bit_weight, dynamic_4bit_int_moe


def missing(owner: str, wanted: Iterable[str], there: Iterable[str]) -> list[str]:
    """What is not there, as one sentence or none."""
    found = set(there)
    lacking = [name for name in wanted if name not in found]
    return [f"{owner} has no {', '.join(lacking)}"] if lacking else []


def parameters(function: Callable) -> list[str]:
    """Names of what a function takes."""
    return list(inspect.signature(function).parameters)


def more_to_implement(cls: type, implemented: Iterable[str]) -> list[str]:
    """Abstract methods of a class besides some, as one sentence or none."""
    more = sorted(set(getattr(cls, "__abstractmethods__", ())) - set(implemented))
    return [f"{cls.__name__} wants {', '.join(more)}"] if more else []


def operator_problems() -> list[str]:
    """What the operators compute wrongly on this machine; a linear layer and a layer of experts are tried.

    The inputs are integers that dynamic quantization represents exactly, so the answers are exact.
    """
    generator = torch.Generator().manual_seed(0)
    K, N, E = 64, 32, 2
    nibbles = torch.randint(256, (E, N, K // 2), dtype=torch.uint8, generator=generator)
    values = (torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(-2).to(torch.int32) - 8).to(torch.float32)
    packed = dyn_quant_pack_4bit_weight(nibbles, torch.ones(E, N, 1, dtype=torch.float32), None, K, K, N)
    # A range of 255 makes the step of the quantizer 1.
    x = torch.randint(-128, 128, (3, K), generator=generator).to(torch.float32)
    x[:, 0], x[:, 1] = -128.0, 127.0
    expected = x @ values[0].T
    found = []
    if not torch.equal(dyn_quant_matmul_4bit(x, packed[0], K, K, N), expected):
        found.append("dyn_quant_matmul_4bit gives wrong sums")

    down = torch.full((E, K, N // 2), 0x88, dtype=torch.uint8)  # zeros, but for one 1 per expert: output k is input k
    for k in range(0, N, 2):
        down[:, k, k // 2], down[:, k + 1, k // 2] = 0x89, 0x98
    w2 = dyn_quant_pack_4bit_weight(down, torch.ones(E, K, 1, dtype=torch.float32), None, N, N, K)
    ids, weights = torch.tensor([[1, -1]] * 3), torch.ones(3, 2)
    out = dynamic_4bit_int_moe(x, ids, weights, packed, w2, K, N, N, -1, False, Activation.RELU2)
    hidden = (x @ values[1].T).clamp(min=0).square()
    # The second quantization has 255 steps over the range of a row, and rounds to the nearest.
    bound = hidden.amax(1, keepdim=True) / 255
    if not ((out[:, :N] - hidden).abs() <= bound).all() or out[:, N:].any():
        found.append("dynamic_4bit_int_moe gives wrong sums")
    return found
