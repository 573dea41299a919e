"""What a process takes: a program in a process of its own, and what the system says of it there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import w4a8

HERE = Path(__file__).resolve().parent
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self")
needs_its_allocator = pytest.mark.skipif(SANITIZED, reason="the sanitizer's allocator keeps freed memory")

# In front of each program.
PRELUDE = '''
import sys

def memory(field, file="/proc/self/status"):
    """Bytes: VmRSS and RssAnon now, VmHWM the most since begin(), VmSize of addresses; of smaps, the sum of all."""
    with open(file) as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))

def begin():
    """Makes VmHWM begin anew; returns VmRSS."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return memory("VmRSS")
'''


def environment(**variables: str) -> dict[str, str]:
    """Of a process that finds this package and the tests' helpers.

    glibc gives freed blocks back to the system at once, whatever their size: what is measured is what is alive.
    """
    package = Path(os.path.abspath(w4a8.__file__)).parent.parent
    path = [HERE, HERE / "python", HERE / "python" / "moe", package, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "2",
        "PYTHONPATH": os.pathsep.join(str(part) for part in path if str(part)),
        **variables,
    }


def run(code: str, *arguments: object, **variables: str) -> list[int]:
    """Runs a program in a process of its own; returns the integers of the last line that it prints."""
    command = [sys.executable, "-c", PRELUDE + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment(**variables))
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return [int(word) for word in done.stdout.splitlines()[-1].split()]
