"""`w4a8 inspect`: what it refuses, in words that name what is wrong, as loading and `chat` do."""

import json
import shutil

import available  # noqa: F401
import format_checkpoints
import gguf_models
import multiplied_out
import pytest
import test_transformers_formats as formats
from safetensors.torch import load_file, save_file
from test_inspect import load
from test_quantize_transformers import make_model

from w4a8.command import main


@pytest.fixture
def gptq(tmp_path):
    shutil.copytree(multiplied_out.TOOL_WRITTEN / "gptq", tmp_path / "model")
    return tmp_path / "model"


def refused_lines(path, capsys):
    capsys.readouterr()
    assert main(["inspect", str(path), "--memory-speed", "1"]) == 1
    said = capsys.readouterr()
    return [line for line in said.out.splitlines() if line.startswith("REFUSED")] + said.err.splitlines()


def test_the_name_of_an_expert_stays(tmp_path, capsys):
    """Layers with the same reason are one line, which says which expert it is."""
    make_model("qwen3").save_pretrained(tmp_path / "floats")
    formats.write(tmp_path, "qwen3", format_checkpoints.ALL_FORMATS["GPTQ"])
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(path)
    names = [name for name in tensors if name.endswith("experts.0.up_proj.g_idx")]
    for name in names:
        tensors[name] = tensors[name].flip(0)
    save_file(tensors, path, metadata={"format": "pt"})
    (line,) = refused_lines(tmp_path / "theirs", capsys)
    assert len(names) > 1 and f"{len(names)} layers of experts: experts.0.up_proj.g_idx: " in line


def test_what_is_no_number_of_experts(tmp_path, capsys):
    """Of an array of strings transformers takes the length."""
    tiny = gguf_models.TinyModel("qwen3moe")
    tiny.update({"expert_used_count": ["x"]})
    tiny.write(tmp_path)
    said = "qwen3moe.expert_used_count is 1 strings in the GGUF file, but a number is expected"
    assert refused_lines(tmp_path, capsys) == [f"w4a8: {said}"]
    with pytest.raises(ValueError, match=said):
        load(tmp_path, gguf_file="model.gguf")


@pytest.mark.parametrize("count", [0, -1, 7, 2**31])
def test_more_experts_of_a_token_than_there_are(count, tmp_path, capsys):
    make_model("qwen3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_local_experts"] == 6
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": count}))
    said = f"w4a8: config.json: num_experts_per_tok is {count}, but 1..6 is expected"
    assert refused_lines(tmp_path, capsys) == [said]
    assert main(["chat", str(tmp_path)]) == 1 and said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "chat"])
def test_mlx(command, gptq, capsys):
    config = json.loads((gptq / "config.json").read_text())
    config["quantization_config"] = config["quantization"] = {"group_size": 64, "bits": 4}
    (gptq / "config.json").write_text(json.dumps(config))
    assert main([command, str(gptq)]) == 1
    assert f"{gptq} is in MLX's format, which is not read here" in capsys.readouterr().err


TOKENS = {"model": "gpt2", "pre": "gpt-2", "tokens": [*"abcdefgh", "ab"], "merges": ["a b"], "token_type": [1] * 9}
TOKEN_KEYS = [
    ("tokens", 9, "9, but an array of strings is expected"),
    ("merges", "x", "'x', but an array of strings is expected"),
    ("merges", [1, 2], "array([1, 2], dtype=int32), but an array of strings is expected"),
    ("token_type", -1, "-1, but an array of 9 numbers is expected"),
    ("token_type", [1], "array([1], dtype=int32), but an array of 9 numbers is expected"),
    ("bos_token_id", -1, "-1, but 0..8 is expected"),
    ("eos_token_id", 9, "9, but 0..8 is expected"),
    ("padding_token_id", "x", "'x', but 0..8 is expected"),
    ("eot_token_id", 2**62, f"{2**62}, but 0..8 is expected"),
]


@pytest.mark.parametrize(("key", "value", "said"), [(None, None, None), *TOKEN_KEYS], ids=str)
def test_keys_of_a_tokenizer(key, value, said, tmp_path, capsys):
    """What chat refuses, inspect refuses."""
    tiny = gguf_models.TinyModel("qwen3")
    tiny.keys |= {f"tokenizer.ggml.{name}": each for name, each in TOKENS.items()}
    if key is not None:
        tiny.keys[f"tokenizer.ggml.{key}"] = value
    path = str(tiny.write(tmp_path))
    code = main(["inspect", path, "--memory-speed", "1"])
    said_by_inspect = "".join(capsys.readouterr())
    if key is None:
        assert code == 0 and "tokenizer  " not in said_by_inspect
        return
    assert code == 1
    assert main(["chat", path]) == 1
    if value != "x" or key == "merges":  # otherwise transformers' config refuses it
        assert f"tokenizer.ggml.{key} is {said}" in said_by_inspect
        assert f"tokenizer.ggml.{key} is {said}" in capsys.readouterr().err


def test_a_damaged_tokenizer(gptq, capsys):
    (gptq / "tokenizer.json").write_text("{}")
    assert main(["inspect", str(gptq), "--memory-speed", "1"]) == 1
    assert "cannot make the tokenizer" in capsys.readouterr().out
