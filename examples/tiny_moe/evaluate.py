"""Bits per byte of a byte-level model, and text sampled from it."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

import data

CONTEXT = 512
# Every window but the first scores only its last STRIDE bytes, so that each of them has 128 bytes before it at least.
STRIDE = 384


def windows(length: int, context: int = CONTEXT, stride: int = STRIDE) -> Iterator[tuple[int, int]]:
    """Yield (start, scored): together, the last ``scored`` targets of the windows are all ``length`` of them once."""
    start, done = 0, 0
    while done < length:
        # The last window is moved back instead of being shortened: equal lengths can be batched.
        start = max(0, min(start, length - context))
        end = min(start + context, length)
        yield start, end - done
        done = end
        start += stride


@torch.inference_mode()
def bits_per_byte(model: PreTrainedModel, text: bytes, label: str, batch: int = 16) -> float:
    """Average cost of a byte of ``text`` in bits; the text is preceded by one separator, which is not scored."""
    tokens = torch.from_numpy(np.frombuffer(bytes((data.SEPARATOR,)) + text, dtype=np.uint8).astype(np.int64))
    spans = list(windows(len(text)))
    length = min(CONTEXT, len(text))
    total = 0.0
    for first in tqdm(range(0, len(spans), batch), desc=label, unit="batch", leave=False):
        chunk = spans[first : first + batch]
        block = torch.stack([tokens[start : start + length + 1] for start, _ in chunk])
        logits = model(input_ids=block[:, :-1], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten(), reduction="none")
        for row, (_, scored) in zip(loss.view(len(chunk), length), chunk, strict=True):
            total += row[length - scored :].double().sum().item()
    return total / math.log(2) / len(text)


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt: str, new_bytes: int, temperature: float, seed: int) -> Iterator[str]:
    """Continue ``prompt`` byte by byte with a KV cache; yields the text as it is written. Temperature 0 is greedy."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([[data.SEPARATOR, *prompt.encode()]])
    cache = None
    for _ in range(new_bytes):
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits = output.logits[0, -1].float()
        if temperature > 0:
            probabilities = (logits / temperature).softmax(dim=-1)
            chosen = int(torch.multinomial(probabilities, 1, generator=generator))
        else:
            chosen = int(logits.argmax())
        if chosen == data.SEPARATOR:
            break
        yield decoder.decode(bytes((chosen,)))
        tokens = torch.tensor([[chosen]])
    yield decoder.decode(b"", final=True)
