"""`w4a8 chat`: what is written beside what the model generates."""

import argparse
import io
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")
import multiplied_out  # noqa: E402
from gguf_models import TinyModel  # noqa: E402
from test_quantize_transformers import make_model  # noqa: E402

import w4a8  # noqa: E402
from w4a8.command import conversation, extras, main, model_loading, sampling  # noqa: E402
from w4a8.integrations.transformers import W4A8Config, fuse, kept_text  # noqa: E402

TOOL_WRITTEN = multiplied_out.TOOL_WRITTEN
DEMO = Path(__file__).parents[3] / "examples/tiny_moe/checkpoints/g32"


def talk(monkeypatch, capsys, text, *arguments, greedy=True):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code = main(["chat", *map(str, arguments), *(["--temperature", "0"] if greedy else [])])
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
    turns = "{% if enable_thinking %}w3 {% endif %}{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
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


def test_a_model_that_also_sees(tmp_path, monkeypatch, capsys):
    """As Gemma 3 of 4B and more is published: the numbers of the text are a part of its config."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 256, "pad_token_id": 5}
    config = transformers.Gemma3Config(text_config=text, vision_config={**sizes, "image_size": 28, "patch_size": 14})
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    code, out, err = talk(monkeypatch, capsys, "def \n", tmp_path, "--max-new-tokens", "5")
    assert code == 0 and out and "prompt of 4 tokens" in err and "5 written" in err


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


def ask_in_python(folder, text, count, **options):
    """The words of the model's answer to a text, greedy."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=W4A8Config())
    fuse(model)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokens(text, return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0, **options)
    return tokens.decode(written[0, ids.shape[1] :])


def test_commands(with_words, tmp_path, monkeypatch, capsys):
    """What the model reads behind them, by its answers; an unknown one lists them; a text may begin with a path."""
    file = tmp_path / "saved.json"
    lines = f"/retry\nw1\n/system w7 w8\nw2\n/save {file}\n/retry\n/clear\nw2\n/system\n/clear\n/w5/w6\n/other\n"
    code, out, err = talk(monkeypatch, capsys, lines, with_words, "--max-new-tokens", "3", "--system", "w9")
    one, two, again, third, fourth = out.splitlines()
    assert code == 0 and again == two and "[there is no question yet]" in err
    assert err.index("there is no /other") < err.index("/clear forget") < err.index("/help")
    said = "system w9 user w1 assistant"
    assert one == ask_in_python(with_words, said, 3)
    said = f"system w7 w8 user w1 assistant {one} user w2 assistant"
    assert two == ask_in_python(with_words, said, 3)
    assert third == ask_in_python(with_words, "system w7 w8 user w2 assistant", 3)
    assert fourth == ask_in_python(with_words, "user /w5/w6 assistant", 3)
    roles = ["system", "user", "assistant", "user", "assistant"]
    contents = ["w7 w8", "w1", one, "w2", two]
    expected = [{"role": role, "content": content} for role, content in zip(roles, contents)]
    assert json.loads(file.read_text()) == {"messages": expected}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "saved.json"]


def test_several_lines_and_thinking(with_words, monkeypatch, capsys):
    lines = '"""w1\n\nw2"""\n/clear\n"""w1\nw2\n'
    code, out, err = talk(monkeypatch, capsys, lines, with_words, "--max-new-tokens", "3", "--think")
    assert code == 0 and "[cut: 3 tokens of an answer (--max-new-tokens)]" in err
    assert out.splitlines() == [ask_in_python(with_words, "w3 user w1 w2 assistant", 3)] * 2
    (with_words / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for option in ("--think", "--no-think"):
        code, _, err = talk(monkeypatch, capsys, "w1\n", with_words, option)
        assert code == 2 and "has no switch for thinking: leave --think out" in err
    code, _, err = talk(monkeypatch, capsys, "w1\n", with_words, "--raw", "--system", "w1")
    assert code == 2 and "--system and --think are for answers in the chat format" in err


def test_a_full_conversation(with_words, monkeypatch, capsys):
    """The answer is cut; a question that does not fit is not asked."""
    lines = "w1 w2\nw3\n/clear\nw1 w2\n"
    code, out, err = talk(monkeypatch, capsys, lines, with_words, "--ctx", "9")
    one, two = out.splitlines()
    assert code == 0 and one == two == ask_in_python(with_words, "user w1 w2 assistant", 5)
    assert err.count("[cut: 9 tokens of the conversation (--ctx)]") == 2
    assert "[full: 12 tokens of the conversation, 9 are the most (--ctx); /clear begins a new one]" in err


def test_a_session(with_words, tmp_path, monkeypatch, capsys):
    """Two runs say what one says, and the second one reads its own tokens alone."""
    file, options = tmp_path / "one.session", (with_words, "--max-new-tokens", "3")
    _, expected, _ = talk(monkeypatch, capsys, "w1 w2\nw3\n", *options)
    _, first, _ = talk(monkeypatch, capsys, "w1 w2\n", *options, "--session", file)
    code, second, err = talk(monkeypatch, capsys, "w3\n", *options, "--session", file)
    assert code == 0 and first + second == expected
    assert "2 messages, 6 tokens are kept]" in err and "[prompt of 10 tokens, 6 of them from before:" in err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "one.session"]
    assert talk(monkeypatch, capsys, "/clear\n", *options, "--session", file)[0] == 0
    _, again, err = talk(monkeypatch, capsys, "w1 w2\n", *options, "--session", file)
    assert again == first and ": 0 messages," in err


def test_a_session_that_is_wrong(with_words, tmp_path, monkeypatch, capsys):
    """Is named, and stays as it was."""
    file, options = tmp_path / "one.session", (with_words, "--max-new-tokens", "3")
    talk(monkeypatch, capsys, "w1 w2\n", *options, "--session", file)
    whole = file.read_bytes()

    def refused(expected, *more):
        before = file.read_bytes()
        code, out, err = talk(monkeypatch, capsys, "w3\n", *options, "--session", file, *more)
        assert code == 1 and out == "" and f"w4a8: {file} is {expected}" in err
        assert file.read_bytes() == before

    for changed in (
        whole[:-1],
        b"",
        whole[:7],
        b"no session at all",
        whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:],
    ):
        file.write_bytes(changed)
        refused("no session, or damaged: ")
    file.write_bytes(whole.replace(b"w1 w2", b"w1 w3"))
    refused("no session, or damaged: its checksum differs")
    file.write_bytes(whole)
    refused("a session of another settings: ", "--activation-group", "-1")
    monkeypatch.setattr(w4a8, "__version__", "0")
    refused("a session of another version: ")
    monkeypatch.undo()
    config = with_words / "config.json"
    config.write_text(config.read_text() + " ")
    refused("a session of another model")
    code, _, err = talk(monkeypatch, capsys, "w3\n", *options, "--raw", "--session", file)
    assert code == 2 and "--session is for answers in the chat format" in err
    code, _, err = talk(monkeypatch, capsys, "w3\n", *options, "--session", tmp_path / "none" / "file")
    assert code == 2 and "there is no folder" in err


NOTHING = argparse.Namespace(temperature=None, top_k=None, top_p=None, min_p=None, repetition_penalty=None)


def settings(given=(), keys=(), **config):
    args = argparse.Namespace(**{**vars(NOTHING), **dict(given)})
    return sampling.settings(args, transformers.GenerationConfig(**config), dict(keys))


def test_settings():
    """Of the options, else of the model, else the defaults; what has an effect is said."""
    found, said = settings({"top_p": 0.5}, temperature=0.6, top_k=20, top_p=0.95, do_sample=True)
    assert found == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.5, "min_p": 0.0, "repetition_penalty": 1.0, "do_sample": True
    }  # fmt: skip
    assert said == "temperature 0.6 (the model's), top k 20 (the model's), top p 0.5 (as asked)"
    found, said = settings()
    assert (found["temperature"], found["top_k"]) == (0.7, 50)
    assert said == "temperature 0.7 (default), top k 50 (default)"
    keys = {"general.sampling.temp": 0.25, "general.sampling.penalty_repeat": 1.1, "general.sampling.min_p": 0.05}
    found, said = settings(keys=keys)
    assert (found["temperature"], found["repetition_penalty"], found["min_p"]) == (0.25, 1.1, 0.05)
    assert said.endswith("min p 0.05 (the model's), repetition penalty 1.1 (the model's)")
    assert settings(do_sample=True)[0]["temperature"] == 1.0
    assert settings(do_sample=False)[0] == {"repetition_penalty": 1.0, "do_sample": False}
    found, said = settings({"temperature": 0.0}, top_k=20, repetition_penalty=1.1)
    assert found == {"repetition_penalty": 1.1, "do_sample": False}
    assert said == "temperature 0 (as asked), repetition penalty 1.1 (the model's)"
    with pytest.raises(ValueError, match=r"general\.sampling\.top_p is 2\.0, expected a number of 0 to 1"):
        settings(keys={"general.sampling.top_p": 2.0})
    with pytest.raises(ValueError, match=r"generation_config\.json: top_k is True, expected a number"):
        settings(top_k=True)


def test_the_models_own_settings(with_words, monkeypatch, capsys):
    """Are what generate gets."""
    (with_words / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 1, "min_p": 0.125}))
    seen = []
    before = kept_text.KeptText.generate
    monkeypatch.setattr(kept_text.KeptText, "generate", lambda *a, **o: seen.append(o) or before(*a, **o))
    lines = "w1\n"
    arguments = (with_words, "--max-new-tokens", "3", "--repetition-penalty", "1.5")
    code, out, err = talk(monkeypatch, capsys, lines, *arguments, greedy=False)
    assert code == 0 and {
        "do_sample": True, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.125, "repetition_penalty": 1.5
    }.items() <= seen[0].items()  # fmt: skip
    assert out == ask_in_python(with_words, "user w1 assistant", 3, repetition_penalty=1.5) + "\n"
    assert (
        "[temperature 1 (the model's), top k 1 (the model's), min p 0.125 (the model's), repetition penalty 1.5 (as"
        in err
    )


def test_thinking_switch():
    assert conversation.thinking_switch("{% if enable_thinking is defined and not enable_thinking %}x{% endif %}")
    template = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    assert conversation.thinking_switch(template) == "thinking"
    assert conversation.thinking_switch("{{ message.thinking }} the thinking is {{ message['thinking'] }}") is None


def test_on_a_terminal(with_words):
    """Progress of loading is in one line. Ctrl-C ends an answer, and nothing at the prompt; then an empty line ends the
    program."""
    pty, fcntl, termios = map(pytest.importorskip, ("pty", "fcntl", "termios"))
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    endless = ["--max-new-tokens", "10000000", "--ctx", "20000000", "--temperature", "0"]
    command = [sys.executable, "-m", "w4a8", "chat", str(with_words), *endless]
    environment = {**os.environ, "TERM": "dumb"}
    config = json.loads((with_words / "config.json").read_text())
    (with_words / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (with_words / "generation_config.json").write_text("{}")
    child = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True)
    os.close(its)
    screen = b""

    def wait_for(text, interrupt=False):
        nonlocal screen
        begin = sent = time.monotonic()
        while text not in screen:
            assert time.monotonic() < begin + 120, (text, screen)
            if interrupt and time.monotonic() > sent + 5:  # readline sees none that comes before it waits for a key
                child.send_signal(signal.SIGINT)
                sent = time.monotonic()
            if select.select([ours], [], [], 1)[0]:
                screen += os.read(ours, 4096)
        before, _, screen = screen.partition(text)
        return before

    try:
        shown = wait_for(b"> ")
        assert b"importing transformers" in shown and b"Packing" in shown
        # Of progress nothing stays: a line shows what is written behind the last return to its start.
        lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in shown.split(b"\n")]
        assert all(line.startswith(b"[") for line in lines[:-1]) and lines[-1] == b""
        wait_for(b"an empty line ends it", interrupt=True)
        wait_for(b"> ")
        for _ in range(2):
            os.write(ours, b"w1 w2\n")
            wait_for(b"\n")  # what was written to it
            wait_for(b" w")  # of the answer
            child.send_signal(signal.SIGINT)
            assert b"[prompt of 4 tokens" in wait_for(b" written: ")
            wait_for(b"> ")
            os.write(ours, b"/clear\n")
            wait_for(b"> ")
        os.write(ours, b"\n")
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def test_speeds():
    times = [0.0, 2.0, 3.0, 4.0, 6.0]
    assert conversation.speeds(10, 0, times) == "prompt of 10 tokens: 5.0 tokens/s; 4 written: 0.8 tokens/s"
    assert conversation.speeds(10, 6, times[:2]) == "prompt of 10 tokens, 6 of them from before: 2.0 tokens/s"
    assert conversation.speeds(10, 0, times[:1]) == "nothing written"
