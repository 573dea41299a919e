"""`w4a8 verify`: what a hostile directory states is neither followed nor waited for; `inspect` and others beside it."""

import hashlib
import json
import os

import available  # noqa: F401
import multiplied_out
import pytest
from test_pack import run_json

from w4a8.checkpoint import open_source
from w4a8.checkpoint.gguf_file import GGUFFile
from w4a8.command import main
from w4a8.command.headers import read_headers
from w4a8.formats.packed_directory import FORMAT, METHOD, VERSION

STATED = {"quant_method": METHOD, "format": FORMAT, "version": VERSION}


def verify(capsys, folder):
    return run_json(capsys, "verify", folder)


@pytest.fixture
def packed(tmp_path, capsys):
    assert main(["pack", str(multiplied_out.TOOL_WRITTEN / "gptq"), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    return tmp_path / "out"


@pytest.mark.parametrize("shape", [[2**62, 4], [2**62, 0], [4, 2**62], [2**31], [0]], ids=str)
def test_a_header_that_the_file_does_not_hold(shape, packed, capsys):
    """Is said at once: no loop over rows that are not there."""
    (packed / "SHA256SUMS").unlink()
    weights = packed / "model.safetensors"
    content = weights.read_bytes()
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    name = next(name for name in entries if name.endswith("w2_packed"))
    entries[name]["shape"] = shape
    header = json.dumps(entries).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    code, answer = verify(capsys, packed)
    (problem,) = answer["problems"]
    assert code == 1 and f"tensor {name!r} is U8 of shape {shape}, but at bytes" in problem


@pytest.mark.parametrize(("shape", "words"), [([2**62, 0], "which holds nothing"), ([2**20, 1], "[0]: ")])
def test_a_stack_of_nothing(shape, words, tmp_path, capsys):
    """One line, not one for each of its matrices."""
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": STATED}))
    end = shape[0] * shape[1]
    header = json.dumps({"a.packed": {"dtype": "U8", "shape": shape, "data_offsets": [0, end]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(end))
    code, answer = verify(capsys, tmp_path)
    (problem,) = answer["problems"]
    assert code == 1 and problem.startswith("a.packed") and words in problem


PIPES = ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "generation_config.json"]


@pytest.mark.parametrize("name", PIPES)
@pytest.mark.parametrize("command", ["verify", "inspect", "chat", "pack"])
def test_a_named_pipe(command, name, packed, tmp_path, capsys):
    """Nobody waits for what never comes."""
    (packed / name).unlink(missing_ok=True)
    os.mkfifo(packed / name)
    if command == "verify":
        code = main(["verify", str(packed)])
    else:
        code = main([command, str(packed), *([str(tmp_path / "more")] if command == "pack" else [])])
    said = capsys.readouterr()
    assert code == 1
    if (command, name) == ("verify", "config.json"):
        assert "is no packed directory" in said.err
    else:
        assert f"{packed / name} is no regular file" in said.out + said.err


def test_named_pipes_for_other_readers(packed, tmp_path):
    index = packed / "model.safetensors.index.json"
    os.mkfifo(index)
    with pytest.raises(ValueError, match=r"index\.json is no regular file"):
        open_source(packed)
    index.unlink()
    (packed / "model.safetensors").unlink()
    os.mkfifo(packed / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is no regular file"):
        open_source(packed)
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"model\.gguf is no regular file"):
        GGUFFile(tmp_path / "model.gguf")


def test_names_that_lead_out(packed, tmp_path, capsys):
    """Are not followed: whether a file outside is there, and what it holds, is not said."""
    (tmp_path / "secret").write_text("x")
    digest = hashlib.sha256(b"x").hexdigest()
    with (packed / "SHA256SUMS").open("a") as file:
        for name in ("../secret", str(tmp_path / "secret"), "../nothing"):
            file.write(f"{digest}  {name}\n")
    code, answer = verify(capsys, packed)
    names = ("../secret", tmp_path / "secret", "../nothing")
    assert code == 1
    assert answer["problems"] == [f"{packed / 'SHA256SUMS'} names {name}, a file outside" for name in names]


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_leads_out(file, packed, capsys):
    (packed / "SHA256SUMS").unlink()
    path = packed / file
    before = json.loads(path.read_text()) if path.is_file() else {}
    for names, wrong in (
        ({"AutoConfig": "code.A", "AutoTokenizer": ["code.A", None]}, []),
        ({"AutoConfig": "someone/else--code.A", "AutoModel": "code.A"}, ["'someone/else--code.A'"]),
        ({"AutoConfig": "../code.A", "AutoTokenizer": [None, 5]}, ["'../code.A'", "5"]),
        (7, ["7"]),
    ):
        path.write_text(json.dumps({**before, "auto_map": names}))
        problems = verify(capsys, packed)[1]["problems"]
        assert problems == [f"{path}: auto_map names {each}, which is no code in {packed}" for each in wrong]


@pytest.mark.parametrize("name", ["../out/model.safetensors", "/etc/passwd", "..", ""])
def test_an_index_that_leads_out(name, packed, capsys):
    (packed / "SHA256SUMS").unlink()
    tensors = dict.fromkeys(read_headers(packed), name)
    (packed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": tensors}))
    for command in ("verify", "inspect", "chat"):
        assert main([command, str(packed)]) == 1
        said = capsys.readouterr()
        assert f"names {name!r}, which is no file of {packed}" in said.out + said.err
