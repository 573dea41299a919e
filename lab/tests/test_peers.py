"""The harness of lab/peers: a peer that is wrong, crashes or refuses is a record with its reason, not timed."""

import json
import os
import sys

import numpy as np
import pytest

FAKES = """
import os, signal
import numpy as np
from peers.base import Entry
from peers.problem import from_bfloat16

class Right(Entry):
    name, kind, always = "w4a8", "linear", True
    def inputs(self, m):
        self.x = from_bfloat16(self.files[f"x-{m}"])
    def call(self, i):
        return self.x @ self.files.float_weights("w", 0).T

class Wrong(Right):
    name, always = "wrong", False
    def call(self, i):
        return 1.1 * super().call(i)

class NotFinite(Right):
    name, always = "not finite", False
    def call(self, i):
        return super().call(i) * np.nan

class Crashing(Right):
    name, always = "crashing", False
    def call(self, i):
        if len(self.x) > 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().call(i)

class Failing(Right):
    name, always = "failing", False
    def __init__(self, files, threads):
        raise ValueError("cannot be set up")

class Refusing(Right):
    name, always = "refusing", False
    @classmethod
    def refuse(cls, problem):
        return "does not like it"
"""


@pytest.fixture
def peers(monkeypatch, tmp_path):
    (tmp_path / "fake_peers.py").write_text(FAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    from peers import environments, session

    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(session, "FOLDER", tmp_path)
    from peers import bench

    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    import fake_peers

    yield fake_peers
    sys.modules.pop("fake_peers")


def test_only_right_results_are_timed(peers):
    from peers.bench import Plan, measure
    from peers.problem import Linear

    entries = [peers.Right, peers.Wrong, peers.NotFinite, peers.Crashing, peers.Failing, peers.Refusing]
    plan = Plan(rounds=2, seconds=0.001, most_bytes=1e12)
    records, _ = measure(Linear("model", "layer", 24, 64, 32), entries, [1, 3], 1, plan)
    assert [(r["entry"], r["m"]) for r in records] == [(e.name, m) for m in (1, 3) for e in entries]
    by_key = {(r["entry"], r["m"]): r for r in records}
    for m in (1, 3):
        assert by_key["w4a8", m]["seconds"] > 0
        assert by_key["w4a8", m]["error"] < 1e-6  # the same products, summed in another order
        assert by_key["w4a8", m]["note"] is None
        assert by_key["wrong", m]["error"] == pytest.approx(0.1, abs=1e-6)
        assert by_key["wrong", m]["note"] == "wrong result: error 0.100"
        assert by_key["not finite", m]["note"] == "wrong result: not finite or of another shape"
        assert by_key["failing", m]["note"] == "ValueError: cannot be set up"
        assert by_key["refusing", m]["note"] == "does not like it"
        for name in ("wrong", "not finite", "failing", "refusing"):
            assert by_key[name, m]["seconds"] is None
    assert by_key["crashing", 1]["seconds"] > 0
    assert by_key["crashing", 3]["seconds"] is None
    assert by_key["crashing", 3]["note"] == "its process ended with SIGSEGV"


@pytest.mark.parametrize("group", [32, -1])
def test_reference_of_experts(peers, tmp_path, group):
    """The vectorized reference, against loops over tokens and slots in float64."""
    from peers import problem as problems

    problem = problems.Moe("model", hidden=64, intermediate=32, experts=5, top_k=2, group=group)
    files = problems.write(problem, tmp_path / "files", [3], calls=2)
    rows, result = problems.reference(files, 3)
    assert rows.tolist() == [0, 1, 2]
    x = problems.from_bfloat16(files["x-3"]).astype(np.float64)

    def weight(name, expert):
        packed, scales = files[name][expert], files["s" + name[1:]][expert]
        n, half = packed.shape
        w = np.zeros((n, 2 * half))
        for row in range(n):
            for k in range(2 * half):
                nibble = int(packed[row, k // 2]) >> 4 if k % 2 else int(packed[row, k // 2]) & 15
                w[row, k] = (nibble - 8) * scales[row, k // 32 if group == 32 else 0]
        return w

    for token in range(3):
        expected = np.zeros(64)
        for expert, gate in zip(files["ids-3"][0, token], files["gates-3"][0, token]):
            both = weight("w13", expert) @ x[token]
            hidden = both[:32] / (1 + np.exp(-both[:32])) * both[32:]
            expected += gate * (weight("w2", expert) @ hidden)
        # float32: 64 and 32 terms and the activation, each within 2^-24 of the largest partial sum
        assert np.abs(result[token] - expected).max() <= 200 * 2.0**-24 * np.abs(expected).max()


def test_batches_hold_what_fits(peers):
    from peers.session import batches

    # 0.6 bytes a weight and 0.35 GB a process: 0.95 GB each; two others fit beside the one that is always there.
    others = [peers.Wrong, peers.NotFinite, peers.Crashing]
    found = batches([peers.Right, *others], 1_000_000_000, 1, 3e9)
    assert found == [[peers.Right, peers.Wrong, peers.NotFinite], [peers.Right, peers.Crashing]]
    assert batches([peers.Right], 1_000_000_000, 1, 3e9) == [[peers.Right]]


def test_goals_compare_with_the_fastest_peer_of_the_kind(peers):
    from peers.goals import goals

    common = {"problem": "p", "kind": "moe", "group": "128", "threads": 2, "m": 512, "copies": 1, "own_seconds": 2.0}
    common.update(reading_seconds=0.5, multiply_seconds=1.5)
    entries = [("w4a8", "int4", 2.0), ("int4 a", "int4", 5.0), ("int4 b", "int4", 4.0), ("vllm INT8_W8A8", "int8", 3.0)]
    entries += [("limit: multiply", "", 1.5)]
    records = [{**common, "entry": name, "weights": weights, "seconds": seconds} for name, weights, seconds in entries]
    reached = {line["what"]: (line["goal"], line["reached"]) for line in goals(records, amx=False)}
    assert reached == {
        "512 tokens, times as fast as the fastest int4 peer (int4 b)": (1.5, 2.0),
        "512 tokens, times as fast as vLLM's int8 (vllm INT8_W8A8)": (1.15, 1.5),
        "w4a8, 512 tokens, share of the multiply peak": (0.82, 0.75),
    }


AMX_GOALS = {
    "moe": {
        ("32", 1): {"w4a8, 1 tokens, share of reading": 0.90},
        ("128", 16): {"w4a8, 16 tokens, share of reading": 0.95},
        ("32", 512): {
            "512 tokens, times as fast as vLLM's int8 (vllm INT8_W8A8)": 1.0,
            "512 tokens, times as fast as vLLM's int4 (vllm INT4_W4A8)": 2.5,
            "w4a8, 512 tokens, share of the longer of reading and half of the multiply peak": 0.5,
        },
        ("channel", 2048): {"2048 tokens, times as fast as vLLM's int8 (vllm INT8_W8A8)": 1.25},
    },
    "linear": {
        ("128", 16): {"M=16, times as fast as vllm int4 W4A8": 1.8, "M=16, times as fast as vllm int8 W8A8": 0.9},
        ("128", 128): {"M=128, times as fast as vllm int4 W4A8": 1.3, "M=128, times as fast as vllm int8 W8A8": 0.8},
        ("128", 512): {
            "M=512, times as fast as vllm int4 W4A8": 1.5,
            "M=512, times as fast as vllm int8 W8A8": 0.8,
            "M=512, times as fast as torch bf16 linear": 1.6,
        },
        ("channel", 512): {"M=512, times as fast as torch bf16 linear": 1.8},
    },
}


@pytest.mark.parametrize("kind", ["moe", "linear"])
def test_goals_of_a_cpu_with_amx(peers, kind):
    from peers.goals import goals

    entries = {
        "moe": [("vllm INT4_W4A8", "int4", 6.0), ("vllm INT8_W8A8", "int8", 3.0)],
        "linear": [
            ("vllm int4 W4A8", "int4", 6.0),
            ("vllm int8 W8A8", "int8", 3.0),
            ("torch bf16 linear", "bf16", 5.0),
        ],
    }[kind]
    ratios = {"int4": 3.0, "int8": 1.5, "bf16": 2.5}
    for (group, m), wanted in AMX_GOALS[kind].items():
        common = {"problem": "p", "kind": kind, "group": group, "threads": 2, "m": m, "copies": 1, "own_seconds": 2.0}
        common.update(reading_seconds=0.5, multiply_seconds=0.75)
        records = [{**common, "entry": n, "weights": w, "seconds": s} for n, w, s in [("w4a8", "int4", 2.0), *entries]]
        lines = {line["what"]: line for line in goals(records, amx=True)}
        assert {what: lines[what]["goal"] for what in wanted} == wanted
        for what in wanted:
            share = 0.75 if "longer" in what else 0.25  # 2 * 0.75 / 2, 0.5 / 2
            expected = [ratio for name, weights, _ in entries if name in what for ratio in [ratios[weights]]] or [share]
            assert lines[what]["reached"] == expected[0]
        assert not any("multiply peak" in what and "longer" not in what for what in lines if kind == "moe")


PRINTED = """
T=16     64 workers    1056 tasks in  2 phases   longest share 1.250 x the mean
memory in use    32        2     24.7 ms     9.2 GB/s   copy   29.9 GB/s    30.9 %
new memory       32        2     33.9 ms     6.7 GB/s   copy   23.9 GB/s    28.1 %
one token, H 64, I 32, one expert: 7.50 us a call; torch.add: 2.53 us
"""


def test_goals_of_what_the_programs_print(peers, monkeypatch):
    from peers import programs

    monkeypatch.setattr(programs, "output", lambda command, threads: PRINTED.splitlines())
    assert programs.split_balance()[1] == [("64 workers, 16 tokens, mean / longest share", "", 1 / 1.15, 0.8)]
    assert programs.packing(2)[1] == [("packing, share of copying", "32", 0.3, pytest.approx(0.309))]
    assert programs.call_overhead()[1] == [("15 us / a call at one token on a tiny layer", "32", 1.0, 2.0)]


def test_a_run_writes_its_report(peers, monkeypatch, tmp_path):
    from peers import report

    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "RECORDS", tmp_path / "build")
    common = {"problem": "experts", "kind": "moe", "group": "32", "threads": 2, "copies": 3, "own_seconds": 0.002}
    records = [
        {**common, "m": m, "entry": entry, "error": error, "note": note, "seconds": seconds}
        for m, entry, error, note, seconds in (
            (1, "w4a8", 0.01, None, 0.002),
            (1, "slow", 0.02, None, 0.005),
            (1, "absent", None, "no wheel", None),
            (4, "w4a8", 0.03, None, 0.002),
            (4, "slow", None, "too slow", None),
        )
    ]
    collected = report.Collected("some")
    collected.add(records, {"torch": "2.0"})
    written = (tmp_path / "some.md").read_text()
    assert written.startswith("# The fused operator beside other libraries\n\nWritten by `make bench-peers` ")
    assert written.count("\n## ") == 1  # no goals before the end of a run
    start = written.index("\n## ")
    assert written[start:].splitlines() == [
        "",
        "## experts, group 32, 2 threads, 3 copies in turn",
        "",
        "| ms (× w4a8) | M=1 | M=4 | error |",
        "|---|---|---|---|",
        "| w4a8 | 2 | 2 | 0.0300 |",
        "| slow | 5 (2.50×) | – | 0.0200 |",
        "",
        "- slow: too slow",
        "- absent: no wheel",
    ]
    goal = {"problem": "experts", "what": "fast", "group": "32", "threads": 2, "goal": 2.0, "reached": 1.5}
    collected.save(goals=[goal], programs={"A program": ["prints | this"]})
    assert json.loads((tmp_path / "build/some.json").read_text())["records"] == records
    assert (tmp_path / "some.md").read_text()[len(written) :].splitlines() == [
        "",
        "## Goals",
        "",
        "| goal | group | threads | goal | reached | reached / goal | |",
        "|---|---|---|---|---|---|---|",
        "| **experts** | | | | | | |",
        "| fast | 32 | 2 | 2.00 | 1.50 | 0.75 | missed |",
        "",
        "0 of 1 reached",
        "",
        "## A program",
        "",
        "    prints | this",
    ]
