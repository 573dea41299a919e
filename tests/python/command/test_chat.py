"""`w4a8 chat`: what is written beside what the model generates."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
import multiplied_out  # noqa: E402
from gguf_models import TinyModel  # noqa: E402
from test_quantize_transformers import make_model  # noqa: E402

import w4a8  # noqa: E402
from w4a8.command import chat, extras, main, model_loading  # noqa: E402
from w4a8.integrations.transformers import W4A8Config, fuse  # noqa: E402

TOOL_WRITTEN = multiplied_out.TOOL_WRITTEN
DEMO = Path(__file__).parents[3] / "examples/tiny_moe/checkpoints/g32"


def talk(monkeypatch, capsys, text, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code = main(["chat", *map(str, arguments), "--temperature", "0"])
    return code, *capsys.readouterr()


def test_the_demo(monkeypatch, capsys):
    """A model of bytes continues the text: what is written is what it generates. The empty line ends it."""
    if not DEMO.is_dir():
        pytest.skip("needs the examples")
    code, out, err = talk(monkeypatch, capsys, "import os\n\nnever read\n", DEMO, "--max-new-tokens", "20")
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, quantization_config=W4A8Config())
    fuse(model)
    prompt = torch.tensor([list(b"import os")])
    written = model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]
    assert code == 0 and out == bytes(written.tolist()).decode(errors="replace") + "\n"
    assert "prompt of 9 tokens" in err and "20 written" in err and "no chat template" in err
    assert "attention" not in err and "one by one" not in err


@pytest.fixture
def with_words(tmp_path):
    """A checkpoint with a tokenizer of words, and a chat template that names who spoke."""
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(TOOL_WRITTEN / "gptq", tmp_path / "model")
    size = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]
    words = {word: i for i, word in enumerate(["hello", "user", "assistant", *(f"w{i}" for i in range(size - 3))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")
    turns = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    tokenizer.chat_template = turns + "{% if add_generation_prompt %}assistant {% endif %}"
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_conversation(with_words, monkeypatch, capsys):
    """The second prompt has the first one and its answer in it."""
    code, out, err = talk(monkeypatch, capsys, "hello w1\nw2\n", with_words, "--max-new-tokens", "3")
    assert code == 0 and "no chat template" not in err
    answers = out.splitlines()
    assert len(answers) == 2 and all(answers)
    tokens = transformers.AutoTokenizer.from_pretrained(with_words)
    first = tokens("user hello w1 assistant").input_ids
    second = tokens(f"user hello w1 assistant {answers[0]} user w2 assistant").input_ids
    known = len(first) + 2  # the last token of the answer was written, not read
    assert f"prompt of {len(first)} tokens:" in err
    assert f"prompt of {len(second)} tokens, {known} of them from before:" in err


def test_raw_takes_no_template(with_words, monkeypatch, capsys):
    _, _, err = talk(monkeypatch, capsys, "hello w1\n", with_words, "--raw", "--max-new-tokens", "2")
    assert "prompt of 2 tokens" in err


def test_floats_are_rounded(tmp_path, monkeypatch, capsys):
    model = make_model("Qwen3")
    model.save_pretrained(tmp_path)
    code, _, err = talk(monkeypatch, capsys, "", tmp_path, "--group-size", "16")
    assert code == 1 and f"{tmp_path} has no tokenizer" in err


@pytest.mark.parametrize(("size", "kinds"), [(32, {"int8"}), (24, set())])
def test_attention(size, kinds, tmp_path, monkeypatch, capsys):
    """Over a cache of int8; transformers' own, with a reason, for heads that the operator has not."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": size}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    seen, operator = set(), w4a8.paged_attention

    def attention(*args, kind, **options):
        seen.add(kind)
        return operator(*args, kind=kind, **options)

    monkeypatch.setattr(w4a8, "paged_attention", attention)
    code, _, err = talk(monkeypatch, capsys, "ab\n", tmp_path, "--max-new-tokens", "2")
    assert code == 0 and "2 written" in err and seen == kinds
    reason = "[attention is transformers' own: the heads are not of 16 to 512 numbers, a multiple of 16]"
    assert err.count("attention") == err.count(reason) == (not kinds)


def test_what_is_wrong(monkeypatch, capsys):
    code, _, err = talk(monkeypatch, capsys, "", TOOL_WRITTEN / "gptq", "--group-size", "16")
    assert code == 2 and "leave --group-size out" in err
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = talk(monkeypatch, capsys, "", TOOL_WRITTEN / "gptq")
    assert (code, err) == (1, f"w4a8: this needs transformers: {extras.TRANSFORMERS}\n")


def test_lines_of_windows_and_a_broken_template(with_words, monkeypatch, capsys):
    code, _, _ = talk(monkeypatch, capsys, "\r\nnever read\r\n", with_words)
    assert code == 0
    (with_words / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    code, _, err = talk(monkeypatch, capsys, "hello\r\n", with_words)
    assert code == 1 and "the chat template fails: no" in err


@pytest.mark.parametrize(("keys", "adds"), [({}, False), ({"pre": "llama-bpe"}, True), ({"add_bos_token": True}, True)])
def test_a_text_begins_with_bos_as_in_llama_cpp(keys, adds, tmp_path):
    """Of a GGUF file: transformers does not read these keys."""
    tiny = TinyModel("qwen3")
    letters = [*map(chr, range(ord("a"), ord("z") + 1)), "\u0120"]
    tokens = {"model": "gpt2", "tokens": ["<pad>", "<s>", "</s>", *letters, "ab"], "merges": ["a b"], **keys}
    tokens |= {"token_type": [3, 3, 3, *[1] * 28], "bos_token_id": 1, "eos_token_id": 2}
    tiny.keys |= {f"tokenizer.ggml.{key}": value for key, value in tokens.items()}
    ids = model_loading.tokenizer_of(tiny.write(tmp_path))("ab").input_ids
    assert ids == ([1, 30] if adds else [30])


def test_speeds():
    times = [0.0, 2.0, 3.0, 4.0, 6.0]
    assert chat.speeds(10, 0, times) == "prompt of 10 tokens: 5.0 tokens/s; 4 written: 0.8 tokens/s"
    assert chat.speeds(10, 6, times[:2]) == "prompt of 10 tokens, 6 of them from before: 2.0 tokens/s"
    assert chat.speeds(10, 0, times[:1]) == "nothing written"
