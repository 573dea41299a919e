"""What the system says of the machine, and how fast its memory is read."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch

from w4a8.core.memory import fresh_bytes

_READ = 512 << 20  # bytes that are read again and again: several times the caches of most CPUs


def _text(path: str) -> str:
    """Of a file of the system; "" if there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def cpu_model() -> str:
    """As the system calls it."""
    lines = (line.partition(":") for line in _text("/proc/cpuinfo").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), platform.processor())


def cpus() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def numa_nodes() -> int:
    """At least 1."""
    return max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


def memory() -> tuple[int, int]:
    """Bytes that the machine or the container has, and that are available now; 0 where the system does not say."""
    fields = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines() if ":" in line)
    total, free = (int(fields.get(name, "0").split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limit, used = (_text(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdigit() and used.isdigit() and 0 < int(limit) < total:
        total, free = int(limit), min(free, max(0, int(limit) - int(used)))
    return total, free


def huge_pages() -> str:
    """``always``, ``madvise`` or ``never``; "" where the system has none."""
    modes = _text("/sys/kernel/mm/transparent_hugepage/enabled")
    return modes.partition("[")[2].partition("]")[0]


def read_speed(seconds: float = 2.0) -> float:
    """Bytes a second that torch's threads read of memory, the best of several passes.

    Args:
        seconds: that it may take, about.
    """
    end = time.perf_counter() + seconds
    _, free = memory()
    size = min(_READ, free // 4 if free else _READ) & ~0xFFFF or 1 << 16
    numbers = fresh_bytes(size, packed=True).view(torch.float32)
    numbers.fill_(1.0)  # takes the pages, on all threads
    best = float("inf")
    while best == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - begin)
    return size / best
