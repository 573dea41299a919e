"""How activations are quantized for a matrix: the one place that decides what it is packed with.

In groups of 32, 64 or 128 values of k a row of activations has one scale each, and int8 values are symmetric; a whole
row (-1) has one scale, and its int8 values are asymmetric (docs/numerics.md).
"""

from __future__ import annotations

# One scale for each row.
PER_TOKEN = -1
# Of activations that share a scale, the most exact first.
SIZES = (32, 64, 128)
# Where weights were made for float activations, and nothing else is asked for.
DEFAULT_ACTIVATION_GROUP = 32


def check_activation_group(asked: int | None, group_size: int | None = None) -> None:
    """Refuses what no matrix can have, and, if ``group_size`` of the weights is known, what does not divide it.

    Raises:
        ValueError: neither None (the default), -1, 32, 64 nor 128, or one that does not divide ``group_size``.
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
    """What a matrix is packed with.

    Args:
        asked: -1, 32, 64 or 128; None is :data:`DEFAULT_ACTIVATION_GROUP`, or where that does not fit the next smaller
            size that does, or else -1.
        group_size: of its weights: values of k per scale; -1 is channelwise.
        columns: K.

    Raises:
        ValueError: ``asked`` does not fit; says what does.
    """
    check_activation_group(asked)
    group = columns if group_size in (-1, columns) else group_size
    unit = columns if group == 16 else group  # what the operators want it to divide
    if asked is None:
        sizes = (size for size in reversed(SIZES) if size <= DEFAULT_ACTIVATION_GROUP)
        return next((size for size in sizes if unit % size == 0), PER_TOKEN)
    if asked == PER_TOKEN or unit % asked == 0:
        return asked
    raise ValueError(
        f"activation_group is {asked}, expected None, {_listed(unit)} for in_features = {columns} in groups of {group}"
    )


def in_words(asked: int | None) -> str:
    """How activations are rounded of weights that were made for float ones, for a message."""
    group = asked or DEFAULT_ACTIVATION_GROUP
    return "per token" if group == PER_TOKEN else f"in groups of {group}"


def _listed(unit: int) -> str:
    """-1 and the sizes that divide a number, in words."""
    fitting = [str(size) for size in (PER_TOKEN, *SIZES) if size == PER_TOKEN or unit % size == 0]
    return " or ".join([", ".join(fitting[:-1]), fitting[-1]] if len(fitting) > 1 else fitting)
