"""The trained model of examples/tiny_moe writes the demo's text, offline and through the server."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from conftest import Job, run_engines
from example import CHECKPOINT, PROMPTS, TOKENS, check_greedy, demo_model, with_tokenizer
from server import VLLM, complete, serving
from vllm.v1.executor.multiproc_executor import WorkerProc

from w4a8.command import main
from w4a8.integrations.vllm import binding, hosts
from w4a8.integrations.vllm.executor import InProcess, _end_after

# Differences of logits, whose standard deviation is 8. float32 in both: the additions outside the operators come in
# another order, which tips a value over to the next of 255 integers here and there, and that moves all logits after it
# by hundredths. bfloat16 keeps 8 bits of every activation, a logit of 16 to 1/16, and tips more of them.
TIE = {"float32": 0.1, "bfloat16": 0.5}


def test_offline(tmp_path):
    """Prefix caching and chunked prefill are on, as vLLM's defaults are; all layers run in one call."""
    prompts = [list(prompt.encode()) for prompt in PROMPTS]
    job = Job(CHECKPOINT, {"dtype": "float32"}, prompts, TOKENS, prompt_logprobs=False)
    (result,), log = run_engines([job], tmp_path / "offline", 900, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert re.search(r"w4a8: all \d+ layers run in one call", log) and "AOT compil" not in log
    assert "error" not in result, result["error"]
    model = demo_model()
    for prompt, answer in zip(PROMPTS, result["outputs"]):
        assert len(answer) == TOKENS
        check_greedy(model, prompt, answer, TIE["float32"])


@pytest.fixture(params=[True, False], ids=["a process for the rank", "one for engine and rank"])
def server(request, tmp_path):
    log_path = tmp_path / "serve.log"
    options = [] if request.param else [f"--distributed-executor-backend={binding.in_process()}"]
    with serving(VLLM, with_tokenizer(tmp_path / "model"), log_path, *options) as (address, _):
        yield address
    text = log_path.read_text()
    assert ("(Worker pid=" in text) == request.param
    assert text.count("layers of experts (int4 in groups of ") == 1, "the server should say once what it runs"
    assert len(re.findall(r"w4a8: rank 0 computes on CPUs \d[\d,-]*\n", text)) == 1
    count = len(binding.cores(os.sched_getaffinity(0)))
    assert text.count(f"w4a8: 1 of {count} cores compute nothing: ") == (1 < count < 16)


def test_server(server):
    """Three requests at a time, in the dtype of the checkpoint."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: complete(server, prompt, TOKENS), PROMPTS))
    model = demo_model()
    for prompt, answer in zip(PROMPTS, answers):
        check_greedy(model, prompt, list(answer.encode()), TIE["bfloat16"])
    assert main(["verify-server", f"{server}/v1", "--requests", "80", "--prompts", "16", "--clients", "8"]) == 0


def test_a_second_start_of_the_server(tmp_path):
    """It loads what the first one has compiled, and answers the same. Counted: test_cache.py."""
    model, answers, logs = with_tokenizer(tmp_path / "model"), [], []
    caches = {"VLLM_CACHE_ROOT": str(tmp_path / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache/inductor")}
    caches["W4A8_VLLM_DECODER"] = "0"  # layers in one call are not compiled
    for start in ("first", "second"):
        with serving(VLLM, model, tmp_path / f"{start}.log", **caches) as (address, _):
            answers.append([complete(address, prompt, TOKENS) for prompt in PROMPTS])
        logs.append((tmp_path / f"{start}.log").read_text())
    said = ("saved AOT compiled function", "Directly load AOT compilation", "Compiling model again")
    assert [[log.count(message) for message in said] for log in logs] == [[1, 0, 0], [0, 1, 0]]
    assert answers[0] == answers[1]


SHARED = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_type="shm"))


@pytest.mark.parametrize(
    "ranks, machines, moves, model", [(4, 1, None, None), (2, 2, None, None), (2, 1, "a connector", None),
                                      (2, 1, None, SHARED)]
)  # fmt: skip
def test_what_is_left_to_vllms_executor(ranks, machines, moves, model):
    """Refused by name."""
    parallel = SimpleNamespace(world_size=ranks, tensor_parallel_size=2, nnodes_within_dp=machines)
    config = SimpleNamespace(
        parallel_config=parallel, kv_transfer_config=moves, ec_transfer_config=None, model_config=model
    )
    with pytest.raises(ValueError, match=r"executor\.InProcess is not for stages, several machines or .*: use mp"):
        InProcess._init_executor(SimpleNamespace(vllm_config=config))


class Queue(list):
    """Of messages between ranks."""

    enqueue = list.append

    def dequeue(self, timeout):
        return self.pop(0)


def test_answers_behind_an_error_of_the_first_rank():
    """The others have answered the call that failed. Their next answer is that to the next call."""
    executor, answers = InProcess.__new__(InProcess), Queue()
    done, bad = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE
    executor.workers = [SimpleNamespace(rank=1, worker_response_mq=answers)]
    executor.rpc_broadcast_mq, executor.is_failed, executor._owed = Queue(), False, [0, 0]
    executor._waits_for_none = threading.Event()
    executor.driver_worker = SimpleNamespace(get=lambda number: 10 // number)
    answers += [(bad, "division"), (done, 7), (bad, "of rank 1"), (done, 8)]
    with pytest.raises(ZeroDivisionError):
        executor.collective_rpc("get", args=(0,))
    assert executor.collective_rpc("get", args=(2,)) == [5, 7]
    with pytest.raises(RuntimeError, match="rank 1 failed: of rank 1"):
        executor.collective_rpc("get", args=(2,))
    assert executor.collective_rpc("get", args=(5,), single_value=True) == 2
    assert executor.collective_rpc("get", args=(5,), non_block=True).result() == [2, 8]
    assert [message[3] for message in executor.rpc_broadcast_mq] == [None, None, None, 0, None]
    assert executor._waits_for_none.is_set()


@pytest.mark.parametrize("waits", [True, False])
def test_the_first_rank_does_not_wait_for_one_that_has_ended(waits, monkeypatch):
    """In a call without an end, such as vLLM's own sums in builds for AVX-512."""
    ends, none = [], threading.Event()
    monkeypatch.setattr(hosts, "GRACE", 0.1)
    monkeypatch.setattr(hosts, "end", lambda: ends.append(1))
    if not waits:
        none.set()
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        sentinel = os.pidfd_open(process.pid)
        _end_after([sentinel], none)
        os.close(sentinel)
    assert ends == [1] * waits
