"""Batches of tokens of a text, for ``calibration``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PYDOC = "pydoc"


def text_of(given: str) -> str:
    """The text of a file, or of ``pydoc``: the language reference that Python brings along, 460,000 characters.

    Raises:
        OSError: the file cannot be read.
    """
    if given != PYDOC:
        return Path(given).read_text(encoding="utf-8", errors="replace")
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def windows(tokenizer: Any, text: str, count: int = 8, length: int = 512) -> list[dict[str, torch.Tensor]]:
    """Evenly spread windows of a text, as ``calibration`` takes them; fewer of a text that is shorter than all.

    Args:
        tokenizer: of transformers. If it begins a text with its token for that, each window begins with it.
        text: any.
        count: of windows.
        length: tokens of a window, all but the last of a short text.

    Returns:
        ``input_ids`` int64 [1, length], each.

    Raises:
        ValueError: the text has no tokens.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError("text is empty, expected some tokens")
    start = [each for each in tokenizer("")["input_ids"][:1] if each == tokenizer.bos_token_id]
    own, most = length - len(start), len(ids)
    places = [i * (most - own) // max(1, count - 1) for i in range(count)]
    if most < count * own:
        places = list(range(0, most, own))
    return [{"input_ids": torch.tensor([start + ids[place : place + own]])} for place in places]
