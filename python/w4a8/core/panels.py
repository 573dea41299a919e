"""Single rows of a packed matrix, without unpacking the others.

This file relies on three facts of docs/packed_layout.md: a packed matrix is a header and then panels of 16 rows, all
panels have the same size, and the header has the number of rows. A header and one panel are a packed matrix of 16 rows;
the operators unpack stacks of such matrices.
"""

from __future__ import annotations

import torch

from w4a8.core.matrix import Matrix, unpack_codes
from w4a8.ops import read_header

HEADER, PANEL_ROWS = 64, 16
_N = slice(16, 24)  # place of the number of rows in the header: int64, little-endian
AT_ONCE = 1 << 22  # codes that are unpacked at once


class PackedRows:
    """The rows of one packed matrix."""

    def __init__(self, packed: torch.Tensor) -> None:
        """Takes a packed matrix, uint8 [bytes], without a copy of the panels."""
        header = read_header(packed)
        self.rows, self.columns = header["n"], header["k"]
        self._group, self._kind = header["group"], header["values"]
        self._panels = packed[HEADER:].view(-(-self.rows // PANEL_ROWS), -1)
        self._header = packed[:HEADER].clone()
        self._header[_N] = torch.tensor([PANEL_ROWS]).view(torch.uint8)

    def floats(self, which: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights of some rows, as :meth:`Matrix.floats` has them, rounded to ``dtype``.

        Args:
            which: int64 or int32 [T], indices of rows in any order, with repetitions.
            dtype: of the result.

        Returns:
            [T, columns]. The time depends on T, not on the number of rows of the matrix.

        Raises:
            IndexError: there is no such row.
        """
        if len(which) and not 0 <= int(which.min()) <= int(which.max()) < self.rows:
            raise IndexError(
                f"which has rows {int(which.min())}..{int(which.max())}, but the matrix has rows 0..{self.rows - 1}"
            )
        found = torch.empty(len(which), self.columns, dtype=dtype)
        step = max(1, AT_ONCE // (PANEL_ROWS * self.columns))
        for begin in range(0, len(which), step):
            found[begin : begin + step] = self._floats(which[begin : begin + step].long())
        return found

    def _floats(self, which: torch.Tensor) -> torch.Tensor:
        panels = self._panels.index_select(0, torch.div(which, PANEL_ROWS, rounding_mode="floor"))
        stack = torch.cat((self._header.expand(len(which), HEADER), panels), 1)
        parts = unpack_codes(stack, self._group, self.columns, PANEL_ROWS)
        parts.pop("bias", None)
        row = torch.arange(len(which)), which % PANEL_ROWS
        return Matrix(kind=self._kind, **{name: part[row] for name, part in parts.items()}).floats()
