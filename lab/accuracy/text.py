"""The text that models read: documentation that Python and the pinned PyTorch bring along."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from typing import Any

import torch

MODULES = [
    "argparse",
    "asyncio",
    "decimal",
    "doctest",
    "email",
    "difflib",
    "heapq",
    "http.cookiejar",
    "logging",
    "pickle",
    "random",
    "statistics",
    "tarfile",
    "textwrap",
    "threading",
    "turtle",
    "typing",
    "unittest",
    "zipfile",
    "optparse",
    "smtplib",
    "imaplib",
    "mailbox",
    "ftplib",
]
OBJECTS = [
    "nn.functional.scaled_dot_product_attention",
    "nn.MultiheadAttention",
    "nn.Conv2d",
    "compile",
    "nn.LSTM",
    "optim.Adam",
    "einsum",
    "nn.CTCLoss",
    "nn.Transformer",
    "nn.GRU",
    "nn.EmbeddingBag",
    "nn.CrossEntropyLoss",
    "distributions",
    "stft",
]
LENGTH = 512  # tokens that a model reads at once
PROMPT = 8192  # tokens of a prompt, where the model can have as many


def torch_object(name: str) -> object:
    found: object = torch
    for part in name.split("."):
        found = getattr(found, part)
    return found


def text() -> str:
    things = [importlib.import_module(name) for name in MODULES] + [torch_object(name) for name in OBJECTS]
    return "\n\n".join(inspect.getdoc(thing) or "" for thing in things)


def digest(text: str) -> str:
    """Says whether two runs read the same."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def windows(ids: torch.Tensor, count: int, length: int, first: int | None) -> list[torch.Tensor]:
    """`count` windows, evenly spread.

    Args:
        ids: int64 [tokens].
        count: of windows.
        length: tokens of a window.
        first: a token that each window starts with, part of its length; None: there is none.

    Raises:
        ValueError: there are too few tokens.
    """
    own = length if first is None else length - 1
    found = len(ids) // own
    if found < count:
        raise ValueError(f"the text has {len(ids)} tokens, expected {count * own} or more")
    start = torch.tensor([] if first is None else [first], dtype=ids.dtype)
    places = [i * found // count for i in range(count)]
    return [torch.cat((start, ids[place * own : (place + 1) * own])) for place in places]


def read(tokenizer: Any, text: str, tokens: int, length: int = LENGTH) -> list[torch.Tensor]:
    """Windows of `length`, about `tokens` tokens."""
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    starts = tokenizer.bos_token_id is not None and int(ids[0]) == tokenizer.bos_token_id
    first = tokenizer.bos_token_id if starts else None
    return windows(ids[1:] if starts else ids, max(1, tokens // length), length, first)
