"""lab/bench_models.py with made-up ways of running a model: what is asked, what fails, the tables and goals."""

import json
import os
import sys
from pathlib import Path

import pytest

FAKES = """
import os, signal
from models.base import Model

class Fake(Model):
    name, format = "vLLM, w4a8", "w4a8"
    def __init__(self, folder, threads):
        assert (folder / "config.json").exists()
    def loading(self):
        weights = {"weights_bytes": 2e9, "weights_peak": 1.85e9, "weights_seconds": 1.0}
        return {"seconds": 2.0, "peak": 3e9, "ran": "repacked", **weights}
    def peak(self):
        return 4e9
    def prefill(self, tokens):
        return 700.0 if tokens == 512 else 650.0
    def decode(self, batch, tokens, prompt=8):
        return 10.0 * batch * 8 / prompt

class Int4Head(Fake):
    name = "vLLM, w4a8, int4 lm_head"
    def decode(self, batch, tokens, prompt=8):
        return 15.0 * batch

class Llama(Fake):
    name = "llama.cpp, Q4_0"
    def decode(self, batch, tokens, prompt=8):
        return 5.0

class Failing(Fake):
    name = "failing"
    def __init__(self, folder, threads):
        raise ValueError("cannot be loaded")

class Killed(Fake):
    name = "killed"
    def prefill(self, tokens):
        os.kill(os.getpid(), signal.SIGKILL)

class Refusing(Fake):
    name = "refusing"
    @classmethod
    def refuses(cls, layers, gigabytes):
        return f"{layers} layers and {gigabytes} GB"
"""


@pytest.fixture
def bench_models(monkeypatch, tmp_path):
    (tmp_path / "fake_models.py").write_text(FAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    import bench_models
    import fake_models
    from peers import report, session

    monkeypatch.setattr(session, "FOLDER", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "RECORDS", tmp_path)
    names = ("Fake", "Int4Head", "Llama", "Failing", "Killed", "Refusing")
    monkeypatch.setattr(bench_models, "ENTRIES", [getattr(fake_models, name) for name in names])
    yield bench_models
    for name in ("fake_models", "bench_models"):
        sys.modules.pop(name)


def test_a_run(bench_models, monkeypatch, tmp_path, capsys):
    def write(shapes, folder, formats):
        assert (shapes.layers, shapes.vocabulary, formats) == (2, 6272, ["w4a8"])
        (folder / "w4a8").mkdir(parents=True)
        (folder / "w4a8/config.json").write_text("{}")

    monkeypatch.setattr(bench_models, "write", write)
    arguments = ["--layers", "2", "--rounds", "2", "--folder", str(tmp_path / "m"), "--memory", "8", "--no-serve"]
    arguments += ["--prompts", "512,2048,4096", "--behind", "16"]
    monkeypatch.setattr(sys, "argv", ["bench_models.py", *arguments, "--output", "result"])
    bench_models.main()
    found = json.loads((tmp_path / "result.json").read_text())
    by_name = {record["entry"]: record for record in found["records"]}
    assert by_name["vLLM, w4a8"]["rates"]["decode, batch 8"] == [80.0] * 6
    assert by_name["vLLM, w4a8"]["rates"]["prefill 4096"] == [650.0] * 6
    assert by_name["vLLM, w4a8"]["rates"]["decode behind 16"] == [5.0] * 6
    assert by_name["vLLM, w4a8"]["load_seconds"] == [2.0, 2.0]
    assert by_name["vLLM, w4a8"]["peak"] == 4e9
    assert by_name["failing"]["note"] == "ValueError: cannot be loaded"
    assert by_name["killed"]["note"] == "its process ended with SIGKILL"
    assert by_name["refusing"]["note"] == "2 layers and 8.0 GB"
    reached = {goal["what"]: goal["reached"] for goal in found["goals"]}
    assert reached == {
        "vLLM, w4a8: decode, batch 1, times as fast as llama.cpp": 2.0,
        "vLLM, w4a8: decode, batch 8, times as fast as llama.cpp": 16.0,
        "vLLM, w4a8: prefill 512, times as fast as llama.cpp": 1.0,
        "vLLM, w4a8, int4 lm_head: decode, batch 1, times as fast as llama.cpp": 3.0,
        "vLLM, w4a8, int4 lm_head: decode, batch 8, times as fast as llama.cpp": 24.0,
        "vLLM, w4a8, int4 lm_head: prefill 512, times as fast as llama.cpp": 1.0,
        "vLLM, w4a8: allowed / peak while loading": pytest.approx(2.0),
    }
    printed = capsys.readouterr().out
    assert "| vLLM, w4a8 | 2.0 | 3.0 | 4.0 | 700.0 (700.0–700.0) |" in printed
    assert "refusing: 2 layers and 8.0 GB" in printed
    assert "\n- vLLM, w4a8: repacked\n" in printed
    written = (tmp_path / "result.md").read_text()
    assert written.startswith("# A model with the shapes of Qwen3-30B-A3B, 2 of 48 layers\n\nWritten by `make bench-")
    assert "| vLLM, w4a8 | 2.0 | 3.0 | 4.0 | 700.0 (700.0–700.0) |" in written
    assert "- killed: its process ended with SIGKILL\n" in written
    assert "7 of 7 reached" not in written and "| 1.40 | 2.00 | 1.43 | reached |" in written


def test_one_file(tmp_path):
    """The goals of the pairs that run one file, and the picture of one of them."""
    from models import in_llama, in_vllm, report

    entries = {entry.name: entry for entry in (*in_vllm.ENTRIES, *in_llama.ENTRIES)}
    rates = {"prefill 512": [100.0], "prefill 2048": [90.0], "decode, batch 1": [12.0], "decode, batch 8": [30.0]}
    for name, beside in ((report.OWN_Q4_0, report.LLAMA), (report.OWN_GGUF, report.LLAMA_GGUF)):
        assert entries[name].format == entries[beside].format
        ours = {"entry": name, "rates": rates, "weights_bytes": 20e9, "weights_peak": 23e9}
        ours |= {"architecture": "qwen3moe", "layers": 48, "threads": 2}
        theirs = {"entry": beside, "rates": {title: [10.0] for title in rates}}
        reached = {goal["what"]: goal["reached"] for goal in report.goals([ours, theirs])}
        assert reached == {
            **{f"{name}: {title}, times as fast as llama.cpp": rate[0] / 10 for title, rate in rates.items()},
            f"{name}: allowed / peak while loading": pytest.approx(21.5 / 23),
        }
    assert report.picture({"one": [ours]}, tmp_path / "one.png", {}) is None
    assert report.prompts_picture([ours], tmp_path / "one.png", {}) is None  # two lengths
    pytest.importorskip("matplotlib")
    records = [{**ours, **record, "note": None} for record in (ours, theirs)]
    assert report.picture({"one": records}, tmp_path / "pair.png", {}).stat().st_size > 0
    ours["rates"]["prefill 8192"] = [80.0]  # which the other did not answer
    assert report.prompts_picture(records, tmp_path / "prompts.png", {}).stat().st_size > 0


def test_hybrids(tmp_path):
    """Their goals, and the newest run of each, which one picture shows."""
    from models import report

    rates = {"prefill 512": [36.0], "prefill 2048": [30.0], "decode, batch 1": [19.0], "decode, batch 8": [20.0]}
    ours = {"entry": report.OWN_GGUF, "rates": rates, "architecture": "lfm2moe", "layers": 24, "threads": 2}
    theirs = {**ours, "entry": report.LLAMA_GGUF, "rates": {title: [20.0] for title in rates}}
    assert [(goal["goal"], goal["reached"]) for goal in report.goals([ours, theirs])] == [
        (0.95, 0.95), (0.95, 1.0), (1.2, 1.8), (1.2, 1.5),
    ]  # fmt: skip
    runs = {"old": [ours], "new": [ours, theirs], "other": [{**ours, "architecture": "qwen35moe", "layers": 4}],
            "none": [{**ours, "architecture": "qwen3moe"}], "before": [{"entry": "x"}]}  # fmt: skip
    for time, (name, records) in enumerate(runs.items()):
        path = tmp_path / f"models-{name}.json"
        path.write_text(json.dumps({"records": records}))
        os.utime(path, (time, time))
    found = report.saved_hybrids(tmp_path)
    assert found == {
        "Qwen3.5-35B-A3B, 4 of 40 layers": runs["other"], "LFM2-8B-A1B, 24 of 24 layers": runs["new"],
    }  # fmt: skip
    pytest.importorskip("matplotlib")
    assert report.picture(found, tmp_path / "hybrids.png", {}).stat().st_size > 0


def test_a_server_of_a_file(monkeypatch, tmp_path):
    """It gets the file of a way that runs one, and the tokenizer of its folder; one that ends at once is a failure."""
    from models import in_vllm, serving
    from peers.session import Failed

    (tmp_path / "log").mkdir()
    monkeypatch.setattr(serving, "FOLDER", tmp_path)
    monkeypatch.setattr(serving, "ROOT", tmp_path)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nfor word; do echo "$word"; done >{tmp_path}/asked\n')
    python.chmod(0o755)
    monkeypatch.setattr(serving, "PYTHON", str(python))
    for entry, model in ((in_vllm.PluginGGUF, "/models/some/model.gguf"), (in_vllm.Plugin, "/models/some")):
        with pytest.raises(Failed, match=rf"the server did not start, see log/server-{entry.__name__}\.log"):
            serving.measure(entry, Path("/models/some"), 2, 60)
        asked = (tmp_path / "asked").read_text().splitlines()
        assert asked[asked.index("--model") + 1] == model
        assert asked[asked.index("--tokenizer") + 1] == "/models/some"


def test_where_llama_keeps_weights():
    from models.in_llama import buffers

    sizes = {"  CPU_Mapped": " 1000.00", "CPU_REPACK": "2.5"}
    log = "".join(f"load_tensors: {name} model buffer size = {size} MiB\n" for name, size in sizes.items())
    assert buffers(log) == "CPU_Mapped 1.05 GB, CPU_REPACK 0.00 GB"
    assert buffers("no such line") == "said nothing of buffers"
    assert buffers("llm_load_tensors:        CPU buffer size =   405.16 MiB\n") == "CPU 0.42 GB"
    assert buffers("llama_kv_cache_init:   CPU KV buffer size =  40.50 MiB\n") == "said nothing of buffers"


def test_no_space(bench_models, monkeypatch, tmp_path):
    def write(*unused):
        raise bench_models.NotEnoughSpace("the disk is small")

    monkeypatch.setattr(bench_models, "write", write)
    monkeypatch.setattr(sys, "argv", ["bench_models.py", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="error: the disk is small"):
        bench_models.main()
