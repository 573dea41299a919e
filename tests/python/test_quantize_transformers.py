"""w4a8.quantize_ on the models of transformers: every block it knows, as the installed version has it."""

import copy

import moe_blocks
import numpy as np
import pytest
import reference
import torch
from common import assert_same_bits, assert_within
from test_quantize_experts import expected_experts

import w4a8
from w4a8.nn import W4A8Experts, W4A8Linear

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

COMMON = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip
DEEPSEEK = {
    "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2}
MODELS = {
    "qwen2": ("Qwen2Moe", {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96}),
    "qwen3": ("Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "qwen3, not normalized": ("Qwen3Moe", {"num_experts": 6, "moe_intermediate_size": 32, "norm_topk_prob": False}),
    "mixtral": ("Mixtral", {"num_local_experts": 6}),
    "olmoe": ("Olmoe", {"num_experts": 6}),
    "deepseek 2": ("DeepseekV2", {**DEEPSEEK, "topk_method": "greedy"}),
    "deepseek 2, groups": ("DeepseekV2", {**DEEPSEEK, **GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek 3": ("DeepseekV3", {**DEEPSEEK, **GROUPS, "norm_topk_prob": True}),
    "deepseek 3, not normalized": ("DeepseekV3", {**DEEPSEEK, **GROUPS, "norm_topk_prob": False}),
}
GPT_OSS = {"num_local_experts": 6, "head_dim": 32, "sliding_window": 8, "eos_token_id": 0, "pad_token_id": 0}
if int(transformers.__version__.split(".")[0]) >= 5:  # 4 calls its experts with other arguments
    MODELS["gpt-oss"] = ("GptOss", {**GPT_OSS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})


# Of transformers 5, for test_families.py: experts with its common interface, and Llama 4's.
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FAMILIES = {
    "qwen3 next": (
        "Qwen3Next",
        {"num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96, "head_dim": 32,
         "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
         "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "glm4": (
        "Glm4Moe",
        {"n_routed_experts": 8, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
         "head_dim": 32, "routed_scaling_factor": 2.5, **GROUPS},
    ),
    "minimax m2": ("MiniMaxM2", {"num_local_experts": 6, "head_dim": 32, **TOKENS}),
    "ernie 4.5": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 6, "moe_intermediate_size": 32, "moe_k": 2, "moe_num_shared_experts": 1,
         "moe_layer_start_index": 1, "tie_word_embeddings": False},
    ),
    "llama 4": (
        "Llama4",
        {"num_experts_per_tok": 1, "num_local_experts": 4, "intermediate_size_mlp": 96, "head_dim": 32,
         "moe_layers": [1], **TOKENS},
    ),
    "phimoe": ("Phimoe", {"num_local_experts": 6}),
    "granite": ("GraniteMoe", {"num_local_experts": 6}),
    "hunyuan": ("HunYuanMoEV1", {"num_experts": 6, "moe_topk": 2, "head_dim": 32}),
    "jamba": (
        "Jamba",
        {"num_experts": 6, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 32},
    ),
}  # fmt: skip
NEMOTRON_H = {
    "num_hidden_layers": 2, "layers_block_type": ["attention", "moe"], "head_dim": 32, "n_routed_experts": 6,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64, "mamba_num_heads": 4, "mamba_head_dim": 32,
    "n_groups": 2, "ssm_state_size": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CONFIGS = {"Llama4": "Llama4Text"}  # where the name of the config is another than that of the model

DENSE = {name: (name, {"num_experts_per_tok": None}) for name in ("Llama", "Qwen3", "Qwen2")}  # Qwen2 has biases


def make_model(name):
    family, sizes = {**MODELS, **DENSE, **FAMILIES, "nemotron h": ("NemotronH", NEMOTRON_H)}[name]
    config = getattr(transformers, f"{CONFIGS.get(family, family)}Config")(**{**COMMON, **sizes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith("e_score_correction_bias"):
            tensor.copy_(torch.randn_like(tensor) / 10)
        elif tensor.dim() >= 2:
            tensor.copy_(torch.randn_like(tensor) / tensor.shape[-1] ** 0.5)
    return model


def moe_block(model):
    """The block of the last layer."""
    layer = model.model.layers[-1]
    return getattr(layer, "block_sparse_moe", None) or layer.mlp


def routed(block, x):
    """ids and weights [T, k] by transformers' own float block: its router, or, where the block routes itself (4), the
    weights with which its experts are called."""
    if hasattr(block, "router"):
        _, weights, ids = block.router(x.view(-1, 64))
        return ids, weights
    if isinstance(block.gate, torch.nn.Linear):
        probabilities = block.gate(x.view(-1, 64)).softmax(-1)
        weights, ids = probabilities.topk(2, -1)
        if getattr(block, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights
    found = block.gate(x)
    weights, ids = (found[1], found[2]) if len(found) == 3 else (found[1], found[0])
    return ids, weights


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_block(name):
    """Against docs/numerics.md with the router and the shared experts of transformers' own block."""
    model = make_model(name)
    block = moe_block(model)
    x = torch.randn(2, 9, 64)
    tokens = x.view(-1, 64)
    before = block(x)
    ids, weights = routed(block, x)
    experts = moe_blocks.expert_weights(block.experts)
    kind = 3 if name == "gpt-oss" else 2
    want, explained = expected_experts(experts, tokens, ids, weights, 32, kind)
    single = [expected_experts(experts, tokens, ids[:, j : j + 1], weights[:, j : j + 1], 32, kind)[0] for j in (0, 1)]
    report = w4a8.quantize_(model)
    after = block(x)
    assert isinstance(block.experts, W4A8Experts)
    assert [key for key in report.replaced if key.endswith(".experts")]
    assert type(after) is type(before)
    if isinstance(before, tuple):  # transformers 4: the router's logits; gpt-oss: its weights
        assert_same_bits(after[1], before[1])
        after = after[0]
    # A softmax in another order of operations, where this package routes (see test_softmax_blocks).
    explained = explained + (2 * reference.EXP_ERROR + 10 * reference.U) * sum(np.abs(part) for part in single)
    if hasattr(block, "shared_expert"):
        want = want + (torch.sigmoid(block.shared_expert_gate(tokens)) * block.shared_expert(tokens)).numpy()
    if hasattr(block, "shared_experts"):
        want = want + block.shared_experts(tokens).numpy()
    assert after.shape == x.shape
    assert_within(after.view(-1, 64).numpy(), want, explained + 2 * reference.U * np.abs(want))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_model(name):
    """Everything but output layer and routers is replaced; logits of the routers are still recorded; saved and
    loaded, the bits are the same."""
    model = make_model(name)
    tokens = torch.randint(0, 64, (2, 7))
    records = name.startswith(("qwen", "mixtral", "olmoe"))
    options = {"output_router_logits": True} if records else {}
    before = model(tokens, **options)
    partly = copy.deepcopy(model)
    report = w4a8.quantize_(model)
    assert report.skipped.pop("model.embed_tokens") == "weight of Embedding, which is not replaced"
    assert report.skipped.pop("lm_head") == "skip"
    assert all(key.endswith(("gate", "router")) and reason == "skip" for key, reason in report.skipped.items())
    linears = [key for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert "lm_head" in linears and set(linears) <= {"lm_head", *report.skipped}
    attention = model.model.layers[0].self_attn.o_proj
    assert isinstance(attention, W4A8Linear)
    after = model(tokens, **options)
    assert after.logits.shape == before.logits.shape
    assert torch.isfinite(after.logits).all()
    if records:
        assert [logits.shape for logits in after.router_logits] == [logits.shape for logits in before.router_logits]
        # What comes before the first router is float here.
        w4a8.quantize_(partly, skip="re:.*self_attn")
        assert_same_bits(partly(tokens, **options).router_logits[0], before.router_logits[0])
    other = make_model(name)
    w4a8.quantize_(other)
    other.load_state_dict(model.state_dict())
    assert_same_bits(other(tokens).logits, after.logits)


@torch.no_grad()
def test_tied_embeddings_stay():
    config = transformers.Qwen3MoeConfig(
        **{**COMMON, "num_experts": 4, "moe_intermediate_size": 32, "tie_word_embeddings": True}
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    report = w4a8.quantize_(model, skip="re:.*gate$", default_skip=False)
    assert report.skipped["lm_head"] == "its weight is shared with model.embed_tokens"
    assert model.lm_head.weight is model.model.embed_tokens.weight


@torch.no_grad()
def test_generate():
    """Byte by byte with a cache and all at once, the model chooses the same tokens."""
    model = make_model("qwen3")
    w4a8.quantize_(model)
    tokens = torch.randint(1, 64, (1, 5))
    written = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert written.shape == (1, 11)
    again = torch.cat([tokens, model(written[:, :-1]).logits.argmax(-1)[:, 4:]], 1)
    assert torch.equal(written, again)
