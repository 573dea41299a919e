"""Threads of a vLLM rank in the engine's process, without vLLM."""

import subprocess
import sys

import pytest

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
