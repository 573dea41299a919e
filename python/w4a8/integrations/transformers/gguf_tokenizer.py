"""The tokenizer of a GGUF file: transformers' tokenizer, completed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from tokenizers import Regex, pre_tokenizers

from w4a8.checkpoint.gguf_file import Strings
from w4a8.checkpoint.gguf_keys import LLAMA3, added_tokens
from w4a8.core.json_fields import check_field, shorten

_TEMPLATE = "tokenizer.chat_template."
# tokenizer.ggml.pre: ways to split a text, by the names of llama.cpp (llama-vocab.cpp, llama_vocab::impl::load).
# A piece that is a word of the vocabulary is taken whole.
_WHOLE = (*LLAMA3, "tekken", "glm4", "glm5")
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_AS_GPT2 = (
    *("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum"),
    *("modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "mpt", "olmo", "jais", "trillion"),
    *("granite-docling", "exaone4"),
)
# Ways that transformers does not know: like a known way, or expressions, one after the other.
_LIKE = {
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe"), "llama-bpe"),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), "qwen2"),
}
_DIGITS = (r"\p{N}", _GPT2)
_SHORTENED, _SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s+(?!\S)|\s+"
_UPPER, _LOWER = (rf"[\p{{Lm}}\p{{Lo}}\p{{M}}{case}&&[^\p{{Han}}]]" for case in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_SPLITS = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "mellum2": _DIGITS,
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9]{3}"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        (rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|{_SPACES}",),
    ),
    "seed-coder": (
        rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}",
    ),
    "exaone-moe": (
        rf"{_SHORTENED}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{_SPACES}",
    ),
    # As the tokenizer that its makers publish.
    "kimi-k2": (
        rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORTENED}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORTENED}?|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}",
    ),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
        (
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+",
        ),
    ),
}


def tokenizer_of(path: Path, keys: Mapping[str, Any]) -> Any:
    """The tokenizer. Added to transformers' reading: bos and eos, merges, splits, and chat templates with names.

    Warns of an unknown way to split a text.

    Args:
        path: of the file.
        keys: all keys of the file.

    Raises:
        Exception: of any kind: transformers cannot make the tokenizer.
    """
    _check(keys)
    # A model's own class would take the words and the merges alone when it is saved and loaded again.
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    if keys.get("tokenizer.ggml.model") == "gpt2":
        _split(tokenizer.backend_tokenizer, keys.get("tokenizer.ggml.pre"))
    for name, value in added_tokens(keys).items():
        setattr(tokenizer, name, value)
    templates = {key.removeprefix(_TEMPLATE): text for key, text in keys.items() if key.startswith(_TEMPLATE)}
    if templates:
        default = tokenizer.chat_template
        tokenizer.chat_template = ({} if default is None else {"default": default}) | templates
    return tokenizer


def _check(keys: Mapping[str, Any]) -> None:
    """Raises CheckpointError for keys of which transformers would make no tokenizer, or another; names the key."""
    prefix = "tokenizer.ggml."
    tokens, merges, types = (keys.get(prefix + name) for name in ("tokens", "merges", "token_type"))
    for name, value in (("tokens", tokens), ("merges", merges)):
        is_needed = name == "tokens" or value is not None
        check_field(not is_needed or isinstance(value, Strings), prefix + name, value, "an array of strings")
    is_right = types is None or (isinstance(types, np.ndarray) and len(types) == len(tokens))
    check_field(is_right, f"{prefix}token_type", types, f"an array of {len(tokens)} numbers")
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        number = keys.get(f"{prefix}{name}_token_id")
        is_right = number is None or (type(number) is int and 0 <= number < len(tokens))
        check_field(is_right, f"{prefix}{name}_token_id", number, f"0..{len(tokens) - 1}")


def _split(backend: Any, name: str | None) -> None:
    """Sets the way to split a text by its name."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as known
    except ImportError:
        known = {}
    backend.model.ignore_merges = name in _WHOLE
    like = _LIKE.get(name)
    splits = (known[like],) if like in known else _SPLITS.get(name)
    if splits is not None:
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        steps = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in splits]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_of])
    elif name not in known and name not in _AS_GPT2:
        warnings.warn(
            f"tokenizer.ggml.pre of the GGUF file is {shorten(name)}, and how that splits a text is not known here: it "
            "is split as GPT-2 does it, and may become other tokens than in llama.cpp; take the original tokenizer",
            stacklevel=3,
        )
