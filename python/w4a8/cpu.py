"""What this CPU can run, and choosing a kernel by hand.

Every kernel gives the same bits (docs/numerics.md), so a choice changes only speed. It holds for the whole process,
from the next call on: an operator that runs in another thread meanwhile ends with the kernel it began with.
"""

from typing import TypedDict

from w4a8 import compiled


class KernelInfo(TypedDict):
    """One row of the list of kernels."""

    name: str
    supported: bool  # this CPU has the features, and the kernel is not turned off
    needs: str  # CPU features, separated by spaces
    turned_off: str  # why it is turned off in this process, as far as is known; else ""


# What was last forced from Python; "" leaves the choice to W4A8_KERNEL or else to the CPU.
_forced = ""


def kernels() -> list[KernelInfo]:
    """All kernels compiled in, best first.

    Before a kernel is used for the first time in a process, its results are compared with those of the next one, and
    the operating system is asked for what it gives on request (AMX). A kernel that fails is turned off, with a warning
    by the next operator. Listing the kernels asks for nothing and compares nothing.
    """
    return compiled.kernels()


def active_kernel() -> str:
    """The name of the kernel that runs.

    Raises:
        ValueError: the environment variable W4A8_KERNEL names a kernel that does not exist, that this CPU cannot run,
            or that is turned off.
    """
    return compiled.active_kernel()


def cpu_features() -> str:
    """The features of this CPU that kernels ask for, separated by spaces."""
    return compiled.cpu_features()


class _Choice:
    """Returned by use_kernel; leaving a ``with`` block on it restores the choice before."""

    def __init__(self, previous: str) -> None:
        self._previous = previous

    def __enter__(self) -> str:
        return active_kernel()

    def __exit__(self, *exc_info: object) -> None:
        use_kernel(self._previous)


def use_kernel(name: str) -> _Choice:
    """Forces a kernel, from now on or for a ``with`` block.

        w4a8.use_kernel("scalar")          # from now on
        with w4a8.use_kernel("scalar"):    # inside the block
            ...

    Args:
        name: a name out of kernels(), or "" for the default: W4A8_KERNEL if set, else the best one for this CPU.

    Raises:
        ValueError: no kernel of that name exists, this CPU cannot run it, or it is turned off. Lists the choices;
            nothing is changed.
    """
    global _forced
    compiled.use_kernel(name)
    previous, _forced = _forced, name
    return _Choice(previous)
