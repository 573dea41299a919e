"""Memory for weights, directly from the system: taken page by page when written, given back at once when freed."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Callable, Container, Iterable
from pathlib import Path

import torch

from w4a8 import compiled

_SMALLEST = 64 << 10  # bytes; smaller tensors come from torch's allocator
_LARGE = 8 << 20  # bytes; most of a tensor of this size lies in huge pages anyway
_CHUNK = 64 << 20  # bytes
_LINE = 64  # bytes


def fresh_bytes(*shape: int, packed: bool = False, like: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 zeros. A page that was never written takes no memory. All pages are given back with the tensor.

    Args:
        *shape: of the tensor.
        packed: for packed weights, which are read again and again: huge pages (2 MiB) where the system has them, on
            the NUMA nodes that W4A8_MEMORY asks for (docs/memory.md).
        like: if on the meta device, the result is on the meta device.

    Raises:
        ValueError: W4A8_MEMORY has an unknown value.
        RuntimeError: the system refuses the placement that W4A8_MEMORY asks for.
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
        with contextlib.suppress(OSError):  # a system without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(shape)


def _fresh_pages(count: int) -> mmap.mmap | None:
    """Anonymous memory; None if the system has no such mapping or refuses it, as with too many mappings."""
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
    """Moves small packed weights into huge pages, one after the other, in the order of ``tensors``.

    A matrix smaller than a few huge pages lies in pages of 4 KiB. Looking up these pages takes a third of the time of
    reading the matrix. Large tensors, slices, and tensors mapped from a file stay.

    Args:
        tensors: uint8, contiguous, in the order in which they are read.
        put: called with a tensor and its copy, by which ``put`` must replace the tensor. The default gives the tensor
            the data of the copy.

    Returns:
        Bytes that were moved.

    Raises:
        ValueError, RuntimeError: as fresh_bytes.
    """
    mapped = mapped_files()
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
        compiled.take_pages(pages)
        for tensor, offset in zip(chunk, ends):
            to = torch.frombuffer(pages, dtype=torch.uint8, count=tensor.numel(), offset=offset)
            moved += tensor.numel()
            put(tensor, to.copy_(tensor.detach()).view(tensor.shape))
    if moved:  # give the freed memory back to the system, where the C library can
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
    return moved


def _can_move(tensor: torch.Tensor, mapped: list[tuple[int, int]]) -> bool:
    if tensor.device.type != "cpu" or not 0 < tensor.numel() < _LARGE or not tensor.is_contiguous():
        return False
    storage = getattr(tensor, "untyped_storage", tensor.storage)()  # torch 1 has no untyped_storage
    if storage.nbytes() != tensor.numel():
        return False
    return not any(begin <= tensor.data_ptr() < end for begin, end in mapped)


def mapped_files(paths: Container[str] | None = None) -> list[tuple[int, int]]:
    """Address ranges [begin, end) of this process that are mapped from files; with ``paths``, from these alone."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # another system
        return []
    fields = [line.split(maxsplit=5) for line in lines]
    mapped = [field for field in fields if len(field) == 6 and field[4] != "0"]
    ranges = [field[0].split("-") for field in mapped if paths is None or field[5] in paths]
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


def placed(packed: torch.Tensor, stays_mapped: bool) -> torch.Tensor:
    """Packed weights that are mapped from a file, where ``W4A8_MEMORY`` wants them: there, or copied (fresh_bytes).

    Args:
        packed: the weights.
        stays_mapped: where they are if ``W4A8_MEMORY`` is not set.

    Raises:
        ValueError, RuntimeError: as fresh_bytes.
    """
    memory = compiled.packed_memory()
    if memory == "map" or (stays_mapped and memory == ""):
        return packed
    fresh = fresh_bytes(*packed.shape, packed=True)
    take_pages(fresh)
    return fresh.copy_(packed)


def take_pages(fresh: torch.Tensor) -> None:
    """Takes the pages of fresh bytes from the system, by all threads, before they are written; below 4 MiB nothing.

    A huge page is cleared within the write that touches it first, while other threads that write there wait.
    """
    compiled.take_pages(fresh.view(-1).numpy())


def on_cpu() -> contextlib.AbstractContextManager[object]:
    """A context in which new tensors are on the CPU, whatever the caller's default device."""
    # Torch calls a function of Python for each operator within the context of a device.
    device = torch.device("cpu")
    return contextlib.nullcontext() if torch.empty(0).device == device else device  # torch 1 has no default device
