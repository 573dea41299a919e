"""The one place that decides the ``activation_group`` of a packed matrix (docs/numerics.md).

32, 64 or 128: so many values of k of an activation row share a scale, int8 values are symmetric. -1: the whole row has
one scale, int8 values are asymmetric.
"""

from __future__ import annotations

# One scale for each row.
PER_TOKEN = -1
# Values of k that share a scale, the most exact size first.
SIZES = (32, 64, 128)
# For weights that were made for float activations, where the user asks for nothing else.
DEFAULT_ACTIVATION_GROUP = 32


def check_activation_group(asked: int | None, group_size: int | None = None) -> None:
    """Refuses an activation group that no matrix can have, or that does not divide a known ``group_size`` of weights.

    With a ``group_size`` of -1 or 16, ``asked`` must divide K, which :func:`resolve_activation_group` checks.

    Raises:
        ValueError: ``asked`` is not None (the default), -1, 32, 64 or 128, or does not divide any other ``group_size``.
    """
    if asked is None:
        return
    if isinstance(asked, bool) or asked not in (PER_TOKEN, *SIZES):
        raise ValueError(f"activation_group is {asked!r}, expected None, -1, 32, 64 or 128")
    if group_size in (None, -1, 16) or asked == PER_TOKEN or group_size % asked == 0:
        return
    raise ValueError(
        f"activation_group is {asked}, expected None, {_listed(group_size)}: it must divide group_size = {group_size}"
    )


def resolve_activation_group(asked: int | None, group_size: int, columns: int) -> int:
    """The activation group that a matrix is packed with.

    Args:
        asked: -1, 32, 64 or 128. None: the largest size up to :data:`DEFAULT_ACTIVATION_GROUP` that fits, or -1 if none
            fits.
        group_size: values of k per scale of the weights; -1 is channelwise.
        columns: K.

    Raises:
        ValueError: ``asked`` does not fit; lists the sizes that fit.
    """
    check_activation_group(asked)
    group = columns if group_size in (-1, columns) else group_size
    unit = columns if group == 16 else group  # the operators want a divisor of this number
    if asked is None:
        sizes = (size for size in reversed(SIZES) if size <= DEFAULT_ACTIVATION_GROUP)
        return next((size for size in sizes if unit % size == 0), PER_TOKEN)
    if asked == PER_TOKEN or unit % asked == 0:
        return asked
    raise ValueError(
        f"activation_group is {asked}, expected None, {_listed(unit)} for in_features = {columns} in groups of {group}"
    )


def in_words(asked: int | None) -> str:
    """How activations are rounded for weights that were made for float activations, for a message."""
    group = asked or DEFAULT_ACTIVATION_GROUP
    return "per token" if group == PER_TOKEN else f"in groups of {group}"


def _listed(unit: int) -> str:
    """-1 and the sizes that divide ``unit``, in words."""
    fitting = [str(size) for size in (PER_TOKEN, *SIZES) if size == PER_TOKEN or unit % size == 0]
    return " or ".join([", ".join(fitting[:-1]), fitting[-1]] if len(fitting) > 1 else fitting)
