"""The process of one entry: reads commands (a JSON object per line) from stdin, answers on stdout.

python -m peers.worker MODULE CLASS FOLDER THREADS

{"do": "inputs", "m": 16}         takes inputs
{"do": "output", "path": "..."}   computes call 0 and saves it as float32 [m, features]
{"do": "run", "calls": 5}         -> {"seconds": [...]}; counts calls on from run to run
{"do": "ask", "method": "...", "arguments": [...]}  calls a method of the entry -> {"value": ...}
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback

import numpy as np


def die_with_parent() -> None:
    """A stopped process whose parent is gone would stay for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main() -> None:
    module, name, folder, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    die_with_parent()

    def answer(**values: object) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        entry_class = getattr(importlib.import_module(module), name)
        entry = entry_class(entry_class.open(folder), int(threads))
        answer(versions=entry_class.versions())
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")
        return
    calls = 0
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "inputs":
                entry.inputs(command["m"])
                calls = 0
                answer()
            elif command["do"] == "output":
                np.save(command["path"], np.ascontiguousarray(entry.to_numpy(entry.call(0)), np.float32))
                answer()
            elif command["do"] == "ask":
                answer(value=getattr(entry, command["method"])(*command["arguments"]))
            else:
                seconds = [entry.timed(calls + i) for i in range(command["calls"])]
                calls += command["calls"]
                answer(seconds=seconds)
        except Exception as error:
            traceback.print_exc()
            answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
