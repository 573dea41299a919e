"""Memory for weights: from the system itself, so that it comes page by page and goes back at once."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from w4a8 import compiled

_SMALLEST = 64 << 10  # an allocator does smaller ones better
_LARGE = 8 << 20  # most of these lie in huge pages anyway
_CHUNK = 64 << 20
_LINE = 64  # bytes


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
    pages = None if count < _SMALLEST else _fresh_pages(count)
    if pages is None:
        return torch.zeros(shape, dtype=torch.uint8)
    if packed:
        compiled.place_packed(pages)
    elif hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)


def _fresh_pages(count: int) -> mmap.mmap | None:
    """None where the system has none: no such system call, or too many pieces."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return None
    try:
        return mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return None


def _set_data(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    tensor.data = moved


def move_together(
    tensors: Iterable[torch.Tensor], put: Callable[[torch.Tensor, torch.Tensor], None] = _set_data
) -> int:
    """Moves small packed weights behind each other into huge pages, in the order in which they are read.

    A matrix of less than a few huge pages lies in pages of 4 KiB, and looking those up takes a third of the time of
    reading it. Large ones, slices, and what is mapped from a file stay.

    Args:
        tensors: uint8, contiguous.
        put: is called with a tensor and its copy in the new place, in whose stead that is to stand from then on. The
            default gives the tensor the data of the copy.

    Returns:
        Bytes that were moved.

    Raises:
        ValueError, RuntimeError: as fresh_bytes.
    """
    mapped = _mapped_files()
    small = list({tensor.data_ptr(): tensor for tensor in tensors if _can_move(tensor, mapped)}.values())
    moved = 0
    while small:
        chunk, ends = [], [0]
        while small and (not chunk or ends[-1] + small[0].numel() <= _CHUNK):
            chunk.append(small.pop(0))
            ends.append(-(-(ends[-1] + chunk[-1].numel()) // _LINE) * _LINE)
        pages = _fresh_pages(ends[-1])
        if pages is None:
            break
        compiled.place_packed(pages)
        for tensor, offset in zip(chunk, ends):
            to = torch.frombuffer(pages, dtype=torch.uint8, count=tensor.numel(), offset=offset)
            moved += tensor.numel()
            put(tensor, to.copy_(tensor.detach()).view(tensor.shape))
    if moved:  # what the allocator keeps for later goes back to the system, where the C library can do that
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
    return moved


def _can_move(tensor: torch.Tensor, mapped: list[tuple[int, int]]) -> bool:
    if tensor.device.type != "cpu" or not 0 < tensor.numel() < _LARGE or not tensor.is_contiguous():
        return False
    storage = getattr(tensor, "untyped_storage", tensor.storage)()  # torch 1 has no untyped one
    if storage.nbytes() != tensor.numel():
        return False
    return not any(begin <= tensor.data_ptr() < end for begin, end in mapped)


def _mapped_files() -> list[tuple[int, int]]:
    """Addresses of this process that are of files."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # another system
        return []
    fields = [line.split(maxsplit=5) for line in lines]
    ranges = [field[0].split("-") for field in fields if len(field) == 6 and field[4] != "0"]
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


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
