"""Other libraries' kernels beside w4a8's, each in a process and an environment of its own (lab/README.md).

One module per library. A module names what it installs (an Environment) and its entries: classes that set up a problem
and compute it. This list is the only one.
"""

from importlib import import_module

import folders  # noqa: F401, which puts benchmarks/ on the path

from peers.base import Entry

MODULES = ["limits", "own", "aten", "vllm_ops", "zentorch_ops", "ggml", "onnx", "kt"]


def entries(kind: str) -> list[type[Entry]]:
    """Every entry for "linear" or "moe" problems, the limits and w4a8 first."""
    found = []
    for name in MODULES:
        found += [entry for entry in import_module(f"peers.{name}").ENTRIES if entry.kind in (kind, "any")]
    return found
