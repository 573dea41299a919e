"""Attention `w4a8` and W4A8Cache in transformers: beside stock attention, and rows beside each of them alone."""

import copy
import pickle

import pytest
import torch
from common import assert_same_bits

import w4a8

transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers import DynamicCache  # noqa: E402

from w4a8.integrations.transformers import W4A8Cache, fast_attention  # noqa: E402
from w4a8.integrations.transformers.cache import PAGE  # noqa: E402

COMMON = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": None, "pad_token_id": 0,
    "bos_token_id": 1,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 40, "layer_types": [SLIDING, FULL, SLIDING]}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "Llama": {},
    "Qwen3": {"head_dim": 32},
    "Qwen3Moe": {"head_dim": 32, **EXPERTS},
    "Gemma2": {**GEMMA, "attn_logit_softcapping": 2.0},
    "Gemma3": GEMMA,
    "GptOss": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 40,
        "layer_types": [SLIDING, FULL, SLIDING], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip
OTHERS = {  # beside Llama 4, some layers or all are not packed
    "Llama4": {
        "num_local_experts": 4, "intermediate_size_mlp": 96, "head_dim": 32, "attention_chunk_size": 48,
        "layer_types": ["chunked_attention", FULL, "chunked_attention"],
    },
    "Qwen3Next": {
        **EXPERTS, "shared_expert_intermediate_size": 96, "head_dim": 32, "linear_num_value_heads": 2,
        "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", FULL, "linear_attention"],
    },
    "DeepseekV3": {
        "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 16,
        "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "num_key_value_heads": 4,
    },
    "DiffLlama": {},
    "T5": {},
}  # fmt: skip
KINDS = pytest.mark.parametrize("kind", ["int8", "bfloat16"])
NAMES = pytest.mark.parametrize("name", MODELS)
pytestmark = pytest.mark.usefixtures("no_gradients")


def make_model(name, **changes):
    sizes = {**COMMON, **{**MODELS, **OTHERS}[name], **changes}
    config = {"Gemma3": "Gemma3Text", "Llama4": "Llama4Text"}.get(name, name)
    model = getattr(transformers, f"{name}For{'ConditionalGeneration' if name == 'T5' else 'CausalLM'}")
    model = model(getattr(transformers, f"{config}Config")(**sizes)).eval()
    for key, tensor in model.requires_grad_(False).named_parameters():
        if tensor.dim() >= 2:  # queries so large that attention looks at single tokens
            tensor.copy_(torch.randn_like(tensor) / tensor.shape[-1] ** 0.5 * (2 if "q_proj" in key else 1))
        elif "sinks" in key:
            tensor.copy_(torch.randn_like(tensor) + 1)
    if name in ("Gemma2", "GptOss"):  # attention sdpa of transformers 5.19 passes over soft caps and sinks
        model.set_attn_implementation("eager")
    return model


def each_row_alone(monkeypatch):
    """Sums of a row of float matrices (routers) that do not depend on how many rows there are, as torch's do."""

    def linear(x, weight, bias=None):
        y = (x.unsqueeze(-2) * weight).sum(-1)
        return y if bias is None else y + bias

    monkeypatch.setattr(torch.nn.functional, "linear", linear)


def padded(tokens=170, left=(37, 160, 0)):
    """Tokens [3, tokens] and their mask. More than a block and, without padding, than a page."""
    ids = torch.randint(1, 64, (len(left), tokens))
    mask = torch.stack([(torch.arange(tokens) >= count).long() for count in left])
    return ids * mask, mask


def generated(model, ids, mask=None, new=40, **options):
    """Logits [new, B, vocabulary] and what was written [B, new]; that it came from a W4A8Cache."""
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **options}
    mask = torch.ones_like(ids) if mask is None else mask
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, **options)
    assert type(out.past_key_values) is W4A8Cache
    return torch.stack(out.logits), out.sequences[:, ids.shape[1] :]


@KINDS
@NAMES
def test_rows_of_a_padded_batch(name, kind, monkeypatch):
    """Each row has the bits that it has alone; so has a batch whose prompt came in parts."""
    each_row_alone(monkeypatch)
    model = make_model(name)
    w4a8.quantize_(model, default_skip=False)
    fast_attention(model, kind)
    ids, mask = padded()
    logits, written = generated(model, ids, mask)
    for row in range(3):
        alone, tokens = generated(model, ids[row : row + 1, mask[row].argmax() :])
        assert_same_bits(alone[:, 0], logits[:, row], f"row {row}")
        assert torch.equal(tokens[0], written[row])
    parts, _ = generated(model, ids, mask, prefill_chunk_size=50)
    assert_same_bits(parts, logits)


def off_by(a, b):
    """Root mean square over the vocabulary of the difference of logits of deviation 1, at the median position:
    elsewhere noise may have selected another expert."""
    return (a - b).square().mean(-1).sqrt().median().item()


# About three times what was measured; without a window, a soft cap or sinks it is 0.13 to 0.75.
NEAR = {"bfloat16": 0.03, "int8": 0.09}


@KINDS
@pytest.mark.parametrize("name", [*MODELS, "Llama4", "Qwen3Next", "DeepseekV3"])
def test_near_stock(name, kind):
    """A prompt with padding, and tokens one by one after it, beside stock attention over a DynamicCache."""
    model = make_model(name)
    ids, mask = padded()
    ids, mask = torch.cat([ids, ids[:, -8:]], 1), torch.cat([mask, mask[:, -8:]], 1)
    stock = step_by_step(model, ids, mask, DynamicCache(config=model.config))
    model.set_attn_implementation("w4a8")
    ours = step_by_step(model, ids, mask, W4A8Cache(model.config, kind))
    assert off_by(ours, stock) < NEAR[kind]


def step_by_step(model, ids, mask, cache, prompt=170):
    """Logits of all tokens that are no padding."""
    ends = [prompt, *range(prompt + 1, ids.shape[1] + 1)]
    logits = []
    for begin, end in zip([0, *ends], ends):
        positions = (mask[:, :end].cumsum(1) - 1).clamp(0)[:, begin:]
        out = model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, position_ids=positions)
        logits.append(out.logits)
    return torch.cat(logits, 1)[mask.bool()]


def test_near_stock_is_a_measure(monkeypatch):
    """What test_near_stock would see: the operator called without its window, soft cap or sinks, and other kinds."""
    operator = w4a8.paged_attention
    for name, change in (
        ("Gemma3", {"window": 0}),
        ("Gemma2", {"soft_cap": 0.0}),
        ("GptOss", {"sinks": None}),
        ("GptOss", {"window": 0}),
        ("Llama4", {"chunk": 0}),
    ):
        model = make_model(name)
        ids, mask = padded()
        stock = step_by_step(model, ids, mask, DynamicCache(config=model.config))
        undo = fast_attention(model)
        with monkeypatch.context() as patch:
            changed = lambda *args, change=change, **options: operator(*args, **{**options, **change})  # noqa: E731
            patch.setattr(w4a8, "paged_attention", changed)
            wrong = step_by_step(model, ids, mask, W4A8Cache(model.config))
        undo()
        assert off_by(wrong, stock) > NEAR["int8"], (name, change)


@NAMES
def test_beams(name, monkeypatch):
    """Of a padded batch as of each row alone."""
    each_row_alone(monkeypatch)
    model = make_model(name)
    w4a8.quantize_(model, default_skip=False)
    fast_attention(model)
    ids, mask = padded()
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 20, "do_sample": False}
    together = model.generate(ids, attention_mask=mask, **options)[:, 170:].view(3, 4, 20)
    assert len({tuple(beam.tolist()) for beam in together[0]}) == 4
    for row in range(3):
        alone = model.generate(ids[row : row + 1, mask[row].argmax() :], **options)
        assert torch.equal(alone[:, -20:], together[row])


class Exact:
    """A small model with logits that do not depend on the batch, its cache, and what a new cache says."""

    def __init__(self, monkeypatch, kind="int8"):
        each_row_alone(monkeypatch)
        self.kind = kind
        self.model = make_model("Gemma3")
        w4a8.quantize_(self.model, default_skip=False)
        fast_attention(self.model, kind)
        self.cache = self.new()

    def new(self):
        return W4A8Cache(self.model.config, self.kind)

    def feed(self, ids, mask=None, cache=None):
        """Logits [B, q, vocabulary] of new tokens; mask [B, columns]."""
        cache = self.cache if cache is None else cache
        columns = cache.get_seq_length() + ids.shape[1]
        mask = torch.ones(len(ids), columns, dtype=torch.int64) if mask is None else mask
        positions = (mask.cumsum(1) - 1).clamp(0)[:, -ids.shape[1] :]
        return self.model(ids, attention_mask=mask, past_key_values=cache, position_ids=positions).logits

    def check(self, logits, ids, mask=None):
        """That they are the last ones of these sequences in a new cache."""
        want = self.feed(ids, mask, self.new())[:, -logits.shape[1] :]
        assert_same_bits(logits, want)


@KINDS
def test_rows_are_selected_and_cut(kind, monkeypatch):
    """Rows that share pages go on in different ways, from within a page and at its end; then back to where a page that
    was full is not full any more."""
    exact = Exact(monkeypatch, kind)
    ids = torch.randint(1, 64, (3, 2 * PAGE + 20))
    exact.feed(ids)
    sequences = ids[[2, 0, 0, 2]]
    exact.cache.reorder_cache(torch.tensor([2, 0, 0, 2]))
    for count in (1, 50, 70):  # the last one fills the page
        new = torch.randint(1, 64, (4, count))
        sequences = torch.cat([sequences, new], 1)
        exact.check(exact.feed(new), sequences)
    exact.cache.batch_repeat_interleave(2)
    exact.cache.batch_select_indices(torch.tensor([0, 1, 3, 7]))
    sequences = sequences[[0, 0, 1, 3]]
    exact.cache.crop(-200)  # into a page that all rows of one prompt share
    sequences = sequences[:, :-200]
    assert exact.cache.get_seq_length() == sequences.shape[1]
    for count in (1, 90):
        new = torch.randint(1, 64, (4, count))
        sequences = torch.cat([sequences, new], 1)
        exact.check(exact.feed(new), sequences)
    exact.cache.batch_select_indices(torch.tensor([False, True, False, True]))
    for count in (3, 5):  # the second time begins where the first one did
        new = torch.randint(1, 64, (2, count))
        exact.check(exact.feed(new), torch.cat([sequences[[1, 3]], new], 1))
        exact.cache.crop(-count)


def test_rows_with_padding_are_selected(monkeypatch):
    exact = Exact(monkeypatch)
    ids, mask = padded()
    exact.feed(ids, mask)
    exact.cache.reorder_cache(torch.tensor([1, 1, 0]))
    ids, mask = (torch.cat([tensor[[1, 1, 0]], torch.ones(3, 1, dtype=torch.int64)], 1) for tensor in (ids, mask))
    exact.check(exact.feed(ids[:, -1:], mask), ids, mask)


def test_pages_are_shared_and_used_again(monkeypatch):
    """Eight rows that begin alike have a page each of their own, not all; what is cut off is used again."""
    exact = Exact(monkeypatch)
    exact.feed(torch.randint(1, 64, (1, 3 * PAGE + 5)))
    exact.cache.batch_repeat_interleave(8)
    exact.feed(torch.randint(1, 64, (8, 1)))
    assert exact.cache.pages.count == 3 + 8
    for _ in range(4):
        exact.cache.reorder_cache(torch.tensor([0, 0, 2, 2, 4, 4, 6, 6]))
        exact.feed(torch.randint(1, 64, (8, 1)))
    assert exact.cache.pages.count == 3 + 8
    exact.cache.crop(-2 * PAGE)
    exact.feed(torch.randint(1, 64, (8, PAGE)))
    assert exact.cache.pages.count <= 1 + 2 * 8
    exact.cache.reset()
    assert exact.cache.get_seq_length() == 0 and all(layer.cache is None for layer in exact.cache.layers)
    ids = torch.randint(1, 64, (2, 9))
    exact.check(exact.feed(ids), ids)


def test_padding_anywhere(monkeypatch):
    """Each turn of a conversation with padding of its own, on the left or on the right: a row is its tokens."""
    exact = Exact(monkeypatch)
    turns = [padded(90, (0, 30, 89)), padded(30, (10, 0, 5)), padded(1, (0, 0, 0))]
    ids, mask = (torch.cat([turn[i] for turn in turns], 1) for i in (0, 1))
    ids[:, 90:120], mask[:, 90:120] = ids[:, 90:120].flip(1), mask[:, 90:120].flip(1)
    got = torch.cat([exact.feed(ids[:, a:b], mask[:, :b]) for a, b in ((0, 90), (90, 120), (120, 121))], 1)
    for row in range(3):
        tokens = mask[row].bool()
        alone = exact.feed(ids[row : row + 1, tokens], cache=exact.new())
        assert_same_bits(got[row, tokens], alone[0])
    exact.cache.crop(-20)
    got = exact.feed(ids[:, :4], torch.cat([mask[:, :101], torch.ones(3, 4, dtype=torch.int64)], 1))
    for row in range(3):
        tokens = torch.cat([ids[row, :101][mask[row, :101].bool()], ids[row, :4]])[None]
        assert_same_bits(got[row], exact.feed(tokens, cache=exact.new())[0, -4:])


def test_a_prompt_that_is_used_again(monkeypatch):
    """A copy of its cache, as for prompts that many texts begin with."""
    exact = Exact(monkeypatch)
    prompt = torch.randint(1, 64, (1, PAGE + 9))
    exact.feed(prompt)
    for _ in range(2):
        more = torch.randint(1, 64, (1, 70))
        exact.check(exact.feed(more, cache=copy.deepcopy(exact.cache)), torch.cat([prompt, more], 1))


def test_guessed_tokens(monkeypatch):
    """generate takes back what it guessed from the prompt: what is written is the same."""
    exact = Exact(monkeypatch)
    ids = torch.randint(1, 64, (1, 60)).repeat(1, 2)
    _, written = generated(exact.model, ids)
    guessed = exact.model.generate(ids, prompt_lookup_num_tokens=6, max_new_tokens=40, do_sample=False)
    assert torch.equal(guessed[:, 120:], written)


def test_what_is_refused(monkeypatch):
    exact = Exact(monkeypatch)
    ids, mask = padded(20, (5, 0, 10))
    exact.feed(ids, mask)
    with pytest.raises(ValueError, match="attention_mask says other tokens are padding than when they came"):
        exact.feed(ids[:, :1])
    with pytest.raises(ValueError, match=r"attention_mask has shape \[3, 20\], expected \[3, 21\]"):
        exact.feed(ids[:, :1], mask)
    with pytest.raises(ValueError, match="the batch has 2 rows, the cache 3"):
        exact.feed(ids[:2, :1])
    with pytest.raises(ValueError, match="tokens_to_remove is 3, expected 0 or less"):
        exact.cache.crop(3)
    for other in ("sdpa", "eager"):
        exact.model.set_attn_implementation(other)
        with pytest.raises(RuntimeError, match=r"packed in a W4A8Cache.*set_attn_implementation\(\"w4a8\"\)"):
            exact.feed(ids, cache=exact.new())


def test_a_forward_that_failed(monkeypatch):
    """Layers of different lengths are seen before they are used."""
    exact = Exact(monkeypatch)
    ids = torch.randint(1, 64, (1, 5))

    def fail(*_):
        raise KeyboardInterrupt

    hook = exact.model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        exact.feed(ids)
    hook.remove()
    with pytest.raises(RuntimeError, match=r"others .*a forward was not finished"):
        exact.feed(ids)
    exact.cache.reset()
    exact.check(exact.feed(ids), ids)


def test_fast_attention():
    """What generate's caches are with it; it can be copied, stored and undone."""
    model = make_model("Llama")
    ids = torch.randint(1, 64, (1, 9))
    options = {"max_new_tokens": 2, "return_dict_in_generate": True}
    model.generation_config.cache_implementation = "static"  # of the checkpoint, as Gemma's
    first = fast_attention(model, "bfloat16")
    again = fast_attention(model, "int8")
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        cache = other.generate(ids, **options).past_key_values
        assert type(cache) is W4A8Cache and cache.kind == "int8" and cache.get_seq_length() == 10
    given = W4A8Cache(model.config, "bfloat16")
    assert model.generate(ids, past_key_values=given, **options).past_key_values is given
    cache = model.generate(ids, cache_implementation="dynamic", **options).past_key_values
    assert type(cache) is DynamicCache
    again()
    first()
    assert model.config._attn_implementation == "sdpa" and "_prepare_cache_for_generation" not in vars(model)
    assert type(model.generate(ids, **options).past_key_values) is transformers.StaticCache


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: make_model("Llama").model, "model is a LlamaModel, expected one of transformers with generate"),
        (lambda: make_model("Llama").to("meta"), "model is on meta, expected a CPU"),
        (lambda: make_model("Llama", head_dim=24), "the heads are not of 16 to 512 numbers, a multiple of 16"),
        (lambda: make_model("DeepseekV3"), r"its attention is latent \(MLA\), which fuse\(\) alone runs"),
        (lambda: make_model("DiffLlama"), "DiffLlamaForCausalLM does not run with it: "),
        (lambda: make_model("T5", d_kv=16), "model has an encoder and a decoder, expected a decoder alone"),
    ],
)
def test_fast_attention_says_why_not(make, reason):
    """The model stays as it was."""
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=reason):
        fast_attention(model)
    assert model.config._attn_implementation == before and "_prepare_cache_for_generation" not in vars(model)


def test_other_kinds_are_refused():
    model = make_model("Llama")
    for call in (fast_attention, lambda model, kind: W4A8Cache(model.config, kind)):
        with pytest.raises(ValueError, match="kind is 'int4', expected 'int8' or 'bfloat16'"):
            call(model, "int4")
    assert model.config._attn_implementation == "sdpa"
