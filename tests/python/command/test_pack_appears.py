"""`w4a8 pack`: OUT is all or nothing, whatever interrupts a run and whoever else packs to OUT."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import available  # noqa: F401
import multiplied_out
import pytest
import safetensors.torch
import torch
from test_pack import load, run_json

from w4a8.command import main, pack
from w4a8.command.report import UsageError
from w4a8.integrations.transformers import W4A8Config

TOOL_WRITTEN = multiplied_out.TOOL_WRITTEN


def stop(how):
    def save(model, folder, **options):
        (folder / "config.json").write_text("{}")
        how()

    return save


@pytest.fixture
def interrupts():
    """A shell that starts the tests in the background has them ignore SIGINT, nohup SIGHUP."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {each: signal.signal(each, handler) for each, handler in handlers.items()}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize(
    "how, code",
    [
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 143),
        (lambda: os.kill(os.getpid(), signal.SIGHUP), 129),
        (lambda: os.kill(os.getpid(), signal.SIGINT), 130),
        (lambda: Path("/dev/full").write_bytes(b"x"), 1),
        # In place of /dev/full safetensors would put a file, as root.
        (lambda: safetensors.torch.save_file({"a": torch.zeros(1)}, "/proc/nowhere/a"), 1),
    ],
)
def test_an_interrupted_run_leaves_nothing(how, code, tmp_path, monkeypatch):
    model = load(TOOL_WRITTEN / "gptq", quantization_config=W4A8Config())
    monkeypatch.setattr(type(model), "save_pretrained", stop(how))
    before = signal.getsignal(signal.SIGTERM)
    assert main(["pack", str(TOOL_WRITTEN / "gptq"), str(tmp_path / "out")]) == code
    assert os.listdir(tmp_path) == [] and signal.getsignal(signal.SIGTERM) == before


def test_out_is_a_link_or_here(tmp_path, monkeypatch, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    monkeypatch.chdir(tmp_path)
    assert main(["pack", str(TOOL_WRITTEN / "gptq"), "link"]) == 0
    assert (tmp_path / "link").is_symlink() and main(["verify", "folder"]) == 0
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(pack.model_loading, "load", lambda *_: pytest.fail("the work was begun"))
    capsys.readouterr()
    assert main(["pack", str(TOOL_WRITTEN / "gptq"), "."]) == 2
    assert "the folder that this runs in" in capsys.readouterr().err


HOLDS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from w4a8.command.pack import _appearing

with _appearing(Path(sys.argv[1])) as folder:
    (folder / "sub").mkdir()
    (folder / "sub" / "model.safetensors").write_bytes(bytes(3000))
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_two_at_once_and_what_a_killed_run_leaves(tmp_path, capsys):
    """The second one is told, and takes nothing away; what `kill -9` leaves is removed, and that is said."""
    out, making = tmp_path / "out", tmp_path / ".out.packing"
    command = ["pack", str(TOOL_WRITTEN / "gptq"), str(out)]
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout.readline() == "ready\n"
        assert main(command) == 2
        assert f"another process is packing to {out}" in capsys.readouterr().err
        assert (making / "sub" / "model.safetensors").stat().st_size == 3000
        first.kill()
    assert os.listdir(tmp_path) == [".out.packing"]
    assert main(command) == 0
    assert f"3,000 bytes that a killed run left in {making} are removed" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["out"] and main(["verify", str(out)]) == 0


def test_the_folder_is_made_by_another_while_this_one_waits(tmp_path):
    """Between the look at OUT and the lock."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").touch()
    with pytest.raises(UsageError, match="out is there already"), pack._appearing(tmp_path / "out"):
        pytest.fail("the work was begun")


def test_a_link_in_place_of_the_folder(tmp_path, capsys):
    """Whose target would be emptied."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").touch()
    (tmp_path / ".out.packing").symlink_to("mine")
    assert main(["pack", str(TOOL_WRITTEN / "gptq"), str(tmp_path / "out")]) == 2
    assert f"{tmp_path / '.out.packing'} is a link" in capsys.readouterr().err
    assert os.listdir(tmp_path / "mine") == ["letter"]


def test_a_full_disk_while_the_tokenizer_is_written(tmp_path, monkeypatch, capsys):
    """The package tokenizers raises an Exception, no OSError."""

    def save(folder):
        (folder / "tokenizer.json").touch()
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(pack.model_loading, "tokenizer_of", lambda path: SimpleNamespace(save_pretrained=save))
    assert main(["pack", str(TOOL_WRITTEN / "gptq"), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("w4a8: the tokenizer cannot be written to") and error.endswith("device (os error 28)")
    assert os.listdir(tmp_path) == []


def test_a_path_behind_a_folder_that_is_missing(tmp_path, monkeypatch, capsys):
    """OUT is where the path leads without the folder, which is not made."""
    monkeypatch.chdir(tmp_path)
    assert run_json(capsys, "pack", TOOL_WRITTEN / "gptq", "missing/../zz")[0] == 0
    assert os.listdir(tmp_path) == ["zz"] and main(["verify", "zz"]) == 0
