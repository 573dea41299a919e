"""Muon for stacks of matrices: momentum whose update is replaced by its nearest orthogonal matrix.

``torch.optim.Muon`` takes 2-D parameters only; the experts of a Mixture of Experts are 3-D.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Without instructions for bfloat16, products in it take far longer than in float32.
HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
# Odd quintic whose iterates push every singular value towards 1 (Keller Jordan's published coefficients).
_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalize(update: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Approximate U V^T of every matrix: [..., rows, columns] to the same shape, in bfloat16 where that is fast."""
    a, b, c = _QUINTIC
    x = update.bfloat16() if HAS_BFLOAT16 else update
    wide = x.shape[-2] <= x.shape[-1]
    if not wide:
        x = x.mT.contiguous()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonalized updates; a parameter is [..., rows, columns].

    ``halves`` marks parameters whose rows stack two matrices (gate and up), which are orthogonalized one by one.
    """

    def __init__(self, params: Iterable, lr: float, momentum: float = 0.95, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "halves": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = torch.lerp(p.grad, buffer, group["momentum"])
                if group["halves"]:
                    update = update.unflatten(-2, (2, update.shape[-2] // 2))
                direction = orthogonalize(update)
                # Same root mean square for every shape (0.2 is what AdamW's updates typically have).
                scale = 0.2 * max(update.shape[-2:]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(direction.reshape(p.shape), alpha=-group["lr"] * scale)
