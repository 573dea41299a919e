"""Threads of decoder_step and of torch around it, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BOUND = """
import os, sys
import torch
from test_decoder import HIDDEN, Model

torch.set_num_threads(2)
first, second = sorted(os.sched_getaffinity(0))[:2]
everything = torch.ones(1 << 20)

def places():
    return sorted(sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task"))

model, x = Model(), torch.randn(1, HIDDEN)
everything.add(1)
for task in map(int, os.listdir("/proc/self/task")):
    os.sched_setaffinity(task, {first if task == os.getpid() else second})
counts = []
for _ in range(5):
    model.step(x, [1], [1])
    everything.add(1)
    counts.append(len(places()))
print(counts[0] == counts[-1], places() == [[first]] + [[second]] * (counts[-1] - 1))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_threads_of_torch_stay_bound():
    """A step ends the threads of OpenMP, which would look for work on the CPUs of its own. New ones are bound as these
    were: whoever bound them (vLLM) would find them on the CPU of the caller."""
    where = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", BOUND], cwd=where, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr


FEW_THREADS = """
import os
import torch
from common import assert_same_bits
from test_decoder import HIDDEN, Model
from w4a8.decoder import StepThreads

def tasks():
    return set(os.listdir("/proc/self/task"))

torch.set_num_threads(1)
model, x = Model(), torch.randn(9, HIDDEN)
alone = [model.step(x[:m], [m], [m]) for m in (1, 8, 9)]
torch.set_num_threads(2)
without = tasks()
model.step(x[:1], [1], [1], threads=3)
print(tasks() == without)  # torch has fewer threads: no team was made
threads = StepThreads()
for m in (9, 1, 8, 9, 1):
    count = threads.before(m)
    print(count, torch.get_num_threads(), StepThreads().count)  # the last: of an assistant within the same generate
    assert_same_bits(model.step(x[:m], [m], [m], threads=count), alone[(1, 8, 9).index(m)])
team = tasks() - without
torch.ones(1 << 20).add(1)
print(len(team), tasks() - without == team)
threads.restore()
print(torch.get_num_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_torch_has_one_thread_between_steps_of_few_rows():
    """The team of two threads runs these steps too. It is made by the first step, whatever its rows."""
    where = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", FEW_THREADS], cwd=where, capture_output=True, text=True, check=False)
    counts = ["2", "2", "2", "2", "1", "2", "2", "1", "2", "2", "2", "2", "2", "1", "2"]
    assert done.stdout.split() == ["True", *counts, "1", "True", "2"], done.stderr


FORK = """
import os, signal, sys, threading, time
import torch
from test_decoder import HIDDEN, Model

torch.manual_seed(0)
torch.set_num_threads(2)
models, x = [Model(layers=1, experts=4), Model(layers=1)], torch.randn(200, HIDDEN)
expected = [model.step(x[:3], [3], [3]) for model in models]
stopping = threading.Event()

def steps():
    while not stopping.is_set():
        models[0].step(x, [200], [200])

thread = threading.Thread(target=steps)
if sys.argv[1] == "a step":
    thread.start()
    time.sleep(0.1)
else:
    torch.randn(1 << 20).add_(1)  # on threads of OpenMP

def child(number):
    signal.alarm(60)  # a hang ends as a signal
    try:
        same = all(torch.equal(models[number].step(x[:3], [3], [3]), expected[number]) for _ in range(9))
        return "same" if same else "other bits"
    except RuntimeError as error:
        return str(error)

for number in (0, 1, 1, 0, 0, 1, 0, 0):
    pid = os.fork()
    if pid == 0:
        print(number, child(number), flush=True)
        os._exit(0)
    if os.waitpid(pid, 0)[1] != 0:
        print(number, "hangs")
stopping.set()
if thread.ident is not None:
    thread.join()
"""
IN_USE = "was in use by another thread when this process was forked, expected a decoder that was not, or a new one"


@pytest.mark.parametrize("meanwhile", ["a step", "nothing"])
def test_a_child_of_a_fork_steps(meanwhile):
    """Of a decoder that a thread of the parent was in, an error; of others the same bits. Behind "nothing", the calling
    thread of the parent had threads of OpenMP, which the child must not wait for."""
    command = [sys.executable, "-c", FORK, meanwhile]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 8, done.stderr
    for line in lines:
        refused = meanwhile == "a step" and line.startswith("0 w4a8::decoder_step: decoder ") and line.endswith(IN_USE)
        assert line in ("0 same", "1 same") or refused, line
