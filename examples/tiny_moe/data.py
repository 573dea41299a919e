"""Byte-level text for the tiny model: the Python standard library of the interpreter that runs this.

Nothing is downloaded and nothing is shipped: the text is read from the installation. The held-out modules depend on
the Python version, which is why every figure measured on them is stored next to the SHA-256 of the bytes it was
measured on.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

# Python source never contains NUL, so it marks both the end of a file and the start of the text.
SEPARATOR = 0

# Ordinary code of many kinds, none of it trained on.
HELD_OUT = (
    "bdb.py",
    "bisect.py",
    "cmd.py",
    "contextlib.py",
    "filecmp.py",
    "graphlib.py",
    "queue.py",
    "sched.py",
    "shelve.py",
    "string.py",
    "tempfile.py",
    "textwrap.py",
)


def stdlib_path() -> Path:
    """Directory of the standard library's Python sources."""
    return Path(sysconfig.get_path("stdlib"))


def _join(paths: list[Path]) -> bytes:
    return b"".join(path.read_bytes() + bytes((SEPARATOR,)) for path in paths)


def held_out_bytes() -> bytes:
    """The held-out modules, each followed by a separator."""
    root = stdlib_path()
    # A Python that moved a module gives a shorter text, hence another digest.
    return _join([path for path in (root / name for name in HELD_OUT) if path.exists()])


def held_out_sha256() -> str:
    """Hex digest of :func:`held_out_bytes`; figures are comparable only where it is the same."""
    return hashlib.sha256(held_out_bytes()).hexdigest()
