"""Frees pages of mapped files that have been read."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable

import torch

from w4a8.core.memory import mapped_files

_MADV_DONTNEED = 4


class Pages:
    """Takes pages of mapped files, of which tensors are views, out of this process.

    The tensors stay valid: a second read comes from the file. Without this a process that reads a checkpoint through a
    mapping ends with the whole checkpoint in memory. Tensors elsewhere are not touched.
    """

    def __init__(self, files: Iterable[str]) -> None:
        """Finds the present mappings.

        Args:
            files: paths; mappings of other files are left alone.
        """
        self.mappings: list[tuple[int, int]] = []
        if sys.platform.startswith("linux"):
            self.mappings = mapped_files({os.path.realpath(path) for path in files})
            self.libc = ctypes.CDLL(None)

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Frees the pages of tensors that were never written to.

        A page with another tensor stays: the mapping is private, and a write to the other tensor would be lost.
        """
        for tensor in tensors:
            begin = tensor.data_ptr()
            end = begin + tensor.numel() * tensor.element_size()
            if tensor.is_contiguous() and any(low <= begin and end <= high for low, high in self.mappings):
                first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
                if first < last:
                    self.libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)
