"""From float weights to 4-bit codes, their scales and zero points; and to 8-bit codes."""

from __future__ import annotations

import torch

from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix
from w4a8.nn.grids import DEFAULT_GROUP_SIZE, most_in_features
from w4a8.ops import DEFAULT_EFFORT, round_weights

_NOT_FINITE = "a NaN or an infinite element"


def round_weight(
    weight: torch.Tensor,
    group_size: int = DEFAULT_GROUP_SIZE,
    scale_dtype: torch.dtype = torch.float32,
    effort: int = DEFAULT_EFFORT,
    symmetric: bool = True,
    values: str = "int4",
    bias: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> Matrix:
    """Rounds a matrix (docs/quantization.md, "Rounding").

    Args:
        weight: floating point [N, K], K even.
        group_size: values of k per scale, 16 or a multiple of 32 that divides K; -1 is channelwise.
        scale_dtype: float32 or bfloat16. Weights are rounded with the scale as it is stored.
        effort: 0 to 2: how long scales, and zero points, are searched for.
        symmetric: False: a zero point for each group.
        values: ``int4`` or ``e2m1`` (symmetric).
        bias: [N] of the matrix, or None; not rounded.
        importance: floating point [K], what the squared error of a weight counts; None: all alike.

    Returns:
        A weight on the meta device gives tensors on the meta device.

    Raises:
        ValueError: the group does not fit, another scale_dtype, effort or kind, or the weight has a NaN or an infinity.
        RuntimeError: the importance has another size, or numbers that are negative or not finite.
    """
    most_in_features(symmetric, values)  # refuses what is none
    k = weight.shape[1]
    group = k if group_size == -1 else group_size
    if group <= 0 or k % group != 0:
        raise ValueError(f"group_size is {group_size}, expected -1 or a divisor of in_features = {k}")
    check_rounding(scale_dtype, effort)
    codes, scales, zeros = _rounded(weight, group, values, not symmetric, scale_dtype, effort, importance)
    return Matrix(codes, scales, None if symmetric else zeros, values, bias)


def round_to_8_bits(weight: torch.Tensor, effort: int = DEFAULT_EFFORT) -> Matrix:
    """Rounds a matrix, with one float32 scale for each row.

    Args:
        weight: floating point [N, K], K even and at most 65536.
        effort: as in :func:`round_weight`.

    Raises:
        ValueError: another effort, or the weight has a NaN or an infinity.
    """
    check_rounding(torch.float32, effort)
    codes, scales, _ = _rounded(weight, weight.shape[1], Kind.INT8.value, False, torch.float32, effort, None)
    return Matrix(codes, scales, kind=Kind.INT8)


def check_rounding(scale_dtype: torch.dtype, effort: int) -> None:
    """Raises ValueError if one of the two is not what :func:`round_weight` takes."""
    if scale_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"scale_dtype is {scale_dtype}, expected torch.float32 or torch.bfloat16")
    if isinstance(effort, bool) or effort not in (0, 1, 2):
        raise ValueError(f"effort is {effort!r}, expected 0, 1 or 2")


def _rounded(
    weight: torch.Tensor,
    group: int,
    values: str,
    zero_points: bool,
    scale_dtype: torch.dtype,
    effort: int,
    importance: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    try:
        return round_weights(
            weight.detach(),
            group,
            values=values,
            zero_points=zero_points,
            scale_dtype=scale_dtype,
            effort=effort,
            importance=importance,
        )
    except RuntimeError as error:
        if _NOT_FINITE not in str(error):
            raise
        raise ValueError(f"the weight has {_NOT_FINITE}") from None
