"""How much memory a process takes while it loads a model of a few hundred megabytes whose tensors are shuffled."""

import meter
import pytest
import shuffled_model
from conftest import environment

LOAD = """
import os
from vllm import LLM
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

load_model, found = BaseModelLoader.load_model, []

def measured(self, *args, **kwargs):
    before = begin()
    model = load_model(self, *args, **kwargs)
    found.extend((sum(p.numel() * p.element_size() for p in model.parameters()), memory("VmHWM") - before))
    return model

BaseModelLoader.load_model = measured
LLM(sys.argv[1], enforce_eager=True, max_model_len=64, max_num_seqs=1, skip_tokenizer_init=True)
print(flush=True)
print(*found, flush=True)
os._exit(0)
"""


@pytest.mark.usual
@pytest.mark.parametrize("shuffled", [True, pytest.param(False, marks=pytest.mark.full)], ids=["shuffled", "in order"])
def test_peak_while_loading(shuffled, tmp_path):
    """What is packed, the tensors that are not quantized, one file, and little more; the int8 weights are 500 MB."""
    checkpoint = shuffled_model.write(tmp_path / "model", shuffled)
    variables = environment(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    weights, peak = meter.run(LOAD, checkpoint, **variables)
    assert weights > 280e6
    assert peak < 1.10 * weights + shuffled_model.largest_file(checkpoint) + (32 << 20)
