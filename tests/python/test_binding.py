"""CPUs of a vLLM rank, without vLLM. What `w4a8 serve` makes of them: command/test_serve.py."""

import os
import subprocess
import sys

import pytest

from w4a8.integrations.vllm import binding

if not sys.platform.startswith("linux"):
    pytest.skip("threads are bound on Linux alone", allow_module_level=True)

# In a process of its own: threads stay bound.
THREADS = """
import os
import torch
from w4a8.integrations.vllm.binding import bind_openmp

def others():
    tasks = {int(task) for task in os.listdir("/proc/self/task")} - {os.getpid()}
    return {task: os.sched_getaffinity(task) for task in tasks}

allowed = os.sched_getaffinity(0)
last = max(allowed)
torch.set_num_threads(2)
before = set(others())
bind_openmp([min(allowed), last])
assert [cpus for task, cpus in others().items() if task not in before] == [{last}], others()
assert os.sched_getaffinity(0) == allowed
"""


def test_threads_run_where_they_are_told_to():
    """Threads of w4a8's own follow those of OpenMP: test_decoder_threads.py."""
    found = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    "of_threads, bound",
    [
        ([{0}, {1}, {0, 1, 2}, {0}], {0, 1}),  # OpenMP's two, one from before, and one that the first has begun
        ([{0, 1}, {0, 1}], {0, 1}),
        ([{0, 1, 2}, None, {0, 1, 2}], {0, 1, 2}),  # none is bound, and one ends
    ],
)
def test_cpus_of_threads(of_threads, bound, monkeypatch):
    def affinity(task):
        if of_threads[task] is None:
            raise ProcessLookupError
        return of_threads[task]

    monkeypatch.setattr(os, "listdir", lambda folder: [str(task) for task in range(len(of_threads))])
    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    assert binding.cpus_of_threads({0, 1, 2}) == bound


@pytest.mark.parametrize("cpus, text", [([0], "0"), ([3, 2, 0, 9, 8], "0,2-3,8-9"), (range(64), "0-63"), ([], "")])
def test_numbers_of_cpus(cpus, text):
    assert binding.in_words(cpus) == text
