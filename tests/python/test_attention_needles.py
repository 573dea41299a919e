"""Facts in a prompt of 8,192 tokens are found over packed caches as exact attention finds them.

The model's weights are made by hand. Its first layer gives each token the name of the one before it; its second layer
looks for the token behind an earlier occurrence of the current one, and the model says that. Keys have large constant
parts and a few channels that are larger still, as those of some trained models.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

from w4a8.integrations.transformers import W4A8Cache  # noqa: E402
from w4a8.integrations.transformers.cache import PAGE  # noqa: E402

TOKENS, PART = 8192, 2048
# Where a fact begins: at both ends of the prompt, of blocks of 64 tokens, pages of 128 and segments of 512.
PLACES = (1, 62, 127, 576, 1023, 2050, 4095, 5000, 6655, 8188)
FACT = 4  # tokens: a name and what is known of it
FILLER = 500  # tokens of the vocabulary that facts do not have
SIZE = 64  # numbers that name a token
HEAD = 2 * SIZE  # in rotary pairs (i, i + SIZE): the first half of the pairs turns, the others stand still
STILL = [*range(SIZE // 2, SIZE), *range(SIZE + SIZE // 2, HEAD)]
OWN, BEFORE, FOUND, ONE = (slice(i * SIZE, (i + 1) * SIZE) for i in range(4))  # channels of the hidden state
KINDS = pytest.mark.parametrize("kind", ["int8", "bfloat16"])


def make_model():
    vocabulary = FILLER + len(PLACES) * FACT
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=4 * SIZE, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1,
        num_key_value_heads=1, head_dim=HEAD, max_position_embeddings=2 * TOKENS, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    for name, tensor in model.named_parameters():
        tensor.fill_(1 if "norm" in name else 0)
    generator = torch.Generator().manual_seed(0)
    names = torch.nn.functional.normalize(torch.randn(vocabulary, SIZE, generator=generator)) * 8
    model.model.embed_tokens.weight[:, OWN] = names
    model.model.embed_tokens.weight[:, ONE.start] = 8
    model.lm_head.weight[:, FOUND] = names
    first, second = (layer.self_attn for layer in model.model.layers)
    eye = torch.eye(SIZE)
    # Queries that are keys, turned by one token; the sum over pairs is largest one token back.
    turning = SIZE // 2
    angle = 1e12 ** (-torch.arange(turning) / SIZE)
    first.k_proj.weight[:turning, ONE.start] = 1
    first.q_proj.weight[:turning, ONE.start] = 60 * angle.cos()
    first.q_proj.weight[SIZE : SIZE + turning, ONE.start] = -60 * angle.sin()
    first.v_proj.weight[:SIZE, OWN] = eye
    first.o_proj.weight[BEFORE, :SIZE] = eye
    second.q_proj.weight[STILL, OWN] = 1.75 * eye
    second.k_proj.weight[STILL, BEFORE] = eye
    second.k_proj.weight[STILL, ONE.start] = torch.randn(SIZE, generator=generator)
    second.k_proj.weight[STILL[5::16], ONE.start] *= 8
    second.v_proj.weight[:SIZE, OWN] = eye
    second.o_proj.weight[FOUND, :SIZE] = eye
    return model


def make_prompt():
    """[TOKENS], and the facts [10, FACT] in it."""
    prompt = torch.randint(FILLER, (TOKENS,), generator=torch.Generator().manual_seed(1))
    facts = torch.arange(FILLER, FILLER + len(PLACES) * FACT).view(-1, FACT)
    for place, fact in zip(PLACES, facts):
        prompt[place : place + FACT] = fact
    return prompt, facts


def read(model, cache, prompt):
    for part in prompt[None].split(PART, 1):
        model(part, past_key_values=cache, logits_to_keep=1)
    return cache


def answers(model, cache, questions):
    """Each row asks for one fact: logits [10, FACT - 1, vocabulary], and the likeliest tokens."""
    cache.batch_repeat_interleave(len(questions))
    tokens, logits = questions[:, None], []
    for _ in range(FACT - 1):
        logits.append(model(tokens, past_key_values=cache).logits[:, -1])
        tokens = logits[-1].argmax(-1, keepdim=True)
    logits = torch.stack(logits, 1)
    return logits, logits.argmax(-1)


@pytest.fixture(autouse=True, scope="module")
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def exact():
    """The model, prompt, facts, and the logits of float32 attention."""
    model = make_model()
    prompt, facts = make_prompt()
    logits, said = answers(model, read(model, DynamicCache(config=model.config), prompt), facts[:, 0])
    assert torch.equal(said, facts[:, 1:])
    model.set_attn_implementation("w4a8")
    return model, prompt, facts, logits


@KINDS
def test_facts_are_found(exact, kind):
    """Every answer is right. Logits are up to 55; the bound is about three times the largest difference measured."""
    model, prompt, facts, logits = exact
    found, said = answers(model, read(model, W4A8Cache(model.config, kind), prompt), facts[:, 0])
    assert torch.equal(said, facts[:, 1:])
    assert (found - logits).abs().max() < 0.5


@KINDS
def test_a_fact_that_the_cache_lost(exact, kind):
    """Zeros in the page of one fact change the answer to it, and no other."""
    model, prompt, facts, _ = exact
    cache, lost = read(model, W4A8Cache(model.config, kind), prompt), 6
    (sequence,) = cache.pages.sequences
    cache.layers[1].cache[sequence.pages[(PLACES[lost] + 1) // PAGE]] = 0
    _, said = answers(model, cache, facts[:, 0])
    right = (said == facts[:, 1:]).all(1)
    assert right.logical_not().nonzero().flatten().tolist() == [lost]
