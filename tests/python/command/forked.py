"""Runs commands of `w4a8` in forked children with limits: a line of JSON in, a line of JSON out.

In:  commands, each a list of arguments.
Out: for each [its exit code, what it said, seconds of CPU], with the code None if it raised; and how many MB the child
     grew by. Shorter if a signal ended the child: the last entry is then the signal's name.

The process that forks runs no operator, so that no thread of torch is missing in a child.
"""

import contextlib
import importlib
import io
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

SECONDS, MEGABYTES = 5, 500
# What the commands would import in each child.
IMPORTS = "transformers.models.auto.modeling_auto transformers.models.qwen3_moe.modeling_qwen3_moe "
IMPORTS += "transformers.generation w4a8.command w4a8.integrations.transformers.dry_run gguf accelerate"


def run(arguments):
    """One command."""
    from w4a8.command import main

    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of CPU time; the signal ends the process
    signal.alarm(12 * SECONDS)  # for what waits; other processes may have the CPU
    sys.stdin, said, begin = io.StringIO("ab\n"), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(arguments)
        except BaseException as error:
            code = None
            said.write(f"TRACEBACK {type(error).__name__}: {error}")
    return code, said.getvalue(), round(time.process_time() - begin, 2)


def child(commands, out):
    """Writes the answer piece by piece, so that what came before a signal is known."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, 2 * [pages * resource.getpagesize() + 2 * MEGABYTES * 2**20])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for each in commands:
        print(json.dumps(run(each)), file=out, flush=True)
    print(round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024), file=out, flush=True)


def in_a_child(commands):
    """The answer."""
    reading, writing = os.pipe()
    number = os.fork()
    if number == 0:
        with os.fdopen(writing, "w") as out:
            child(commands, out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        answer = [json.loads(line) for line in file]
    status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    return answer if status == 0 else [*answer, signal.Signals(-status).name if status < 0 else f"exit {status}"]


def serve():
    """Until the input ends."""
    import torch

    torch.set_num_threads(1)
    for name in IMPORTS.split():
        importlib.import_module(name)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(in_a_child(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    serve()
