"""`from_pretrained(gguf_file=)` of models with experts: routers, multi-head latent attention, MTP, float experts."""

import available  # noqa: F401
import gguf_files
import numpy as np
import pytest
import torch
import transformers
from gguf_models import EXPERTS, HEAD, HEADS, HIDDEN, INTER, MODELS, TinyModel, blocks
from test_transformers_gguf import assert_same_weights, load, packed_modules

import w4a8
from w4a8.checkpoint import read_layers
from w4a8.checkpoint.routers import router_in_config

WITH_EXPERTS = [name for name in MODELS if TinyModel.has_experts(name)]
DEEPSEEK = [name for name in MODELS if name.startswith("deepseek")]
pytestmark = pytest.mark.usefixtures("no_gradients")


def by_expert(weights, ids):
    """[T, E] of [T, k]: the order of a token's experts does not matter."""
    return torch.zeros(len(ids), EXPERTS).scatter_(1, ids.long(), weights.float())


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_without_transformers(name, tmp_path):
    """`read_layers` gives the same bytes."""
    path = TinyModel(name).write(tmp_path)
    mine, theirs = (
        sorted(
            bytes(torch.cat([each.flatten() for each in layer.buffers()]).numpy())
            for key, layer in layers.items()
            if "embed" not in key
        )
        for layers in (packed_modules(load(tmp_path)), read_layers(path))
    )
    assert mine == theirs


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_router(name, tmp_path):
    """By the config, as the model routes."""
    TinyModel(name).write(tmp_path)
    model = load(tmp_path)
    router, block = router_in_config(model.config.model_type, model.config.to_dict()), model.model.layers[1].mlp
    gate = getattr(block, "router" if name == "gpt-oss" else "gate")
    logits, weights, ids = gate(torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(0)))
    bias = gate.e_score_correction_bias if router.has_correction_bias else None
    how = {**router.arguments, "e_score_correction_bias": bias}
    mine, theirs = by_expert(*w4a8.topk_routing(logits, ids.shape[-1], **how)), by_expert(weights, ids)
    assert torch.equal(mine != 0, theirs != 0)
    # Exponentials within two units of the last place, above and below the line, a sum of four, a quotient and a
    # product: less than 8 units, 2^-23 each.
    torch.testing.assert_close(mine, theirs, rtol=2**-20, atol=0)


# ---- multi-head latent attention ----


@pytest.mark.parametrize("name", DEEPSEEK)
def test_kv_b_in_two_parts_is_a_float(name, tmp_path):
    """k_b is quantized along the other axis."""
    tiny = TinyModel(name)
    tiny.write(tmp_path)
    model = load(tmp_path, dtype=torch.bfloat16)
    for mine, theirs in zip(model.model.layers, tiny.model.model.layers):
        assert torch.equal(mine.self_attn.kv_b_proj.weight, theirs.self_attn.kv_b_proj.weight.bfloat16())
    report = model.hf_quantizer.report
    assert report.skipped["model.layers.0.self_attn.kv_b_proj"] == "a part of it is quantized along the other axis"


@pytest.mark.parametrize("name", DEEPSEEK)
def test_kv_b_in_one_part_is_packed(name, tmp_path):
    """As llama.cpp wrote it before April 2025; keys are those of the attention that is not absorbed."""
    tiny = TinyModel(name)
    generator = np.random.default_rng(0)
    for layer in range(2):
        for part in ("k_b", "v_b"):
            del tiny.tensors[f"blk.{layer}.attn_{part}.weight"]
        parameter = tiny.model.model.layers[layer].self_attn.kv_b_proj.weight
        tiny.tensors[f"blk.{layer}.attn_kv_b.weight"], values = blocks("Q4_K", parameter.shape, generator)
        parameter.data.copy_(values)
    for which in ("key", "value"):
        tiny.keys[f"deepseek2.attention.{which}_length"] = tiny.keys.pop(f"deepseek2.attention.{which}_length_mla")
    tiny.keys["deepseek2.attention.head_count_kv"] = HEADS
    tiny.write(tmp_path)
    model = load(tmp_path)
    assert "model.layers.0.self_attn.kv_b_proj" in packed_modules(model)
    assert_same_weights(model, tiny.model)


# ---- what predicts further tokens ----


def test_mtp_is_left_out(tmp_path):
    """The block behind the last layer, with experts of its own: llama.cpp writes it and does not run it."""
    tiny = TinyModel("glm4moe")
    last = {name: tensor for name, tensor in tiny.tensors.items() if name.startswith("blk.1.")}
    tiny.tensors |= {name.replace("blk.1.", "blk.2."): tensor for name, tensor in last.items()}
    tiny.tensors["blk.2.nextn.eh_proj.weight"] = tiny.tensors["blk.0.ffn_down.weight"]
    tiny.tensors["blk.2.nextn.enorm.weight"] = torch.ones(HIDDEN)
    tiny.keys |= {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    path = tiny.write(tmp_path)
    model = load(tmp_path)
    assert model.config.num_hidden_layers == 2 and model.config.num_mtp_layers == 0
    assert_same_weights(model, tiny.model)
    layers = read_layers(path)
    assert "blk.1.experts" in layers and not any(".2." in name for name in layers)


def test_nothing_but_mtp(tmp_path):
    tiny = TinyModel("glm4moe")
    tiny.keys["glm4moe.nextn_predict_layers"] = 2
    tiny.write(tmp_path)
    with pytest.raises(ValueError, match="nextn_predict_layers is 2, but of 2 layers fewer are expected"):
        load(tmp_path)


# ---- experts that are floats ----


def as_floats(tensor, dtype):
    """Of blocks: (what `gguf_files.write` takes of a dtype, the values)."""
    values = gguf_files.meaning(*tensor).to(dtype)
    stored = ("BF16", values.view(torch.uint8).numpy()) if dtype == torch.bfloat16 else values
    return stored, values.float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3moe"])
def test_float_experts(name, fused, dtype, tmp_path):
    """Of one layer, in the file as float16 or bfloat16; those of the other are packed."""
    tiny = TinyModel(name)
    experts = tiny.model.model.layers[1].mlp.experts
    values = {}
    for each in ("gate", "up", "down"):
        stack = f"blk.1.ffn_{each}_exps.weight"
        tiny.tensors[stack], values[each] = as_floats(tiny.tensors[stack], dtype)
    gate, up, down = values.values()
    if name == "gpt-oss":
        experts.gate_up_proj.data[..., ::2] = gate.transpose(1, 2)
        experts.gate_up_proj.data[..., 1::2] = up.transpose(1, 2)
        experts.down_proj.data.copy_(down.transpose(1, 2))
    else:
        experts.gate_up_proj.data.copy_(torch.cat((gate, up), 1))
        experts.down_proj.data.copy_(down)
    if fused:
        for suffix in ("weight", "bias") if name == "gpt-oss" else ("weight",):
            parts = [tiny.tensors.pop(f"blk.1.ffn_{each}_exps.{suffix}") for each in ("gate", "up")]
            if isinstance(parts[0], tuple):
                both = parts[0][0], np.concatenate([part[1] for part in parts], 1)
            else:
                both = torch.cat(parts, 1)
            tiny.tensors[f"blk.1.ffn_gate_up_exps.{suffix}"] = both
    tiny.write(tmp_path)
    model = load(tmp_path, experts_implementation="eager")
    assert {key for key in packed_modules(model) if key.endswith(".experts")} == {"model.layers.0.mlp.experts"}
    assert_same_weights(model, tiny.model)
    x = torch.randn(1, 7, HIDDEN, generator=torch.Generator().manual_seed(0))
    mine, theirs = (each.model.layers[1].mlp(x) for each in (model, tiny.model))
    mine, theirs = (each[0] if isinstance(each, tuple) else each for each in (mine, theirs))
    assert torch.equal(mine, theirs)
    model.save_pretrained(tmp_path / "packed")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", attn_implementation="eager")
    assert_same_weights(again, tiny.model)


def test_float_experts_that_do_not_fit(tmp_path):
    tiny = TinyModel("gpt-oss")
    for each in ("gate", "up"):
        tiny.tensors[f"blk.1.ffn_{each}_exps.weight"] = torch.zeros(EXPERTS, INTER - (each == "up"), HIDDEN)
    tiny.write(tmp_path)
    message = r"experts.gate_up_proj is \(4, 256, 1024\), which cannot be made of blk.1.ffn_gate_exps.weight \(4, 512,"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    "name, shapes, message",
    [
        (
            "qwen3moe",
            {"gate_exps.weight": (EXPERTS, INTER - 1, HIDDEN), "up_exps.weight": (EXPERTS, INTER + 1, HIDDEN)},
            r"gate_up_proj is .*, which cannot be made of blk.1.ffn_gate_exps.weight \(4, 511,",
        ),
        ("gpt-oss", {"down_exps.bias": (HIDDEN, EXPERTS)}, r"down_proj_bias .* of blk.1.ffn_down_exps.bias \(256, 4"),
    ],
)
def test_float_experts_of_as_many_elements(name, shapes, message, tmp_path):
    """Joined or laid out anew they would have the shape of the parameter."""
    tiny = TinyModel(name)
    for each in ("gate", "up", "down"):
        stack = f"blk.1.ffn_{each}_exps.weight"
        tiny.tensors[stack] = gguf_files.meaning(*tiny.tensors[stack])
    tiny.tensors |= {f"blk.1.ffn_{each}": torch.zeros(shape) for each, shape in shapes.items()}
    tiny.write(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("shape", [(EXPERTS - 1, HIDDEN), (EXPERTS, HIDDEN - 32), (HIDDEN, EXPERTS)])
def test_biases_of_experts_that_do_not_fit(shape, tmp_path):
    """The same message without transformers."""
    tiny = TinyModel("gpt-oss")
    tiny.tensors["blk.1.ffn_down_exps.bias"] = torch.zeros(shape)
    path = tiny.write(tmp_path)
    for loading in (lambda: load(tmp_path), lambda: read_layers(path)):
        with pytest.raises(ValueError, match=r"tensor 'blk.1.ffn_down_exps.bias' has shape .*, but \(4, 256\) is expe"):
            loading()


# ---- what is refused ----

# A model, keys that are changed (TinyModel.update), and the message; test_dry_run.py loads these files.
REFUSED = {
    "another router": ("glm4moe", {"expert_gating_func": 1},
        "glm4moe.expert_gating_func is 1 in the GGUF file, but glm4_moe computes 2"),
    "weights that are divided by their sum": ("deepseek-v2", {"expert_weights_norm": True},
        "deepseek2.expert_weights_norm is True in the GGUF file, but deepseek_v2 computes False"),
    "temperature": ("deepseek-v3", {"attention.temperature_scale": 0.1},
        "deepseek2.attention.temperature_scale is 0.1.* in the GGUF file, but 0 is expected: it is not applied"),
    "no rank": ("deepseek-v3", {"attention.kv_lora_rank": None},
        "deepseek2.attention.kv_lora_rank is None in the GGUF file, but a number above 0 is expected"),
    "groups": ("glm4moe", {"expert_group_count": 3},
        "glm4moe.expert_group_count is 3 and expert_group_used_count 1, which does not fit 2 of 4 experts"),
}  # fmt: skip


@pytest.mark.parametrize(
    "shape, message",
    [
        (
            (HIDDEN, HEADS * HEAD),
            r"kv_b_proj.weight is \(512, 256\), which cannot be made of .*attn_k_b.weight \(256, 2",
        ),
        ((HEADS, HIDDEN, HEAD // 2), r"which cannot be made of blk.1.attn_k_b.weight \(4, 256, 32\), blk.1.attn_v_b"),
    ],
)
def test_parts_of_kv_b_that_do_not_fit(shape, message, tmp_path):
    tiny = TinyModel("deepseek-v3")
    tiny.tensors["blk.1.attn_k_b.weight"] = torch.zeros(shape)
    tiny.write(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_no_correction_bias(tmp_path):
    """It is a buffer of the model, which would stay zeros."""
    tiny = TinyModel("glm4moe")
    del tiny.tensors["blk.1.exp_probs_b.bias"]
    tiny.write(tmp_path)
    with pytest.raises(ValueError, match=r"holds no tensor for model.layers.1.mlp.gate.e_score_correction_bias"):
        load(tmp_path)
