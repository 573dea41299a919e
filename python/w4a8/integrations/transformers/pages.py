"""Which page of a packed cache holds which tokens of which row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

PAGE = 128  # tokens


@dataclass
class Sequence:
    """A row of the batch."""

    length: int = 0  # tokens, without padding
    pages: list[int] = field(default_factory=list)


@dataclass
class Step:
    """What the operators are told in one forward, the same for all layers."""

    begin: int  # columns that were there before
    rows: torch.Tensor | None  # int64: which of the B * q new columns are tokens, in order; None: all
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # block_table, seq_lens, query_start_loc


class Pages:
    """Which page of the layers' caches holds which tokens. Page p of one layer stands for the same as that of another.

    Full pages are shared by rows that begin alike. A page that is written to belongs to one row.
    """

    def __init__(self) -> None:
        self.layers: list[Any] = []  # PackedLayer
        self.reset()

    def reset(self) -> None:
        """Nothing is held."""
        self.columns = 0  # of the mask: tokens and padding
        self.sequences: list[Sequence] = []
        self.tokens: torch.Tensor | None = None  # bool [B, columns]: no padding; None: there was none
        self.count, self.free = 0, []
        self.table: torch.Tensor | None = None
        self.step: Step | None = None

    def forward(self, begin: int, batch: int, fresh: int, padding: torch.Tensor | None) -> Step:
        """Makes room for new columns, by the first layer of a forward; the others get what it got.

        Args:
            begin: columns of the layer.
            batch, fresh: new columns are ``[batch, fresh]``.
            padding: bool [batch, begin + fresh], False where there is none but padding; None: all are tokens.
        """
        if self.step is not None and self.step.begin == begin:
            return self.step
        if begin != self.columns:
            raise RuntimeError(
                f"a layer of the cache has {begin} columns, others {self.columns}: a forward was not finished. Call "
                "reset() and begin again"
            )
        self.sequences = self.sequences or [Sequence() for _ in range(batch)]
        if batch != len(self.sequences):
            raise ValueError(f"the batch has {batch} rows, the cache {len(self.sequences)}")
        counts, rows = self._note_padding(begin, batch, fresh, padding)
        self._own_last_pages(counts)
        for sequence, count in zip(self.sequences, counts):
            sequence.length += count
            while len(sequence.pages) * PAGE < sequence.length:
                sequence.pages.append(self._page())
                self.table = None
        if self.table is None:
            width = max(1, *(len(sequence.pages) for sequence in self.sequences), 0)
            padded = [sequence.pages + [-1] * (width - len(sequence.pages)) for sequence in self.sequences]
            self.table = torch.tensor(padded, dtype=torch.int32)
        lengths = torch.tensor([sequence.length for sequence in self.sequences], dtype=torch.int32)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        self.columns += fresh
        self.step = Step(begin, rows, (self.table, lengths, starts))
        return self.step

    def _note_padding(
        self, begin: int, batch: int, fresh: int, padding: torch.Tensor | None
    ) -> tuple[list[int], torch.Tensor | None]:
        """New tokens of each row, and where they are."""
        if padding is not None:
            if padding.shape != (batch, begin + fresh):
                expected = [batch, begin + fresh]
                raise ValueError(f"attention_mask has shape {list(padding.shape)}, expected {expected}")
            before = padding[:, :begin]
            if not (before.all() if self.tokens is None else torch.equal(before, self.tokens)):
                raise ValueError("attention_mask says other tokens are padding than when they came into the cache")
        new = None if padding is None else padding[:, begin:]
        if new is None or new.all():
            if self.tokens is not None:
                self.tokens = torch.cat([self.tokens, self.tokens.new_ones(batch, fresh)], 1)
            return [fresh] * batch, None
        old = torch.ones(batch, begin, dtype=torch.bool) if self.tokens is None else self.tokens
        self.tokens = torch.cat([old, new], 1)
        return new.sum(1).tolist(), new.flatten().nonzero()[:, 0]

    def _page(self) -> int:
        if self.free:
            return self.free.pop()
        self.count += 1
        return self.count - 1

    def _own_last_pages(self, counts: Iterable[int]) -> None:
        """Copies a page that is going to be written to where another row has it too."""
        used = Counter(page for sequence in self.sequences for page in sequence.pages) if self.shared() else {}
        copies = {}
        for sequence, count in zip(self.sequences, counts):
            if count and sequence.length % PAGE and used.get(sequence.pages[-1], 0) > 1:
                old, sequence.pages[-1] = sequence.pages[-1], self._page()
                used[old] -= 1
                copies[sequence.pages[-1]] = old
                self.table = None
        if copies:
            for layer in self.layers:
                layer.copy_pages(list(copies.values()), list(copies))

    def shared(self) -> bool:
        """Whether a page belongs to several rows."""
        return sum(len(sequence.pages) for sequence in self.sequences) > self.count - len(self.free)

    def select(self, rows: Iterable[int]) -> None:
        """These rows are the batch now, in this order; one may be there several times."""
        rows = list(rows)
        self.sequences = [Sequence(self.sequences[i].length, list(self.sequences[i].pages)) for i in rows]
        if self.tokens is not None:
            self.tokens = self.tokens[rows]
        self._changed()

    def crop(self, columns: int) -> None:
        """Takes the last ones away."""
        keep = self.columns - columns
        gone = [columns] * len(self.sequences)
        if self.tokens is not None:
            gone = self.tokens[:, keep:].sum(1).tolist()
            self.tokens = self.tokens[:, :keep]
        for sequence, count in zip(self.sequences, gone):
            sequence.length -= count
            del sequence.pages[-(-sequence.length // PAGE) :]
        self.columns = keep
        self._changed()

    def _changed(self) -> None:
        used = {page for sequence in self.sequences for page in sequence.pages}
        self.free = [page for page in range(self.count) if page not in used]
        self.table = self.step = None
