"""whether a server's answers depend on who else is served: asks it alone, then with many clients

Each prompt is answered once while the server does nothing else. Then clients ask the same prompts at a time, in another
order, and stop some answers midway. Tokens and their log probabilities must be the same, to the last bit. The server
is one of `w4a8 serve`, or any other for OpenAI's completions with log probabilities.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any

from w4a8.command.report import add_json, labelled, number, show
from w4a8.core.json_fields import shorten
from w4a8.progress import progress_bar

_WORDS = ("the", "river", "was", "wide", "and", "nobody", "knew", "how", "deep", "it", "ran", "so", "they", "asked")
_MOST = 2000  # characters of a prompt
_STOPPED = 5  # of so many answers one is stopped midway
_WAIT = 600  # seconds, for an answer beside others on a slow machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``w4a8 verify-server``."""
    url = "http://127.0.0.1:8000/v1"
    parser.add_argument("url", metavar="URL", nargs="?", default=url, help="base URL of the server (%(default)s)")
    parser.add_argument("--model", help="name of the model (the first that the server has)")
    parser.add_argument("--api-key", default="", help="key of the server")
    parser.add_argument("--clients", type=number(int, 1, 1024), default=16, help="that ask at a time (%(default)s)")
    parser.add_argument("--requests", type=number(int, 1), default=240, help="of all clients (%(default)s)")
    parser.add_argument("--prompts", type=number(int, 1), default=24, help="different ones (%(default)s)")
    parser.add_argument("--tokens", type=number(int, 1), default=32, help="of an answer (%(default)s)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Asks a server."""
    answer = examine(args)
    show(answer, _text(answer), args.json)
    return 1 if answer["different"] else 0


def examine(args: argparse.Namespace) -> dict[str, Any]:
    """The answer of ``w4a8 verify-server``, in types of JSON.

    Raises:
        ValueError: the server is not there, refuses a request, or gives no log probabilities.
    """
    server = _Server(args)
    prompts = _prompts(args.prompts, server.longest)
    with progress_bar(args.prompts + args.requests, sys.stderr.isatty(), "answer", "asking") as advance:

        def ask(task: tuple[int, bool]) -> Any:
            found = server.answer(prompts[task[0]], stops=task[1])
            advance()
            return found

        alone = [ask((i, False)) for i in range(len(prompts))]
        tasks = [(i % len(prompts), i % _STOPPED == _STOPPED - 1) for i in range(args.requests)]
        random.Random(0).shuffle(tasks)
        with ThreadPoolExecutor(args.clients) as clients:
            beside = list(clients.map(ask, tasks))
    compared = [(i, found) for (i, stops), found in zip(tasks, beside) if not stops]
    wrong = [(i, found) for i, found in compared if found != alone[i]]
    different = [{"prompt": prompts[i], "alone": alone[i], "beside": found} for i, found in wrong]
    stopped = len(tasks) - len(compared)
    counts = {"clients": args.clients, "compared": len(compared), "stopped": stopped}
    return {"url": args.url, "model": server.model, **counts, "different": different}


class _Server:
    def __init__(self, args: argparse.Namespace) -> None:
        self._url, self._tokens = args.url.rstrip("/"), args.tokens
        self._headers = {"Content-Type": "application/json"}
        if args.api_key:
            self._headers["Authorization"] = f"Bearer {args.api_key}"
        with self._open("models") as reply:
            found = {each["id"]: each for each in json.load(reply)["data"]}
        if not found:
            raise ValueError(f"{args.url} has no model")
        self.model = args.model or next(iter(found))
        if self.model not in found:
            raise ValueError(f"--model is {self.model}, but {args.url} has {', '.join(found)}")
        longest = found[self.model].get("max_model_len") or _MOST + args.tokens
        # A character is a token at most.
        self.longest = min(_MOST, longest - args.tokens - 1)
        if self.longest < 1:
            raise ValueError(f"--tokens is {args.tokens}, but the model has {longest} for prompt and answer")

    def answer(self, prompt: str, stops: bool) -> dict[str, Any] | None:
        """Tokens and log probabilities. ``stops``: None, after the first piece of the answer."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": self._tokens, "temperature": 0, "logprobs": 1}
        with self._open("completions", {**body, "ignore_eos": True, "stream": stops}) as reply:
            if stops:
                reply.readline()
                return None
            found = json.load(reply)["choices"][0]["logprobs"]
            answer = found and {"tokens": found["tokens"], "logprobs": found["token_logprobs"]}
        if not answer:
            raise ValueError(f"{self._url} gives no log probabilities")
        return answer

    @contextmanager
    def _open(self, path: str, body: dict[str, Any] | None = None) -> Iterator[Any]:
        """The reply of the server. What goes wrong while it is read is an error that names the address."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{path}", data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_WAIT) as reply:
                yield reply
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise ValueError(f"{self._url}/{path} answers {error.code}: {shorten(said)}") from error
        except OSError as error:
            reason = getattr(error, "reason", None) or error
            raise ValueError(f"{self._url}/{path} does not answer: {reason} (w4a8 serve MODEL starts one)") from error
        except (HTTPException, ValueError, LookupError, TypeError) as error:
            said = f"{type(error).__name__}: {shorten(str(error))}"
            raise ValueError(f"{self._url}/{path} does not answer as OpenAI's servers do ({said})") from error


def _prompts(count: int, longest: int) -> list[str]:
    """Texts of all lengths, of which some begin alike."""
    chance, found = random.Random(1), []
    for i in range(count):
        words = f"{i % 3} " + " ".join(chance.choices(_WORDS, k=longest // 4))
        found.append(words[: max(1, longest * (i + 1) // count)])
    return found


def _text(answer: dict[str, Any]) -> list[str]:
    asked = f"{answer['compared']} answers of {answer['clients']} clients, beside {answer['stopped']} that were stopped"
    rows = [("server", f"{answer['url']}, {answer['model']}"), ("compared", asked)]
    for each in answer["different"]:
        one, other = each["alone"], each["beside"]
        pairs = zip(zip(*one.values()), zip(*other.values()))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one["tokens"]), len(other["tokens"])))
        rows.append(("PROBLEM", f"prompt {shorten(each['prompt'])}: token {at} of the answer differs"))
    good = "same tokens and log probabilities as alone"
    return labelled([*rows, ("result", "DEPENDS ON OTHERS" if answer["different"] else good)])
