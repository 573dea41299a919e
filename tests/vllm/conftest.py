"""Engines run in processes of their own, several models in each, forked from one that has imported vLLM: that takes
longer than a tiny model to load, pack and run.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import models
import pytest
import torch
from required import pytest_make_collect_report, pytest_runtest_makereport, pytest_sessionstart  # noqa: F401

HERE = Path(__file__).parent
TOKENS = 24
# As on a CPU without AMX, where vLLM chooses other backends; and on one without AVX-512, as far as variables go.
AVX2 = os.environ.get("W4A8_TEST_AVX2", "0") == "1"
HIDE_AMX = AVX2 or os.environ.get("W4A8_TEST_HIDE_AMX", "0") == "1"
ONLY_AVX2 = {
    "W4A8_TEST_AVX2": "1",
    "W4A8_KERNEL": "x86_avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(int(os.environ.get("W4A8_TEST_SEED", "0")))
    return [torch.randint(2, models.VOCAB, (n,), generator=generator).tolist() for n in (5, 17, 40)]


def arguments(case: models.Case, compiled: bool = False) -> dict:
    """Arguments of vllm.LLM for a case."""
    found = {"enforce_eager": not compiled, "dtype": case.dtype}
    if case.model.startswith(("deepseek", "glm4_moe_lite")):
        if not compiled:
            # vLLM 0.32's own rotary operator for CPUs rotates DeepSeek's queries wrongly, unquantized models' too.
            found["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
        if case.dtype != "bfloat16":
            found["attention_backend"] = "CPU_MLA"  # where there is AMX, vLLM takes AMX_MLA, which refuses other dtypes
    return found


@dataclass
class Job:
    """One engine: a checkpoint, arguments of vllm.LLM, a checkpoint to reload from, variables for the plugin."""

    model: Path
    arguments: dict = field(default_factory=dict)
    prompts: list = field(default_factory=prompts)
    tokens: int = TOKENS
    prompt_logprobs: bool = True
    reload: Path | None = None
    guesses: bool = False
    environment: dict = field(default_factory=dict)


def environment(hide_amx: bool = False, **variables) -> dict:
    """Of a process that runs vLLM, without what this one was told about the plugin."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("W4A8_VLLM", "VLLM_PLUGINS"))}
    found = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    found["OMP_WAIT_POLICY"] = "PASSIVE"  # on a busy machine, threads that wait by spinning keep each other waiting
    if hide_amx or HIDE_AMX:
        path = [str(HERE / "hide_amx"), clean.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(entry for entry in path if entry)
        found["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"  # oneDNN asks the CPU itself
    if AVX2:
        found.update(ONLY_AVX2)
    return {**clean, **found, **variables}


# vLLM's guesses of tokens from the prompt: a speculative_config.
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# Of jobs whose output layer is as the plugin has it by default: int8, or as a GGUF file has it. Others leave it alone.
DEFAULT_HEAD = {"W4A8_VLLM_LM_HEAD": ""}
# Of engines whose weights are compared: in one process, and with attention as exact as vLLM's own.
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "W4A8_VLLM_ATTENTION": "0"}
FILES = {"jobs": "jobs.json", "results": "results.pt", "log": "log.txt"}


@functools.cache
def engine_server(hide_amx: bool) -> subprocess.Popen:
    """engine.py, until this process ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, str(HERE / "engine.py")]
    server = subprocess.Popen(command, **pipes, env=environment(hide_amx), start_new_session=True)
    atexit.register(server.communicate)  # which ends it
    return server


def run_engines(
    jobs: list[Job], directory: Path, timeout: float, hide_amx: bool = False, ranks: int = 1, **variables
) -> tuple[list[dict], str]:
    """Results of engine.py, and its log. ranks: processes that run each job together, of whose answers the first's are
    returned.
    """
    directory.mkdir(parents=True, exist_ok=True)
    request = {key: str(directory / name) for key, name in FILES.items()}
    Path(request["jobs"]).write_text(json.dumps([vars(job) for job in jobs], default=str))
    request |= {"directory": str(directory), "environment": variables, "ranks": ranks, "meeting": uuid4().hex}
    server = engine_server(hide_amx or HIDE_AMX)
    print(json.dumps(request), file=server.stdin, flush=True)
    code = "no answer"
    if select.select([server.stdout], [], [], timeout)[0]:
        code = server.stdout.readline().strip()
    else:
        os.killpg(server.pid, signal.SIGKILL)
        engine_server.cache_clear()
    log = Path(request["log"]).read_text()
    assert code == "0", f"{code}\n{log[-4000:]}"
    return torch.load(request["results"]), log


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """`checkpoints(case)`: the directory models.write made for a case; other weights with another seed."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def get(case: models.Case, seed: int = 0) -> Path:
        name = f"{case.name}-{seed}"
        if name not in made:
            directory = root / name
            directory.mkdir()
            made[name] = models.write(case, directory, seed)
        return made[name]

    return get
