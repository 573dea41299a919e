"""From float weights to 4-bit codes, their scales and zero points; and to 8-bit codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from w4a8.core.matrix import Matrix4
from w4a8.core.matrix8 import Matrix8
from w4a8.nn.grids import DEFAULT_GROUP_SIZE, Choice, Int4, grid_of

# Weights that are rounded at a time (or one row): bounds the temporaries, which are some 30 bytes per weight.
CHUNK = 1 << 18


def round_weight(
    weight: torch.Tensor,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = torch.float32,
    clip_search: bool = False,
    symmetric: bool = True,
    values: str = "int4",
    bias: torch.Tensor | None = None,
) -> Matrix4:
    """Rounds a matrix to nearest, a chunk of rows at a time.

    Args:
        weight: floating point [N, K], K even.
        group_size: values of k per scale, a divisor of K; -1 is channelwise.
        scale_dtype: float32 or bfloat16. Weights are rounded with the scale as it is stored.
        clip_search: False: the largest magnitude of a group becomes 7 or -7 (e2m1: 6 or -6), or, with zero points, its
            least and largest weight become codes 0 and 15. True: each group gets a scale and zero point that make the
            squared error smaller (``searched``).
        symmetric: False: a zero point for each group.
        values: ``int4`` or ``e2m1`` (symmetric).
        bias: [N] of the matrix, or None; not rounded.

    Returns:
        A weight on the meta device gives tensors on the meta device.

    Raises:
        ValueError: the group does not fit, another scale_dtype or kind, or the weight has a NaN or an infinity.
    """
    n, k = weight.shape
    group = k if group_size == -1 else group_size
    if group <= 0 or k % group != 0:
        raise ValueError(f"group_size is {group_size}, expected -1 or a divisor of in_features = {k}")
    if scale_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"scale_dtype is {scale_dtype}, expected torch.float32 or torch.bfloat16")
    grid = grid_of(symmetric, values)
    nibbles = torch.empty(n, k // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, k // group, dtype=scale_dtype, device=weight.device)
    zeros = None if symmetric else torch.empty(n, k // group, dtype=torch.uint8, device=weight.device)
    for rows, chunk in _chunks(weight):
        groups = chunk.reshape(len(chunk), k // group, group)
        chosen = grid.covering(groups, scale_dtype)
        if clip_search:
            chosen = searched(grid, groups, chosen)
        scales[rows] = chosen[0]
        if zeros is not None:
            zeros[rows] = chosen[1]
        nibbles[rows] = grid.nibbles(_round(grid, groups, chosen), chosen[1])
    return Matrix4(nibbles, scales, zeros, values, bias)


def _chunks(weight: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows at a time, as float32; none of a weight on the meta device.

    Raises:
        ValueError: they have a NaN or an infinity.
    """
    n, k = weight.shape
    size = max(1, CHUNK // k)
    for begin in range(0, 0 if weight.is_meta else n, size):
        rows = slice(begin, begin + size)
        chunk = weight[rows].detach().float().contiguous()
        if not torch.isfinite(chunk).all():
            raise ValueError("the weight has a NaN or an infinite element")
        yield rows, chunk


def round_to_8_bits(weight: torch.Tensor) -> Matrix8:
    """Rounds a matrix to nearest, with one scale for each row: its largest magnitude becomes 127 or -127.

    Args:
        weight: floating point [N, K], K even.

    Returns:
        Scales are float32.

    Raises:
        ValueError: the weight has a NaN or an infinity.
    """
    n, k = weight.shape
    codes = torch.empty(n, k, dtype=torch.uint8)
    scales = torch.empty(n, 1)
    for rows, chunk in _chunks(weight):
        scale = chunk.abs().amax(1, keepdim=True) / 127
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        scales[rows] = scale
        codes[rows] = (chunk / scale).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
    return Matrix8(codes, scales, None)


class _Best:
    """The best of what has been tried for each group, by the values that it gives.

    The best scale for values q is A / B with A = sum(w q) and B = sum(q q), and leaves the error sum(w w) - A^2 / B; so
    the largest A^2 / B wins.
    """

    def __init__(self, grid: Int4, u: torch.Tensor, zeros: torch.Tensor | None) -> None:
        self.grid, self.u, self.zeros = grid, u, zeros
        self.gain = torch.zeros(u.shape[:-1])
        self.factor = torch.ones(u.shape[:-1])
        self._q, self._product = torch.empty_like(u), torch.empty_like(u)

    def attempt(self, inverse: float | torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        """Tries the covering scales over ``inverse``; returns where this is the best so far."""
        q = self.grid.nearest(torch.mul(self.u, inverse, out=self._q), zeros)
        a = torch.mul(q, self.u, out=self._product).sum(-1)
        b = torch.mul(q, q, out=self._product).sum(-1)
        gain = a * a / b  # NaN if all of q is 0, and then not larger
        larger = gain > self.gain
        self.gain = torch.where(larger, gain, self.gain)
        self.factor = torch.where(larger, a / b, self.factor)
        if zeros is not None:
            self.zeros = torch.where(larger, zeros, self.zeros)
        return larger


def searched(grid: Int4, groups: torch.Tensor, covering: Choice) -> Choice:
    """Scales and zero points with a small squared error of rounding to nearest, never more than that of ``covering``.

    Each of the grid's shares of ``covering`` is tried; with zero points then the neighbours of the best one as well.

    Args:
        grid: to round to.
        groups: float32 [..., g].
        covering: float32 or bfloat16 scales [...], not zero, and zero points.

    Returns:
        The dtypes and shapes of ``covering``.
    """
    best = _Best(grid, groups / covering[0].float().unsqueeze(-1), covering[1])  # at most some 20: no sum overflows
    inverses = torch.ones(groups.shape[:-1])
    for share, zeros in grid.tries(groups, covering):
        inverses.masked_fill_(best.attempt(1 / share, zeros), 1 / share)
    if best.zeros is not None:
        middle = best.zeros
        for step in (-1, 1):
            best.attempt(inverses.unsqueeze(-1), (middle + step).clamp_(0, 15))
    scales = grid.stored(covering[0].float() * best.factor, covering[0].dtype)
    chosen = torch.where(scales > 0, scales, covering[0]), best.zeros
    # Storing the scale, or the sums, may have rounded the gain away.
    better = squared_error(grid, groups, chosen) < squared_error(grid, groups, covering)
    zeros = None if covering[1] is None else torch.where(better, chosen[1], covering[1])
    return torch.where(better, chosen[0], covering[0]), zeros


def squared_error(grid: Int4, groups: torch.Tensor, choice: Choice) -> torch.Tensor:
    """float64 [...]: what rounding float32 [..., g] with a choice loses."""
    rounded = _round(grid, groups, choice).double() * choice[0].double().unsqueeze(-1)
    return rounded.sub_(groups).square_().sum(-1)


def _round(grid: Int4, groups: torch.Tensor, choice: Choice) -> torch.Tensor:
    return grid.nearest(groups / choice[0].float().unsqueeze(-1), choice[1])
