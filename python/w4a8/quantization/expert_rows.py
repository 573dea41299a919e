"""The rows that a calibration routes to the experts of a layer, and rounding for these rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from w4a8.core.matrix import Matrix
from w4a8.nn import QuantOptions
from w4a8.nn.compensation import Inputs, round_compensated
from w4a8.nn.rounding import check_finite
from w4a8.quantization.moe_blocks import Experts


@dataclass
class ExpertRows:
    """Inputs of experts.

    Attributes:
        rows: of each call: rows [T, H], or one tensor [., H] of an expert.
        ids: of each call: the experts [T, k] of each row; None: an equal run of rows for each expert (Llama 4); an int:
            all rows are that expert's.
        exact: of each call: the float model's rows, or None.
    """

    rows: list[torch.Tensor] = field(default_factory=list)
    ids: list[torch.Tensor | int | None] = field(default_factory=list)
    exact: list[torch.Tensor | None] = field(default_factory=list)

    def of(self, expert: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Rows [., H] of one of ``count`` experts, with the float model's rows; of each call that has some."""
        found = []
        for rows, ids, exact in zip(self.rows, self.ids, self.exact):
            if isinstance(ids, int):
                chosen = torch.full((len(rows),), ids == expert)
            elif ids is None:
                chosen = (torch.arange(len(rows)) // (len(rows) // count) == expert) & (rows != 0).any(1)
            else:
                chosen = (ids.reshape(len(rows), -1) == expert).any(1)
            if chosen.any():
                found.append((rows[chosen].float(), None if exact is None else exact[chosen].float()))
        return found


class ExpertRounding:
    """Rounds the matrices of experts, w13 of each before its w2.

    If an expert got fewer rows than a matrix has columns, rows of all experts stand in for the missing rows.

    Attributes:
        few: how many experts got fewer rows than w13 has columns.
    """

    def __init__(self, experts: Experts, found: ExpertRows, options: QuantOptions) -> None:
        self.experts, self.found, self.options = experts, found, options
        self.count, hidden, intermediate = experts.sizes
        self.mean = {"w13": Inputs.none(hidden), "w2": Inputs.none(intermediate)}
        self.few = 0
        for expert in range(self.count):
            parts = found.of(expert, self.count)
            self.few += sum(len(rows) for rows, _ in parts) < hidden
            for rows, exact in parts:
                self.mean["w13"].add(rows, exact)
                self.mean["w2"].add(between(experts, expert, experts.w13[expert], rows))
        self.w13 = torch.empty(0)  # of the last expert, multiplied out

    def __call__(self, name: str, expert: int, weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
        """As ``W4A8Experts.from_float`` takes it."""
        check_finite(weight, bias)
        inputs = Inputs.none(weight.shape[1])
        for rows, exact in self.found.of(expert, self.count):
            if name == "w2":
                rows = between(self.experts, expert, self.w13, rows)
                exact = None if exact is None else between(self.experts, expert, self.experts.w13[expert], exact)
            inputs.add(rows, exact)
        matrix, rounded = round_compensated(weight, self.options, inputs.filled(self.mean[name]), bias)
        if name == "w13":
            self.w13 = rounded
        return matrix


def between(experts: Experts, expert: int, w13: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The input of an expert's w2, for rows [., H] and the expert's w13."""
    bias = None if experts.w13_bias is None else experts.w13_bias[expert].to(w13.dtype)
    return experts.between(torch.nn.functional.linear(rows.to(w13.dtype), w13, bias).float())
