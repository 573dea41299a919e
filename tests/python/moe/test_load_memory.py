"""w4a8.load of a few hundred megabytes, shuffled over files: the peak is what is packed and what may be mapped."""

import meter
import pytest
import shuffled_model

pytestmark = meter.needs_proc

LOAD = """
import torch, w4a8
w4a8.checkpoint.tensors.MOST_MAPPED = 16 << 20  # small beside a layer
warm = w4a8.load(sys.argv[1], only=lambda name: ".0." in name)  # what a first call allocates for good
del warm
before = begin()
layers = w4a8.load(sys.argv[1], **eval(sys.argv[2]))
packed = sum(p.numel() * p.element_size() for layer in layers.values() for p in layer.buffers())
print(packed, memory("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    pytest.importorskip("safetensors")
    return shuffled_model.write(tmp_path_factory.mktemp("shuffled") / "model", layers=3, experts=128)


@pytest.mark.parametrize(
    "part", [{}, {"tp_rank": 1, "tp_size": 2}, {"ep_rank": 1, "ep_size": 2}], ids=["whole", "tp", "ep"]
)
def test_peak(checkpoint, part):
    """A rank has its share and no more."""
    packed, peak = meter.run(LOAD, checkpoint, part)
    assert packed > (300e6 if not part else 150e6)
    # The pages of the files that have been read since they were opened: the system maps them 64 KiB at a time, of
    # tensors of 256 KiB among those of other layers half as much again. One layer of half the experts is 53 MB.
    mapped = 1.5 * (16 << 20)
    assert peak < 1.02 * packed + mapped + (12 << 20)
