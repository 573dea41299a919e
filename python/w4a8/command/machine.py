"""CPU, memory and pages of this machine, as the system reports them, and the measured speed of memory."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch

from w4a8.core.memory import fresh_bytes

_NODES = Path("/sys/devices/system/node")
_READ = 512 << 20  # bytes of one pass: several times the caches of most CPUs
_COPIED = 128 << 20  # bytes of one copy to a device


def _text(path: str) -> str:
    """The text of a file of the system; "" if the file cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def cpu_model() -> str:
    """The system's name of the CPU."""
    lines = (line.partition(":") for line in _text("/proc/cpuinfo").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), platform.processor())


def numa_nodes() -> int:
    """The number of NUMA nodes, at least 1."""
    return max(1, len(list(_NODES.glob("node[0-9]*"))))


def node_memory() -> list[int]:
    """Bytes of memory of each NUMA node that has some; [] if the system does not say."""
    texts = map(_text, map(str, _NODES.glob("node[0-9]*/meminfo")))
    found = (line.split()[-2] for text in texts for line in text.splitlines() if "MemTotal" in line)
    return [int(each) << 10 for each in found if each != "0"]


def memory() -> tuple[int, int]:
    """Bytes of memory of the machine or the container: in all, and available now; 0 if the system does not say."""
    fields = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines() if ":" in line)
    total, free = (int(fields.get(name, "0").split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limit, used = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit() and 0 < int(limit) < total:
        total, free = int(limit), min(free, max(0, int(limit) - int(used)))
    return total, free


def accelerators() -> list[dict[str, Any]]:
    """Name and bytes of memory, in all and available now, of each device that torch can use beside the CPU."""
    found: list[dict[str, Any]] = []
    current = getattr(getattr(torch, "accelerator", None), "current_accelerator", lambda **_: None)(
        check_available=True
    )
    module = None if current is None else getattr(torch, current.type, None)
    if not all(hasattr(module, name) for name in ("device_count", "get_device_properties", "mem_get_info")):
        return found
    for index in range(module.device_count()):
        name = getattr(module.get_device_properties(index), "name", current.type)
        free, total = module.mem_get_info(index)
        found.append({"device": f"{current.type}:{index}", "name": name, "bytes": total, "available_bytes": free})
    return found


def copy_speeds(device: str) -> dict[str, int | None]:
    """Bytes per second of copies from pinned memory to a device and back, the best of several; None: not measured."""
    names, found = ("to_bytes_per_second", "from_bytes_per_second"), []
    try:
        synchronize = getattr(torch, torch.device(device).type).synchronize
        here = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(here, device=device)
        for to, source in ((there, here), (here, there)):
            best = float("inf")
            for _ in range(5):
                synchronize(device)
                begin = time.perf_counter()
                to.copy_(source, non_blocking=True)
                synchronize(device)
                best = min(best, time.perf_counter() - begin)
            found.append(round(_COPIED / best))
    except (RuntimeError, AssertionError, AttributeError):  # no driver, no memory, or no such functions
        return dict.fromkeys(names)
    return dict(zip(names, found))


def huge_pages() -> str:
    """The mode of huge pages: ``always``, ``madvise`` or ``never``; "" if the system has no huge pages."""
    modes = _text("/sys/kernel/mm/transparent_hugepage/enabled")
    return modes.partition("[")[2].partition("]")[0]


def read_speed(seconds: float = 2.0) -> float:
    """Bytes per second that torch's threads read from memory, the best of several passes.

    Args:
        seconds: about how long the measurement takes.
    """
    end = time.perf_counter() + seconds
    _, free = memory()
    size = min(_READ, free // 4 if free else _READ) & ~0xFFFF or 1 << 16
    numbers = fresh_bytes(size, packed=True).view(torch.float32)
    numbers.fill_(1.0)  # the first write takes the pages; all threads write
    best = float("inf")
    while best == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - begin)
    return size / best
