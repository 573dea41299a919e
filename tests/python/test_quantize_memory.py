"""What w4a8.quantize_ takes while it runs, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import w4a8

MEASURE = """
import sys
import moe_blocks, torch, w4a8

def kib(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":"))

def model(layers, hidden, intermediate):
    make = lambda: torch.nn.ModuleList([
        torch.nn.Linear(hidden, 4 * hidden),
        moe_blocks.FusedBlock(experts=8, hidden=hidden, intermediate=intermediate),
        moe_blocks.MixtralSparseMoeBlock(experts=8, hidden=hidden, intermediate=intermediate),
    ])
    return torch.nn.ModuleList([make() for _ in range(layers)])

effort = int(sys.argv[1])
torch.set_num_threads(1)  # small operations: threads would mostly wait for each other
w4a8.quantize_(model(1, 64, 32), effort=effort)  # imports, thread pool and allocator are warm
big = model(3, 512, 256)
before = kib("RssAnon")
with open("/proc/self/clear_refs", "w") as reset:
    reset.write("5")  # VmHWM starts again
report = w4a8.quantize_(big, effort=effort)
print(report.float_bytes, report.packed_bytes, 1024 * (kib("VmHWM") - kib("VmRSS")), 1024 * (before - kib("RssAnon")))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("effort", [0, 2])
def test_memory_is_bounded(effort):
    """The float weights of a module are gone before the next is packed, and memory never exceeds the model's by more
    than the packed weights of one."""
    package = Path(os.path.abspath(w4a8.__file__)).parent.parent
    path = [str(Path(__file__).parent), str(package), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",  # freed blocks go back to the system at once
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
    }
    command = [sys.executable, "-c", MEASURE, str(effort)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    float_bytes, packed_bytes, above_end, freed = map(int, done.stdout.split())
    assert freed >= 0.97 * (float_bytes - packed_bytes), "something keeps float weights"
    # The peak is at the first module, when all floats are there: what was freed later, and one module's packed
    # weights (experts: 8 * 3 * 512 * 256 at 5/8 byte) with the codes and scales of one matrix before packing, and the
    # gate and up rows of one expert joined (MixtralSparseMoeBlock).
    one = 8 * 3 * 512 * 256 * 0.625 + 4 * 512 * 512 * 0.625 + 4 * 512 * 512
    assert above_end - freed <= one
