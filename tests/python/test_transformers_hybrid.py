"""Hybrid models in transformers: their layers of linear attention by the operators, beside transformers' own code."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.19")

from w4a8.integrations.transformers import W4A8Config, linear_attention  # noqa: E402

HEADS = {"linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 48}
COMMON = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False, "intermediate_size": 96,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_expand": 2}
# The class's name in transformers, that of its config if it is another, and sizes.
MODELS = {
    "Qwen3_5": ("Qwen3_5Text", {**HEADS, "linear_num_value_heads": 6}),
    "Qwen3_5Moe": ("Qwen3_5MoeText", {**HEADS, **EXPERTS, "linear_num_value_heads": 4}),
    "Qwen3Next": ("Qwen3Next", {**HEADS, **EXPERTS, "linear_num_value_heads": 4}),
    "Bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [2], "mamba_proj_bias": False}),
    "FalconH1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 128, "mamba_rms_norm": False, "ssm_in_multiplier": 1.25,
                              "ssm_multipliers": [0.5, 0.75, 1.5, 1.25, 2.0], "ssm_out_multiplier": 0.7,
                              "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.3, "key_multiplier": 0.6,
                              "mlp_multipliers": [0.9, 1.2], "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5}),
    "GraniteMoeHybrid": ("GraniteMoeHybrid", {**MAMBA, "layer_types": ["mamba", "mamba", "attention", "mamba"],
                                              "num_local_experts": 0, "shared_intermediate_size": 64}),
    "NemotronH": ("NemotronH", {"layers_block_type": ["mamba", "attention", "mamba", "moe"], "mamba_num_heads": 8,
                                "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2, "n_routed_experts": 4,
                                "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                "moe_shared_expert_intermediate_size": 32}),
    "OlmoHybrid": ("OlmoHybrid", {**HEADS, "linear_value_head_dim": 64, "linear_num_value_heads": 4,
                                  "pad_token_id": 0}),
    # Without experts: of two that are nearly as likely, roundings of 70 tokens choose the other one somewhere.
    "KimiLinear": ("KimiLinear", {"num_key_value_heads": 2, "linear_num_heads": 2, "linear_head_dim": 32,
                                  "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
                                  "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                                  "mlp_layer_types": ["dense"] * 4, "pad_token_id": 0, "bos_token_id": 1,
                                  "eos_token_id": 2}),
    "Lfm2": ("Lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "Lfm2Moe": ("Lfm2Moe", {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1,
                            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    """The folder of a float model."""
    config, sizes = MODELS[request.param]
    torch.manual_seed(0)
    made = getattr(transformers, f"{request.param}ForCausalLM")(
        getattr(transformers, f"{config}Config")(**{**COMMON, **sizes})
    )
    for name, parameter in made.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        elif name.endswith("A_log"):
            torch.nn.init.uniform_(parameter, -1.0, 2.7)
        elif name.endswith("dt_bias"):
            torch.nn.init.normal_(parameter)
    folder = tmp_path_factory.mktemp("hybrid")
    made.save_pretrained(folder)
    return folder


def load(folder, dtype=torch.float32):
    quantized = W4A8Config(group_size=32)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=quantized)


@pytest.fixture(scope="module")
def model(saved):
    return load(saved)


def linear_layers(model):
    return [module for module in model.modules() if type(module).__name__ in linear_attention._OPERATORS]


@pytest.fixture(scope="module")
def stock(model):
    """The same model with transformers' code."""
    made = copy.deepcopy(model)
    for layer in linear_layers(made):
        del layer.forward
    return made


def ids(batch, tokens, seed=1):
    return torch.randint(3, COMMON["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(seed))


def assert_near(found, expected):
    """int8 activations turn roundings of float32 into steps of 1/127 of a few of their largest number."""
    assert (found - expected).abs().median() < 1e-4 * expected.abs().max()
    assert (found - expected).abs().max() < 2e-2 * expected.abs().max()


def test_every_layer_is_taken(model):
    layers = linear_layers(model)
    assert layers and all(isinstance(layer.forward, linear_attention._Operator) for layer in layers)


@pytest.mark.parametrize("tokens", [1, 2, 3, 70])
def test_logits_are_those_of_transformers(model, stock, tokens):
    with torch.no_grad():
        assert_near(model(ids(2, tokens)).logits, stock(ids(2, tokens)).logits)
        assert_near(model(ids(2, tokens), use_cache=False).logits, stock(ids(2, tokens), use_cache=False).logits)


def layer_input(layer, tokens, seed=0, batch=2):
    width = (getattr(layer, "out_proj", None) or layer.o_proj).out_features
    return torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(seed))


def cache_of(layer, cache):
    """The argument."""
    return {"past_key_values" if hasattr(layer, "conv") else "cache_params": cache}


@pytest.mark.parametrize("tokens", [(70,), (1, 1, 1, 1), (5, 1, 64), (2, 3)])
def test_one_layer_and_its_states(model, tokens):
    """The layer alone: outputs and both states, beside transformers' code that goes on from them."""
    layer, ours, theirs = linear_layers(model)[0], *(transformers.DynamicCache(config=model.config) for _ in range(2))
    with torch.no_grad():
        for seed, count in enumerate(tokens):
            x = layer_input(layer, count, seed)
            found, expected = (
                layer(x, **cache_of(layer, ours)),
                type(layer).forward(layer, x, **cache_of(layer, theirs)),
            )
            assert (found - expected).abs().max() < 2e-2 * expected.abs().max()
            assert (found - expected).abs().median() < 1e-4 * expected.abs().max()
        state, like = (cache.get_recurrent_state(layer.layer_idx) for cache in (ours, theirs))
        assert state is None or (state - like).abs().max() < 2e-5 * like.abs().max()
        conv, as_there = (cache.get_conv_state(layer.layer_idx)[..., 1:] for cache in (ours, theirs))
        torch.testing.assert_close(conv, as_there, rtol=0, atol=0)
        # Transformers' code goes on from our states.
        x = layer_input(layer, 1, 9)
        found, expected = (type(layer).forward(layer, x, **cache_of(layer, cache)) for cache in (ours, theirs))
        assert (found - expected).abs().max() < 2e-2 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", [1, 13, 64])
def test_cuts_change_no_bit(saved, model, cut, dtype):
    model = model if dtype == torch.float32 else load(saved, dtype)
    layer, prompt = linear_layers(model)[0], layer_input(linear_layers(model)[0], 80).to(dtype)
    with torch.no_grad():
        caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
        whole = layer(prompt, **cache_of(layer, caches[0]))
        parts = [layer(part, **cache_of(layer, caches[1])) for part in prompt.split(cut, 1)]
    assert torch.equal(torch.cat(parts, 1), whole)
    state, same = (cache.get_recurrent_state(layer.layer_idx) for cache in caches)
    assert state is None or torch.equal(state, same)


def test_generate(model, stock):
    """With a shorter prompt, padded on the left; float32 roundings do not change the most likely tokens here."""
    prompt, mask = ids(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[0, :7] = 0
    how = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **how), stock.generate(prompt, **how))


def test_beams(model, stock):
    """Their states are put into another order. Of beams that are nearly as likely roundings may choose another."""
    how = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    how |= {"return_dict_in_generate": True, "output_scores": True}
    found, expected = (each.generate(ids(2, 20), **how).sequences_scores for each in (model, stock))
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=0)


def test_a_cache_that_was_reset(model):
    layer, cache = linear_layers(model)[0], transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        first = layer(layer_input(layer, 9), **cache_of(layer, cache))
        cache.layers[layer.layer_idx].reset()
        assert torch.equal(layer(layer_input(layer, 9), **cache_of(layer, cache)), first)


def test_what_the_operator_does_not_compute_is_transformers(model, monkeypatch):
    layer, x = linear_layers(model)[0], layer_input(linear_layers(model)[0], 5, batch=1)
    for name in ("gated_delta", "state_space", "short_conv"):
        monkeypatch.setattr(linear_attention.ops, name, None)
    with torch.no_grad():
        expected = type(layer).forward(layer, x)
        recording = transformers.DynamicCache(config=model.config)
        recording.layers[layer.layer_idx].activate_past_recording()
        assert torch.equal(layer(x, **cache_of(layer, recording)), expected)
        monkeypatch.setattr(layer, "conv_kernel_size", 9)
        assert torch.equal(layer(x), type(layer).forward(layer, x))


def test_packed_sequences_and_gradients_are_transformers(model, monkeypatch):
    layer, x = linear_layers(model)[0], layer_input(linear_layers(model)[0], 5, batch=1)
    monkeypatch.setattr(type(layer), "forward", lambda self, hidden_states, **more: hidden_states)
    with torch.no_grad():
        assert layer(x) is not x
        assert layer(x, **cache_of(layer, transformers.DynamicCache(config=model.config))) is not x
        assert layer(x, cu_seq_lens_q=torch.tensor([0, 2, 5], dtype=torch.int32)) is x
    x.requires_grad_()
    assert layer(x) is x


def test_weights_that_change_are_read_again(model):
    made, x = copy.deepcopy(linear_layers(model)[0]), layer_input(linear_layers(model)[0], 5)
    with torch.no_grad():
        made(x)
        for name, parameter in made.named_parameters():
            if name != "A_log":
                parameter.mul_(0.5)
        assert_near(made(x), type(made).forward(made, x))
        if hasattr(made, "A_log"):  # alone
            made.A_log.add_(1)
            assert_near(made(x), type(made).forward(made, x))


def test_loaded_in_inference_mode(model, saved):
    """Its tensors have no versions."""
    with torch.inference_mode():
        made = load(saved)
        assert all(isinstance(layer.forward, linear_attention._Operator) for layer in linear_layers(made))
        assert_near(made(ids(1, 9)).logits, model(ids(1, 9)).logits)


def test_a_copy_and_a_pickle_have_operators_of_their_own(model):
    x = ids(1, 9)
    with torch.no_grad():
        expected = model(x).logits
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(layer.forward._module() is layer for layer in linear_layers(made))
            assert_near(made(x).logits, expected)  # torch's floats depend on where they lie
