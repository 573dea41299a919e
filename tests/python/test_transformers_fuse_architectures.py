"""fuse() on every architecture of docs/formats.md: beside the model's own layers over the same cache, or why not."""

import pytest

pytest.importorskip("transformers", minversion="5")
pytest.importorskip("gguf")

import test_gguf_architectures
import torch
from gguf_architectures import INT4, STACKED, VOCAB, model_of, write, write_int4

from w4a8.integrations.transformers import W4A8Cache, W4A8Config, fast_attention, fuse

TOKENS = torch.randint(3, VOCAB, (4, 24), generator=torch.Generator().manual_seed(1))
# Of which there is no row in core/families.py (docs/decoder.md says why), or which are stopped by something else.
UNKNOWN = ("cohere2", "command-r", "gemma4", "gemma4, experts", "hunyuan-dense", "hunyuan-moe", "llama4",
           "phimoe")  # fmt: skip
LATENT = ("deepseek2, GLM-4.7-Flash", "deepseek2, V2", "deepseek2, V3", "glm-dsa")
LEFT_ALONE = {
    **dict.fromkeys(UNKNOWN, "models of type .* are not known"),
    **dict.fromkeys(LATENT, "no layer keeps keys and values of all tokens"),
}


def load(name, folder):
    floats = model_of(name)
    if name in STACKED:  # no int4 format has such experts
        write(name, floats, folder, quantized=True)
        return test_gguf_architectures.load(folder)
    write_int4(floats, folder)
    return test_gguf_architectures.load(folder, gguf_file=None, quantization_config=W4A8Config())


def logits(model):
    return model(TOKENS, past_key_values=W4A8Cache(model.config), use_cache=True).logits


@pytest.mark.parametrize("name", INT4)
@torch.no_grad()
def test_in_one_call(name, tmp_path):
    """The same roundings to int8 but for ties, which move what attends to a token by little. Another norm, factor or
    rotation would move all positions."""
    model = load(name, tmp_path)
    if name in LEFT_ALONE:
        with pytest.raises(ValueError, match=LEFT_ALONE[name]):
            fuse(model)
        return
    undo = fast_attention(model)
    own = logits(model)
    undo()
    fuse(model)
    off = (logits(model) - own).square().mean(-1).sqrt() / own.std()
    assert off.quantile(0.1) < 1e-5  # seen: 2e-7
    assert off.median() < 1e-3  # seen: 6e-7
    assert (off > 0.05).float().mean() < 0.05


@pytest.mark.parametrize(("name", "limit"), [("phi3, long", 128), ("mistral3", 32)])
@torch.no_grad()
def test_positions_behind_a_limit(name, limit, tmp_path, monkeypatch):
    """LongRoPE has other angles there, Ministral 3 a factor of queries: the model's own layers run, over the same
    cache. The next text runs in one call again, with the same bits."""
    model, stock = load(name, tmp_path), []
    text = torch.randint(3, VOCAB, (1, limit + 6), generator=torch.Generator().manual_seed(2))

    def answer():
        stock.clear()
        cache, found = W4A8Cache(model.config), []
        for part in text.split([limit - 2, 2, 5, 1], 1):
            found.append(model(part, past_key_values=cache, use_cache=True).logits)
        return torch.cat(found, 1)

    forward = type(model.model).forward

    def noting(*args, **kwargs):
        stock.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", noting)
    undo = fast_attention(model)
    own = answer()
    assert len(stock) == 4
    undo()
    fuse(model)
    got = answer()
    assert len(stock) == 2
    off = (got - own).square().mean(-1).sqrt() / own.std()
    assert off[:, :limit].quantile(0.1) < 1e-5
    assert off.max() < 0.01  # ties of few tokens
    assert torch.equal(answer(), got)
    assert len(stock) == 2
