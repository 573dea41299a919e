"""The kernels that this CPU can run, and the choice of a kernel by hand.

Every kernel gives the same bits (docs/numerics.md), so the choice changes speed alone. The choice holds for the whole
process, from the next call on. An operator that is running in another thread keeps its kernel.
"""

from typing import TypedDict

from w4a8 import compiled


class KernelInfo(TypedDict):
    """One row of the list of kernels."""

    name: str
    supported: bool  # this CPU has the features, and the kernel is not turned off
    needs: str  # CPU features, separated by spaces
    turned_off: str  # why the kernel is turned off in this process; "" as long as it is on, as far as is known


# The last name given to use_kernel; "": W4A8_KERNEL decides, or else the CPU.
_forced = ""


def kernels() -> list[KernelInfo]:
    """All kernels compiled in, best first.

    Before the first use of a kernel in a process, a kernel of AMX asks the operating system for permission. The results
    are then compared with those of the next kernel that needs no permission. A kernel that fails is turned off. If its
    results differ, the next operator warns. A call of this function neither asks nor compares.
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
    """The features of this CPU that kernels need, separated by spaces."""
    return compiled.cpu_features()


class _Choice:
    """The result of use_kernel. The end of its ``with`` block restores the previous choice."""

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
        name: a name from kernels(), or "" for the default: W4A8_KERNEL if set, else the best kernel for this CPU.

    Raises:
        ValueError: no kernel has this name, this CPU cannot run the kernel, or the kernel is turned off. Lists the
            choices; the kernel stays as before.
    """
    global _forced
    compiled.use_kernel(name)
    previous, _forced = _forced, name
    return _Choice(previous)
