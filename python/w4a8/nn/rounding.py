"""From float weights to codes, their scales and zero points."""

from __future__ import annotations

import torch

from w4a8.core.matrix import Matrix
from w4a8.nn.options import QuantOptions
from w4a8.ops import round_weights

_NOT_FINITE = "a NaN or an infinite element"


def round_weight(
    weight: torch.Tensor,
    options: QuantOptions,
    bias: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> Matrix:
    """Rounds a matrix (docs/quantization.md, "Rounding").

    Args:
        weight: floating point [N, K], K even.
        options: their group divides K. Weights are rounded with the stored scale.
        bias: [N] of the matrix, or None; not rounded, but checked.
        importance: floating point [K], factors of the squared errors of weights; None: all alike.

    Returns:
        A weight on the meta device gives tensors on the meta device.

    Raises:
        ValueError: the group does not divide K, the options have ``bits``, or the weight or the bias has a NaN or an
            infinity.
        RuntimeError: the importance has another size, or numbers that are negative or not finite.
    """
    group = group_of(weight, options)
    check_finite(bias=bias)
    codes, scales, zeros = _rounded(
        weight,
        group,
        values=options.values,
        zero_points=not options.symmetric,
        scale_dtype=options.scale_dtype,
        effort=options.effort,
        importance=importance,
    )
    return Matrix(codes, scales, None if options.symmetric else zeros, options.values, bias)


def group_of(weight: torch.Tensor, options: QuantOptions) -> int:
    """Values of k per scale of a matrix [N, K].

    Raises:
        ValueError: the operators cannot run such a matrix, or the options have ``bits``.
    """
    if options.bits is not None:
        raise ValueError(f"bits is {options.bits}, expected None: of one matrix there is no average")
    k = weight.shape[1]
    group = k if options.group_size == -1 else options.group_size
    problem = options.form.problem(len(weight), k, group)
    if problem:
        raise ValueError(problem)
    return group


def check_finite(weight: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> None:
    """Raises ValueError if one of the two has a NaN or an infinity; says which."""
    for name, tensor in (("bias", bias), ("weight", weight)):
        if tensor is not None and not tensor.is_meta and not tensor.isfinite().all():
            raise ValueError(f"the {name} has {_NOT_FINITE}")


def _rounded(weight: torch.Tensor, group: int, **how: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    try:
        return round_weights(weight.detach(), group, **how)
    except RuntimeError as error:
        if _NOT_FINITE not in str(error):
            raise
        raise ValueError(f"the weight has {_NOT_FINITE}") from None
