"""Attention `w4a8` in transformers where stock attention computes, bit for bit; which masks are known."""

import pytest
import torch
from common import assert_same_bits

transformers = pytest.importorskip("transformers", minversion="5.0")

from test_transformers_attention import MODELS, make_model, padded, step_by_step  # noqa: E402
from transformers import DynamicCache, masking_utils  # noqa: E402

from w4a8.integrations.transformers import W4A8Cache  # noqa: E402
from w4a8.integrations.transformers.attention import reach_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("name", [*MODELS, "Llama4", "Qwen3Next", "DeepseekV3"])
def test_without_a_packed_cache(name):
    """Without a cache, with a dynamic and with a static one: the bits of stock attention, padding and all."""
    model = make_model(name)
    ids, mask = padded(100, (37, 90, 0))
    caches = [{"use_cache": False}, {"cache_implementation": "dynamic"}]
    if name not in ("Qwen3Next", "Llama4"):  # stock 5.19 fails with Llama 4
        caches.append({"cache_implementation": "static"})
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 5}

    def run(cache):
        outs = [model.generate(ids, attention_mask=given, **options, **cache) for given in (mask, torch.ones_like(ids))]
        return torch.stack([torch.stack(out.logits) for out in outs])

    stock = [run(cache) for cache in caches]
    model.set_attn_implementation("w4a8")
    for cache, want in zip(caches, stock):
        assert_same_bits(run(cache), want, str(cache))


def test_training():
    """Gradients are those of stock attention, with dropout."""
    model = make_model("Llama", attention_dropout=0.5)
    ids, mask = padded(20, (5, 0, 10))
    gradients = []
    for name in ("sdpa", "w4a8"):
        model.set_attn_implementation(name)
        model.train().requires_grad_(True).zero_grad()
        torch.manual_seed(1)
        with torch.enable_grad():
            model(ids, attention_mask=mask, labels=ids).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    assert gradients[0].any()
    assert_same_bits(gradients[1], gradients[0])


def test_an_encoder():
    """It is not causal, and has no cache."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes)).eval()
    ids, mask = padded(20, (5, 0, 10))
    stock = model(ids, attention_mask=mask).last_hidden_state
    model.set_attn_implementation("w4a8")
    assert_same_bits(model(ids, attention_mask=mask).last_hidden_state, stock)


def test_heads_that_the_operator_has_not(monkeypatch):
    """The layers are those of DynamicCache, so that logits have stock's bits; beams work."""
    model = make_model("Llama", head_dim=24)
    ids, mask = padded(100, (37, 90, 0))
    cache = DynamicCache(config=model.config)
    stock = step_by_step(model, ids, mask, cache, prompt=90)
    model.set_attn_implementation("w4a8")
    cache = W4A8Cache(model.config)
    assert_same_bits(step_by_step(model, ids, mask, cache, prompt=90), stock)
    keys = cache.layers[0].stock.keys
    cache.crop(-10)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 5]))
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert torch.equal(cache.layers[0].stock.keys, keys[[2, 0, 1], :, :90]) and cache.get_seq_length() == 90


def test_a_mask_of_ones_own():
    """A prompt may have any: it is attended to in floats. What is packed may not."""
    model = make_model("Llama")
    ids, _ = padded(100)
    square = torch.ones(100, 100, dtype=torch.bool).tril().logical_or(torch.arange(100) < 30)[None, None]
    stock = model(ids[2:], attention_mask=square, past_key_values=DynamicCache(config=model.config)).logits
    model.set_attn_implementation("w4a8")
    cache = W4A8Cache(model.config)
    assert_same_bits(model(ids[2:], attention_mask=square, past_key_values=cache).logits, stock)
    more = torch.ones(1, 1, 2, 102, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="cannot be continued with a mask that is neither causal nor a sli"):
        model(ids[2:, :2], attention_mask=more, past_key_values=cache)


def test_which_masks_are_known():
    causal, sliding = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(9)
    chunked = masking_utils.chunked_causal_mask_function(9, torch.zeros(1))
    both_ways = masking_utils.sliding_window_bidirectional_mask_function(9)
    others = [
        both_ways, masking_utils.or_masks(causal, sliding), masking_utils.and_masks(causal, sliding),
        masking_utils.and_masks(sliding, causal), masking_utils.bidirectional_mask_function, lambda *_: True,
    ]  # fmt: skip
    assert reach_of(causal) == {} and reach_of(sliding) == {"window": 9} and reach_of(chunked) == {"chunk": 9}
    assert [reach_of(function) for function in others] == [None] * len(others)


def test_a_model_that_looks_at_the_mask():
    """It gets the one that stock attention has, whole."""
    mask = masking_utils.create_causal_mask
    config = make_model("Llama").config
    embeddings, padding = torch.zeros(2, 5, 8), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    want = mask(config, embeddings, padding, None)
    config._attn_implementation = "w4a8"
    for given in (mask(config, embeddings, padding, None), mask(config, embeddings, padding.bool(), None)):
        assert given.reach == {} and given.shape == (2, 1, 5, 5) and given.dtype == torch.bool
        assert torch.equal(given[:, :, 1:], want[:, :, 1:]) and torch.equal(given.contiguous(), want)
    whole = mask(config, embeddings, torch.ones(2, 5), None)
    assert whole.stock is None and torch.equal(whole[0, 0], torch.ones(5, 5, dtype=torch.bool).tril())
    assert mask(config, embeddings, whole, None) is whole
