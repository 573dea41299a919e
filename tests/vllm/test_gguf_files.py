"""What becomes of the path of a GGUF file: its folder, an engine's arguments, other plugins, and what is refused."""

import inspect
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import gguf_models
import pytest
import torch
import transformers
from gguf_models import HIDDEN, VOCAB, TinyModel
from vllm import envs, plugins
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import model_loader
from vllm.model_executor.layers import quantization
from vllm.model_executor.models import registry
from vllm.transformers_utils.config import get_pooling_config

from w4a8.integrations.vllm import gguf, plugin
from w4a8.integrations.vllm.gguf import W4A8GGUFConfig, W4A8GGUFLoader
from w4a8.integrations.vllm.gguf_folder import NAME, folder_of, linears_of

CHARACTERS = [chr(code) for code in range(33, 33 + VOCAB - 5)]
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["<pad>", "<s>", "</s>", *CHARACTERS, "ab", "\u0120"],
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (VOCAB - 3)],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.chat_template": TEMPLATE,
}


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """vLLM's, empty."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    assert str(tmp_path / "cache") == envs.VLLM_CACHE_ROOT
    return tmp_path / "cache" / NAME


def written(folder, name="qwen3", change=None, **options):
    """A file with a tokenizer."""
    tiny = TinyModel(name)
    tiny.keys |= TOKENIZER
    if change is not None:
        change(tiny)
    folder.mkdir(exist_ok=True)
    tiny.write(folder, **options)
    return sorted(folder.glob("*.gguf"))[0]


def arguments(model, **given):
    how = {"tokenizer": None, "skip_tokenizer_init": False, "served_model_name": None, "quantization": None}
    how |= {"mamba_ssm_cache_dtype": "auto", "speculative_config": None}
    return SimpleNamespace(**{"model": str(model), "load_format": "auto", "config_format": "auto", **how, **given})


# ---- the folder ----


GIVEN = {"quantization": "gguf", "load_format": "gguf", "config_format": "gguf", "mamba_ssm_cache_dtype": "bfloat16"}


@pytest.mark.parametrize("given", [{}, GIVEN])
def test_the_arguments_of_an_engine(given, cache, tmp_path):
    path = written(tmp_path / "files")
    found = arguments(path, **given)
    gguf.take_file(found)
    folder = Path(found.model)
    assert folder.parent == cache and found.tokenizer is None and found.served_model_name == str(path)
    assert (found.quantization, found.load_format, found.config_format) == (NAME, NAME, "auto")
    assert found.mamba_ssm_cache_dtype == given.get("mamba_ssm_cache_dtype", "float32")
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": NAME, "file": str(path)}
    assert (config["model_type"], config["vocab_size"], config["dtype"]) == ("qwen3", VOCAB, "bfloat16")
    gguf.take_file(found)  # as where vLLM makes a configuration of them again
    assert found.model == str(folder)


def test_the_tokenizer_of_the_file(cache, tmp_path):
    path = written(tmp_path / "files", change=lambda tiny: tiny.keys.update({"tokenizer.ggml.add_bos_token": True}))
    found = transformers.AutoTokenizer.from_pretrained(folder_of(path, cache, True))
    ids = found("ab ba").input_ids
    tokens = TOKENIZER["tokenizer.ggml.tokens"]
    assert [tokens[each] for each in ids] == ["<s>", "ab", "\u0120", "b", "a"]
    assert found.decode(ids[1:]) == "ab ba"
    chat = found.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "<user>ab" and (found.bos_token_id, found.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("keys", "adds"),
    [
        ({}, False),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_where_a_text_begins_with_bos(keys, adds, cache, tmp_path):
    """As in llama.cpp, which knows it of some where the file does not say."""
    path = written(tmp_path / "files", change=lambda tiny: tiny.keys.update(keys))
    found = transformers.AutoTokenizer.from_pretrained(folder_of(path, cache, True))
    assert (found("ab").input_ids[0] == 1) == adds


def test_the_pooling_of_an_embedding_model(cache, tmp_path):
    path = written(tmp_path / "files", change=lambda tiny: tiny.keys.update({"qwen3.pooling_type": 1}))
    found = get_pooling_config(str(folder_of(path, cache, False)))
    assert "MEAN" in found.values() and True in found.values()  # the second: divided by its length


def test_made_once(cache, tmp_path):
    """For a file as it is; another folder without a tokenizer, which takes time."""
    path = written(tmp_path / "files")
    folder = folder_of(path, cache, True)
    stamp = folder.stat().st_mtime_ns
    assert folder_of(path, cache, True) == folder and folder.stat().st_mtime_ns == stamp
    other = folder_of(path, cache, False)
    assert other != folder and not (other / "tokenizer.json").exists() and (folder / "tokenizer.json").exists()
    os.utime(path, (1, 1))
    assert folder_of(path, cache, True) != folder
    assert len(list(cache.iterdir())) == 3  # nothing half made is left


@pytest.mark.parametrize("given", [{"tokenizer": "a/tokenizer"}, {"skip_tokenizer_init": True}])
def test_no_tokenizer_is_asked_for(given, cache, tmp_path):
    def without(tiny):
        for key in TOKENIZER:
            del tiny.keys[key]

    path = written(tmp_path / "files", change=without)
    found = arguments(path, **given)
    gguf.take_file(found)
    assert found.tokenizer == given.get("tokenizer")
    message = r"model.gguf: transformers cannot make its tokenizer \(.*\): pass --tokenizer NAME"
    with pytest.raises(ValueError, match=message):
        gguf.take_file(arguments(path))
    assert len(list(cache.iterdir())) == 1


def test_split_files_and_folders(cache, tmp_path):
    """Any file of a split model, and the folder that has nothing else."""
    path = written(tmp_path / "files", split_max_tensors=9)
    assert path.name == "model-00001-of-00003.gguf"
    for model in (path, path.parent):
        found = arguments(model)
        gguf.take_file(found)
        assert W4A8GGUFConfig.from_config(
            json.loads((Path(found.model) / "config.json").read_text())["quantization_config"]
        ).matrices.keys() >= {"lm_head", "model.layers.1.mlp.down_proj"}
        assert found.served_model_name == str(model)


def test_rope_of_llama_3(cache, tmp_path):
    frequencies = 5000.0 ** -(torch.arange(0, 64, 2) / 64)
    lengths = 2 * torch.pi / frequencies
    smooth = ((8192 / lengths - 1) / 3).clamp(0, 1)
    factors = 1 / ((1 - smooth) / 8 + smooth)
    assert factors.min() == 1 and factors.max() > 1

    def scaled(tiny):
        tiny.tensors["rope_freqs.weight"] = factors

    folder = folder_of(written(tmp_path / "files", "llama", scaled), cache, False)
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_type"] == "llama3"


# ---- what is refused ----


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("quantization", "gptq", "None or gguf"), ("load_format", "dummy", "auto or gguf")],
)
def test_arguments_that_a_file_cannot_have(name, value, expected, cache, tmp_path):
    path = written(tmp_path / "files")
    with pytest.raises(ValueError, match=f"w4a8: {name} is '{value}', but for a GGUF file {expected} is expected"):
        gguf.take_file(arguments(path, **{name: value}))


def test_other_models_are_left_alone(cache, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").touch()
    for model in ("Qwen/Qwen3-30B-A3B", tmp_path, tmp_path / "nothing"):
        found = arguments(model)
        gguf.take_file(found)
        assert found == arguments(model)


def of_floats(tiny):
    name = "blk.0.ffn_down_exps.weight"
    tiny.tensors[name] = gguf_models.gguf_files.meaning(*tiny.tensors[name]).half()


BROKEN = {
    "no file": (lambda path: path.unlink(), r"model.gguf is missing"),
    "another file": (lambda path: path.write_bytes(b"x" * 100), r"model.gguf: no GGUF file: it does not begin with"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"model.gguf: tensor '.*"),
}
REFUSED = {
    "an architecture that transformers runs": (
        lambda tiny: setattr(tiny, "architecture", "glm-dsa"),
        r"model.gguf: general.architecture is 'glm-dsa', which is not run here: its CPU backend has no sparse "
        r"attention \(known: apertus, cohere2, ",
    ),
    "an architecture": (
        lambda tiny: setattr(tiny, "architecture", "bloom"),
        r"model.gguf: general.architecture is 'bloom', which is not run here \(known: apertus, cohere2, command-r, ",
    ),
    "a tensor": (
        lambda tiny: tiny.tensors.update({"blk.0.attn_sub_norm.weight": torch.ones(HIDDEN)}),
        r"model.gguf: tensor 'blk.0.attn_sub_norm.weight' is none of a model that is qwen3moe",
    ),
    "a key": (
        lambda tiny: tiny.keys.pop("qwen3moe.attention.head_count"),
        r"qwen3moe.attention.head_count is None in the GGUF file, but a number above 0 is expected",
    ),
    "experts that are floats": (
        of_floats,
        r"tensor 'blk.0.ffn_down_exps.weight' is F16, but a quantized type is expected",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_files_that_cannot_be_read(what, cache, tmp_path):
    path = written(tmp_path / "files")
    damage, message = BROKEN[what]
    damage(path)
    linears_of.cache_clear()
    with pytest.raises(ValueError, match=message):
        gguf.take_file(arguments(path))
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_are_not_known(what, cache, tmp_path):
    change, message = REFUSED[what]
    path = written(tmp_path / "files", "qwen3moe", change)
    with pytest.raises(ValueError, match=message):
        gguf.take_file(arguments(path))
    assert not cache.exists() or not list(cache.iterdir())


# ---- beside vllm-gguf-plugin ----


@pytest.fixture
def registries(monkeypatch):
    """vLLM as before any plugin."""
    for cls, name in ((EngineArgs, "create_engine_config"), (EngineArgs, "create_model_config")):
        monkeypatch.setattr(cls, name, inspect.unwrap(getattr(cls, name)))
    methods = list(get_args(quantization.QuantizationMethods))
    monkeypatch.setattr(quantization, "QUANTIZATION_METHODS", methods)
    monkeypatch.setattr(quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", {})
    loaders = {name: cls for name, cls in model_loader._LOAD_FORMAT_TO_MODEL_LOADER.items() if name != NAME}
    monkeypatch.setattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", loaders)
    monkeypatch.setattr(plugins, "plugins_loaded", True)
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda function: function())  # which takes long
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def other_plugin(monkeypatch):
    """What vllm-gguf-plugin does to a path."""

    class Config(W4A8GGUFConfig):
        pass

    class Loader(W4A8GGUFLoader):
        pass

    quantization.register_quantization_config("gguf")(Config)
    model_loader.register_model_loader("gguf")(Loader)
    create, lookup = EngineArgs.create_model_config, arg_utils.maybe_override_with_speculators

    def create_model_config(self):
        assert not self.model.endswith(".gguf"), "a GGUF file on a CPU"
        return create(self)

    def maybe_override_with_speculators(model, **kwargs):
        assert not model.endswith(".gguf"), "a GGUF file on a CPU"
        return lookup(model=model, **kwargs)

    monkeypatch.setattr(EngineArgs, "create_model_config", create_model_config)
    monkeypatch.setattr(arg_utils, "maybe_override_with_speculators", maybe_override_with_speculators)


@pytest.mark.parametrize("order", ["alone", "it first", "it afterwards"])
def test_beside_another_plugin(order, registries, monkeypatch, cache, tmp_path):
    """Whichever comes first, files on CPUs are run here."""
    path = written(tmp_path / "files", "qwen3moe")
    if order == "it first":
        other_plugin(monkeypatch)
    gguf.register_gguf()
    gguf.register_gguf()  # once in a process is enough
    if order == "it afterwards":
        other_plugin(monkeypatch)
    found = EngineArgs(str(path), max_model_len=64, enforce_eager=True).create_engine_config()
    assert type(found.quant_config) is W4A8GGUFConfig and found.quant_config.path == str(path)
    assert type(model_loader.get_model_loader(found.load_config)) is W4A8GGUFLoader
    assert found.model_config.served_model_name == str(path)
    assert found.model_config.dtype == torch.bfloat16


def test_a_config_and_a_tokenizer_of_ones_own(registries, cache, tmp_path):
    """--hf-config-path and --tokenizer are taken; what is in the file is read all the same."""
    path = written(tmp_path / "files")
    tiny = TinyModel("qwen3")
    tiny.model.config.max_position_embeddings = 77
    tiny.model.config.save_pretrained(tmp_path / "config")
    gguf.register_gguf()
    given = {"hf_config_path": str(tmp_path / "config"), "tokenizer": str(tmp_path / "config")}
    found = EngineArgs(str(path), skip_tokenizer_init=True, enforce_eager=True, **given).create_engine_config()
    assert found.model_config.max_model_len == 77 and found.model_config.tokenizer == str(tmp_path / "config")
    assert type(found.quant_config) is W4A8GGUFConfig and found.quant_config.path == str(path)


def test_vllm_that_is_not_as_expected(registries, monkeypatch):
    monkeypatch.delattr(EngineArgs, "create_engine_config")
    with pytest.raises(RuntimeError, match="EngineArgs has no create_engine_config"):
        gguf.register_gguf()
    assert NAME not in quantization.QUANTIZATION_METHODS


@pytest.mark.parametrize(("switch", "taken"), [(None, True), ("0", False)])
def test_weight_only_models_may_be_left_to_vllm(switch, taken, registries, monkeypatch):
    for name in ("W4A8_VLLM", "W4A8_VLLM_W4A16"):
        monkeypatch.delenv(name, raising=False)
    if switch is not None:
        monkeypatch.setenv("W4A8_VLLM_W4A16", switch)
    monkeypatch.setitem(plugin._state, "done", False)
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    plugin.activate()
    assert (NAME in quantization.QUANTIZATION_METHODS) == taken
