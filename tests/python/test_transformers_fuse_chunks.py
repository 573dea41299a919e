"""fuse() on Llama 4: attention in chunks, factors of queries, and experts whose inputs are multiplied."""

import pytest

transformers = pytest.importorskip("transformers", minversion="5")

import torch  # noqa: E402
from common import assert_same_bits  # noqa: E402
from test_transformers_fuse import LONG, SIZES, check_rows_alone, differs_by, fails, run  # noqa: E402

from w4a8.integrations.rotary import for_queries, unturned  # noqa: E402
from w4a8.integrations.transformers import W4A8Cache, W4A8Config, fast_attention, fuse  # noqa: E402

CHUNK = 5
pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def model(tmp_path):
    """Dense layers and layers with experts in turn; the fourth layer sees all, without rotation."""
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        **SIZES, intermediate_size_mlp=192, num_local_experts=4, interleave_moe_layer_step=2,
        attention_chunk_size=CHUNK, floor_scale=3, attn_scale=0.5,
    )  # fmt: skip
    made = transformers.Llama4ForCausalLM(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    made.save_pretrained(tmp_path)
    packed = W4A8Config(group_size=32, default_skip=False, skip=["re:.*router$"])
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.Llama4ForCausalLM.from_pretrained(tmp_path, quantization_config=packed, **how).eval()


def test_beside_the_models_own_layers(model):
    """Without a cache in floats, and over the same cache, where all but ties is the same. What only Llama 4 has moves
    logits by more than the bound."""
    own = model(LONG, use_cache=False).logits
    for change in ({"attention_chunk_size": 2 * CHUNK}, {"attn_scale": 0.0}):
        kept = {name: getattr(model.config, name) for name in change}
        for name, value in change.items():
            setattr(model.config, name, value)
            for layer in model.model.layers:
                setattr(layer.self_attn, name, value)
        assert differs_by(model(LONG, use_cache=False).logits, own) > 0.1, change
        for name, value in kept.items():
            setattr(model.config, name, value)
            for layer in model.model.layers:
                setattr(layer.self_attn, name, value)
    undo = fast_attention(model)
    over_cache = run(model, LONG)
    undo()
    fuse(model, "bfloat16")
    assert differs_by(run(model, LONG, cache=W4A8Cache(model.config, "bfloat16")), own) < 0.05
    fuse(model)
    off = (run(model, LONG) - over_cache).square().mean(-1).sqrt() / over_cache.std()
    assert off.quantile(0.1) < 1e-5
    assert off.median() < 1e-3


def test_rows_have_the_same_bits_alone(model):
    """Padding to the left and to the right, chunks, and what logits_to_keep asks for."""
    fuse(model)
    check_rows_alone(model, [LONG[0, :n] for n in (9, 4, 7)])


def test_generate(model, monkeypatch):
    """Greedy, from within a chunk over several, the tokens of the model's own layers; a row with padding; beams."""
    options = {"max_new_tokens": 3 * CHUNK, "min_new_tokens": 3 * CHUNK, "pad_token_id": 0, "do_sample": False}
    prompt = LONG[:1, : CHUNK + 2]
    undo = fast_attention(model)
    own = model.generate(prompt, **options)
    undo()
    fuse(model)
    monkeypatch.setattr(type(model.model), "forward", fails)
    assert torch.equal(model.generate(prompt, **options), own)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), prompt], 1)
    both = torch.cat([padded, LONG[1:, : padded.shape[1]]])
    answers = model.generate(both, attention_mask=(both != 0).long(), **options)
    assert torch.equal(answers[:1, 3:], own)
    beams = model.generate(both, attention_mask=(both != 0).long(), num_beams=3, **options)
    assert torch.equal(model.generate(prompt, num_beams=3, **options), beams[:1, 3:])


def test_factors_of_queries():
    """In float64, at positions around steps."""
    every, scale = 7, 0.1
    got = for_queries(unturned(30, 32), every, scale, ahead=1)
    places = torch.arange(30, dtype=torch.float64)
    wanted = 1 + scale * torch.log(torch.floor((places + 1) / every) + 1)
    assert_same_bits(got[:, 16:], torch.zeros(30, 16))
    torch.testing.assert_close(got[:, :16].double(), wanted[:, None].expand(-1, 16), rtol=2**-22, atol=0)
