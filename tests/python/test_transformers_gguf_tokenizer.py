"""Tokenizers of GGUF files: what the file's way to split a text says, and chat templates with names."""

import warnings

import available  # noqa: F401
import gguf_files
import pytest
import torch
import transformers

from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.integrations.transformers.gguf_tokenizer import tokenizer_of
from w4a8.integrations.vllm.gguf_folder import folder_of

LETTERS = [*map(chr, range(ord("0"), ord("9") + 1)), *map(chr, range(ord("a"), ord("z") + 1)), ".", "!", "\u0120"]
TOKENS = ["<pad>", "<s>", "</s>", *LETTERS, "12", "123", "1234", "ab", "abc", "xyz", ".a", "!."]
# Nothing makes "xyz".
MERGES = ["1 2", "12 3", "123 4", "a b", "ab c", ". a", "! ."]
MODEL = {
    "context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 64,
    "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": len(TOKENS),
}  # fmt: skip


@pytest.fixture
def made(tmp_path):
    """Of keys behind "tokenizer.": the tokenizer."""

    def made(**keys):
        found = {"ggml.model": "gpt2", "ggml.tokens": TOKENS, "ggml.merges": MERGES}
        found |= {"ggml.token_type": [3, 3, 3, *[1] * (len(TOKENS) - 3)], "ggml.bos_token_id": 1, **keys}
        keys = {f"qwen3.{key}": value for key, value in MODEL.items()}
        keys |= {f"tokenizer.{key}": value for key, value in found.items() if value is not None}
        path = gguf_files.write(tmp_path / "model.gguf", "qwen3", keys, {"output.weight": torch.ones(1)})
        return tokenizer_of(path, GGUFFile(path).keys)

    return made


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "1234 abc . a x y z !."),
        ("exaone4", "1234 abc . a x y z !."),
        ("qwen2", "1 2 3 4 abc .a x y z !."),
        ("llama-bpe", "<s> 123 4 abc .a xyz !."),
        ("falcon3", "<s> 123 4 abc .a xyz !."),
        ("smaug-bpe", "123 4 abc .a x y z !."),
        ("glm4", "123 4 abc .a xyz !."),
        ("glm5", "123 4 abc .a xyz !."),
        ("chatglm-bpe", "123 4 abc .a x y z !."),
        ("tekken", "<s> 1 2 3 4 abc .a xyz !."),
        ("gpt-4o", "123 4 abc .a x y z !."),
        ("smollm", "1 2 3 4 abc . a x y z !."),
        ("command-r", "1 2 3 4 abc . a x y z !."),
        ("deepseek-v3", "123 4 abc .a x y z !."),
        ("hunyuan-dense", "123 4 abc .a x y z !."),
        ("hunyuan", "1 2 3 4 abc .a x y z !."),
        ("deepseek-coder", "1 2 3 4 abc . a x y z !."),
        ("default", "123 4 abc . a x y z !."),
        ("bailingmoe2", "1 2 3 4 abc .a x y z !."),
        ("seed-coder", "1 2 3 4 abc .a x y z !."),
        ("exaone-moe", "1 2 3 4 abc .a x y z !."),
        ("kimi-k2", "123 4 abc .a x y z !."),
    ],
)
def test_does_what_the_name_says(pre, expected, made):
    """By the expressions in llama.cpp (llama-vocab.cpp), by hand; a word that no merge makes is whole in some."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = made(**{"ggml.pre": pre})
    ids = [each for part in ("1234", "abc", ".a", "xyz", "!.") for each in tokenizer(part).input_ids]
    parts = " ".join(TOKENS[each] for each in ids)
    assert parts.replace("<s> ", "") == expected.replace("<s> ", "")
    assert ("<s>" in parts) == ("<s>" in expected)


@pytest.mark.parametrize("pre", ["deepseek-llm", "superbpe", None])
def test_an_unknown_name_is_said(pre, made):
    with pytest.warns(UserWarning, match=rf"tokenizer.ggml.pre of the GGUF file is {pre!r}, and how that splits"):
        tokenizer = made(**{"ggml.pre": pre})
    assert [TOKENS[each] for each in tokenizer("1234").input_ids] == ["1234"]


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3"])
def test_in_the_folder_for_vllm(name, tmp_path):
    """Saved beside a config.json whose model has a class of its own: vLLM takes what AutoTokenizer makes of it."""
    gguf_models = pytest.importorskip("gguf_models")
    tiny = gguf_models.TinyModel(name)
    tokens = [*TOKENS, *(f"[PAD{i}]" for i in range(gguf_models.VOCAB - len(TOKENS)))]
    found = {"model": "gpt2", "tokens": tokens, "merges": MERGES, "token_type": [3, 3, 3, *[1] * (len(tokens) - 3)]}
    tiny.keys |= {f"tokenizer.ggml.{key}": value for key, value in {**found, "pre": "llama-bpe"}.items()}
    again = transformers.AutoTokenizer.from_pretrained(folder_of(tiny.write(tmp_path), tmp_path / "cache", True))
    assert [TOKENS[each] for each in again("xyz1234").input_ids] == ["<s>", "xyz", "123", "4"]


def test_chat_templates(made, tmp_path):
    """One, or several with names; they are saved."""
    said = [{"role": "user", "content": "abc"}]
    one, other = "{{ messages[0].content }}!", "{{ messages[0].content }}."
    names = {"chat_template": one, "chat_templates": ["rag"], "chat_template.rag": other}
    assert made(**{"ggml.pre": "qwen2", "chat_template": one}).chat_template == one
    tokenizer = made(**{"ggml.pre": "qwen2"}, **names)
    tokenizer.save_pretrained(tmp_path / "saved")
    for each in (tokenizer, transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert each.apply_chat_template(said, tokenize=False) == "abc!"
        assert each.apply_chat_template(said, chat_template="rag", tokenize=False) == "abc."
    del names["chat_template"]
    assert made(**{"ggml.pre": "qwen2"}, **names).chat_template == {"rag": other}
