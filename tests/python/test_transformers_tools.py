"""Checkpoints that other tools have written (tests/tool_written), through W4A8Config, beside what they mean in floats.

Every folder there is taken; a new one needs nothing here.
"""

import json

import pytest
import torch
from common import assert_same_bits

transformers = pytest.importorskip("transformers", minversion="5.0")

import multiplied_out  # noqa: E402
import test_transformers  # noqa: E402

from w4a8.integrations.transformers import W4A8Config  # noqa: E402
from w4a8.nn import W4A8Linear, W8A8Linear  # noqa: E402

FOLDERS = sorted(path.parent.name for path in multiplied_out.TOOL_WRITTEN.glob("*/config.json"))


def prompts(model):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, model.config.vocab_size, (n,), generator=generator).tolist() for n in (5, 17, 40)]


@pytest.mark.parametrize("folder", FOLDERS)
@torch.no_grad()
def test_tools(folder, tmp_path):
    """In float32 only int8 inputs make a difference. How much they do is measured in the float model, on the very
    tokens, by an emulation that shares no code with the package. What is left from the emulation is inputs that float32
    arithmetic puts on the other side of a tie: 2 % of that difference, as tests/vllm allows."""
    checkpoint = multiplied_out.TOOL_WRITTEN / folder
    model = test_transformers.load(checkpoint, quantization_config=W4A8Config(), dtype=torch.float32)
    multiplied_out.write(checkpoint, tmp_path / "floats")
    floats = multiplied_out.load(tmp_path / "floats", torch.float32)
    attention = isinstance(model.model.layers[0].self_attn.q_proj, (W4A8Linear, W8A8Linear))
    int8 = multiplied_out.quantized_matrices(floats, attention, isinstance(model.lm_head, W4A8Linear))
    found = multiplied_out.logprobs(model, prompts(model))
    exact = multiplied_out.logprobs(floats, prompts(model))
    stated = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    rounded = multiplied_out.logprobs(floats, prompts(model), int8, multiplied_out.activation_group(stated))
    off, noise = multiplied_out.assert_near(found, exact, rounded, 0.02)
    assert off <= 1.02 * noise

    model.save_pretrained(tmp_path / "packed")
    packed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    for one, other in zip(multiplied_out.logprobs(packed, prompts(model)), found):
        assert_same_bits(one, other)
