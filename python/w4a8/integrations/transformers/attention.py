"""Attention ``w4a8`` of transformers: ``paged_attention`` over a W4A8Cache, stock attention without one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_overlay,
    sdpa_mask,
    sliding_window_overlay,
)
from transformers.utils import logging

import w4a8
from w4a8.integrations.expectations import missing, parameters
from w4a8.integrations.transformers.cache import PackedStates, token_rows

logger = logging.get_logger(__name__)

NAME = "w4a8"
# Functions made by one `def` share its code.
_BOTH = and_masks(causal_mask_function).__code__
# An overlay of the causal mask: the function that makes it, the variable with its number, and the operator's argument.
_OVERLAYS = (
    (sliding_window_overlay(1).__code__, "sliding_window", "window"),
    (chunked_overlay(1, torch.zeros(1)).__code__, "chunk_size", "chunk"),
)


class Mask:
    """A causal mask of transformers, not made yet: the operator needs no mask, stock attention makes it.

    Any other use by a model makes the mask.

    Args:
        reach: what a token sees of those before it, arguments of the operator (:func:`reach_of`); None: another mask.
        arguments: of ``sdpa_mask``.
        last: of so many last queries; 0: of all.
    """

    def __init__(self, reach: dict[str, int] | None, arguments: dict[str, Any], last: int = 0) -> None:
        self.reach, self.padding, self.arguments, self.last = reach, arguments["attention_mask"], arguments, last

    @cached_property
    def stock(self) -> torch.Tensor | None:
        """bool [B, 1, q, keys], as attention sdpa gets it: None if the argument ``is_causal`` is enough."""
        return self._whole() if self.last else sdpa_mask(**self.arguments)

    def _whole(self) -> torch.Tensor:
        mask = sdpa_mask(**{**self.arguments, "allow_is_causal_skip": False})
        return mask[:, :, -self.last :]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "arguments":
            raise AttributeError(name)
        return getattr(self._whole(), name)

    def __getitem__(self, index: Any) -> Mask | torch.Tensor:
        last = _last_queries(index)
        return self._whole()[index] if last is None else Mask(self.reach, self.arguments, last)


def _last_queries(index: Any) -> int | None:
    """n of ``[:, :, -n:, :]``, by which a model leaves out queries of a prompt; None: another index."""
    everything = slice(None)
    if not isinstance(index, tuple) or len(index) != 4 or (*index[:2], index[3]) != (everything,) * 3:
        return None
    rows = index[2]
    is_end = isinstance(rows, slice) and isinstance(rows.start, int) and rows.start <= 0
    return -rows.start if is_end and (rows.stop, rows.step) == (None, None) else None


def reach_of(function: Callable[..., Any]) -> dict[str, int] | None:
    """``window`` or ``chunk`` of a mask function; {}: a causal mask with neither; None: another mask."""
    if function is causal_mask_function:
        return {}
    parts = _enclosed(function, _BOTH).get("mask_functions", ())
    if len(parts) == 2 and parts[1] is causal_mask_function:
        for code, name, argument in _OVERLAYS:
            found = _enclosed(parts[0], code)
            if found:
                return {argument: found[name]}
    return None


def _enclosed(function: Callable[..., Any], code: Any) -> dict[str, Any]:
    """The enclosed variables of a function with this code."""
    if getattr(function, "__code__", None) is not code:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__)))


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Mask | torch.Tensor | None:
    """For AttentionMaskInterface: a Mask if the cache may be a W4A8Cache, else the mask of attention sdpa."""
    if isinstance(attention_mask, Mask):
        return attention_mask
    arguments = {
        **kwargs, "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask,
        "allow_is_causal_skip": allow_is_causal_skip,
    }  # fmt: skip
    # Static caches have tensors, or more keys than tokens; encoders may skip another mask.
    whole = isinstance(q_offset, int) and kv_offset == 0 and kv_length == q_offset + q_length
    if not whole or "allow_is_bidirectional_skip" in kwargs:
        return sdpa_mask(**arguments)
    return Mask(reach_of(mask_function), arguments)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | PackedStates,
    value: torch.Tensor | PackedStates,
    attention_mask: Mask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """For AttentionInterface.

    Args:
        module: of the model.
        query: [B, H, q, D], the last q of the new columns.
        key, value: results of the cache's update, or [B, KV, keys, D] and [B, KV, keys, V].
        attention_mask: of make_mask, or the model's own.
        dropout, scaling: as for attention sdpa.
        kwargs: of the model.

    Returns:
        [B, q, H, V], and None or, of stock attention, weights.

    Raises:
        NotImplementedError: the operator does not have the attention that is needed over a W4A8Cache.
    """
    if not isinstance(key, PackedStates):
        return _stock(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    mask = attention_mask if isinstance(attention_mask, Mask) else None
    reason = _reason(module, attention_mask, dropout, kwargs)
    if reason is not None:
        if not key.first:
            raise NotImplementedError(f"a W4A8Cache cannot be continued with {reason}: use a DynamicCache")
        out = _stock(module, query, key.key, key.value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        key.write(None if mask is None else mask.padding)
        return out
    if kwargs.get("output_attentions", False):
        logger.warning_once("attention w4a8 has no weights to return: output_attentions=True needs eager attention")
    reach = {"window": kwargs.get("sliding_window") or 0} if mask is None else mask.reach
    step = key.write(None if mask is None else mask.padding)
    asked, fresh = query.shape[2], key.key.shape[2]
    if asked < fresh:  # a layer with the keys of another, of a prompt whose last results alone are wanted
        query = torch.nn.functional.pad(query, (0, 0, fresh - asked, 0))
    batch, heads, _, size = query.shape
    got = w4a8.paged_attention(
        token_rows(query, step),
        key.layer.cache,
        *step.tables,
        size**-0.5 if scaling is None else scaling,
        kind=key.layer.kind,
        value_size=key.layer.value_size,
        **reach,
        soft_cap=kwargs.get("softcap") or 0.0,
        sinks=kwargs.get("s_aux"),
    )
    if step.rows is not None:
        got = got.new_zeros(batch * fresh, *got.shape[1:]).index_copy_(0, step.rows, got)
    return got.view(batch, fresh, heads, -1)[:, fresh - asked :], None


def _reason(
    module: torch.nn.Module, mask: Mask | torch.Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> str | None:
    """Why the operator cannot compute this attention, or None."""
    if mask is None and not _is_causal(module, kwargs):
        return "attention that is not causal"
    if mask is not None and getattr(mask, "reach", None) is None:
        return "a mask that is neither causal nor a sliding window nor chunks"
    if kwargs.get("position_bias") is not None:
        return "a bias for positions"
    return "dropout" if dropout else None


def _is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else causal


def _stock(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask | torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention sdpa; the model's own (eager) for soft caps or sinks, which sdpa does not have."""
    mask = mask.stock if isinstance(mask, Mask) else mask
    eager = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    if eager is None or (kwargs.get("softcap") is None and kwargs.get("s_aux") is None):
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    if mask is None and query.shape[2] > 1 and _is_causal(module, kwargs):
        mask = torch.ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool).tril()  # what attention sdpa does then
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype), torch.finfo(query.dtype).min)
    return eager(module, query, key, value, mask, **kwargs)


def attention_problems() -> list[str]:
    """Parts of transformers that are not as this file expects."""
    needed = ("q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "allow_is_causal_skip")
    found = missing("sdpa_mask", needed, parameters(sdpa_mask))
    sliding = and_masks(sliding_window_overlay(7), causal_mask_function)
    chunks = and_masks(chunked_overlay(5, torch.zeros(1)), causal_mask_function)
    if [reach_of(each) for each in (causal_mask_function, sliding, chunks)] != [{}, {"window": 7}, {"chunk": 5}]:
        found.append("masks of sliding windows and of chunks are not what and_masks makes")
    return found


def register_attention() -> None:
    """Once per process."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
