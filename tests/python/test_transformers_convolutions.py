"""Weights of depthwise convolutions: torch multiplies 16-bit ones slowly where the CPU has no instructions for them."""

import available  # noqa: F401
import pytest
import test_transformers
import torch
from gguf_architectures import VOCAB, model_of, write

from w4a8.integrations.transformers import W4A8Config, quantizer

TOKENS = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
FAMILIES = ["qwen35moe", "granitehybrid", "lfm2"]  # the second with biases, and without a float before the third's
pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture(params=[True, False], ids=["with instructions", "without"])
def is_fast(request, monkeypatch):
    return let(monkeypatch, request.param)


def let(monkeypatch, is_fast):
    monkeypatch.setattr(quantizer, "_is_fast", lambda dtype: is_fast or dtype == torch.float32)
    return is_fast


def convolutions(model):
    return [each for each in model.modules() if type(each) is torch.nn.Conv1d]


def steps(model):
    """Logits of a prompt, and of the tokens behind it, with a cache."""
    cache, parts = None, []
    for begin, end in ((0, 6), (6, 7), (7, 9)):
        out = model(TOKENS[:, begin:end], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits.float())
    return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FAMILIES)
def test_of_a_gguf_file(name, dtype, monkeypatch, tmp_path):
    """The weights of the file, and the logits of a model that has them in its own type, but for its roundings."""
    floats, logits = model_of(name), {}
    write(name, floats, tmp_path, True)
    for is_fast in (True, False):
        let(monkeypatch, is_fast)
        model = test_transformers.load(tmp_path, gguf_file="model.gguf", dtype=dtype)
        assert model.dtype == dtype and len(convolutions(model)) == (3 if name == "qwen35moe" else 2)
        for here, there in zip(convolutions(model), convolutions(floats)):
            assert all(each.dtype == (dtype if is_fast else torch.float32) for each in here.state_dict().values())
            assert all(map(torch.equal, here.float().state_dict().values(), there.state_dict().values()))
            here.to(dtype if is_fast else torch.float32)
        logits[is_fast] = steps(model)
    off = (logits[True] - logits[False]).square().mean().sqrt() / logits[True].std()
    assert (off == 0) if dtype == torch.float32 else off < 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_and_loaded_again(name, is_fast, tmp_path):
    """A packed directory, of floats that are rounded too: the same bits, type and tensors."""
    model_of(name).save_pretrained(tmp_path / "floats")
    config = W4A8Config(group_size=32)
    model = test_transformers.load(tmp_path / "floats", quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "packed")
    again = test_transformers.load(tmp_path / "packed", dtype="auto")
    assert again.dtype == model.dtype == again.config.dtype == torch.bfloat16
    assert again.state_dict().keys() == model.state_dict().keys()
    kept = torch.bfloat16 if is_fast else torch.float32
    assert {each.weight.dtype for each in convolutions(again)} == {kept}
    assert torch.equal(steps(again), steps(model))


def test_which_types_are_fast():
    """As torch decides: float32 always."""
    assert quantizer._is_fast(torch.float32)
    for dtype, asked in ((torch.bfloat16, "_is_mkldnn_bf16_supported"), (torch.float16, "_is_mkldnn_fp16_supported")):
        assert quantizer._is_fast(dtype) == getattr(torch.ops.mkldnn, asked)()
