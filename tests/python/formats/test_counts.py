"""Counts that the files do not hold are an error before anything of so many is built: no list, no module."""

import json
import sys

import available  # noqa: F401
import gguf_files
import pytest
import torch
import transformers
from gguf_models import TinyModel
from test_quantize_transformers import make_model

from w4a8.checkpoint import read_layers
from w4a8.checkpoint.counts import blocks_of, check_counts
from w4a8.command import main
from w4a8.core.json_fields import CheckpointError

SHAPES = {"layers.0.up": (48, 16), "layers.0.experts": (6, 16, 16), "layers.1.up": (48, 16), "scale": ()}
WEIGHTS = 2 * 48 * 16 + 6 * 16 * 16 + 1
# What is stated, and the error; None: the files may hold it.
STATED = [
    ({"num_hidden_layers": 2, "vocab_size": 48, "num_experts": 48, "num_attention_heads": 4}, None),
    ({"max_position_embeddings": 2**62, "eos_token_id": 2**40, "num_hidden_layers": "x", "hidden_size": [None]}, None),
    ({"num_hidden_layers": 3}, "here: num_hidden_layers is 3, but the tensors are of at most 2 layers"),
    ({"a": {"b": {"n_layer": 2**31}}}, "here: a.b.n_layer is 2147483648, but the tensors are of at most 2 layers"),
    ({"vision_config": {"depth": 1e30}}, "here: vision_config.depth is 1e+30, but the tensors are of at most 2 layers"),
    ({"n_routed_experts": 49}, "here: n_routed_experts is 49, but the tensors are of at most 48 experts"),
    ({"vocab_size": WEIGHTS + 1}, f"vocab_size is {WEIGHTS + 1}, but the tensors are of at most {WEIGHTS} weights"),
    ({"x.attention.head_count_kv": [1, 2**62]}, f"head_count_kv is [1, {2**62}], but the tensors are of at most"),
]  # fmt: skip


@pytest.mark.parametrize(("stated", "error"), STATED, ids=lambda value: str(value)[:40])
def test_by_hand(stated, error):
    if error is None:
        check_counts(stated, SHAPES, 2, "here: ")
        return
    with pytest.raises(CheckpointError) as raised:
        check_counts(stated, SHAPES, 2, "here: ")
    assert error in str(raised.value)


def test_blocks():
    assert blocks_of(["blk.0.a", "blk.0.b", f"blk.{2**70}.a", "output.weight", "x.blk.1.a"]) == 2


KEYS = {
    "block_count": "layers",
    "expert_count": "experts",
    "embedding_length": "weights",
    "attention.head_count": "weights",
    "attention.head_count_kv": "weights",
    "vocab_size": "weights",
}


@pytest.mark.parametrize("key", KEYS)
def test_gguf(key, tmp_path, capsys, monkeypatch):
    tiny, auto = TinyModel("qwen3moe"), transformers.AutoModelForCausalLM
    monkeypatch.setattr(auto, "from_pretrained", lambda *_, **__: pytest.fail("a model was built"))
    for count in (2**31 - 1, 2**62):
        tiny.update({key: count})
        path = str(tiny.write(tmp_path))
        said = f"qwen3moe.{key} is {count}, but the tensors are of at most"
        for command in (["inspect", path], ["chat", path], ["pack", path, str(tmp_path / "out")]):
            assert main(command) == 1
            error = capsys.readouterr().err
            assert said in error and KEYS[key] in error
        with pytest.raises(CheckpointError, match=said):
            read_layers(path)


def test_gguf_by_transformers(tmp_path):
    """Which makes the config first: lists of at most 10,000."""
    tiny = TinyModel("qwen3moe")
    for count, said in ((2**31 - 1, r"but 1\.\.10000 is expected"), (9999, "the tensors are of at most 2 layers")):
        tiny.update({"block_count": count})
        tiny.write(tmp_path)
        with pytest.raises(CheckpointError, match=f"qwen3moe.block_count is {count}, but {said}|{said}"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")


def test_a_block_of_any_number(tmp_path):
    """No table of names for all layers below it."""
    tiny = TinyModel("qwen3")
    tiny.update(tensors={f"blk.{2**40}.attn_norm.weight": torch.ones(4)})
    tiny.write(tmp_path)
    with pytest.raises(ValueError, match=f"tensor 'blk.{2**40}.attn_norm.weight' .*has no such weight"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")


@pytest.mark.parametrize("name", ["floats", "packed"])
@pytest.mark.parametrize("field", ["num_hidden_layers", "num_local_experts", "vocab_size", "num_attention_heads"])
def test_folders(name, field, tmp_path, capsys, monkeypatch):
    make_model("minimax m2").save_pretrained(tmp_path / "floats")
    if name == "packed":
        assert main(["pack", str(tmp_path / "floats"), str(tmp_path / "packed")]) == 0
    path = tmp_path / name / "config.json"
    config = json.loads(path.read_text())
    assert field in config
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("a config was made"))
    for count in (2**31, 2**62, sys.maxsize * 4):
        path.write_text(json.dumps({**config, field: count}))
        for command in ("inspect", "chat"):
            capsys.readouterr()
            assert main([command, str(tmp_path / name)]) == 1
            assert f"config.json: {field} is {count}, but the tensors are of at most" in capsys.readouterr().err


def test_numbers_that_writers_take(tmp_path):
    """The file of the tests above states what was asked for."""
    path = gguf_files.write(tmp_path / "model.gguf", "x", {"a": -1, "b": 2**62, "c": 7}, {"t": torch.ones(1)})
    from w4a8.checkpoint.gguf_file import GGUFFile

    assert {key: GGUFFile(path).keys[key] for key in "abc"} == {"a": -1, "b": 2**62, "c": 7}
