"""Names on the Hub, in the subcommands."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", minversion="5.0")  # which brings huggingface_hub
import multiplied_out

from w4a8.command import extras, inspect, main, model

TOOL_WRITTEN = multiplied_out.TOOL_WRITTEN


@pytest.fixture
def cached(tmp_path):
    """Variables with which huggingface_hub finds Someone/gptq in its cache, and looks nowhere else."""
    snapshot = tmp_path / "hub/models--Someone--gptq/snapshots/0123"
    shutil.copytree(TOOL_WRITTEN / "gptq", snapshot)
    (tmp_path / "hub/models--Someone--gptq/refs").mkdir()
    (tmp_path / "hub/models--Someone--gptq/refs/main").write_text("0123")
    return {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}


def run(environment, *arguments):
    command = [sys.executable, "-m", "w4a8", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")


def test_a_name_on_the_hub_offline(cached, tmp_path):
    done = run(cached, "inspect", "Someone/gptq", "--json", "--memory-speed", "1")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["packed_bytes"] == inspect.examine(str(TOOL_WRITTEN / "gptq"), 1.0)[0]["packed_bytes"]
    done = run(cached, "pack", "Someone/gptq", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for name in ("Someone/else", "Someone/gptq/model.gguf"):
        done = run(cached, "inspect", name)
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and "Someone/" in done.stderr


class Hub:
    """In place of huggingface_hub: Someone/big has no weights on this machine."""

    def __init__(self, folder):
        self.folder, self.asked = folder, []

    def snapshot_download(self, repo, allow_patterns, **options):
        self.asked.append((repo, allow_patterns))
        return str(self.folder)

    def list_repo_files(self, repo):
        return ["README.md", "b/x-Q4_K_M.gguf", "a.gguf"]

    def get_safetensors_metadata(self, repo):
        tensors = inspect.read_headers(TOOL_WRITTEN / "gptq")
        names = list(tensors)
        halves = (names[::2], names[1::2])
        files = {f"{i}.safetensors": SimpleNamespace(tensors={n: tensors[n] for n in h}) for i, h in enumerate(halves)}
        return SimpleNamespace(files_metadata=files)


def test_inspect_downloads_no_weights(tmp_path, monkeypatch, capsys):
    hub = Hub(tmp_path)
    monkeypatch.setattr(model, "hub", lambda: hub)
    monkeypatch.setattr("w4a8.command.headers.hub", lambda: hub)
    shutil.copy(TOOL_WRITTEN / "gptq/config.json", tmp_path)
    files = hub.get_safetensors_metadata("Someone/big").files_metadata
    index = {
        "metadata": {},
        "weight_map": {name: file for file, metadata in files.items() for name in metadata.tensors},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    answer = inspect.examine("Someone/big", 1.0)[0]
    local = inspect.examine(str(TOOL_WRITTEN / "gptq"), 1.0)[0]
    for field in ("packed_bytes", "float_bytes", "token_bytes"):
        assert answer[field] == local[field]
    assert answer["files"] == 2 and answer["peak_bytes"] < local["peak_bytes"]
    ((repo, patterns),) = hub.asked
    assert repo == "Someone/big" and not any("safetensors" in pattern for pattern in patterns if pattern != "*.json")


def test_gguf_files_on_the_hub_are_named(tmp_path, monkeypatch, capsys):
    hub = Hub(tmp_path)
    monkeypatch.setattr(model, "hub", lambda: hub)
    assert main(["inspect", "Someone/big"]) == 1
    assert "name one of its GGUF files: Someone/big/a.gguf, Someone/big/b/x-Q4_K_M.gguf" in capsys.readouterr().err
    assert main(["inspect", "Someone/big/x-00002-of-00003.gguf"]) == 1
    assert hub.asked[-1] == ("Someone/big", ["x-*-of-00003.gguf"])


@pytest.mark.parametrize("name", ["one", "one/two/three", "a/b/c.safetensors", "/no/where", "./a/b"])
def test_what_is_no_name(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model, "hub", lambda: pytest.fail("the Hub was asked"))
    assert model.hub_name(name) is None
    with pytest.raises(ValueError, match="is not there"):
        model.find(name)


def test_a_slip_of_the_pen_is_not_sent_to_the_hub(monkeypatch, tmp_path):
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model, "hub", lambda: pytest.fail("the Hub was asked"))
    with pytest.raises(ValueError, match="models/qwn is not there, though models is a folder"):
        model.find("models/qwn")


def test_the_hub_needs_its_package(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["inspect", "Someone/big"]) == 1
    assert extras.TRANSFORMERS in capsys.readouterr().err
