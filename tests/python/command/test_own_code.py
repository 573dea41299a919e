"""Checkpoints that name code of their own (auto_map): known classes do without, and nobody is asked."""

import builtins
import json
import sys

import available  # noqa: F401
import pytest
import torch
import transformers
from test_pack import assert_same_model, load, run_json

from w4a8.command import main
from w4a8.integrations.transformers import W4A8Config

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 32,
         "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "n_group": 1, "topk_group": 1,
         "first_k_dense_replace": 1, "max_position_embeddings": 64}  # fmt: skip
CLASSES = {"AutoConfig": "DeepseekV3Config", "AutoModelForCausalLM": "DeepseekV3ForCausalLM"}
AUTO_MAP = {each: f"code.{name}" for each, name in CLASSES.items()}


@pytest.fixture
def k2(tmp_path, monkeypatch):
    """As Kimi K2 is published: a model_type that transformers does not know; its code would end the process."""
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES)).bfloat16()
    model.save_pretrained(tmp_path / "k2")
    change(tmp_path / "k2", model_type="kimi_k2", auto_map=AUTO_MAP)
    (tmp_path / "k2" / "code.py").write_text("import os\nos._exit(77)\n")
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("the user was asked"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    return tmp_path / "k2"


def change(folder, **fields):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_kimi_k2(k2, tmp_path, capsys):
    """Is DeepSeek-V3, in inspect, pack and from_pretrained; what is packed of it names no code."""
    code, answer = run_json(capsys, "inspect", k2, "--memory-speed", "1")
    assert code == 0 and answer["refused"] == []
    model = load(k2, quantization_config=W4A8Config())
    change(k2, model_type="deepseek_v3", auto_map=None)
    want = load(k2, quantization_config=W4A8Config())
    assert_same_model(model, want)
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens).logits, want(tokens).logits)
    assert answer["packed_bytes"] == want.hf_quantizer.report.packed_bytes
    change(k2, model_type="kimi_k2", auto_map=AUTO_MAP)
    assert run_json(capsys, "pack", k2, tmp_path / "out")[0] == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "auto_map" not in config and config["model_type"] == "deepseek_v3"
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert_same_model(load(tmp_path / "out"), want)


def test_a_known_class_with_code(k2, tmp_path, capsys):
    """As DeepSeek-V3 is published."""
    change(k2, model_type="deepseek_v3")
    assert run_json(capsys, "pack", k2, tmp_path / "out")[0] == 0
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("command", ["inspect", "chat", "pack"])
def test_an_unknown_class(command, k2, tmp_path, capsys):
    change(k2, model_type="kimi_k99")
    assert main([command, str(k2), *([str(tmp_path / "out")] if command == "pack" else [])]) == 1
    said = (
        "is of code of its own (auto_map), which w4a8 does not run. If you trust the code: in Python from_pretrained("
    )
    assert f"w4a8: {k2} {said}" in capsys.readouterr().err


def test_a_tokenizer_of_code(k2, tmp_path, capsys):
    """Is left out by pack, and said; chat cannot do without."""
    names = {"AutoTokenizer": ["code.Tokenizer", None]}
    (k2 / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tokenizer", "auto_map": names}))
    code, answer = run_json(capsys, "pack", k2, tmp_path / "out")
    assert code == 0 and "which w4a8 does not run" in answer["no_tokenizer"]
    assert main(["chat", str(k2)]) == 1
    assert "which w4a8 does not run" in capsys.readouterr().err
