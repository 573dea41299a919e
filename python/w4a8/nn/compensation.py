"""Rounding in which later columns of a matrix make up for the rounding errors of earlier ones.

GPTQ (Frantar et al. 2022, https://arxiv.org/abs/2210.17323) keeps the error of the products with a layer's inputs
small, not the error of the weights. Columns are rounded one after another. Each error is subtracted from later columns
such that the products change least. GPTAQ (Li et al. 2025, https://arxiv.org/abs/2504.02692) takes the float model's
products, whose inputs differ from the inputs behind rounded layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from w4a8.core.kind import E2M1_VALUES, Kind
from w4a8.core.matrix import Matrix
from w4a8.core.threads import one_thread
from w4a8.nn.options import QuantOptions
from w4a8.nn.rounding import check_finite, group_of
from w4a8.ops import round_weights

# Share of the mean of the Hessian's diagonal that is added to the diagonal.
DAMPING = 0.05
# Share of the step that moves weights for the float model's inputs. The whole step fits the calibration text too
# closely (docs/quantization.md, "Calibration").
CORRECTION = 0.5
BLOCK = 128  # columns that are rounded before their errors reach all later columns
_E2M1 = torch.tensor(E2M1_VALUES[:8])  # by code; the fourth bit of a code is the sign


@dataclass
class Inputs:
    """Sums over the inputs x [K] of a matrix.

    Attributes:
        gram: float64 [K, K], of x x^T: the Hessian of the products' squared error, but for a factor.
        drift: float64 [K, K], of (f - x) x^T; f is the float model's input in place of x.
        rows: how many inputs there were.
    """

    gram: torch.Tensor
    drift: torch.Tensor
    rows: int = 0

    @classmethod
    def none(cls, columns: int) -> Inputs:
        """Of no inputs yet."""
        return cls(*(torch.zeros(columns, columns, dtype=torch.float64) for _ in range(2)))

    def add(self, rows: torch.Tensor, exact: torch.Tensor | None = None) -> None:
        """Takes inputs [..., K], and the float model's inputs, of the same shape."""
        rows = rows.detach().reshape(-1, len(self.gram)).float()
        self.gram += rows.T @ rows
        self.rows += len(rows)
        if exact is not None:
            self.drift += (exact.detach().reshape(rows.shape).float() - rows).T @ rows

    def filled(self, mean: Inputs | None = None) -> Inputs:
        """At least as many inputs as columns: fewer inputs do not determine the correlations.

        Args:
            mean: stands in for the missing inputs. None: these inputs do, as if uncorrelated.
        """
        missing = max(0, len(self.gram) - self.rows)
        if missing == 0:
            return self
        if mean is None:
            return Inputs(self.gram + missing / self.rows * self.gram.diagonal().diag(), self.drift, len(self.gram))
        share = missing / mean.rows
        return Inputs(self.gram + share * mean.gram, self.drift + share * mean.drift, len(self.gram))

    @cached_property
    def size(self) -> torch.Tensor:
        """The mean square of an input times ``rows``: the divisor of sums."""
        return self.gram.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)

    @cached_property
    def factor(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of H = gram / size: the diagonal [K], and upper triangular U [K, K], both float32: U^T U (H + damping) = 1.

        A channel that was always 0 counts as the mean of the others.

        Raises:
            ValueError: an input has a NaN or an infinity.
        """
        if not (self.gram.isfinite().all() and self.drift.isfinite().all()):
            raise ValueError("calibration: its inputs have a NaN or an infinite element")
        hessian = self.gram / self.size
        diagonal = hessian.diagonal()
        used = diagonal > 0
        diagonal[~used] = diagonal[used].mean() if used.any() else 1
        importance = diagonal.float()
        diagonal += DAMPING * diagonal.mean()
        # A A^T = hessian + damping with A upper triangular: U is the inverse of A.
        factor = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1).float()
        unit = torch.eye(len(factor), dtype=factor.dtype)
        return importance, torch.linalg.solve_triangular(factor, unit, upper=True)


def round_compensated(
    weight: torch.Tensor, options: QuantOptions, inputs: Inputs, bias: torch.Tensor | None = None
) -> tuple[Matrix, torch.Tensor]:
    """Rounds a matrix such that its products with inputs change little.

    Scale and zero point of a group are searched for when the group is reached: by ``round_weights`` of the weights
    changed so far, with the mean squares of the inputs as importance. With uncorrelated inputs nothing is compensated,
    and the result is the result of ``round_weights``.

    Args:
        weight: floating point [N, K], K even.
        options: their group divides K.
        inputs: one or more.
        bias: [N] of the matrix, or None; not rounded, but checked.

    Returns:
        The matrix, and the float32 [N, K] that it stands for.

    Raises:
        ValueError: the group does not divide K; the weight, the bias or an input has a NaN or an infinity.
    """
    group = group_of(weight, options)
    check_finite(weight, bias)
    importance, upper = inputs.factor
    weight = weight.detach().float()
    if inputs.drift.any():
        # W + W D (H + d)^-1 in place of W keeps the difference of W f and W x smallest, and (H + d)^-1 is U^T U.
        weight = weight + CORRECTION * (weight @ (inputs.drift / inputs.size).float() @ upper.T @ upper)
    rounding = _Rounding(weight, upper, importance, group, options)
    rounding.run()
    return rounding.matrix(bias), rounding.rounded()


class _Rounding:
    """Of one matrix. Columns are read and written one after another, so each of them is laid out contiguously."""

    def __init__(
        self, weight: torch.Tensor, upper: torch.Tensor, importance: torch.Tensor, group: int, options: QuantOptions
    ) -> None:
        self.columns = weight.T.clone(memory_format=torch.contiguous_format)  # [K, N]
        self.upper, self.importance, self.group, self.options = upper, importance, group, options
        groups, rows = len(upper) // group, weight.shape[0]
        self.values = torch.empty_like(self.columns)
        self.errors = torch.empty_like(self.columns)
        self.scales = torch.empty(groups, rows)
        self.zeros = None if options.symmetric else torch.empty(groups, rows)

    def run(self) -> None:
        k = len(self.columns)
        for block in self._blocks():
            begin, end = block[0][0], block[-1][1]
            for first, last in block:
                if first % self.group == 0:
                    self._search(first // self.group)
                with one_thread():
                    self._round(first, last)
                self._pass_on(first, last, last, end)
            self._pass_on(begin, end, end, k)

    def _blocks(self) -> Iterator[list[tuple[int, int]]]:
        """Runs of columns of one group each, at most BLOCK; and the runs of each block together."""
        k, group = len(self.columns), self.group
        if group > BLOCK:
            for start in range(0, k, group):
                for first in range(start, start + group, BLOCK):
                    yield [(first, min(first + BLOCK, start + group))]
            return
        size = BLOCK // group * group
        for begin in range(0, k, size):
            yield [(first, first + group) for first in range(begin, min(begin + size, k), group)]

    def _search(self, index: int) -> None:
        """The scale and the zero point of a group."""
        own = slice(index * self.group, (index + 1) * self.group)
        _, scales, zeros = round_weights(
            self.columns[own].T.contiguous(),
            self.group,
            values=self.options.values,
            zero_points=not self.options.symmetric,
            scale_dtype=self.options.scale_dtype,
            effort=self.options.effort,
            importance=self.importance[own],
        )
        self.scales[index] = scales[:, 0].float()
        if self.zeros is not None:
            self.zeros[index] = zeros[:, 0].float()

    def _round(self, first: int, last: int) -> None:
        """Rounds columns of a group; each column makes up for the errors of earlier columns of the run."""
        scale = self.scales[first // self.group]
        zero = None if self.zeros is None else self.zeros[first // self.group]
        for k in range(first, last):
            column = self.columns[k] - self.upper[first:k, k] @ self.errors[first:k]
            value = self.values[k] = self._nearest(column / scale, zero)
            self.errors[k] = (column - value * scale) / self.upper[k, k]

    def _nearest(self, x: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
        if self.options.values == Kind.E2M1:
            return _nearest_e2m1(x)
        if zero is not None:
            return torch.minimum(torch.maximum(x.round_(), -zero), 15 - zero)
        middle = Kind(self.options.values).middle
        return x.round_().clamp_(-middle, middle - 1)

    def _pass_on(self, first: int, last: int, begin: int, end: int) -> None:
        """Subtracts the errors of some columns from later ones."""
        if begin < end:
            self.columns[begin:end] -= self.upper[first:last, begin:end].T @ self.errors[first:last]

    def rounded(self) -> torch.Tensor:
        """float32 [N, K]."""
        return (self.values.unflatten(0, (-1, self.group)) * self.scales.unsqueeze(1)).flatten(0, 1).T.contiguous()

    def matrix(self, bias: torch.Tensor | None) -> Matrix:
        """The codes; 4-bit codes two to a byte."""
        kind = Kind(self.options.values)
        values = self.values.unflatten(0, (-1, self.group))
        if kind == Kind.E2M1:
            codes = torch.bucketize(values.abs(), _E2M1) + 8 * (values < 0)
        else:
            codes = values + (kind.middle if self.zeros is None else self.zeros.unsqueeze(1))
        codes = codes.flatten(0, 1).T.to(torch.uint8)
        codes = (codes[:, ::2] | codes[:, 1::2] << 4 if kind.bits == 4 else codes).contiguous()
        scales = self.scales.T.contiguous().to(self.options.scale_dtype)
        zeros = None if self.zeros is None else self.zeros.T.to(torch.uint8).contiguous()
        return Matrix(codes, scales, zeros, kind, bias)


def _nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Of two equally near numbers, the number with the even code."""
    middles = (_E2M1[1:] + _E2M1[:-1]) / 2
    # A middle belongs to the upper number, so behind an even code it is moved up.
    middles[::2] = torch.nextafter(middles[::2], _E2M1[-1:])
    return _E2M1[torch.bucketize(x.abs(), middles, right=True)] * x.sign()
