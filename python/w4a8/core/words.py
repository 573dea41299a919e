"""Kinds of matrices, counts of layers and sizes, in words for messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

_PLURALS = {"layer of experts": "layers of experts"}

# Names of formats, by ``values`` and ``scale_dtype`` of a header.
_FORMATS = {("e2m1", "e8m0"): "MXFP4", ("e2m1", "e5m3"): "NVFP4"}


def weights_in_words(header: Mapping[str, object]) -> str:
    """A text like ``int4 with zero points in groups of 128``.

    Args:
        header: ``values``, ``scale_dtype``, ``has_zero_points``, ``has_minimums``, ``group`` and ``k`` of a packed
            matrix.
    """
    name = _FORMATS.get((header["values"], header["scale_dtype"]), header["values"])
    zeros = " with zero points" * header["has_zero_points"] + " with minimums" * header["has_minimums"]
    return f"{name}{zeros}" + (" channelwise" if header["group"] == header["k"] else f" in groups of {header['group']}")


def counted(counts: Counter[str]) -> str:
    """A text like ``2 linear layers (int4 in groups of 32), 1 output layer (int8 channelwise)``, the most first.

    Args:
        counts: number of layers of each ``<kind of layer>: <detail>``.
    """
    kinds: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for key, count in counts.most_common():
        kind, _, detail = key.partition(": ")
        kinds[kind].append((detail, count))
    parts = []
    for kind, details in kinds.items():
        total = sum(count for _, count in details)
        listed = ", ".join(f"{count} {detail}" if len(details) > 1 else detail for detail, count in details)
        parts.append(f"{plural(total, kind)} ({listed})")
    return ", ".join(parts)


def plural(count: int, kind: str) -> str:
    """A text like ``4 layers of experts``."""
    return f"{count} {kind if count == 1 else _PLURALS.get(kind, f'{kind}s')}"


def gigabytes(count: float) -> str:
    """A text like ``1.24 GB`` (10^9 bytes), ``310.0 MB`` or ``1,024 bytes``."""
    if count < 1e6:
        return f"{int(count):,} bytes"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
