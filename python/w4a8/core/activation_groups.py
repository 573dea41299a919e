"""The one place that decides the ``activation_group`` of a packed matrix (docs/numerics.md).

32, 64 or 128: so many values of k of an activation row share a scale, int8 values are symmetric. -1: the whole row has
one scale, int8 values are asymmetric.
"""

from __future__ import annotations

import math

from w4a8.ops import form_problem

# One scale for each row.
PER_TOKEN = -1
# For weights that were made for float activations, where the user asks for nothing else.
DEFAULT_ACTIVATION_GROUP = 32


def check_activation_group(asked: int | None, group_size: int | None = None) -> None:
    """Refuses an activation group that no matrix can have, or no matrix in groups of a known ``group_size``.

    Raises:
        ValueError: as :func:`resolve_activation_group`, if ``asked`` fits no K.
    """
    group = 16 if group_size in (None, PER_TOKEN) else group_size
    resolve_activation_group(asked, group, math.lcm(256, 2 * group))


def resolve_activation_group(asked: int | None, group_size: int, columns: int) -> int:
    """The activation group that a matrix is packed with.

    Args:
        asked: -1, 32, 64 or 128. None: :data:`DEFAULT_ACTIVATION_GROUP`, or -1 if that does not fit.
        group_size: values of k per scale of the weights; -1 is channelwise.
        columns: K.

    Raises:
        ValueError: ``asked`` does not fit, or the operators have no such groups of weights.
    """
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or asked.bit_length() > 63):
        raise ValueError(f"activation_group is {asked!r}, expected None or an int of 64 bits")
    group = columns if group_size == -1 else group_size
    wanted = DEFAULT_ACTIVATION_GROUP if asked is None else asked
    problem = form_problem(group, columns, 1, activation_group=wanted)
    if asked is None:
        return PER_TOKEN if problem else wanted
    if problem:
        raise ValueError(problem)
    return asked


def in_words(asked: int | None) -> str:
    """How activations are rounded for weights that were made for float activations, for a message."""
    group = asked or DEFAULT_ACTIVATION_GROUP
    return "per token" if group == PER_TOKEN else f"in groups of {group}"
