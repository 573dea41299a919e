"""A conversation of ``w4a8 chat``: its messages, and answers as they are written."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from w4a8.command.session import whole

# What chat templates call a switch for thinking: Qwen, GLM, SmolLM3 and others; DeepSeek.
_THINKING = (r"\b(enable_thinking)\b", r"\b(thinking) is (?:not )?defined\b")


def tell(text: str) -> None:
    """Writes a line that is no answer to stderr."""
    print(f"[{text}]", file=sys.stderr, flush=True)


def thinking_switch(template: str) -> str | None:
    """The variable of a chat template that lets the model think or not; None: it has none."""
    found = (re.search(pattern, template) for pattern in _THINKING)
    return next((match[1] for match in found if match is not None), None)


class Conversation:
    """What was said, and the model's answers.

    Args:
        kept: KeptText of the model.
        tokenizer: of the model.
        options: of ``generate``; ``max_new_tokens`` among them.
        chat: False: the model continues the text, and nothing is remembered.
        system: the system prompt, or none.
        template: variables of the chat template.
        context: the most tokens of a conversation; None: no limit.
    """

    def __init__(
        self, kept: Any, tokenizer: Any, options: dict[str, Any], *, chat: bool, system: str | None = None,
        template: dict[str, Any] | None = None, context: int | None = None,
    ) -> None:  # fmt: skip
        self.kept, self.tokenizer, self.options, self.chat = kept, tokenizer, options, chat
        self.template, self.context = template or {}, context
        self.messages: list[dict[str, str]] = []
        self.set_system(system)

    def set_system(self, text: str | None) -> None:
        """Replaces the system prompt; an empty one is none."""
        rest = [each for each in self.messages if each["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def clear(self) -> None:
        """Forgets all but the system prompt."""
        self.messages = [each for each in self.messages if each["role"] == "system"]
        self.kept.clear()

    def take_back(self) -> str | None:
        """Removes the last question and its answer; returns the question, None if there is none."""
        while self.messages and self.messages[-1]["role"] != "system":
            if self.messages[-1]["role"] == "user":
                return self.messages.pop()["content"]
            self.messages.pop()
        return None

    def save(self, path: Path) -> None:
        """Writes the messages as JSON, whole or not at all."""
        with whole(path) as part:
            part.write_text(json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False) + "\n")

    def ask(self, text: str) -> None:
        """Writes the answer to stdout as it comes. The question and the answer are added to the messages.

        Raises:
            ValueError: the chat template, or transformers, fails.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        if self.chat:
            ids, stable = self._prompt(messages)
        else:
            ids, stable = self.tokenizer(text, return_tensors="pt")["input_ids"], 0
        prompt, limit = ids.shape[1], self.options["max_new_tokens"]
        room = limit if self.context is None else self.context - prompt
        if room < 1:
            new = "; /clear begins a new one" if self.chat else ""
            tell(f"full: {prompt} tokens of the conversation, {self.context} are the most (--ctx){new}")
            return
        streamer = _streamer(self.tokenizer)
        try:
            written = self._write(ids, stable, streamer, min(limit, room))
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            tell("stopped: the question is forgotten")
            return
        if self.chat:
            reply = self.tokenizer.decode(written, skip_special_tokens=True)
            self.messages = [*messages, {"role": "assistant", "content": reply}]
        sys.stdout.flush()
        tell(speeds(prompt, prompt - self.kept.read, streamer.times))
        if len(written) == min(limit, room) and not _ends(self.kept.model, written):
            most = f"{limit} tokens of an answer (--max-new-tokens)"
            tell(f"cut: {most if limit <= room else f'{self.context} tokens of the conversation (--ctx)'}")

    def _write(self, ids: torch.Tensor, stable: int, streamer: Any, count: int) -> list[int]:
        """The new tokens. On a terminal Ctrl-C ends the answer, but raises KeyboardInterrupt before the first token."""
        options = {**self.options, "streamer": streamer, "stopping_criteria": [streamer.stops], "max_new_tokens": count}
        text = self.kept.model.config.get_text_config(decoder=True)  # of a model that also sees, a part
        pad = getattr(text, "pad_token_id", None) or 0
        try:
            with streamer.ends_at_interrupt():
                whole = self.kept.generate(ids, stable, pad_token_id=pad, **options)
        except (TypeError, AttributeError, LookupError) as error:  # of generation_config.json, say
            raise ValueError(f"transformers cannot generate: {type(error).__name__}: {error}") from error
        return whole[0, ids.shape[1] :].tolist()

    def _prompt(self, messages: list[dict[str, str]]) -> tuple[torch.Tensor, int]:
        """Tokens [1, n] of the messages, and how many of the first ones do not belong to the call for an answer."""
        from w4a8.integrations.transformers.kept_text import equal_tokens

        found = []
        for asks in (True, False):
            how = {"add_generation_prompt": asks, "return_tensors": "pt", "return_dict": True, **self.template}
            try:
                found.append(self.tokenizer.apply_chat_template(messages, **how)["input_ids"])
            except Exception as error:  # the template is code of the model's author and may raise any error
                raise ValueError(f"the chat template fails: {error}; --raw does without") from error
        return found[0], equal_tokens(found[0][0].tolist(), found[1][0].tolist())


def _ends(model: Any, written: list[int]) -> bool:
    """Whether the last token is one that ends an answer."""
    ends = model.generation_config.eos_token_id
    return written[-1] in (ends if isinstance(ends, list) else [ends])


def _streamer(tokenizer: Any) -> Any:
    """Writes text as it comes. ``times``: when the prompt was given, and when each token came."""
    from transformers import StoppingCriteria, TextStreamer

    class Streamer(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times = [time.perf_counter()]
            self.stops = Stops()

        def put(self, value: torch.Tensor) -> None:
            if not self.next_tokens_are_prompt:  # the first call has the prompt
                self.times.append(time.perf_counter())
            super().put(value)

        def interrupt(self, *_: Any) -> None:
            if len(self.times) == 1 or self.stops.asked:  # while the prompt is read, or a second time
                raise KeyboardInterrupt
            self.stops.asked = True

        @contextmanager
        def ends_at_interrupt(self) -> Iterator[None]:
            if not sys.stdin.isatty() or threading.current_thread() is not threading.main_thread():
                yield
                return
            before = signal.signal(signal.SIGINT, self.interrupt)
            try:
                yield
            finally:
                signal.signal(signal.SIGINT, before)

    class Stops(StoppingCriteria):
        asked = False

        def __call__(self, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return torch.full((len(ids),), self.asked, device=ids.device)

    return Streamer()


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
