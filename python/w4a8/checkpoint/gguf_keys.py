"""Keys of a GGUF file: of the right type, or an error that names the key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from w4a8.core.json_fields import CheckpointError, shorten

# Names of Llama 3's way to split a text (tokenizer.ggml.pre).
_MADE_SO = ("falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
LLAMA3 = ("llama3", "llama-v3", "llama-bpe", *_MADE_SO)
# With these llama.cpp begins a text with bos, if the file does not state it.
_WITH_BOS = (*LLAMA3, "tekken", "chameleon")
_MOST_LAYERS = 10_000  # numbers of layers in names of tensors have up to four digits


def added_tokens(keys: Mapping[str, Any]) -> dict[str, bool]:
    """``add_bos_token`` and ``add_eos_token`` of a tokenizer, as in llama.cpp; transformers reads no such keys."""
    model, split = (keys.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    adds_bos = keys.get("tokenizer.ggml.add_bos_token", model == "llama" or split in _WITH_BOS)
    return {"add_bos_token": bool(adds_bos), "add_eos_token": bool(keys.get("tokenizer.ggml.add_eos_token"))}


# pooling_type (llama_pooling_type): the name in a layer of sentence-transformers.
_POOLINGS = {1: "pooling_mode_mean_tokens", 2: "pooling_mode_cls_token", 3: "pooling_mode_lasttoken"}


def pooling_of(keys: Mapping[str, Any]) -> str | None:
    """Pooling of an embedding model, the way from the vectors of a text to one; None: the key is missing or 0 (none).

    Raises:
        CheckpointError: neither none (0), mean (1), cls (2) nor last (3).
    """
    found = Keys(keys)
    kind = found.count("pooling_type", 0, least=0)
    if kind != 0 and kind not in _POOLINGS:
        raise CheckpointError(f"{found.architecture}.pooling_type is {kind} in the GGUF file, but 0..3 is expected")
    return _POOLINGS.get(kind)


class Keys:
    """Keys of a file's architecture, by names without ``<architecture>.``.

    Attributes:
        architecture: ``general.architecture``.
    """

    def __init__(self, keys: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> None:
        """Takes all keys of a file; ``changes`` take precedence, by names without ``<architecture>.``.

        Raises:
            CheckpointError: there is no architecture.
        """
        self.architecture = keys.get("general.architecture")
        if not isinstance(self.architecture, str):
            raise CheckpointError(f"general.architecture is {shorten(self.architecture)}, but a string is expected")
        self._keys, self._changes = keys, changes or {}

    def get(self, name: str, default: Any = None) -> Any:
        """A value of any type."""
        found = self._changes[name] if name in self._changes else self._keys.get(f"{self.architecture}.{name}")
        return default if found is None else found

    def having(self, changes: Mapping[str, Any]) -> Keys:
        """The same keys with other values; None is a key that is not there."""
        return Keys(self._keys, {**self._changes, **changes})

    @property
    def layers(self) -> int:
        """Number of layers of the model. Layers behind these predict further tokens (MTP), and are left out everywhere.

        Raises:
            CheckpointError: ``block_count`` is missing, no count or above 10,000, or all layers are MTP layers.
        """
        further, count = self.count("nextn_predict_layers", 0, least=0), self.count("block_count", most=_MOST_LAYERS)
        if further >= count:
            key = f"{self.architecture}.nextn_predict_layers"
            raise CheckpointError(f"{key} is {further}, but of {count} layers fewer are expected")
        return count - further

    def is_left_out(self, tensor: str) -> bool:
        """Whether a tensor belongs to a layer behind the layers of the model."""
        if self.count("nextn_predict_layers", 0, least=0) == 0:
            return False
        found = re.match(r"blk\.(\d{1,4})\.", tensor)
        return found is not None and self.layers <= int(found[1]) < self.count("block_count")

    def typed(self, name: str, kind: type, default: Any = None) -> Any:
        """A value of a type; an integer is a float, too.

        Raises:
            CheckpointError: another type, or missing without a default.
        """
        value = self.get(name, default)
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        key = f"{self.architecture}.{name}"
        raise CheckpointError(f"{key} is {shorten(value)}, but {kind.__name__} is expected")

    def count(self, name: str, default: int | None = None, least: int = 1, most: int = 2**31 - 1) -> int:
        """A number of things, from ``least`` to ``most``.

        Raises:
            CheckpointError: no integer, or outside this range.
        """
        value = self.typed(name, int, default)
        if not least <= value <= most:
            until = "2**31-1" if most == 2**31 - 1 else most
            raise CheckpointError(f"{self.architecture}.{name} is {value}, but {least}..{until} is expected")
        return value

    def number(self, name: str, default: float | None = None, least: int | None = None) -> float:
        """A number above 0, or from ``least`` on, of its own type.

        Raises:
            CheckpointError: no such number.
        """
        value = self.get(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not (value > 0 if least is None else value >= least):
            key, expected = f"{self.architecture}.{name}", "above 0" if least is None else f"from {least} on"
            raise CheckpointError(f"{key} is {shorten(value)} in the GGUF file, but a number {expected} is expected")
        return value
