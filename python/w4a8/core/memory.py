"""Memory for weights: from the system itself, so that it comes page by page and goes back at once."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

from w4a8 import compiled

_SMALLEST = 64 << 10  # an allocator does smaller ones better


def fresh_bytes(*shape: int, packed: bool = False, like: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 zeros. A page that nobody has written takes no memory, and all are given back when the tensor goes.

    Args:
        *shape: of the tensor.
        packed: for packed weights, which are streamed again and again: huge pages (2 MiB) where the system has them, on
            the NUMA nodes that W4A8_MEMORY asks for (docs/memory.md).
        like: where this is on the meta device, so is what comes.

    Raises:
        ValueError: W4A8_MEMORY has another value than it can have.
        RuntimeError: the system refuses what W4A8_MEMORY asks for.
    """
    if like is not None and like.is_meta:
        return torch.empty(shape, dtype=torch.uint8, device="meta")
    count = math.prod(shape)
    if count < _SMALLEST or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=torch.uint8)
    try:
        pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # too many pieces for the system
        return torch.zeros(shape, dtype=torch.uint8)
    if packed:
        compiled.place_packed(pages)
    elif hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)


def keeps_files_mapped() -> bool:
    """Whether packed weights of a file stay where the file is mapped: unless W4A8_MEMORY is ``copy`` or ``interleave``.

    Raises:
        ValueError: W4A8_MEMORY has another value.
    """
    return compiled.packed_memory() == ""


def on_cpu() -> contextlib.AbstractContextManager[object]:
    """A context in which tensors are made on the CPU, whatever the caller's default device is."""
    device = torch.device("cpu")
    return device if hasattr(device, "__enter__") else contextlib.nullcontext()  # torch 1 has no default device
