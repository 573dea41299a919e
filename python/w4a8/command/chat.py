"""talk to MODEL in the terminal, by transformers

    w4a8 chat MODEL                    a model with a chat template answers, another one continues the text
    echo "def " | w4a8 chat MODEL --raw

Floats are rounded while they are loaded. An empty line, or the end of the input, ends it.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import pairwise, takewhile
from typing import Any

import torch

from w4a8.command import model_loading
from w4a8.command.model import HELP, find
from w4a8.command.report import number


class Bytes:
    """Stands in for a tokenizer: one token is one byte (vocabulary 256)."""

    eos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([list(text.encode())])}

    def decode(self, tokens: Any, **_: Any) -> str:
        return bytes(int(token) for token in tokens).decode(errors="replace")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``w4a8 chat``."""
    parser.add_argument("model", metavar="MODEL", help=HELP)
    parser.add_argument("--raw", action="store_true", help="continue the text instead of answering in the chat format")
    parser.add_argument("--max-new-tokens", type=number(int, 1), default=512, help="of an answer (%(default)s)")
    parser.add_argument("--temperature", type=number(float, 0), default=0.7, help="0 is greedy (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (%(default)s)")
    parser.add_argument("--threads", type=number(int, 1), help="of torch; the default is one per core")
    model_loading.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Loads the model and answers line by line."""
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    begin, path = time.perf_counter(), find(args.model)
    model, report = model_loading.load(path, args)
    tokenizer = model_loading.tokenizer_of(path)
    if tokenizer is None:
        if model.config.vocab_size != 256:
            raise ValueError(f"{args.model} has no tokenizer")
        tokenizer = Bytes()
    _tell(f"loaded in {time.perf_counter() - begin:.1f} s")
    _speed_up(model)
    from w4a8.integrations.transformers.kept_text import KeptText

    kept = KeptText(model)
    if report is not None:
        _tell(str(report).splitlines()[0])
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0, "num_beams": 1}
    if args.temperature > 0:
        options["temperature"] = args.temperature
    messages = None if args.raw or getattr(tokenizer, "chat_template", None) is None else []
    if messages is None and not args.raw:
        _tell("there is no chat template: the model continues the text")
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline().rstrip("\r\n")
        if not line:
            return 0
        _answer(kept, tokenizer, line, messages, options)


def _speed_up(model: Any) -> None:
    """Makes all layers run in one call; in an unknown family of models, replaces attention alone (cache of int8)."""
    from w4a8.integrations.transformers import fast_attention, fuse

    try:
        fuse(model)
    except ValueError as error:
        _tell(f"the layers run one by one: {error}")
        try:
            fast_attention(model)
        except ValueError as reason:
            _tell(f"attention is transformers' own: {reason}")


def _tell(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)


def _counter(tokenizer: Any) -> Any:
    """A streamer that writes text as it comes. ``times``: when the prompt was given, and when each token came."""
    from transformers import TextStreamer

    class Counter(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times = [time.perf_counter()]

        def put(self, value: torch.Tensor) -> None:
            if not self.next_tokens_are_prompt:  # the first call has the prompt
                self.times.append(time.perf_counter())
            super().put(value)

    return Counter()


def speeds(prompt_tokens: int, kept: int, times: list[float]) -> str:
    """The speed of reading the prompt and of writing the answer, in tokens per second, as text.

    Args:
        prompt_tokens: length of the prompt.
        kept: how many of them were not read again.
        times: in seconds: when the prompt was given, and when each token came.
    """
    steps = [later - earlier for earlier, later in pairwise(times)]
    if not steps:
        return "nothing written"
    known = f", {kept} of them from before" if kept else ""
    text = f"prompt of {prompt_tokens} tokens{known}: {(prompt_tokens - kept) / steps[0]:.1f} tokens/s"
    written = steps[1:]
    return text + (f"; {len(steps)} written: {len(written) / sum(written):.1f} tokens/s" if written else "")


def _answer(
    kept: Any, tokenizer: Any, text: str, messages: list[dict[str, str]] | None, options: dict[str, Any]
) -> None:
    """Streams the answer of the model. ``text`` and the answer are added to the conversation, ``messages``."""
    stable = 0
    if messages is None:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
    else:
        messages.append({"role": "user", "content": text})
        ids, stable = _prompt(tokenizer, messages)
    prompt = ids.shape[1]
    streamer = _counter(tokenizer)
    pad = kept.model.config.pad_token_id or 0
    try:
        written = kept.generate(ids, stable, streamer=streamer, pad_token_id=pad, **options)
    except (TypeError, AttributeError, LookupError) as error:  # of generation_config.json, say
        raise ValueError(f"transformers cannot generate: {type(error).__name__}: {error}") from error
    if messages is not None:
        reply = tokenizer.decode(written[0, prompt:], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": reply})
    sys.stdout.flush()
    _tell(speeds(prompt, prompt - kept.read, streamer.times))


def _prompt(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[torch.Tensor, int]:
    """The tokens [1, n] of a conversation, and how many of the first ones do not belong to the call for an answer."""
    found = []
    for asks in (True, False):
        try:
            made = tokenizer.apply_chat_template(
                messages, add_generation_prompt=asks, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # the template is code of the model's author and may raise any error
            raise ValueError(f"the chat template fails: {error}; --raw does without") from error
        found.append(made["input_ids"])
    pairs = zip(found[0][0].tolist(), found[1][0].tolist())
    return found[0], sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
