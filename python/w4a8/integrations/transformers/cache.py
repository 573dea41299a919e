"""A cache of transformers with packed keys and values for ``paged_attention`` (docs/transformers.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

import w4a8
from w4a8.ops import BLOCK_TOKENS, HEAD_SIZES

KINDS = ("int8", "bfloat16")
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
PAGE = 128  # tokens


@dataclass
class Sequence:
    """A row of the batch."""

    length: int = 0  # tokens, without padding
    pages: list[int] = field(default_factory=list)


@dataclass
class Step:
    """Arguments of the operators in one forward, the same for all layers."""

    begin: int  # columns before this step
    rows: torch.Tensor | None  # int64: which of the B * q new columns are tokens, in order; None: all
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # block_table, seq_lens, query_start_loc


class Pages:
    """The pages of tokens in the layers' caches. Page p has the same tokens in every layer.

    Rows that :meth:`select` makes of one row share its pages. A shared page is copied before a row writes to it.
    """

    def __init__(self) -> None:
        self.layers: list[Any] = []  # PackedLayer
        self.reset()

    def reset(self) -> None:
        """Makes all pages free."""
        self.columns = 0  # of the mask: tokens and padding
        self.sequences: list[Sequence] = []
        self.tokens: torch.Tensor | None = None  # bool [B, columns]: no padding; None: there was none
        self.count, self.free = 0, []
        self.table: torch.Tensor | None = None
        self.step: Step | None = None

    def forward(self, begin: int, batch: int, fresh: int, padding: torch.Tensor | None) -> Step:
        """Makes room for new columns, for the first layer of a forward; the other layers get the same step.

        Args:
            begin: columns of the layer.
            batch, fresh: new columns are ``[batch, fresh]``.
            padding: bool [batch, begin + fresh], False for padding; None: all are tokens.

        Raises:
            RuntimeError: an earlier forward was not finished.
            ValueError: another number of rows; ``padding`` has another shape, or differs for earlier columns.
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
        """Counts and places of the new tokens of each row."""
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
        """Copies a page that will be written to, if another row has this page too."""
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
        """Makes these rows the batch, in this order; a row may occur several times."""
        rows = list(rows)
        self.sequences = [Sequence(self.sequences[i].length, list(self.sequences[i].pages)) for i in rows]
        if self.tokens is not None:
            self.tokens = self.tokens[rows]
        self._changed()

    def crop(self, columns: int) -> None:
        """Removes the last ``columns`` columns of each row."""
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


class PackedStates:
    """The result of ``update`` of a packed layer, for keys and for values. Only attention ``w4a8`` can take it."""

    def __init__(self, layer: PackedLayer, key: torch.Tensor, value: torch.Tensor) -> None:
        self.layer, self.key, self.value = layer, key, value  # [B, KV, q, D], [B, KV, q, V] of the new columns
        self.first = layer.columns == 0  # no columns before
        self.step: Step | None = None  # set by write

    def write(self, padding: torch.Tensor | None) -> Step:
        """Writes keys and values into the cache, once."""
        if self.step is None:
            self.step = self.layer.write(self.key, self.value, padding)
        return self.step

    def to(self, *args: Any, **kwargs: Any) -> PackedStates:
        """Itself: models move what layers share to the device of a layer, and all are on the CPU."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            'keys and values are packed in a W4A8Cache, which attention "w4a8" alone can read: call '
            'model.set_attn_implementation("w4a8"); a model that does more with them cannot use this cache'
        )


def _refuse_accelerator(keys: torch.Tensor) -> None:
    if keys.device.type not in ("cpu", "meta"):
        raise ValueError(f"keys are on {keys.device}, expected a CPU: beside an accelerator use another cache")


class PackedLayer(CacheLayerMixin):
    """The cache of one layer of the model; a layer of DynamicCache if the operator cannot take the heads."""

    is_croppable = True

    def __init__(self, pages: Pages, kind: str) -> None:
        super().__init__()
        self.pages, self.kind, self.columns = pages, kind, 0
        self.stock: DynamicLayer | None = None
        self.cache: torch.Tensor | None = None  # uint8 [pages, KV, bytes]
        pages.layers.append(self)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        _refuse_accelerator(key_states)
        sizes = key_states.shape[-1], value_states.shape[-1]
        if all(size in HEAD_SIZES for size in sizes) and key_states.dtype in _TYPES and key_states.device.type == "cpu":
            self.make_cache(key_states.shape[1], *sizes)
        else:
            self.stock = DynamicLayer()
            self.is_initialized = True

    def make_cache(self, heads: int, key_size: int, value_size: int) -> None:
        block = w4a8.attention_block_bytes(self.kind, key_size, value_size)
        self.value_size = value_size
        self.cache = torch.empty(0, heads, PAGE // BLOCK_TOKENS * block, dtype=torch.uint8)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Takes keys [B, KV, q, D], values [B, KV, q, V]. Attention, which knows the padding, writes both."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.stock is not None:
            return self.stock.update(key_states, value_states)
        states = PackedStates(self, key_states, value_states)
        return states, states

    def write(self, key: torch.Tensor, value: torch.Tensor, padding: torch.Tensor | None) -> Step:
        batch, _, fresh, _ = key.shape
        step = self.pages.forward(self.columns, batch, fresh, padding)
        self.reserve()
        w4a8.paged_attention_write(
            token_rows(key, step), token_rows(value, step), self.cache, *step.tables, kind=self.kind
        )
        self.columns += fresh
        return step

    def reserve(self) -> None:
        have, needed = len(self.cache), self.pages.count
        if have < needed:
            grown = self.cache.new_empty(max(needed, have * 3 // 2), *self.cache.shape[1:])
            grown[:have] = self.cache
            self.cache = grown

    def copy_pages(self, old: list[int], new: list[int]) -> None:
        if self.cache is not None:
            self.reserve()
            self.cache[new] = self.cache[old]

    def get_seq_length(self) -> int:
        return self.columns if self.stock is None else self.stock.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.is_initialized, self.cache, self.stock, self.columns = False, None, None, 0

    # W4A8Cache does these in its pages, once for all layers.
    def crop(self, tokens_to_remove: int) -> None:
        if self.stock is not None:
            self.stock.crop(tokens_to_remove)
        else:
            self.columns = max(0, self.columns + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.stock is not None:
            self.stock.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.stock is not None:
            self.stock.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.stock is not None:
            self.stock.batch_select_indices(indices)


class LatentLayer(PackedLayer):
    """The cache of one layer with latent attention (MLA), for layers that run in one call; else one of DynamicCache."""

    def __init__(self, pages: Pages) -> None:
        super().__init__(pages, "latent")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Takes latent rows [B, 1, q, rank] and turned channels [B, 1, q, rope] of a model's own layers.

        Raises:
            RuntimeError: the cache has rows of a step in one call.
        """
        _refuse_accelerator(key_states)
        if self.columns:
            raise RuntimeError(
                "the cache has latent rows of layers in one call, which the model's own layers cannot read. Call "
                "reset() and begin again"
            )
        if self.stock is None:
            self.stock, self.is_initialized = DynamicLayer(), True
        return self.stock.update(key_states, value_states)


class PackedHybridLayer(LinearAttentionLayer, PackedLayer):
    """The cache of a layer with attention and linear attention side by side (Falcon-H1)."""

    is_compileable = False

    def __init__(self, pages: Pages, kind: str, states: int) -> None:
        PackedLayer.__init__(self, pages, kind)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of keys and values, which come without names, or of states."""
        part = PackedLayer if args else LinearAttentionLayer
        part.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        PackedLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        PackedLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        PackedLayer.reorder_cache(self, beam_idx)


class W4A8Cache(Cache):
    """Keys and values of full, sliding and chunked attention, packed; other layers are as in ``DynamicCache``.

    Of latent attention, the latent rows that layers in one call write (:func:`fuse`), in bfloat16.

    Only attention ``w4a8`` can read the cache: ``model.set_attn_implementation("w4a8")``. Each row of the batch is a
    sequence of its own length. Padding is never kept, and a sliding window counts tokens. Layers with a sliding window
    or chunks keep all tokens too, so that ``crop`` can go back by any number. Rows of beams share full pages.

    Args:
        config: of the model.
        kind: of keys and values, "int8" or "bfloat16".

    Raises:
        ValueError: kind is another.
    """

    def __init__(self, config: Any, kind: str = "int8") -> None:
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}, expected 'int8' or 'bfloat16'")
        self.kind, self.pages = kind, Pages()
        layers, text = DynamicCache(config=config).layers, config.get_text_config(decoder=True)
        is_latent = getattr(text, "kv_lora_rank", None) is not None
        for i, layer in enumerate(layers):
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                layers[i] = LatentLayer(self.pages) if is_latent else PackedLayer(self.pages, kind)
            elif type(layer) is LinearAttentionAndFullAttentionLayer:
                layers[i] = PackedHybridLayer(self.pages, kind, len(layer.conv_states))
        super().__init__(layers=layers)

    def begin_step(
        self, heads: Iterable[tuple[int, int, int]], batch: int, fresh: int, padding: torch.Tensor | None
    ) -> tuple[Step, list[torch.Tensor]]:
        """Makes room for new columns of all packed layers; end_step follows the writing.

        Args:
            heads: number of key heads, and sizes of their keys and values, by packed layer.
            batch, fresh: new columns are [batch, fresh].
            padding: bool [batch, columns before + fresh], False for padding; None: all are tokens.

        Returns:
            Arguments of the operators, and the cache of each packed layer.
        """
        layers = self.pages.layers
        step = self.pages.forward(layers[0].columns, batch, fresh, padding)
        for layer, sizes in zip(layers, heads):
            if layer.cache is None:
                layer.make_cache(*sizes)
            layer.reserve()
        return step, [layer.cache for layer in layers]

    def end_step(self, fresh: int) -> None:
        """Counts ``fresh`` new columns, written in all packed layers."""
        for layer in self.pages.layers:
            layer.columns += fresh

    def reset(self) -> None:
        """Forgets everything, and frees the memory."""
        self.pages.reset()
        super().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` columns of each row.

        Raises:
            ValueError: the number is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}, expected 0 or less")
        super().crop(tokens_to_remove)
        self.pages.crop(min(-tokens_to_remove, self.pages.columns))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was."""
        super().reorder_cache(beam_idx)
        if self.pages.sequences:
            self.pages.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        super().batch_repeat_interleave(repeats)
        self.pages.select(i for i in range(len(self.pages.sequences)) for _ in range(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these rows: numbers, or a bool for each."""
        super().batch_select_indices(indices)
        if self.pages.sequences:
            self.pages.select(torch.arange(len(self.pages.sequences))[indices].tolist())


def token_rows(states: torch.Tensor, step: Step) -> torch.Tensor:
    """[B, heads, q, D] as [tokens, heads, D], without padding."""
    rows = states.transpose(1, 2).flatten(0, 1)
    return rows if step.rows is None else rows[step.rows]
