"""Each number of a small GGUF file and of a packed folder is set to what it cannot be: an error, or a right result.

Within five seconds and 500 MB, for `inspect`, `chat`, `pack` and `verify`, in forked children (forked.py).
"""

import itertools
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import available  # noqa: F401
import forked
import gguf_models
import meter
import pytest
import tokenizers
import transformers
from test_quantize_transformers import make_model

from w4a8.command import main

pytestmark = [meter.needs_proc, meter.needs_its_allocator]
VALUES = [0, -1, 2**31, 2**62, math.nan, "x", [1, 2]]
WORDS = [*"abcdefgh", "ab"]


@pytest.fixture(scope="module")
def ask():
    """`ask(commands)`: the answer of forked.py."""
    with subprocess.Popen(
        [sys.executable, forked.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as server:

        def ask(commands):
            server.stdin.write(json.dumps(commands) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield ask
        server.stdin.close()


@pytest.fixture
def check(ask, tmp_path):
    """`check(path, what)`: runs the commands; inspect refuses what chat does not load. Returns the exit codes."""

    def check(path, what):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        name = str(path)
        commands = [["inspect", name, "--memory-speed", "1"], ["chat", name, "--max-new-tokens", "2"]]
        commands += [["pack", name, str(tmp_path / "out")], *([["verify", name]] if path.is_dir() else [])]
        *answers, grown = ask(commands)
        assert len(answers) == len(commands), f"{what}: {commands[len(answers)]} {grown}"
        for command, (code, said, _) in zip(commands, answers):
            assert code in (0, 1, 2) and "allocate" not in said, f"{what}: {command} {said}"
        assert grown < forked.MEGABYTES, f"{what}: {grown} MB"
        codes = [code for code, *_ in answers]
        runs = "[loaded in" in answers[1][1]  # behind it numbers decide
        assert (codes[0] == 0) == runs, f"{what}: inspect {answers[0]}, chat {answers[1]}"
        return codes

    return check


@pytest.fixture
def tiny():
    """A GGUF file with experts and a tokenizer."""
    tiny = gguf_models.TinyModel("qwen3moe")
    words = [*WORDS, *(f"w{i}" for i in range(gguf_models.VOCAB - len(WORDS)))]
    found = {"model": "gpt2", "pre": "gpt-2", "tokens": words, "merges": ["a b"], "token_type": [1] * len(words)}
    tiny.keys |= {f"tokenizer.ggml.{name}": each for name, each in found.items()}
    return tiny


def test_keys_of_a_gguf_file(tiny, check, tmp_path):
    assert check(tiny.write(tmp_path), "whole") == [0, 0, 0]
    keys, refused = dict(tiny.keys), 0
    for key in [key for key, value in keys.items() if not isinstance(value, str)]:
        for value in VALUES:
            tiny.keys = {**keys, key: value}
            refused += check(tiny.write(tmp_path), f"{key} = {value}")[0]
    assert refused > len(keys)


def fields_of_gguf(data):
    """Where the numbers are that are no values: name, offset and format; of the first keys and tensors."""
    at, found = 4, []

    def number(name, form):
        nonlocal at
        found.append((name, at, form))
        at += struct.calcsize(form)
        return struct.unpack_from(form, data, at - struct.calcsize(form))[0]

    def skip(kind, what):
        nonlocal at
        if kind == 8:
            length = number(f"length of {what}", "<Q")
            at += length
        elif kind == 9:
            inner, count = number(f"type in {what}", "<I"), number(f"count of {what}", "<Q")
            for _ in range(count):
                skip(inner, f"{what}[]")
        else:
            at += {0: 1, 1: 1, 2: 2, 3: 2, 7: 1, 10: 8, 11: 8, 12: 8}.get(kind, 4)

    number("version", "<I")
    tensors, keys = number("tensors", "<Q"), number("keys", "<Q")
    for _ in range(keys):
        skip(8, "name of a key")
        skip(number("type of a key", "<I"), "a key")
    for _ in range(tensors):
        skip(8, "name of a tensor")
        for _ in range(number("dimensions", "<I")):
            number("dimension", "<Q")
        number("type of a tensor", "<I")
        number("offset", "<Q")
    few = itertools.groupby(sorted(found), key=lambda field: field[0])
    return [field for _, group in few for field in list(group)[:2]]


def test_header_of_a_gguf_file(tiny, check, tmp_path):
    path = tiny.write(tmp_path)
    data, refused = path.read_bytes(), 0
    fields = fields_of_gguf(data)
    for name, at, form in fields:
        for value in (0, -1, 2**31, 2**62):
            size = struct.calcsize(form)
            path.write_bytes(data[:at] + (value % 256**size).to_bytes(size, "little") + data[at + size :])
            refused += check(path, f"{name} at {at} = {value}")[0]
    assert refused > 2 * len(fields)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A packed folder with experts and a tokenizer."""
    folder = tmp_path_factory.mktemp("packed")
    model = make_model("qwen3")
    model.save_pretrained(folder / "floats")
    words = {word: i for i, word in enumerate([*WORDS, *(f"w{i}" for i in range(model.config.vocab_size - 9))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(folder / "floats")
    assert main(["pack", str(folder / "floats"), str(folder / "packed")]) == 0
    (folder / "packed" / "SHA256SUMS").unlink()
    return folder / "packed"


@pytest.fixture
def folder(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "folder")
    return tmp_path / "folder"


def places(owner, path=()):
    """Of numbers and lists, as paths of keys."""
    for key, value in owner.items():
        if isinstance(value, dict):
            yield from places(value, (*path, key))
        elif isinstance(value, (int, float, list)):
            yield (*path, key)


def changed(owner, path, value):
    """A copy with another value."""
    key, *rest = path
    new = [*owner] if isinstance(owner, list) else dict(owner)
    new[key] = changed(owner[key], rest, value) if rest else value
    return new


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_json_of_a_packed_folder(file, folder, check):
    assert check(folder, "whole") == [0, 0, 2, 0]
    config = json.loads((folder / file).read_text())
    for path in [*places(config)]:
        for value in VALUES:
            (folder / file).write_text(json.dumps(changed(config, path, value)))
            check(folder, f"{'.'.join(path)} = {value}")


def test_header_of_a_packed_folder(folder, check):
    path, refused = folder / "model.safetensors", 0
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    names = [next(name for name in entries if name.endswith(end)) for end in ("w2_packed", ".packed", "norm.weight")]
    fields = [("dtype",), ("shape",), ("shape", 0), ("data_offsets",), ("data_offsets", 0), ("data_offsets", 1)]
    for name, field, value in itertools.product(names, fields, VALUES):
        if value != 0 or field != ("data_offsets", 0) or entries[name]["data_offsets"][0] != 0:
            header = json.dumps(changed(entries, (name, *field), value)).encode()
            path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
            codes = check(folder, f"{name} {field} = {value}")
            refused += codes[0]
            assert codes[0] == codes[3] == 1, f"{name} {field} = {value}"
    for value in (0, 2**31, 2**62, 2**64 - 1):
        path.write_bytes(value.to_bytes(8, "little") + data[8:])
        assert check(folder, f"size = {value}")[0] == 1
    assert refused > 80


def test_header_of_a_packed_matrix(folder, check):
    """Of four bytes each, before the codes."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    for end, value in itertools.product(("w2_packed", ".packed"), (0, 2**31 - 1)):
        begin = 8 + size + next(each for name, each in entries.items() if name.endswith(end))["data_offsets"][0]
        for at in range(begin, begin + 64, 8 if value else 4):
            path.write_bytes(data[:at] + value.to_bytes(4, "little") + data[at + 4 :])
            check(folder, f"{end}, byte {at - begin} = {value}")


def test_the_limits_are_limits(ask, tmp_path):
    """What grows or waits is ended, and what raises is known."""
    os.mkfifo(tmp_path / "pipe")
    Path(tmp_path / "bad").write_text("")
    *answers, _ = ask([["inspect", str(tmp_path / "pipe")], ["inspect", str(tmp_path / "bad")]])
    assert [code for code, *_ in answers] == [1, 1]
