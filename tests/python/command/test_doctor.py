"""`w4a8 doctor`, and what all subcommands share: help, exit codes, one line for an error."""

import importlib.metadata
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import w4a8
from w4a8.command import doctor, extras, machine, main
from w4a8.core.memory import fresh_bytes


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("W4A8_VLLM", "W4A8_MEMORY", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "_READ", 1 << 20)
    monkeypatch.setattr(machine.read_speed, "__defaults__", (0.0,))


def run_json(capsys, *arguments):
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_no_command_is_wrong_usage(capsys):
    assert main([]) == 2
    written = capsys.readouterr()
    assert written.out == "" and "doctor" in written.err


@pytest.mark.parametrize("arguments", [["nonsense"], ["doctor", "--nonsense"], ["doctor", "more"]])
def test_wrong_arguments(capsys, arguments):
    assert main(arguments) == 2
    assert arguments[-1] in capsys.readouterr().err


def test_help_and_version(capsys):
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out
    assert main(["doctor", "--help"]) == 0
    assert "--json" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"w4a8 {w4a8.__version__}\n"


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "w4a8", "--version"], capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"w4a8 {w4a8.__version__}\n", "")
    assert subprocess.run([sys.executable, "-m", "w4a8"], capture_output=True, cwd="/").returncode == 2


def test_the_console_script():
    found = list(importlib.metadata.entry_points(group="console_scripts", name="w4a8"))
    if not found:
        pytest.skip("the package is on the path and not installed")
    assert found[0].load() is main


@pytest.mark.parametrize("error", [ValueError("two\n  lines"), OSError("two lines"), RuntimeError("two lines")])
def test_an_error_is_one_line(monkeypatch, capsys, error):
    def fail(args):
        raise error

    monkeypatch.setattr(doctor, "run", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "w4a8: two lines\n"


def test_json(capsys):
    code, answer = run_json(capsys, "doctor")
    assert code == 0 and answer["problems"] == []
    assert answer["w4a8"] == w4a8.__version__ and answer["torch"] == torch.__version__
    assert answer["active"] == w4a8.active_kernel() and answer["features"] == w4a8.cpu_features().split()
    assert [each["name"] for each in answer["kernels"]] == [each["name"] for each in w4a8.kernels()]
    for each in answer["kernels"]:
        assert bool(each["lacks"]) != (each["supported"] or bool(each["turned_off"]))
    assert 1e7 < answer["memory"]["read_bytes_per_second"] < 1e13


def test_a_wrong_operator_is_a_problem(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "operator_problems", lambda: ["dyn_quant_matmul_4bit gives wrong sums"])
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "PROBLEM       the operators do not work here: dyn_quant_matmul_4bit gives wrong sums"


def test_bad_variables_are_problems(monkeypatch, capsys):
    """All that is known besides is printed nevertheless."""
    monkeypatch.setenv("W4A8_MEMORY", "here")
    code, answer = run_json(capsys, "doctor")
    assert code == 1 and [each["name"] for each in answer["kernels"]] == [each["name"] for each in w4a8.kernels()]
    (problem,) = answer["problems"]
    assert "W4A8_MEMORY" in problem and "here" in problem
    assert answer["environment"]["W4A8_MEMORY"] == "here"


AMX = {"name": "x86_amx", "supported": True, "needs": "amx_int8", "turned_off": ""}


@pytest.mark.parametrize(
    "kernel, features, active, expected",
    [
        (AMX, "avx2", "x86_avx2", "lacks amx_int8"),
        (AMX, "amx_int8", "x86_amx", "permitted"),
        (AMX, "amx_int8", "scalar", "was not asked"),
        ({**AMX, "supported": False, "turned_off": "Linux refuses"}, "amx_int8", "scalar", "turned off: Linux refuses"),
        ({**AMX, "name": "arm_neon"}, "", "arm_neon", ""),
    ],
)
def test_what_became_of_amx(monkeypatch, kernel, features, active, expected):
    monkeypatch.setattr(w4a8, "kernels", lambda: [kernel])
    monkeypatch.setattr(w4a8, "cpu_features", lambda: features)
    found = doctor._amx(active)
    assert expected in found and bool(found) == bool(expected)


def with_vllm(monkeypatch, version, entry_points=("w4a8",)):
    """As if a vLLM were installed; importing it would fail."""
    monkeypatch.setattr(doctor, "installed", lambda *names: version if "vllm" in names else None)
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    named = [SimpleNamespace(name=name) for name in entry_points]
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: named)


@pytest.mark.parametrize(
    "version, variables, entry_points, takes_over, expected",
    [
        ("0.32.0", {}, ["w4a8"], True, "known; the plugin takes over if its self-test passes"),
        ("0.99.0", {}, ["w4a8"], True, "vLLM 0.99.0 has not been tested"),
        ("0.1.0", {}, ["w4a8"], False, "vLLM 0.1.0 has not been tested"),
        ("0.1.0", {"W4A8_VLLM": "1"}, ["w4a8"], True, "takes over"),
        ("0.32.0", {"W4A8_VLLM": "0"}, ["w4a8"], False, "W4A8_VLLM=0"),
        ("0.32.0", {"VLLM_PLUGINS": "other"}, ["w4a8"], False, "VLLM_PLUGINS=other"),
        ("0.32.0", {"VLLM_PLUGINS": "other,w4a8"}, ["w4a8"], True, "takes over"),
        ("0.32.0", {}, ["other"], False, "vllm.general_plugins"),
        ("0.32.0", {"W4A8_VLLM": "yes"}, ["w4a8"], False, "W4A8_VLLM='yes'"),
    ],
)
def test_what_the_plugin_would_do(monkeypatch, version, variables, entry_points, takes_over, expected):
    with_vllm(monkeypatch, version, entry_points)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    answer = doctor.examine()
    assert answer["vllm"]["version"] == version and answer["vllm"]["takes_over"] == takes_over
    assert expected in answer["vllm"]["note"]
    assert bool(answer["problems"]) == (variables.get("W4A8_VLLM") == "yes")
    assert any(line.startswith(f"vLLM          {version}: ") for line in doctor.text_of(answer))


def test_vllm_is_imported_only_on_demand(monkeypatch):
    with_vllm(monkeypatch, "0.32.0")
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import of it fails
    assert doctor.examine()["vllm"]["takes_over"]
    found = doctor.examine(with_vllm=True)["vllm"]
    assert not found["takes_over"] and "ModuleNotFoundError" in found["note"]


def test_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda *names: None)
    answer = doctor.examine()
    assert extras.VLLM in answer["vllm"]["note"]
    assert extras.TRANSFORMERS in answer["transformers"]["note"]


def test_an_integration_that_cannot_be_imported(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda *names: "4.0.0" if names == ("transformers",) else None)
    monkeypatch.setitem(sys.modules, "w4a8.integrations.transformers", None)
    found = doctor.examine()["transformers"]
    assert not found["ready"] and found["version"] == "4.0.0" and "w4a8.integrations.transformers" in found["note"]


def test_memory_in_a_container(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal:  1000 kB\nMemAvailable:  500 kB\n",
        "/sys/fs/cgroup/memory.max": "307200\n",
        "/sys/fs/cgroup/memory.current": "102400\n",
    }
    monkeypatch.setattr(machine, "_text", lambda path: files.get(path, ""))
    assert machine.memory() == (300 << 10, 200 << 10)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine.memory() == (1000 << 10, 500 << 10)
    files.clear()
    assert machine.memory() == (0, 0)


def test_huge_pages(monkeypatch):
    monkeypatch.setattr(machine, "_text", lambda path: "always [madvise] never\n")
    assert machine.huge_pages() == "madvise"
    monkeypatch.setattr(machine, "_text", lambda path: "")
    assert machine.huge_pages() == ""


def test_read_speed_divides_bytes_by_time(monkeypatch):
    """Of two passes, of 4 s and of 2 s, the faster one counts."""
    clock = iter([0.0, 0.0, 4.0, 4.0, 4.0, 6.0, 10.0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(machine, "memory", lambda: (0, 0))
    assert fresh_bytes(1 << 20).numel() == machine._READ
    assert machine.read_speed(5.0) == machine._READ / 2.0


def test_accelerators(monkeypatch, capsys):
    """Their names and memory, as torch says; none on a machine without."""
    if not hasattr(torch, "accelerator"):
        pytest.skip("this torch has no torch.accelerator")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert run_json(capsys, "doctor")[1]["accelerators"] == []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name=f"card {index}"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3 << 30, (8 + index) << 30))
    code, answer = run_json(capsys, "doctor")
    assert code == 0
    assert answer["accelerators"][1] == {
        "device": "cuda:1", "name": "card 1", "bytes": 9 << 30, "available_bytes": 3 << 30,
        "to_bytes_per_second": None, "from_bytes_per_second": None,
    }  # fmt: skip
    assert main(["doctor"]) == 0
    assert "beside it     cuda:0, card 0: 8.0 GiB, 3.0 available; it can" in capsys.readouterr().out


def test_speed_of_copies(monkeypatch, capsys):
    """By a clock that a copy of this many bytes takes so long; a device that cannot be asked has no speed."""
    assert machine.copy_speeds("cpu") == machine.copy_speeds("meta")
    copied, clock = [], iter(range(100))
    empty, like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: empty(16, dtype=dtype))
    monkeypatch.setattr(torch, "empty_like", lambda tensor, device: like(tensor))
    monkeypatch.setattr(torch.cuda, "synchronize", copied.append)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock) / 100)
    speeds = machine.copy_speeds("cuda:1")
    assert copied == ["cuda:1"] * 20
    assert speeds == {"to_bytes_per_second": 100 * machine._COPIED, "from_bytes_per_second": 100 * machine._COPIED}
    found = {"device": "cuda:1", "name": "card", "bytes": 8 << 30, "available_bytes": 3 << 30, **speeds}
    assert "3.0 available; copies 13.4 GB/s there, 13.4 back; it can" in doctor._accelerator(found)
