"""Memory for weights: from the system itself, so that it comes page by page and goes back at once."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_SMALLEST = 64 << 10  # an allocator does smaller ones better


def fresh_bytes(*shape: int, huge_pages: bool = False) -> torch.Tensor:
    """uint8 zeros. A page that nobody has written takes no memory, and all are given back when the tensor goes.

    Args:
        *shape: of the tensor.
        huge_pages: ask for them where the system has them: for what is streamed again and again. A page is 2 MiB then.
    """
    count = math.prod(shape)
    if count < _SMALLEST or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=torch.uint8)
    try:
        pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # too many pieces for the system
        return torch.zeros(shape, dtype=torch.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)


def on_cpu() -> contextlib.AbstractContextManager[object]:
    """A context in which tensors are made on the CPU, whatever the caller's default device is."""
    device = torch.device("cpu")
    return device if hasattr(device, "__enter__") else contextlib.nullcontext()  # torch 1 has no default device
