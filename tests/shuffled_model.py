"""A model of a few hundred megabytes for tests of memory, whose tensors come in no order: each is in one of several
files by chance, so that what belongs together is far apart. Written by benchmarks/real_size.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "layers": 5,
    "vocabulary": 4096,
    "group": 128,
    "hidden": 1024,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 128,
    "intermediate": 512,
    "experts": 64,
    "top_k": 4,
    "positions": 1024,
}
FILES = 12

# What a process reads of itself; begin() makes VmHWM, the peak, begin anew.
METER = """
def memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))

def begin():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return memory("VmRSS")
"""


def write(folder: Path, shuffled: bool = True, **sizes: int) -> Path:
    """Makes the checkpoint, shuffled over FILES files or in the order of the model; returns its folder."""
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.insert(0, str(ROOT / "benchmarks"))
    from real_size.shapes import Shapes
    from real_size.write import write_files, write_settings

    shapes = Shapes(**{**SIZES, **sizes})
    tensors = list(shapes.tensors())
    if shuffled:
        random.Random(0).shuffle(tensors)
    share = -(-len(tensors) // FILES)
    folder.mkdir(parents=True)
    write_settings(shapes, folder)
    write_files(folder, [tensors[i : i + share] for i in range(0, len(tensors), share)], shapes.group, lambda _: None)
    return folder


def largest_file(folder: Path) -> int:
    """Bytes of the largest file: a reader maps one at a time."""
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


def run(code: str, *arguments: object, **variables: str) -> list[int]:
    """Runs a program with METER before it in a process of its own; returns the integers of its last line.

    Large temporaries go back to the system at once: what malloc keeps for later is not what is measured.
    """
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072", **variables}
    command = [sys.executable, "-c", METER + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [int(word) for word in done.stdout.splitlines()[-1].split()]
