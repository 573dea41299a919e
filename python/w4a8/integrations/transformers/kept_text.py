"""``KeptText``: the next prompt of a conversation reads only its new tokens."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from w4a8.integrations.transformers.cache import PAGE, PackedLayer, Sequence, W4A8Cache
from w4a8.integrations.transformers.fast import cache_kind

# Layers of transformers' caches that can be cut anywhere, by their names: older versions lack some.
_CUT_ANYWHERE = ("DynamicLayer", "DynamicIndexedLayer", "DummyLayer")


class KeptText:
    """The tokens that a model has read, with their cache: one sequence.

    A new text keeps the longest equal beginning. Keys and values are cut there. A state of linear attention, or a
    window that has dropped tokens, cannot be cut: there is one copy, made at the end of what :meth:`generate` calls
    ``stable``. Before that place such a model reads its text again.

    Args:
        model: with ``generate``; on a CPU after ``fuse`` or ``fast_attention`` if it is to use them.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.clear()

    def clear(self) -> None:
        """Forgets all tokens."""
        self.ids: list[int] = []  # that the cache has
        self.cache: Any = None
        self.read = 0  # tokens that the last call of generate read before the first new one
        self._copy: tuple[int, list[dict[str, Any]]] | None = None  # tokens, and states of each layer after them

    def generate(self, ids: torch.Tensor, stable: int = 0, **options: Any) -> torch.Tensor:
        """``model.generate`` of one sequence, without beams.

        Args:
            ids: int64 [1, n], the whole text.
            stable: how many of the first tokens the next text will probably begin with.
            options: of ``model.generate``.

        Returns:
            int64 [1, n + written], the whole text.

        Raises:
            ValueError: ``ids`` is not one sequence of a token or more.
        """
        if ids.dim() != 2 or len(ids) != 1 or not ids.numel():
            raise ValueError(f"ids has shape {list(ids.shape)}, expected [1, tokens], a token or more")
        tokens, ids = ids[0].tolist(), ids.to(self.model.device)
        kept, cache = self._begin(tokens), self.cache
        self.ids, self.cache = [], None  # nothing is kept if what follows fails
        self.read = len(tokens) - kept
        if cache is not None:
            stable = min(stable, len(tokens) - 1)  # the last token's logits are generate's
            if stable > kept and any(map(_states, cache.layers)):
                self._read(ids[:, kept:stable], cache)
                self._copy = stable, [copy.deepcopy(_states(layer)) for layer in cache.layers]
            options["past_key_values"] = cache
        written = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        if cache is not None and cache.get_seq_length() == written.shape[1] - 1:  # the last token was not read
            self.ids, self.cache = written[0, :-1].tolist(), cache
        else:
            self._copy = None
        return written

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors, and facts in types of JSON, for :meth:`restore`. Of another cache than W4A8Cache there are none."""
        if not isinstance(self.cache, W4A8Cache) or not all(map(_can_be_stored, self.cache.layers)):
            return {}, {}
        (row,) = self.cache.pages.sequences
        tensors, facts = {"ids": torch.tensor(self.ids)}, {"copy": None if self._copy is None else self._copy[0]}
        for i, layer in enumerate(self.cache.layers):
            if isinstance(layer, PackedLayer):
                tensors[f"pages.{i}"], facts[f"value_size.{i}"] = layer.cache[row.pages], layer.value_size
            for when, states in (("now", _states(layer)), ("copy", self._copy[1][i] if self._copy else {})):
                for name, value in states.items():
                    if isinstance(value, dict):  # of each state of the layer
                        for key, each in value.items():
                            where = tensors if isinstance(each, torch.Tensor) else facts
                            where[f"{when}.{i}.{name}.{key}"] = each
                    elif name not in ("device", "dtype"):
                        facts[f"{when}.{i}.{name}"] = value
        return {name: tensor.contiguous() for name, tensor in tensors.items()}, facts

    def restore(self, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        """Makes this the text that :meth:`state` is of, of an equal model with an equal cache."""
        self.clear()
        if not tensors:
            return
        self.ids, self.cache = tensors["ids"].tolist(), _new_cache(self.model)
        count = len(self.ids)
        for i, layer in enumerate(self.cache.layers):
            if isinstance(layer, PackedLayer):
                layer.cache, layer.value_size = tensors[f"pages.{i}"], facts[f"value_size.{i}"]
                layer.columns, layer.is_initialized = count, True
            vars(layer).update(_stored("now", i, {**tensors, **facts}))
        if facts["copy"] is not None:
            copies = [_stored("copy", i, {**tensors, **facts}) for i in range(len(self.cache.layers))]
            self._copy = facts["copy"], copies
        pages = self.cache.pages
        pages.columns, pages.count = count, -(-count // PAGE)
        pages.sequences = [Sequence(count, list(range(pages.count)))]

    def _begin(self, tokens: list[int]) -> int:
        """Cuts the cache back to the tokens that it keeps of a text, all but one at most; returns how many."""
        count = equal_tokens(self.ids, tokens[:-1])
        if self.cache is not None and count < len(self.ids):
            if any(map(_states, self.cache.layers)):
                if self._copy is not None and self._copy[0] <= count:
                    count = self._copy[0]
                    for layer, states in zip(self.cache.layers, self._copy[1]):
                        vars(layer).update(copy.deepcopy(states))
                else:
                    count = 0
            if count:
                _cut(self.cache, len(self.ids) - count)
        if not count:
            self._copy, self.cache = None, _new_cache(self.model)
        return count

    @torch.no_grad()
    def _read(self, ids: torch.Tensor, cache: Any) -> None:
        options = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        self.model(ids, past_key_values=cache, use_cache=True, **options)


def equal_tokens(one: list[int], other: list[int]) -> int:
    """How many first tokens are equal."""
    pairs = enumerate(zip(one, other))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _new_cache(model: Any) -> Any:
    """As ``generate`` makes; None: another kind, which is not kept."""
    kind, options = cache_kind(model), model.generation_config
    if kind is not None:
        return W4A8Cache(model.config, kind)
    if options.cache_implementation is not None or options.use_cache is False:
        return None
    cache = DynamicCache(config=model.config) if model._supports_default_dynamic_cache() else None
    # Without attention the cache does not count its tokens.
    return cache if cache is not None and any(isinstance(each, DynamicLayer) for each in cache.layers) else None


def _states(layer: Any) -> dict[str, Any]:
    """What of a layer of the cache cannot be cut."""
    if isinstance(layer, PackedLayer):
        if not isinstance(layer, LinearAttentionLayer):
            return {}
        return {name: vars(layer)[name] for name in vars(LinearAttentionLayer())}
    return {} if type(layer).__name__ in _CUT_ANYWHERE else dict(vars(layer))


def _can_be_stored(layer: Any) -> bool:
    if isinstance(layer, PackedLayer):
        return layer.cache is not None and layer.stock is None
    return type(layer) is LinearAttentionLayer or type(layer).__name__ == "DummyLayer"


def _stored(when: str, index: int, everything: dict[str, Any]) -> dict[str, Any]:
    """The states of a layer, as ``KeptText.state`` has them."""
    found: dict[str, Any] = {}
    begin = f"{when}.{index}."
    for key, value in everything.items():
        if key.startswith(begin):
            name, _, number = key[len(begin) :].partition(".")
            if number:
                found.setdefault(name, {})[int(number)] = value
            else:
                found[name] = value
            if isinstance(value, torch.Tensor) and name == "conv_states":
                found["device"], found["dtype"] = value.device, value.dtype
    return found


def _cut(cache: Any, count: int) -> None:
    """Removes the last ``count`` tokens from all that can be cut."""
    for layer in cache.layers:
        if isinstance(layer, PackedLayer):
            PackedLayer.crop(layer, -count)
        elif not _states(layer):
            layer.crop(-count)
    if isinstance(cache, W4A8Cache):
        cache.pages.crop(min(count, cache.pages.columns))
