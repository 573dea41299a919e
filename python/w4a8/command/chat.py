"""talk to MODEL in the terminal, by transformers

    w4a8 chat MODEL                    a model with a chat template answers, another one continues the text
    echo "def " | w4a8 chat MODEL --raw

Floats are rounded while they are loaded. An empty line, or the end of the input, ends it. Text of several lines begins
and ends with three quotation marks. /help lists the commands.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from w4a8.checkpoint.gguf_file import GGUFFile, is_gguf
from w4a8.command import model_loading, sampling, session
from w4a8.command.conversation import Conversation, tell, thinking_switch
from w4a8.command.model import HELP, find
from w4a8.command.report import UsageError, number
from w4a8.core.words import gigabytes, plural
from w4a8.quantization import QuantizationReport

_COMMANDS = {
    "/clear": "forget the conversation, but not the system prompt",
    "/system": "TEXT: a new system prompt, or none",
    "/retry": "another answer to the last question",
    "/save": "FILE: write the messages as JSON",
    "/help": "this list",
}
_QUOTES = '"""'


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
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument(
        "--think", action=argparse.BooleanOptionalAction, help="switch thinking on or off, where the chat template can"
    )
    parser.add_argument("--max-new-tokens", type=number(int, 1), default=512, help="of an answer (%(default)s)")
    parser.add_argument(
        "--ctx", type=number(int, 2), metavar="N", help="the most tokens of a conversation; the default is the model's"
    )
    parser.add_argument(
        "--session",
        type=Path,
        metavar="FILE",
        help="go on with the conversation in FILE, and keep it there with its cache (megabytes, not text)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of random numbers (%(default)s)")
    parser.add_argument("--threads", type=number(int, 1), help="of torch; the default is one per core")
    parser.add_argument(
        "--device", metavar="NAME", help="of everything but the experts, such as cuda; not run on one yet"
    )
    sampling.add_options(parser)
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
        if model.config.get_text_config(decoder=True).vocab_size != 256:
            raise ValueError(f"{args.model} has no tokenizer")
        tokenizer = Bytes()
    said = "" if report is None else f": {_became(report)}"
    tell(f"loaded in {time.perf_counter() - begin:.1f} s{said}")
    for note in model_loading.speed_up(model) if args.device is None else ():
        tell(note)
    conversation = _conversation(args, path, model, tokenizer)
    made_with = _open_session(args, path, conversation)
    if sys.stdin.isatty():
        tell(f"{'/help lists commands; ' if conversation.chat else ''}Ctrl-D ends")
    while True:
        text = _read()
        if not text:
            return 0
        if not (conversation.chat and _command(conversation, text)):
            conversation.ask(text)
        if made_with is not None:
            try:
                session.save(args.session, made_with, conversation.messages, conversation.kept)
            except (OSError, RuntimeError) as error:  # safetensors has a class of its own for a full disk
                tell(f"{args.session} is not written: {error}")


def _became(report: QuantizationReport) -> str:
    """What became of the layers, in words."""
    left = f", {plural(len(report.skipped), 'layer')} left as floats" if report.skipped else ""
    return f"{plural(len(report.replaced), 'layer')} packed, {gigabytes(report.packed_bytes)} of weights{left}"


def _open_session(args: argparse.Namespace, path: Path, conversation: Conversation) -> dict[str, Any] | None:
    """Goes on with the session's conversation, if there is one. What the session is made with; None: there is none."""
    if args.session is None:
        return None
    if not conversation.chat:
        raise UsageError("--session is for answers in the chat format, not for text that is continued")
    from w4a8.integrations.transformers.fast import cache_kind

    made_with = session.identity(path, args, cache_kind(conversation.kept.model))
    if args.session.exists():
        conversation.messages = session.load(args.session, made_with, conversation.kept)
        if args.system is not None:
            conversation.set_system(args.system)
        tell(f"{args.session}: {len(conversation.messages)} messages, {len(conversation.kept.ids)} tokens are kept")
    elif not args.session.parent.is_dir():
        raise UsageError(f"--session {args.session}: there is no folder {args.session.parent}")
    return made_with


def _conversation(args: argparse.Namespace, path: Path, model: Any, tokenizer: Any) -> Conversation:
    from w4a8.integrations.transformers.kept_text import KeptText

    template = getattr(tokenizer, "chat_template", None)
    if template is None and not args.raw:
        tell("there is no chat template: the model continues the text")
    chat, variables = template is not None and not args.raw, {}
    if not chat and (args.system is not None or args.think is not None):
        raise UsageError("--system and --think are for answers in the chat format, not for text that is continued")
    if args.think is not None:
        switch = thinking_switch(str(template))
        if switch is None:
            raise UsageError(f"the chat template of {args.model} has no switch for thinking: leave --think out")
        variables[switch] = args.think
    keys = GGUFFile(path).keys if is_gguf(path) else {}
    options, said = sampling.settings(args, model.generation_config, keys)
    tell(said)
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return Conversation(
        KeptText(model),
        tokenizer,
        {**options, "max_new_tokens": args.max_new_tokens, "num_beams": 1},
        chat=chat,
        system=args.system,
        template=variables,
        context=args.ctx or context,
    )


def _read() -> str:
    """The next text; of several lines between three quotation marks. Nothing: the end."""
    line = _line("> ")
    if line is None or not line.startswith(_QUOTES):
        return line or ""
    lines = [line[len(_QUOTES) :]]
    while not lines[-1].endswith(_QUOTES):
        line = _line(". ")
        if line is None:
            return "\n".join(lines)
        lines.append(line)
    return "\n".join(lines)[: -len(_QUOTES)]


def _line(prompt: str) -> str | None:
    """A line of the input, without its end; None: there is no further one."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\r\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (arrows and history of input())
    while True:
        try:
            return input(prompt)
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            tell("an empty line ends it")


def _command(conversation: Conversation, text: str) -> bool:
    """Does what a line that begins with / says; returns whether it is a command."""
    name, _, rest = text.partition(" ")
    rest = rest.strip()
    if not re.fullmatch(r"/[a-z]+", name):
        return False
    if name == "/clear":
        conversation.clear()
    elif name == "/system":
        conversation.set_system(rest)
    elif name == "/retry":
        question = conversation.take_back()
        if question is None:
            tell("there is no question yet")
        else:
            conversation.ask(question)
    elif name == "/save" and rest:
        try:
            conversation.save(Path(rest))
            tell(f"written: {rest}")
        except OSError as error:
            tell(f"not written: {error}")
    else:
        if name not in _COMMANDS:
            tell(f"there is no {name}")
        for each, does in _COMMANDS.items():
            tell(f"{each} {does}")
    return True
