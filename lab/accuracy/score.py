"""How far a model's answers are from those of the float model, on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

EVERY = 2  # KL and agreement are of every second position: all logits of one are kept
ROWS = 64  # positions that are worked on at once

# Token ids [T] -> logits [n, vocabulary] of all of them, or of the last n.
Logits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Score:
    """Means over positions, each with its standard error, as if positions were independent."""

    perplexity: float
    change: float  # of the logarithm of the perplexity, against the float model
    change_error: float
    kl: float  # of float's distribution against the model's, in nats
    kl_error: float
    top1: float  # share of positions with the same likeliest token
    top1_error: float

    def record(self) -> dict[str, float]:
        return asdict(self)


def mean(values: torch.Tensor) -> tuple[float, float]:
    """Of [n], and its standard error."""
    return float(values.mean()), float(values.std() / math.sqrt(len(values)))


def losses_of(logs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """float64 [n] of the logarithms of probabilities [n, vocabulary] and the tokens [n] that came."""
    return -logs.gather(1, ids[:, None])[:, 0].double()


class Reference:
    """What the float model says of each window of tokens, or its end: a file of float32 [windows, n, vocabulary]."""

    def __init__(self, logits: Logits, windows: list[torch.Tensor], file: Path):
        self.windows = windows
        self.losses: list[torch.Tensor] = []
        for i, ids in enumerate(windows):
            found = logits(ids)
            ids = ids[-len(found) :]
            if i == 0:
                shape = (len(windows), -(-len(ids) // EVERY), found.shape[1])
                file.unlink(missing_ok=True)
                self.logs = np.lib.format.open_memmap(file, "w+", np.float32, shape)
            kept = []
            for at in range(0, len(ids), ROWS):
                logs = found[at : at + ROWS].float().log_softmax(-1)
                kept.append(losses_of(logs[: len(ids) - 1 - at], ids[at + 1 : at + 1 + ROWS]))
                self.logs[i, at // EVERY : (at + ROWS) // EVERY] = logs[::EVERY].numpy()
            self.losses.append(torch.cat(kept))

    @property
    def perplexity(self) -> float:
        return math.exp(float(torch.cat(self.losses).mean()))

    def score(self, logits: Logits) -> Score:
        losses, divergences, agreements = [], [], []
        for ids, exact in zip(self.windows, self.logs):
            found = logits(ids)
            ids = ids[-len(found) :]
            for at in range(0, len(ids), ROWS):
                logs = found[at : at + ROWS].float().log_softmax(-1)
                losses.append(losses_of(logs[: len(ids) - 1 - at], ids[at + 1 : at + 1 + ROWS]))
                kept = logs[::EVERY]
                true = torch.from_numpy(exact[at // EVERY : (at + ROWS) // EVERY].copy())
                agreements.append((true.argmax(-1) == kept.argmax(-1)).double())
                divergences.append((true.exp() * (true - kept)).sum(-1).double())
        loss = torch.cat(losses)
        change, kl, top1 = (
            mean(each) for each in (loss - torch.cat(self.losses), torch.cat(divergences), torch.cat(agreements))
        )
        return Score(math.exp(float(loss.mean())), *change, *kl, *top1)
