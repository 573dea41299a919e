"""What w4a8.quantize_ takes while it runs, in a process of its own."""

import meter
import pytest

MEASURE = """
import moe_blocks, torch, w4a8

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
before = memory("RssAnon")
begin()
report = w4a8.quantize_(big, effort=effort)
print(report.float_bytes, report.packed_bytes, memory("VmHWM") - memory("VmRSS"), before - memory("RssAnon"))
"""


@meter.needs_proc
@pytest.mark.parametrize("effort", [0, 2])
def test_memory_is_bounded(effort):
    """The float weights of a module are gone before the next is packed, and memory never exceeds the model's by more
    than the packed weights of one."""
    float_bytes, packed_bytes, above_end, freed = meter.run(MEASURE, effort)
    assert freed >= 0.97 * (float_bytes - packed_bytes), "something keeps float weights"
    # The peak is at the first module, when all floats are there: what was freed later, and one module's packed
    # weights (experts: 8 * 3 * 512 * 256 at 5/8 byte) with the codes and scales of one matrix before packing, and the
    # gate and up rows of one expert joined (MixtralSparseMoeBlock).
    one = 8 * 3 * 512 * 256 * 0.625 + 4 * 512 * 512 * 0.625 + 4 * 512 * 512
    assert above_end - freed <= one
