"""Which versions of transformers this was tested with."""

from __future__ import annotations

import os

# tests/python/test_transformers*.py, test_families.py and test_quantize_transformers.py have run with these.
OLDEST, NEWEST = (5, 19), (5, 23)
SWITCH = "W4A8_TRANSFORMERS"


def version_problem(version: str) -> str | None:
    """Why a version of transformers should not be used without being told to, or None.

    Raises:
        ValueError: the variable ``W4A8_TRANSFORMERS`` is neither ``auto`` nor ``1``.
    """
    switch = os.environ.get(SWITCH, "").strip() or "auto"
    if switch not in ("auto", "1"):
        raise ValueError(f"{SWITCH}={switch!r}, expected auto or 1")
    try:
        release = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        release = ()
    if release[:1] < (5,):
        return f"needs transformers 5, this is {version}: load the model with it and call w4a8.quantize_"
    if switch == "1" or OLDEST <= release <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    return (
        f"has not been tested with transformers {version} (tested: {oldest} to {newest}); {SWITCH}=1 in the "
        "environment uses it all the same"
    )
