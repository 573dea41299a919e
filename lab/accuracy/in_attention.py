"""The rows of attention: the operators over a packed cache, in a float32 model; its own attention is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import trained_models

from accuracy.score import Logits, Reference
from accuracy.text import LENGTH
from accuracy.ways import FLOAT, SECTIONS, Case, Running, Way, called, shallow

EXACT = "exact"
KINDS = (EXACT, "int8", "bfloat16")  # of the cache
SCORED = 2048  # the last tokens of a prompt


def in_parts(model: torch.nn.Module, make_cache: Callable[[], Any]) -> Logits:
    """Tokens go through the model LENGTH at a time, each with those before it in the cache; the last SCORED count."""

    def run(ids: torch.Tensor) -> torch.Tensor:
        states, found = make_cache(), []
        for end in range(LENGTH, len(ids) + LENGTH, LENGTH):
            part = ids[None, end - LENGTH : end]
            keep = 0 if end > len(ids) - SCORED else 1  # 0: all
            with torch.no_grad():
                logits = model(part, past_key_values=states, logits_to_keep=keep).logits[0]
            if keep == 0:
                found.append(logits)
        return torch.cat(found)[-SCORED:]

    return run


@contextmanager
def attending(case: Case, kind: str) -> Iterator[Running]:
    """A copy of the float model. EXACT is another float32 implementation than the reference has: only roundings."""
    from transformers import DynamicCache

    from w4a8.integrations.transformers import W4A8Cache

    model = shallow(case.model)
    model.set_attn_implementation("eager" if kind == EXACT else "w4a8")
    make_cache = lambda: DynamicCache(config=model.config) if kind == EXACT else W4A8Cache(model.config, kind)  # noqa: E731
    yield Running(in_parts(model, make_cache), None, "float32" if kind == EXACT else "operators")


def ways(case: Case) -> Iterator[Way]:
    """The windows of the reference, and the prompt, which has a reference of its own."""

    @cache
    def of_prompt() -> Reference:
        from transformers import DynamicCache

        logits = in_parts(case.model, lambda: DynamicCache(config=case.model.config))
        return Reference(logits, [case.prompt], trained_models.FOLDER / "prompt.npy")

    for length, reference in ((len(case.reference.windows[0]), None), (len(case.prompt), of_prompt)):
        for kind in KINDS:
            title = f"{'attention' if kind == EXACT else 'cache'}: {kind}, {length:,} tokens"
            yield Way(SECTIONS[4], title, called(FLOAT), lambda kind=kind: attending(case, kind), reference)
