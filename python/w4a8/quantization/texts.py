"""Batches of tokens of a text, for ``calibration``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PYDOC = "pydoc"
OWN = "own"


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
    """Evenly spread windows of a text for ``calibration``; fewer if the text is shorter than all together.

    Args:
        tokenizer: of transformers. If the tokenizer puts bos in front of a text, each window begins with bos.
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


def own_text(model: Any, count: int = 16, length: int = 256) -> list[dict[str, torch.Tensor]]:
    """Text that a model writes itself, drawn from its own distribution, as ``calibration`` takes it: no data is needed.

    As in LLM-QAT (Liu et al. 2023, https://arxiv.org/abs/2305.17888). The same model gives the same text.

    Args:
        model: of transformers, that generates text.
        count: of texts, which are written side by side.
        length: tokens of a text, the first of them bos, or else eos.

    Returns:
        ``input_ids`` int64 [1, length], each.
    """
    known = model.generation_config
    first = next((each for each in (known.bos_token_id, known.eos_token_id) if each is not None), 0)
    ids = torch.full((count, 1), first[0] if isinstance(first, list) else first)
    plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    more = length - 1
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=more, max_new_tokens=more, **plain
        )
    return [{"input_ids": row[None]} for row in found]
