"""fuse() of hybrid models: attention and linear attention in one call. That the call gives the operators' bits is in
test_decoder_linear.py."""

import pytest

transformers = pytest.importorskip("transformers", minversion="5.19")

import torch  # noqa: E402
from common import assert_same_bits  # noqa: E402
from test_transformers_fuse import check_rows_alone, differs_by, fails, run  # noqa: E402
from test_transformers_hybrid import ids, saved  # noqa: E402, F401

from w4a8.integrations.transformers import W4A8Cache, W4A8Config, fast_attention, fuse  # noqa: E402
from w4a8.integrations.transformers.fast import latent_cache  # noqa: E402

FUSED = ["Qwen3_5", "Qwen3_5Moe", "Qwen3Next", "GraniteMoeHybrid", "NemotronH", "Lfm2", "Lfm2Moe", "Bamba", "FalconH1",
         "OlmoHybrid", "KimiLinear"]  # fmt: skip
pytestmark = [pytest.mark.usefixtures("no_gradients"), pytest.mark.parametrize("saved", FUSED, indirect=True)]


@pytest.fixture
def model(saved):  # noqa: F811
    return load(saved)


def load(saved):  # noqa: F811
    packed = W4A8Config(group_size=32, default_skip=False, skip=["re:.*((?<!forget_)gate|norm)$"])  # one must match
    return transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, quantization_config=packed)


def own_layers(model, tokens):
    """Logits of the model's own layers over the same cache; of latent attention, over floats."""
    is_latent = hasattr(model.config, "kv_lora_rank")
    undo = (latent_cache if is_latent else fast_attention)(model, "bfloat16")
    found = run(model, tokens, cache=W4A8Cache(model.config, "bfloat16"))
    undo()
    return found


def test_families(model):
    """As in test_transformers_fuse.py: a norm that is wrong moves the logits by more than roundings do."""
    tokens = ids(2, 70)
    own = own_layers(model, tokens)
    undo = fuse(model, "bfloat16")
    error = differs_by(run(model, tokens, cache=W4A8Cache(model.config, "bfloat16")), own)
    undo()
    assert error < 0.02
    parameters = [(key, each) for key, each in model.named_parameters() if each.squeeze().dim() == 1]
    found = {key.rsplit(".", 1)[-1] for key, _ in parameters}
    assert found >= ({"weight"} if model.config.model_type.startswith("lfm2") else {"A_log", "dt_bias", "weight"})
    for key, parameter in parameters:
        before = parameter.clone()
        parameter.copy_(parameter + 1)
        wanted = own_layers(model, tokens)
        other = fuse(model, "bfloat16")
        changed = run(model, tokens, cache=W4A8Cache(model.config, "bfloat16"))
        other()
        parameter.copy_(before)
        assert differs_by(changed, wanted) < 0.05 < 0.1 < 0.1 + differs_by(changed, own), key


def test_rows_have_the_same_bits_alone(model):
    """Padding to the left and to the right, chunks, and what logits_to_keep asks for. The output layer is packed."""
    fuse(model)
    assert model.forward.stack.head is None
    rows = [ids(1, n, seed=n)[0] for n in (9, 4, 7)]
    alone, cache = check_rows_alone(model, rows)
    cache.reset()
    assert_same_bits(run(model, rows[0][None], cache=cache)[0], alone[0])


def test_loaded_in_inference_mode(model, saved):  # noqa: F811
    fuse(model)
    with torch.inference_mode():
        made = load(saved)
        fuse(made)
        assert_same_bits(made(ids(1, 9)).logits, model(ids(1, 9)).logits)


def test_generate(model, monkeypatch):
    """Greedy; beams, whose states are put into another order; and rows of which one is padded."""
    fuse(model)
    monkeypatch.setattr(type(model.model), "forward", fails)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
    prompt = ids(1, 12)
    greedy, steps = model.generate(prompt, **options), prompt
    for _ in range(8):
        steps = torch.cat([steps, run(model, steps)[:, -1:].argmax(-1)], 1)
    assert torch.equal(greedy, steps)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), prompt], 1)
    both = torch.cat([padded, ids(1, 17, seed=3)])
    answers = model.generate(both, attention_mask=(both != 0).long(), **options)
    assert torch.equal(answers[:1, 5:], greedy)
    beams = model.generate(prompt, num_beams=3, return_dict_in_generate=True, output_scores=True, **options)
    cache, parts = W4A8Cache(model.config), beams.sequences.split([12] + [1] * 8, 1)  # as beams came into theirs
    logits = torch.cat([run(model, part, cache=cache) for part in parts], 1)[0, 11:-1].log_softmax(-1)
    new = beams.sequences[0, 12:]
    torch.testing.assert_close(logits.gather(1, new[:, None]).sum() / 8, beams.sequences_scores[0])


def test_what_is_not_in_the_call_runs_layer_by_layer(model, monkeypatch):
    fuse(model)
    step = model.forward.stack.decoder.step
    monkeypatch.setattr(model.forward.stack.decoder, "step", fails)
    tokens, positions = ids(1, 6), torch.arange(6).expand(3, 1, 6).clone()
    cache = W4A8Cache(model.config)
    cache.activate_past_recording()
    run(model, tokens, cache=cache)
    run(model, tokens, cache=transformers.DynamicCache(config=model.config))
    monkeypatch.setattr(model.forward.stack.decoder, "step", step)
    expected = run(model, tokens)
    if model.config.model_type.startswith("qwen3_5"):
        assert_same_bits(run(model, tokens, position_ids=positions), expected)
        positions[1, 0, 3] = 2
        monkeypatch.setattr(model.forward.stack.decoder, "step", fails)
        run(model, tokens, position_ids=positions)


def test_floats_are_not_fused(saved):  # noqa: F811
    made = transformers.AutoModelForCausalLM.from_pretrained(saved)
    with pytest.raises(ValueError, match=r"linear attention of .* is not packed"):
        fuse(made)
