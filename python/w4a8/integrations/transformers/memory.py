"""Lets go of what has been read of a mapped file."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable

import torch

_MADV_DONTNEED = 4


class Pages:
    """Takes pages under tensors out of this process, where the tensors are views of mapped files.

    The tensors stay valid: what is read again comes from the file again. Without this a process that reads a checkpoint
    through a mapping holds all of it in the end, as far as memory goes. Tensors elsewhere are not touched.
    """

    def __init__(self, files: Iterable[str]) -> None:
        """Finds the mappings as they are now.

        Args:
            files: paths; mappings of other files are left alone.
        """
        self.mappings: list[tuple[int, int]] = []
        if sys.platform.startswith("linux"):
            self.mappings = _mappings({os.path.realpath(path) for path in files})
            self.libc = ctypes.CDLL(None)

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Lets go of tensors that were not written to since they were mapped.

        A page that is not all of one tensor stays: the mapping is private, and what was written to a neighbour would be
        lost.
        """
        for tensor in tensors:
            begin = tensor.data_ptr()
            end = begin + tensor.numel() * tensor.element_size()
            if tensor.is_contiguous() and any(low <= begin and end <= high for low, high in self.mappings):
                first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
                if first < last:
                    self.libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)


def _mappings(names: set[str]) -> list[tuple[int, int]]:
    """Addresses under which files are mapped."""
    found = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5] in names:
                low, high = (int(address, 16) for address in fields[0].split("-"))
                found.append((low, high))
    return found
