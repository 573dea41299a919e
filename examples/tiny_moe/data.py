"""Byte-level text for the tiny model: the Python standard library of the interpreter that runs this.

Nothing is downloaded and nothing is shipped: the text is read from the installation. The held-out modules depend on
the Python version, which is why every figure measured on them is stored next to the SHA-256 of the bytes it was
measured on.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np

VOCAB_SIZE = 256
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

# Tests are repetitive, tables are not code, and third-party packages are not the standard library.
_SKIPPED_DIRS = frozenset(
    (
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idle_test",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    )
)
_SKIPPED_FILES = frozenset(("html/entities.py", "msilib/schema.py", "msilib/sequence.py", "stringprep.py"))


def stdlib_path() -> Path:
    """Directory of the standard library's Python sources."""
    return Path(sysconfig.get_path("stdlib"))


def _join(paths: list[Path]) -> bytes:
    return b"".join(path.read_bytes() + bytes((SEPARATOR,)) for path in paths)


def training_files() -> list[Path]:
    """Every source file that may be trained on, in a fixed order."""
    root = stdlib_path()
    chosen = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        directories = name.split("/")[:-1]
        if _SKIPPED_DIRS.intersection(directories) or any(part.startswith("config-") for part in directories):
            continue
        if name in HELD_OUT or name in _SKIPPED_FILES or path.name.startswith("_sysconfigdata"):
            continue
        chosen.append(path)
    return chosen


def training_bytes() -> np.ndarray:
    """All training files, each followed by a separator: uint8 [bytes]."""
    return np.frombuffer(_join(training_files()), dtype=np.uint8)


def held_out_bytes() -> bytes:
    """The held-out modules, each followed by a separator."""
    root = stdlib_path()
    # A Python that moved a module gives a shorter text, hence another digest.
    return _join([path for path in (root / name for name in HELD_OUT) if path.exists()])


def held_out_sha256() -> str:
    """Hex digest of :func:`held_out_bytes`; figures are comparable only where it is the same."""
    return hashlib.sha256(held_out_bytes()).hexdigest()


def main() -> None:
    """Print what the corpus of this machine consists of."""
    files = training_files()
    print(f"standard library  {stdlib_path()}")
    print(f"training          {len(files)} files, {training_bytes().size:,} bytes")
    print(f"held out          {len(HELD_OUT)} files, {len(held_out_bytes()):,} bytes, sha256 {held_out_sha256()}")


if __name__ == "__main__":
    main()
