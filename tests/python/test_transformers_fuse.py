"""fuse(): the layers of transformers' models in one call. That the call gives the operators' bits is in
test_decoder.py; here, that each family's modules are found, and what generate does with it."""

import copy

import pytest

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("gguf")

import torch  # noqa: E402
from common import assert_same_bits  # noqa: E402
from gguf_models import VOCAB, TinyModel  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache  # noqa: E402

from w4a8.integrations.transformers import W4A8Cache, W4A8Config, fuse  # noqa: E402
from w4a8.nn import GateNumbers, W4A8Experts  # noqa: E402

FUSED = ["llama", "llama, tied", "llama, biases", "gemma3", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "mixtral",
         "olmoe", "gpt-oss", "glm4moe"]  # fmt: skip
# Quantized while loading, without a GGUF file.
SIZES = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0}  # fmt: skip
ROUNDED = {
    "Ernie4_5": {},
    "Exaone4": {"sliding_window": 4, "sliding_window_pattern": 2},
    "Glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "Granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
        "logits_scaling": 8.0,
    },
    "Olmo2": {},
    "SeedOss": {"attention_bias": True, "attention_out_bias": False},
    "SmolLM3": {"no_rope_layers": [1, 1, 0, 1]},
    "Phi3": {"partial_rotary_factor": 0.5, "sliding_window": 4, "original_max_position_embeddings": 4096},
}
UNKNOWN = "Starcoder2"  # a model without a family
TOKENS = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(1))
LONG = torch.randint(3, VOCAB, (2, 48), generator=torch.Generator().manual_seed(2))
pytestmark = pytest.mark.usefixtures("no_gradients")


def load(name, folder, seed=0, **options):
    if name in (*ROUNDED, UNKNOWN):
        torch.manual_seed(seed)
        config = getattr(transformers, f"{name}Config")(**SIZES, **ROUNDED.get(name, {}))
        made = getattr(transformers, f"{name}ForCausalLM")(config)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
        made.save_pretrained(folder)
        how = {"quantization_config": W4A8Config(group_size=32), "dtype": torch.float32, **options}
        return AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    TinyModel(name, seed).write(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", **{"dtype": torch.float32, **options}
    ).eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    with torch.no_grad():
        model = load("llama", tmp_path_factory.mktemp("llama"))
    fuse(model)
    return model


def run(model, ids, mask=None, cache=None, **kwargs):
    cache = W4A8Cache(model.config) if cache is None else cache
    return model(ids, attention_mask=mask, past_key_values=cache, use_cache=True, **kwargs).logits


def fails(*args, **kwargs):
    raise AssertionError("the model's own layers ran")


def differs_by(a, b):
    """Median over positions of the root mean square, in units of the logits' spread."""
    return ((a - b).square().mean(-1).sqrt() / b.std()).median().item()


@pytest.mark.parametrize("name", [*FUSED, *ROUNDED])
def test_families(name, tmp_path):
    """Beside the model's own layers. Both round inputs to int8 at the same places; where one is on the other side of a
    tie, logits move by some 2^-6 of their spread, and attention over bfloat16 by less. A norm, a scale or a rotation
    that is wrong moves them by a tenth and more, as the last lines show for each norm."""
    model = load(name, tmp_path, attn_implementation="eager")
    tokens = LONG if name in ROUNDED else TOKENS  # a few tokens do not show a layer that is turned or not
    own = model(tokens).logits
    undo = fuse(model, "bfloat16")
    for layer in model.model.layers:
        layer.self_attn.o_proj.forward = None  # would fail
        del layer.self_attn.o_proj.forward
    got = run(model, tokens, cache=W4A8Cache(model.config, "bfloat16"))
    assert got.dtype == own.dtype and got.shape == own.shape
    error = differs_by(got, own)
    undo()
    for norm in [part for key, part in model.named_modules() if key.endswith("norm")]:
        norm.weight += 0.5
    other = fuse(model, "bfloat16")
    assert differs_by(run(model, tokens, cache=W4A8Cache(model.config, "bfloat16")), own) > 2 * error + 0.05
    other()
    assert error < 0.05, error


def test_a_cap_of_the_logits(tmp_path):
    model = load("gemma3", tmp_path, attn_implementation="eager")
    plain = model(TOKENS).logits
    model.config.final_logit_softcapping = cap = plain.std().item() / 2
    own = model(TOKENS).logits
    fuse(model, "bfloat16")
    got = run(model, TOKENS, cache=W4A8Cache(model.config, "bfloat16"))
    assert got.abs().max() <= cap
    assert differs_by(got, own) < 0.05 < 0.1 < differs_by(plain, own)


def test_numbers_of_experts(tmp_path):
    """They go into the call."""
    model = load("gpt-oss", tmp_path, attn_implementation="eager")
    plain = model(TOKENS).logits
    experts = [module for module in model.modules() if isinstance(module, W4A8Experts)]
    for each in experts:
        each.numbers = GateNumbers(0.05, 0.5)
    own = model(TOKENS).logits
    fuse(model, "bfloat16")
    error = differs_by(run(model, TOKENS, cache=W4A8Cache(model.config, "bfloat16")), own)
    assert error < 0.05 < 0.1 < differs_by(plain, own)


def check_rows_alone(model, rows):
    """Of rows of up to 9 tokens, the first of 9: their logits alone, and the cache of the first one in parts. Bits of
    latent attention depend on how many tokens come first: one in both here."""
    alone = [run(model, row[None])[0] for row in rows]
    for side in ("left", "right"):
        ids, mask = torch.zeros(len(rows), 9, dtype=torch.int64), torch.zeros(len(rows), 9, dtype=torch.int64)
        for i, row in enumerate(rows):
            where = slice(9 - len(row), 9) if side == "left" else slice(len(row))
            ids[i, where], mask[i, where] = row, 1
        together = run(model, ids, mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        for i in range(len(rows)):
            assert_same_bits(together[i][mask[i].bool()], alone[i])
            assert not together[i][~mask[i].bool()].any()

    def in_parts(*sizes):
        cache = W4A8Cache(model.config)
        return torch.cat([run(model, part, cache=cache)[0] for part in rows[0][None].split(sizes, 1)]), cache

    is_latent = hasattr(model.config, "kv_lora_rank")
    found, cache = in_parts(1, 2, 1, 5) if is_latent else in_parts(3, 1, 5)
    assert_same_bits(found, in_parts(1, 8)[0] if is_latent else alone[0])
    assert_same_bits(run(model, rows[0][None], logits_to_keep=2)[0], alone[0][-2:])
    return alone, cache


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3moe"])
def test_rows_have_the_same_bits_alone(name, tmp_path):
    """Padding to the left and to the right, chunks, and what logits_to_keep asks for."""
    model = load(name, tmp_path)
    fuse(model)
    rows = [torch.randint(3, VOCAB, (n,)) for n in (9, 4, 7)]
    alone, _ = check_rows_alone(model, rows)
    for kept in ([1, 5], list(range(8, -1, -1))):  # the second: all of them, in another order
        assert_same_bits(run(model, rows[0][None], logits_to_keep=torch.tensor(kept))[0], alone[0][kept])


def test_generate(llama, monkeypatch):
    """Greedy, and lossless with tokens that are guessed and taken back; beams and sampling run."""
    assert type(llama).forward is not llama.forward
    monkeypatch.setattr(type(llama.model), "forward", fails)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    ids = TOKENS[:1].repeat(1, 3)
    greedy = llama.generate(ids, do_sample=False, **options)
    steps = ids
    for _ in range(12):
        steps = torch.cat([steps, run(llama, steps)[:, -1:].argmax(-1)], 1)
    assert torch.equal(greedy, steps)
    assert torch.equal(llama.generate(ids, do_sample=False, prompt_lookup_num_tokens=3, **options), greedy)
    both = torch.cat([ids, ids.flip(1)])
    beams = llama.generate(both, num_beams=3, do_sample=False, **options)
    assert beams.shape == (2, 30)
    assert torch.equal(llama.generate(both[1:], num_beams=3, do_sample=False, **options), beams[1:])
    assert llama.generate(both, do_sample=True, **options).shape == (2, 30)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), ids], 1)
    mask = (padded != 0).long()
    assert torch.equal(llama.generate(padded, attention_mask=mask, do_sample=False, **options)[:, 5:], greedy)


def test_threads_of_torch_while_generate_runs(llama, monkeypatch):
    """One between steps of few rows. Afterwards as before, also behind an error, and in other calls."""
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    step = llama.forward.stack.decoder.step

    def noting(*args, threads, **kwargs):
        seen.append((len(args[0]), threads, torch.get_num_threads()))
        if len(seen) == 7:
            raise KeyError("a step fails")
        return step(*args, threads=threads, **kwargs)

    monkeypatch.setattr(llama.forward.stack.decoder, "step", noting)
    prompt = torch.randint(3, VOCAB, (1, 12))
    try:
        llama.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
        assert torch.get_num_threads() == 2
        run(llama, TOKENS[:1, :1])
        assert seen == [(12, 2, 2), (1, 2, 1), (1, 2, 1), (1, 0, 2)]
        with pytest.raises(KeyError, match="a step fails"):
            llama.generate(prompt, max_new_tokens=9, min_new_tokens=9, do_sample=False, pad_token_id=0)
        assert seen[4:] == [(12, 2, 2), (1, 2, 1), (1, 2, 1)] and torch.get_num_threads() == 2
        run(llama, TOKENS[:1, :1])
        assert seen[-1] == (1, 0, 2)
    finally:
        torch.set_num_threads(before)


def test_embeddings_and_positions(llama):
    expected = run(llama, TOKENS)
    got = run(llama, None, inputs_embeds=llama.get_input_embeddings()(TOKENS))
    assert_same_bits(got, expected)
    got = run(llama, TOKENS, position_ids=torch.arange(6)[None])
    assert_same_bits(got, expected)
    assert (run(llama, TOKENS, position_ids=torch.arange(6)[None] * 3) - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"past_key_values": "dynamic"}, "no W4A8Cache of kind int8"),
        ({"past_key_values": "bfloat16"}, "no W4A8Cache of kind int8"),
        ({"past_key_values": None}, "no W4A8Cache of kind int8"),
        ({"labels": TOKENS}, "labels are given"),
        ({"output_hidden_states": True}, "output_hidden_states is given"),
        ({"return_dict": False}, "return_dict is False"),
    ],
)
def test_the_models_own_layers(llama, arguments, message, monkeypatch):
    caches = {"dynamic": DynamicCache(), "bfloat16": W4A8Cache(llama.config, "bfloat16"), None: None}
    said = []
    monkeypatch.setattr("w4a8.integrations.transformers.fused.logger.warning_once", said.append)
    given = {"past_key_values": W4A8Cache(llama.config), "use_cache": True} | arguments
    if not isinstance(given["past_key_values"], W4A8Cache):
        given["past_key_values"] = caches[given["past_key_values"]]
    out = llama(TOKENS, **given)
    assert len(said) == 1 and message in said[0]
    logits = next(part for part in out if part.dim() == 3) if isinstance(out, tuple) else out.logits
    assert differs_by(logits, run(llama, TOKENS)) < 0.1
    assert not arguments.get("output_hidden_states") or len(out.hidden_states) == 3


def test_gradients_are_the_models_own_layers(llama, monkeypatch):
    said = []
    monkeypatch.setattr("w4a8.integrations.transformers.fused.logger.warning_once", said.append)
    with torch.enable_grad():
        llama(TOKENS, past_key_values=W4A8Cache(llama.config), use_cache=True)
    assert "gradients are on" in said[0]


def test_an_option_of_loading(llama, tmp_path, caplog):
    """W4A8Config(fuse=): the answers of fuse(). What is not known loads as ever, and is named. It is not saved."""
    config = W4A8Config(fuse="int8")
    model = load("llama", tmp_path, quantization_config=config)
    assert type(vars(model)["forward"]) is type(vars(llama)["forward"]) and "fuse" not in config.to_dict()
    options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    found, expected = (each.generate(TOKENS, **options) for each in (model, llama))
    # The output layer is a product of torch over K = 256, whose last bits depend on where its operands lie in memory.
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=0, atol=256 * 2.0**-24)
    other = load(UNKNOWN, tmp_path / "other", quantization_config=W4A8Config(group_size=32, fuse="int8"))
    assert "forward" not in vars(other) and "the layers do not run in one call: " in caplog.text
    with pytest.raises(ValueError, match="fuse is 'int4', expected None or one of int8, bfloat16"):
        W4A8Config(fuse="int4")


def test_undo_and_copies(tmp_path):
    model = load("llama", tmp_path)
    own, before = model(TOKENS).logits, model.config._attn_implementation
    undo = fuse(model)
    expected = run(model, TOKENS)
    copied = copy.deepcopy(model)
    assert_same_bits(run(copied, TOKENS), expected)
    del model.model.layers[0].self_attn.k_proj.packed  # the copy has its own
    assert_same_bits(run(copied, TOKENS), expected)
    copied_again = load("llama", tmp_path)
    undo = fuse(copied_again)
    undo()
    assert "forward" not in vars(copied_again) and copied_again.config._attn_implementation == before
    assert_same_bits(copied_again(TOKENS).logits, own)


def test_refuses(tmp_path):
    model = load(UNKNOWN, tmp_path)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="models of type starcoder2 are not known"):
        fuse(model)
    assert "forward" not in vars(model) and model.config._attn_implementation == before


def test_refuses_layers_that_are_not_packed(tmp_path):
    model = load("llama", tmp_path)
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(256, 512)
    with pytest.raises(ValueError, match=r"LlamaMLP\.up_proj is not packed"):
        fuse(model)
    assert "forward" not in vars(model)
