"""`from_pretrained(gguf_file=)`: what is refused, and what is left to transformers."""

import logging

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
package = pytest.importorskip("gguf")
import gguf_files  # noqa: E402
import gguf_models  # noqa: E402
from gguf_models import HIDDEN, INTER, TinyModel  # noqa: E402
from test_transformers_gguf import config_of, llama3_factors, load, packed_modules  # noqa: E402
from transformers import GgufConfig  # noqa: E402

from w4a8.integrations.transformers import W4A8Config, gguf  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_gradients")


UNLIKE = gguf_models.blocks("Q5_K", (gguf_models.EXPERTS, INTER, HIDDEN), np.random.default_rng(0))[0]
# Keys and tensors of qwen3moe that are changed (TinyModel.update), and the message; test_dry_run.py loads these files.
BROKEN = {
    "an unknown tensor": ({}, {"blk.0.attn_sub_norm.weight": torch.ones(4)},
        r"tensor 'blk.0.attn_sub_norm.weight' of .*model.gguf: Qwen3MoeForCausalLM has no such weight"),
    "a layer too many": ({}, {"blk.2.attn_norm.weight": torch.ones(HIDDEN)},
        r"tensor 'blk.2.attn_norm.weight' of .*: Qwen3MoeForCausalLM has no such weight"),
    "a missing tensor": ({}, {"blk.1.attn_k.weight": None},
        r"model.gguf holds no tensor for model.layers.1.self_attn.k_proj.weight"),
    "missing experts": ({}, {"blk.1.ffn_up_exps.weight": None},
        r"model.gguf holds no tensor for model.layers.1.mlp.experts.gate_up_proj"),
    "a shape": ({}, {"blk.0.attn_norm.weight": torch.ones(4)},
        r"tensor 'blk.0.attn_norm.weight' has shape \(4,\), but \(256,\) is expected"),
    "unlike experts": ({}, {"blk.0.ffn_up_exps.weight": UNLIKE},
        r"model.layers.0.mlp.experts: blk.0.ffn_up_exps.weight: the codes are"),
    "a missing key": ({"expert_feed_forward_length": None}, {},
        r"qwen3moe.expert_feed_forward_length is None in the GGUF file, but a number above 0 is expected"),
    "a key": ({"attention.head_count": [4, 4]}, {},
        r"qwen3moe.attention.head_count is \[4, 4\] in the GGUF file, but a number above 0 is expected"),
    "no vocabulary": ({"vocab_size": None}, {}, r"qwen3moe.vocab_size is None in the GGUF file"),
    "part of a head": ({"rope.dimension_count": 32}, {},
        r"qwen3moe.rope.dimension_count is 32 in the GGUF file, but qwen3_moe has 64 there"),
    "rope": ({"rope.scaling.type": "longrope"}, {},
        r"rope.scaling.type is 'longrope' in the GGUF file, but none, linear or yarn is expected"),
    "a factor of attention": ({"rope.scaling.attn_factor": 2.0}, {},
        r"qwen3moe.rope.scaling.attn_factor is 2.0 in the GGUF file"),
    "scaled weights of experts": ({"expert_weights_scale": 2.5}, {},
        r"qwen3moe.expert_weights_scale is 2.5 in the GGUF file, but qwen3_moe computes 1.0"),
    "groups of experts": ({"expert_group_count": 4}, {},
        r"qwen3moe.expert_group_count is 4 in the GGUF file, but qwen3_moe computes 1"),
    "factors of rope": ({}, {"rope_freqs.weight": llama3_factors() * 1.5},
        r"rope_freqs.weight has other factors than Llama 3's"),
    "a cut file": (None, None, r"tensor '.*' ends at \d+, but the file at \d+"),
}  # fmt: skip


def test_other_experts(tmp_path):
    """A model whose experts are of other sizes, or have biases that the file lacks."""
    tiny = TinyModel("qwen3moe")
    tiny.write(tmp_path)
    config = config_of(tmp_path)
    config.moe_intermediate_size = 256
    with pytest.raises(ValueError, match=r"mlp.experts: experts, hidden and intermediate size \(4, 256, 512\), but"):
        load(tmp_path, config=config)


@pytest.fixture
def starcoder2(tmp_path):
    """A file of an architecture that is transformers' alone."""
    sizes = {"block_count": 1, "embedding_length": 64, "feed_forward_length": 64, "context_length": 128,
             "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_epsilon": 1e-5,
             "rope.freq_base": 10000.0}  # fmt: skip
    keys = {f"starcoder2.{key}": value for key, value in sizes.items()}
    config = transformers.Starcoder2Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    names = package.get_tensor_name_map(package.MODEL_ARCH.STARCODER2, 1)
    parameters = transformers.Starcoder2ForCausalLM(config).named_parameters()
    stems = ((*key.rpartition("."), parameter) for key, parameter in parameters)
    tensors = {f"{names.get_name(stem)}.{suffix}": parameter for stem, _, suffix, parameter in stems}
    gguf_files.write(tmp_path / "model.gguf", "starcoder2", keys, tensors)
    return tmp_path


def test_other_architectures(starcoder2, caplog):
    known = f"w4a8 packs GGUF files of {', '.join(gguf.BY_MODEL_TYPE)}, but this is starcoder2"
    with pytest.raises(ValueError, match=f"{known}: load it without W4A8Config"):
        load(starcoder2, quantization_config=W4A8Config())
    with caplog.at_level(logging.WARNING, "w4a8"):
        model = load(starcoder2)
    assert not packed_modules(model)
    assert f"{known}: transformers loads it" in caplog.text


def test_other_devices(tmp_path, monkeypatch):
    TinyModel("qwen3").write(tmp_path)
    with pytest.raises(RuntimeError, match=r"device_map: device is cuda.*, which torch cannot use here"):
        load(tmp_path, device_map="cuda", quantization_config=W4A8Config())
    assert packed_modules(load(tmp_path, device_map="cpu"))
    calls = []
    wrapped = gguf.with_gguf(lambda config, asked, device_map, gguf_file: calls.append((asked, device_map)))
    config = config_of(tmp_path)
    wrapped(config, None, {"": "cuda"}, gguf_file="model.gguf")
    wrapped(config, GgufConfig(dequantize=True), None, gguf_file="model.gguf")
    wrapped(config, W4A8Config(), None, gguf_file=None)
    assert len(calls) == 3
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    wrapped(config, None, "auto", gguf_file="model.gguf")
    assert len(calls) == 4
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert isinstance(wrapped(config, GgufConfig(), "auto", gguf_file="model.gguf")[0], gguf.GGUFQuantizer)
    assert len(calls) == 4


def test_a_transformers_that_is_not_as_expected(monkeypatch):
    """Left to transformers, in words."""
    assert gguf.gguf_problems() == []
    monkeypatch.setattr(gguf.modeling, "get_hf_quantizer", lambda config, quantization_config: None)
    assert gguf.gguf_problems() == ["get_hf_quantizer has no device_map, weights_only, user_agent, gguf_file"]
    model = TinyModel("qwen3").model
    with pytest.raises(RuntimeError, match="transformers has not said where the GGUF file is"):
        gguf.GGUFQuantizer(W4A8Config(), model.config).preprocess_model(model)
