"""Servers of several processes that compute: replicas, and ranks of which one is killed."""

import os
import pickle
import re
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from conftest import DEFAULT_HEAD, Job, run_engines
from example import CHECKPOINT, PROMPTS, TOKENS, with_tokenizer
from server import SERVE, ask, complete, processes_of, serving, shared_files
from vllm.config import ModelConfig

from w4a8.command import main
from w4a8.integrations.vllm import replicas

SEVERAL = {"data_parallel_size": 2, "data_parallel_external_lb": False, "data_parallel_rank_local": None}


@pytest.mark.parametrize(
    "experts, ours, changes, alone",
    [
        (8, True, {}, True),
        (8, True, {"data_parallel_size": 1}, False),
        (8, True, {"data_parallel_external_lb": True}, False),
        (8, True, {"data_parallel_rank_local": 0}, False),  # each replica is started by itself
        (8, True, {"distributed_executor_backend": "external_launcher"}, False),
        (8, False, {}, False),
        (0, True, {}, False),  # as vLLM does it
    ],
)
def test_which_replicas_compute_alone(experts, ours, changes, alone):
    """The answer goes to the process of each replica, which then counts itself alone."""
    model, quantization = ModelConfig.__new__(ModelConfig), type("Config", (), {})
    model.model_arch_config = SimpleNamespace(num_experts=experts)
    quantization.__module__ = "w4a8.x" if ours else "vllm.x"
    parallel = SimpleNamespace(**{"distributed_executor_backend": "mp", **SEVERAL, **changes})
    replicas._part(SimpleNamespace(model_config=model, parallel_config=parallel, quant_config=quantization()))
    model, parallel = pickle.loads(pickle.dumps((model, parallel)))
    assert model.is_moe == (experts > 0 and not alone)
    parallel.data_parallel_size = 1
    assert model.is_moe == (experts > 0)


def test_replicas_answer_as_one_engine(tmp_path):
    """Each has all experts and runs in one call; both answer."""
    prompts = [list(prompt.encode()) for prompt in PROMPTS]
    job = Job(CHECKPOINT, {}, prompts, TOKENS, prompt_logprobs=False, environment=DEFAULT_HEAD)
    (alone,), _ = run_engines([job], tmp_path / "alone", 900, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    log = tmp_path / "serve.log"
    with serving(SERVE, with_tokenizer(tmp_path / "model"), log, "--data-parallel-size", "2") as (address, server):
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            answers = clients.map(lambda prompt: complete(address, prompt, TOKENS), PROMPTS)
            assert [list(answer.encode()) for answer in answers] == alone["outputs"]
        assert main(["verify-server", f"{address}/v1", "--requests", "120", "--prompts", "12"]) == 0
        figures = urllib.request.urlopen(f"{address}/metrics").read().decode()
    assert server.returncode == 0
    counts = re.findall(r'^vllm:request_success_total\{engine="(\d)",finished_reason="length".* (\S+)$', figures, re.M)
    assert sorted(engine for engine, count in counts if float(count) > 0) == ["0", "1"]
    said = log.read_text()
    assert "w4a8: each of 2 replicas holds all experts, and computes alone" in said
    assert len(re.findall(r"w4a8: all \d+ layers run in one call", said)) == 2


def test_a_killed_server_leaves_no_engine(tmp_path):
    log = tmp_path / "serve.log"
    with serving(SERVE, with_tokenizer(tmp_path / "model"), log) as (_, process):
        assert len(processes_of(process.pid)) > 1
        process.kill()
        process.wait()
        killed = time.monotonic()
        while processes_of(process.pid) and time.monotonic() < killed + 60:
            time.sleep(0.1)
    left = processes_of(process.pid)
    for each in left:
        os.kill(int(each.name), signal.SIGKILL)
    assert not left
    assert "w4a8: the process that asks the engine has ended" in log.read_text()


@pytest.mark.parametrize("idle", [False, True], ids=["in the middle of an answer", "idle"])
def test_a_killed_rank_ends_the_server(idle, tmp_path):
    """Before that, answers are those of the server asked alone."""
    log = tmp_path / "serve.log"
    with serving(SERVE, with_tokenizer(tmp_path / "model"), log, "--tensor-parallel-size", "2") as (address, process):
        (rank,) = re.findall(r"pid=(\d+)\).* w4a8: rank 1 computes on CPUs", log.read_text())
        cpus = re.findall(r"w4a8: rank \d computes on CPUs (\S+)", log.read_text())
        assert len(cpus) == 2 and (cpus[0] != cpus[1] or len(os.sched_getaffinity(0)) == 1)
        assert main(["verify-server", f"{address}/v1", "--requests", "60", "--prompts", "6"]) == 0
        shared = shared_files(processes_of(process.pid))
        assert f"/proc/{rank}" in map(str, processes_of(process.pid))
        question = {"prompt": PROMPTS[0], "max_tokens": 2 if idle else 450, "ignore_eos": True, "stream": True}
        with ask(address, "completions", **question) as answer:
            if idle:
                assert answer.read().endswith(b"data: [DONE]\n\n")
            else:
                assert answer.readline().startswith(b"data: ")
            os.kill(int(rank), signal.SIGKILL)
            killed = time.monotonic()
            assert process.wait(60) == 1  # a supervisor starts it again
        while processes_of(process.pid) and time.monotonic() < killed + 60:
            time.sleep(0.1)
    assert not processes_of(process.pid)
    assert not [name for name in shared if os.path.exists(name)]
    assert "Worker proc VllmWorker-1 died unexpectedly" in log.read_text()
