"""serve MODEL by vLLM, with the settings that docs/vllm.md recommends

The command is printed and then takes the place of this one. What comes behind MODEL and is not listed here is given on
to vLLM: `w4a8 serve MODEL --tensor-parallel-size 2`. `--api-key KEY` lets those in alone who have the key.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import w4a8
from w4a8.checkpoint.gguf_file import GGUFFile, is_gguf
from w4a8.checkpoint.gguf_keys import Keys
from w4a8.command import cuts, extras, machine
from w4a8.command.doctor import VLLM, installed
from w4a8.command.model import HELP, find, hub_name, short_name
from w4a8.command.report import number
from w4a8.core.json_fields import json_field, read_json
from w4a8.core.words import gigabytes, plural
from w4a8.formats.packed_directory import METHOD, is_packed
from w4a8.formats.rules import config_in, method_of
from w4a8.integrations.vllm import binding, network, settings
from w4a8.integrations.vllm.settings import LM_HEAD_SWITCH
from w4a8.ops import BLOCK_TOKENS, HEAD_SIZES, attention_block_bytes

CACHE, PRELOAD = "VLLM_CPU_KVCACHE_SPACE", "LD_PRELOAD"
_ALLOCATOR = "libtcmalloc"  # of Google's; vLLM looks for this name
_LONGEST = 8192  # default of --max-model-len
_EAGER, _HEADLESS, _NAMED = "--enforce-eager", "--headless", "served-model-name"
_EXECUTOR = "distributed-executor-backend"
_MPS = (_EXECUTOR, "kv-transfer-config", "ec-transfer-config", "mm-processor-cache-type")  # for vLLM's own executor
_SERVERS = "api-server-count"
_NODES = ("nnodes", "1", int, "-n")
_PARALLEL = (("tensor", "-tp"), ("pipeline", "-pp"), ("data", "-dp"))
_ROOM = 1.05  # factor of the cache's size: vLLM rounds to blocks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``w4a8 serve``."""
    parser.add_argument("model", metavar="MODEL", help=HELP)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=number(int, 1, 65535), default=8000, help="(%(default)s)")
    parser.add_argument(
        "--max-model-len",
        type=number(int, 1),
        metavar="N",
        help=f"tokens of prompt and answer ({_LONGEST}, or the model's own)",
    )
    parser.add_argument(
        "--kv-cache",
        type=number(int, 1),
        metavar="GIB",
        help=f"of the KV cache ({CACHE}); the default holds one sequence of --max-model-len, 1 at least",
    )
    parser.add_argument(
        "--lm-head",
        choices=("int8", "int4", "0"),
        help=f"what an output layer of floats is rounded to ({LM_HEAD_SWITCH}); 0: nothing. The default is int8",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and do not run it")


def run(args: argparse.Namespace) -> int:
    """Prints the command of vLLM and, without ``--dry-run``, replaces this process by vLLM.

    Raises:
        ImportError: vLLM is not installed.
        OSError: the port is taken.
    """
    program = vllm_program()
    if program is None:
        raise ImportError(f"vLLM is not installed here: {extras.TO_GET_VLLM}")
    if not (args.dry_run or _HEADLESS in args.rest or _said(args.rest, "uds", "", str)):
        check_address(args.host, args.port)
    path = find(args.model, weights=False)
    command, variables = command_of(args, program, path)
    if _EAGER in command and _EAGER not in args.rest:
        print(f"# torch.compile needs a C++ compiler, and there is no {_compiler()}: {_EAGER}", flush=True)
    print(
        " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(command)]),
        flush=True,
    )
    if "amx_int8" in w4a8.cpu_features().split():
        print("# this CPU has AMX: compare with W4A8_VLLM=0 in front of it (docs/vllm.md)", flush=True)
    for line in [] if _HEADLESS in args.rest else _where(args, command, _chats(path)):
        print(f"# {line}", flush=True)
    if not args.dry_run:
        os.execve(command[0], command, {**os.environ, **variables})
    return 0


def check_address(host: str, port: int) -> None:
    """Raises OSError if a server listens there: vLLM says so after many seconds, in a traceback."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM
            probe.bind((host, port))
    except OSError as error:  # others are vLLM's to say
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"--port is {port}, but a server listens there already: name another port") from None


def vllm_program() -> list[str] | None:
    """The program that serves MODEL, with its first arguments; None: there is no vLLM.

    The vLLM of this interpreter comes first: the environment of a ``vllm`` on PATH may lack this package.
    """
    if installed(*VLLM) is not None:
        return [sys.executable, "-m", "w4a8.integrations.vllm.command", "serve"]
    found = shutil.which("vllm")
    return None if found is None else [os.path.abspath(found), "serve"]


def _executor(rest: Sequence[str]) -> list[str]:
    """The option that keeps the first rank in the engine's process, where the user and this vLLM leave that to us."""
    _, stages, _ = _parallel(rest)
    others = stages * _said(rest, *_NODES) > 1 or any(_said(rest, each, "", str) for each in _MPS)
    name = None if others else binding.in_process()
    return [] if name is None else [f"--{_EXECUTOR}={name}"]


def command_of(args: argparse.Namespace, program: list[str], path: Path) -> tuple[list[str], dict[str, str]]:
    """The command, and its environment variables.

    Args:
        args: of the command line; ``rest`` is passed to vLLM.
        program: from :func:`vllm_program`.
        path: of the model, from :func:`find`.
    """
    model = args.model if hub_name(args.model) and not is_gguf(path) else str(path)
    sizes = sizes_of(path)
    longest = args.max_model_len or min(_LONGEST, sizes["longest"] or _LONGEST)
    variables = variables_of(path, sizes, longest, args.rest, args.kv_cache)
    _check_ranks(path, sizes, args.rest, int(variables.get(CACHE, os.environ.get(CACHE) or "0")))
    variables |= _preloaded()
    if _said(args.rest, *_NODES) > 1:
        variables |= network.towards(_said(args.rest, "master-addr", "", str))
    if args.lm_head is not None:
        variables[LM_HEAD_SWITCH] = args.lm_head
    options = {"max-model-len": longest, "host": args.host, "port": args.port}
    names = [] if _said(args.rest, _NAMED, "", str) else [f"--{_NAMED}", short_name(args.model, path), model]
    eager = [_EAGER] if shutil.which(_compiler()) is None and _EAGER not in args.rest else []
    if _parallel(args.rest)[-1] > 1 and _HEADLESS not in args.rest and not _said(args.rest, _SERVERS, "", str):
        options[_SERVERS] = 1  # vLLM's default is one for each replica
    said = [f"--{name}={value}" for name, value in options.items()]
    return [*program, model, *said, *names, *eager, *_executor(args.rest), *args.rest], variables


def variables_of(
    path: Path, sizes: Mapping[str, Any], tokens: int, rest: Sequence[str] = (), gib: int | None = None
) -> dict[str, str]:
    """Variables of the environment for vLLM: the size of its cache, and which CPUs compute.

    Args:
        path: of the model.
        sizes: from :func:`sizes_of`.
        tokens: that the cache holds.
        rest: arguments of vLLM.
        gib: the size of the cache; None: as the environment says, else for ``tokens``, 1 at least.
    """
    variables = {}
    if gib is not None or CACHE not in os.environ:
        ours = _quantized(path) or _said(rest, "quantization", "", str) == METHOD
        kind = attention_kind(sizes, rest) if ours else None
        needed = math.ceil(_ROOM * tokens * cache_bytes(sizes, kind) / 2**30)
        variables[CACHE] = str(max(1, needed) if gib is None else gib)
    if binding.chosen():
        return variables
    allowed = os.sched_getaffinity(0)
    shares = binding.shares(allowed, _ranks(rest))
    if shares:
        variables[binding.BIND] = "|".join(map(binding.in_words, shares))
    elif binding.shares_cores(allowed):
        variables[binding.RESERVED] = "0"
    return variables


def _ranks(rest: Sequence[str]) -> int:
    """Processes of this machine that compute, by vLLM's arguments."""
    return math.prod(_parallel(rest)) // max(1, _said(rest, *_NODES))


def _parallel(rest: Sequence[str]) -> list[int]:
    """Ranks with a part of each layer, stages, replicas."""
    return [max(1, _said(rest, f"{name}-parallel-size", "1", int, short)) for name, short in _PARALLEL]


def _check_ranks(path: Path, sizes: Mapping[str, Any], rest: Sequence[str], cache: int) -> None:
    """Says what several ranks cannot do before anything is loaded. ``cache``: GiB of each rank.

    Raises:
        ValueError: heads, groups or blocks cannot be cut, stages are not compiled, or a NUMA node has not the memory
            for its ranks.
    """
    (tensor, stages, _), here, nodes = _parallel(rest), _ranks(rest), machine.node_memory()
    whole_experts = _has(rest, "--enable-expert-parallel", "-ep")
    problem = ""
    if tensor > 1:
        problem = cuts.heads_problem(sizes, tensor) or cuts.down_problem(path, tensor, whole_experts)
    if problem:
        raise ValueError(f"--tensor-parallel-size is {tensor}, but {problem}")
    if stages > 1 and (_has(rest, _EAGER) or shutil.which(_compiler()) is None):
        needed = f"torch.compile: a C++ compiler ({_compiler()}), and no {_EAGER}"
        raise ValueError(f"--pipeline-parallel-size is {stages}, for which vLLM needs {needed}")
    if here < 2 or not nodes or not _quantized(path) or os.environ.get("W4A8_MEMORY") == "map":
        return
    files = GGUFFile(path).paths if is_gguf(path) else path.glob("*.safetensors")
    weights = sum(file.stat().st_size for file in files) / tensor / stages
    each = math.ceil(here / len(nodes))
    if each * (weights + cache * 2**30) > min(nodes):
        text = f"{plural(each, 'rank')} of {gigabytes(weights)} of weights and {cache} GiB of cache each"
        raise ValueError(f"a NUMA node has {gigabytes(min(nodes))} of memory, but {text} would be there")


def _preloaded() -> dict[str, str]:
    """LD_PRELOAD with the allocator that vLLM asks for, where there is one; an empty one of the environment stays."""
    given = os.environ.get(PRELOAD)
    if given == "" or _ALLOCATOR in (given or ""):
        return {}
    found = next(filter(None, map(find_library, ("tcmalloc_minimal", "tcmalloc"))), None)
    return {} if found is None else {PRELOAD: ":".join(filter(None, (given, found)))}


def _where(args: argparse.Namespace, command: Sequence[str], chats: bool) -> list[str]:
    """How to reach the server, in lines. ``chats``: it answers in the chat format."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(args.host, args.host)
    url = f"http://{host}:{args.port}/v1"
    name = _said(command, _NAMED, "", str)
    path, question = "completions", {"prompt": "Once upon a time"}
    if chats:
        path, question = "chat/completions", {"messages": [{"role": "user", "content": "What is a CPU?"}]}
    body = json.dumps({"model": name, **question, "max_tokens": 64})
    key = " -H 'Authorization: Bearer KEY'" if _said(command, "api-key", "", str) else ""
    return [
        f"programs for OpenAI's interface take {url} as base URL, and {name} as model; to try it:",
        f"curl -s {url}/{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}",
    ]


def _chats(path: Path) -> bool:
    """Whether a model has a chat template."""
    if is_gguf(path):
        return "tokenizer.chat_template" in GGUFFile(path).keys
    config = path / "tokenizer_config.json"
    return (path / "chat_template.jinja").is_file() or (config.is_file() and "chat_template" in read_json(config))


def _compiler() -> str:
    """The C++ compiler that torch.compile calls, as ``torch._inductor.config`` chooses it."""
    return os.environ.get("CXX") or "g++"


def cache_bytes(sizes: Mapping[str, Any], kind: str | None = None) -> int:
    """Bytes of one token in the KV cache; 0 if the model does not say.

    Args:
        sizes: ``layers``; ``latent``, numbers of a token in multi-head latent attention, or else ``heads``, ``head``.
        kind: from :func:`attention_kind`; None is 16 bits.
    """
    heads, head = sizes["heads"] or 0, sizes["head"] or 0
    if kind is None:
        token = 2 * (sizes["latent"] or 2 * heads * head)
    else:
        token = heads * attention_block_bytes(kind, head, head) // BLOCK_TOKENS
    return token * (sizes["layers"] or 0)


def attention_kind(sizes: Mapping[str, Any], rest: Sequence[str]) -> str | None:
    """The type of the plugin's KV cache for a quantized model, "int8" or "bfloat16"; None: vLLM's own attention runs.

    Args:
        sizes: as for :func:`cache_bytes`.
        rest: arguments of vLLM.

    Raises:
        ValueError: a setting of the plugin has an invalid value; names the setting.
    """
    with settings.of_engine(_said(rest, "additional-config", "{}", json.loads)):
        ours = settings.mode() != "0" and settings.runs_w4a16() and settings.attends()
    blocks = _said(rest, "block-size", "0", int) % BLOCK_TOKENS == 0
    if not (ours and blocks) or sizes["latent"] or sizes["head"] not in HEAD_SIZES:
        return None
    return settings.CACHE_KINDS.get(_said(rest, "kv-cache-dtype", "auto", str))


def _has(rest: Sequence[str], *flags: str) -> bool:
    """Whether one of these options of vLLM without a value is given. vLLM takes ``_`` for ``-``, too."""
    return any(word.replace("_", "-") in flags for word in rest)


def _said(rest: Sequence[str], name: str, default: str, read: Callable[[str], Any], short: str | None = None) -> Any:
    """The value of an option of vLLM; the last one counts. vLLM takes ``_`` for ``-``, too.

    Raises:
        ValueError: the value cannot be read; names the option.
    """
    value, names = default, (f"--{name}", f"--{name.replace('-', '_')}", short)
    for word, behind in zip(rest, [*rest[1:], ""]):
        option, equals, text = word.partition("=")
        if option in names:
            value = text if equals else behind
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"--{name} is {value!r}: {error}") from error


def _quantized(path: Path) -> bool:
    """Whether a model is quantized by a method whose layers the plugin runs."""
    config = None if is_gguf(path) else config_in(path)
    return is_gguf(path) or (config is not None and (method_of(config) is not None or is_packed(config)))


def sizes_of(path: Path) -> dict[str, Any]:
    """``longest``: tokens of the model's context; ``queries``: heads of queries, the most of a layer; and sizes of its
    cache, as :func:`cache_bytes` takes them.
    """
    return _sizes_of_file(path) if is_gguf(path) else _sizes_of_config(read_json(path / "config.json"))


def _sizes_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    text = json_field(config, "text_config", dict, "config.json: text_config") or config

    def size(name: str) -> int | None:
        return json_field(text, name, int, f"config.json: {name}")

    heads, rank, rope = size("num_attention_heads"), size("kv_lora_rank"), size("qk_rope_head_dim")
    return {
        "longest": size("max_position_embeddings"),
        "layers": size("num_hidden_layers"),
        "queries": heads,
        "heads": size("num_key_value_heads") or heads,
        "head": size("head_dim") or ((size("hidden_size") or 0) // heads if heads else None),
        "latent": rank + rope if rank and rope else None,
    }


def _sizes_of_file(path: Path) -> dict[str, Any]:
    keys = Keys(GGUFFile(path).keys)
    heads = keys.get("attention.head_count")
    kept, rank, rope = (
        keys.get(name) for name in ("attention.head_count_kv", "attention.kv_lora_rank", "rope.dimension_count")
    )
    kept = heads if kept is None else kept if isinstance(kept, int) else int(max(kept))  # one number a layer
    head = keys.get("attention.key_length") or (keys.get("embedding_length") // heads if heads else None)
    return {
        "longest": keys.get("context_length"),
        "layers": keys.get("block_count"),
        "queries": heads if isinstance(heads, int) else int(max(heads or [0])),
        "heads": kept,
        "head": head,
        "latent": rank + rope if rank and rope else None,
    }
