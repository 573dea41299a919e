"""The kinds of weights that floats are rounded to."""

from __future__ import annotations

# Weights that share a scale where floats are quantized and nothing else is asked for.
DEFAULT_GROUP_SIZE = 32


def most_in_features(symmetric: bool, values: str) -> int:
    """K that the operators take, of what ``from_float`` and ``quantize_`` take.

    Raises:
        ValueError: unknown values, or zero points for e2m1.
    """
    if values not in ("int4", "e2m1"):
        raise ValueError(f"values is {values!r}, expected 'int4' or 'e2m1'")
    if values == "e2m1" and not symmetric:
        raise ValueError("symmetric is False, expected True for values = 'e2m1', which have no zero points")
    return 1 << 20 if symmetric and values == "int4" else 1 << 19
