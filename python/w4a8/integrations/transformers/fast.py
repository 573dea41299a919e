"""``fast_attention``: a model whose ``generate`` uses the attention operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from w4a8.integrations.transformers.attention import NAME, attention_problems
from w4a8.integrations.transformers.cache import W4A8Cache
from w4a8.integrations.transformers.guard import Guard

_HOOK = "_prepare_cache_for_generation"


class _MakesCache(Guard):
    """``_prepare_cache_for_generation`` of one model: W4A8Cache in place of DynamicCache."""

    def __init__(self, model: torch.nn.Module, kind: str, before: str) -> None:
        super().__init__(model)
        self.kind, self.before = kind, before

    def __reduce__(self) -> tuple[type, tuple[Any, str, str]]:
        return type(self), (self._module(), self.kind, self.before)

    def __call__(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        model = self._module()
        # The checkpoint's setting is no wish of the caller: Gemma's is "hybrid", a static cache.
        wish, default = generation_config.cache_implementation, model.generation_config.cache_implementation
        given = model_kwargs.get("past_key_values")
        if wish == default and (given is None or isinstance(given, W4A8Cache)):
            generation_config.cache_implementation = wish = None
        got = type(model)._prepare_cache_for_generation(model, generation_config, model_kwargs, *args, **kwargs)
        if given is None and wish is None and model_kwargs.get("past_key_values") is not None:
            model_kwargs["past_key_values"] = cache = W4A8Cache(model.config, self.kind)
            if generation_config.is_assistant:
                cache.activate_past_recording()
        return got


def fast_attention(model: Any, kind: str = "int8") -> Callable[[], None]:
    """Lets ``model.generate`` use the operator: attention ``w4a8``, and a W4A8Cache in place of a DynamicCache.

    A cache that ``generate`` gets, or makes for ``cache_implementation=``, is used unchanged. The model is tried with
    one token.

    Args:
        model: with ``generate``, on a CPU.
        kind: of the cache, "int8" or "bfloat16".

    Returns:
        A function that undoes the change.

    Raises:
        ValueError: another kind, or the operator cannot compute this model's attention; gives the reason.
    """
    if NAME not in AttentionInterface():
        raise ValueError(f"this transformers is not as attention expects it: {'; '.join(attention_problems())}")
    text = _text_of(model)
    earlier = vars(model).get(_HOOK)
    before = text._attn_implementation if earlier is None else earlier.before
    _set(model, text, NAME)
    try:
        _try(model, text, W4A8Cache(model.config, kind))
    except ValueError:
        _set(model, text, before if earlier is None else NAME)
        raise
    return _make_caches(model, text, kind, before)


def latent_cache(model: Any, kind: str = "int8") -> Callable[[], None]:
    """Lets ``model.generate`` make a W4A8Cache for latent attention, which only layers in one call write to.

    Args, returns, and raises as :func:`fast_attention`.
    """
    text = _text_of(model)
    W4A8Cache(model.config, kind)
    return _make_caches(model, text, kind, text._attn_implementation)


def cache_kind(model: Any) -> str | None:
    """The kind of the W4A8Cache that ``model.generate`` makes; None: it makes another cache."""
    hook = vars(model).get(_HOOK)
    return hook.kind if isinstance(hook, _MakesCache) else None


def _text_of(model: Any) -> Any:
    """The config of the decoder, whose ``generate`` can be given a cache."""
    if not (isinstance(model, PreTrainedModel) and hasattr(model, _HOOK)):
        raise ValueError(f"model is a {type(model).__name__}, expected one of transformers with generate")
    if model.config.is_encoder_decoder:
        raise ValueError("model has an encoder and a decoder, expected a decoder alone")
    if model.device.type != "cpu":
        raise ValueError(f"model is on {model.device}, expected a CPU")
    return model.config.get_text_config(decoder=True)


def _make_caches(model: Any, text: Any, kind: str, before: str) -> Callable[[], None]:
    """Replaces what makes the cache of ``generate``; returns what undoes that, with the attention from before."""
    setattr(model, _HOOK, _MakesCache(model, kind, before))

    def undo() -> None:
        if vars(model).pop(_HOOK, None) is not None:
            _set(model, text, before)

    return undo


def _set(model: Any, text: Any, name: str) -> None:
    """Sets the attention of the decoder alone: encoders of pictures stay."""
    parts = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    model.set_attn_implementation({parts[0]: name} if parts else name)


def _try(model: Any, text: Any, cache: W4A8Cache) -> None:
    """Raises ValueError, with a reason, unless all possible layers of the cache are packed."""
    if text._attn_implementation != NAME:
        raise ValueError(f"{type(model).__name__} has attention of its own, which cannot be set")
    if any(layer.kind == "latent" for layer in cache.pages.layers):
        raise ValueError("its attention is latent (MLA), which fuse() alone runs")
    if not cache.pages.layers:
        raise ValueError("no layer keeps keys and values of all tokens or of a sliding window")
    try:
        with torch.no_grad():
            model(torch.ones(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
    except Exception as error:  # of any model's code
        raise ValueError(f"{type(model).__name__} does not run with it: {type(error).__name__}: {error}") from error
    if any(layer.cache is None for layer in cache.pages.layers):
        raise ValueError("the heads are not of 16 to 512 numbers, a multiple of 16")
    if cache.pages.columns != 1 or any(layer.columns != 1 for layer in cache.pages.layers):
        raise ValueError(f"{type(model).__name__} has layers with attention of their own")
