"""CPUs of vLLM's ranks: how many vLLM keeps for its own processes, several ranks on a NUMA node, threads of a rank in
the engine's process, and a line of the log about what is idle.

vLLM's binding ``auto`` gives a rank one logical CPU of each core of a NUMA node, and takes one core of each rank away
for its scheduler and its server. These wait most of the time. Only :func:`say_cpus` imports vLLM.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

BIND = "VLLM_CPU_OMP_THREADS_BIND"
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
# From so many cores on, one for vLLM's own processes is a small share, and vLLM's default stays. Of two cores it is
# half of the speed (docs/vllm.md).
_MANY = 16
_NODES = Path("/sys/devices/system/node")
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"  # the logical CPUs of a CPU's core


def cores(cpus: Collection[int]) -> set[str]:
    """The cores that logical CPUs belong to, each by the system's list of its logical CPUs."""
    found = set()
    for cpu in cpus:
        try:
            found.add(Path(_SIBLINGS.format(cpu)).read_text().strip())
        except OSError:  # the system does not say: a core of its own
            found.add(str(cpu))
    return found


def shares_cores(cpus: Collection[int]) -> bool:
    """Whether ranks and vLLM's own processes should share all cores of ``cpus``, which this process may use.

    They should on few cores, and where a core has logical CPUs that no rank uses.
    """
    count = len(cores(cpus))
    return count < _MANY or count < len(cpus)


def shares(cpus: Collection[int], ranks: int) -> list[set[int]]:
    """CPUs of each of several ranks on fewer NUMA nodes, which vLLM's ``auto`` refuses.

    Args:
        cpus: those that this process may use.
        ranks: of this machine.

    Returns:
        As many cores for each rank, those of a node next to each other, and one logical CPU of each core. [] if
        ``auto`` does it, or there are fewer cores than ranks.
    """
    node_of = {cpu: node for node, each in enumerate(_nodes()) for cpu in each}
    nodes = {node_of.get(cpu, 0) for cpu in cpus}
    first: dict[str, int] = {}  # of each core
    for cpu in sorted(cpus):
        first.setdefault(next(iter(cores([cpu]))), cpu)
    found = sorted(first.values(), key=lambda cpu: (node_of.get(cpu, 0), cpu))
    if ranks <= len(nodes) or len(found) < ranks:
        return []
    return [set(found[i * len(found) // ranks : (i + 1) * len(found) // ranks]) for i in range(ranks)]


def _nodes() -> list[set[int]]:
    """The CPUs of each NUMA node, as far as the system says."""
    found = []
    for node in sorted(_NODES.glob("node[0-9]*/cpulist")):
        runs = [run.split("-") for run in node.read_text().strip().split(",") if run]
        found.append({cpu for run in runs for cpu in range(int(run[0]), int(run[-1]) + 1)})
    return found


def chosen() -> bool:
    """Whether the user chose the CPUs of ranks."""
    return any(name in os.environ for name in (BIND, RESERVED))


def in_words(cpus: Collection[int]) -> str:
    """Numbers of CPUs as Linux writes them, such as "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def cpus_of_threads(allowed: set[int]) -> set[int]:
    """The CPUs that threads of this process are bound to; ``allowed``, those that a process may use, if none is.

    OpenMP may bind each of its threads to a CPU of its own, the main thread too. Threads from before have all CPUs.
    """
    return set().union(*(cpus for cpus in _cpus_of_each("self") if cpus != allowed)) or allowed


def _cpus_of_each(process: int | str) -> Iterator[set[int]]:
    """The CPUs of each thread of a process."""
    for task in os.listdir(f"/proc/{process}/task"):
        with suppress(ProcessLookupError):  # it ended meanwhile
            yield os.sched_getaffinity(int(task))


def has_module(name: str) -> bool:
    """Whether the vLLM of this interpreter has the module ``vllm.…``; nothing is imported."""
    found = find_spec("vllm")
    folders = [] if found is None else found.submodule_search_locations or []
    return any(Path(folder, name.partition(".")[2].replace(".", "/") + ".py").is_file() for folder in folders)


def in_process() -> str | None:
    """For vLLM's ``distributed_executor_backend``, without stages, on one machine: the first rank runs in the engine's
    process, bound as in a process of its own. None: this vLLM lacks what that takes.
    """
    return "w4a8.integrations.vllm.executor.InProcess" if has_module("vllm.utils.ompmultiprocessing") else None


def bind_openmp(cpus: Sequence[int]) -> None:
    """Gives each new thread of OpenMP one of ``cpus``; the calling thread, which is the first, stays where it is.

    Threads of w4a8's own, which start at the first step, run where OpenMP's do. If some of OpenMP's exist already,
    all stay as they are.
    """
    before = set(os.listdir("/proc/self/task"))
    torch.zeros(1 << 20).add_(1)  # enough for all threads
    threads = sorted(int(task) for task in set(os.listdir("/proc/self/task")) - before)
    if len(threads) == len(cpus) - 1:
        for thread, cpu in zip(threads, cpus[1:]):
            os.sched_setaffinity(thread, {cpu})


def say_cpus(vllm_config: Any) -> None:
    """Logs the CPUs of this rank, and a warning if cores compute nothing though the user chose no CPUs."""
    from w4a8.integrations.vllm.log import logger

    engine = multiprocessing.parent_process()
    if engine is None or not hasattr(os, "sched_getaffinity"):  # the rank is the caller's process: so are its CPUs
        return
    config = vllm_config.parallel_config
    allowed = set().union(*_cpus_of_each(engine.pid))  # its first thread may be bound: it may be a rank's
    used = cpus_of_threads(allowed)
    logger().info("w4a8: rank %d computes on CPUs %s", config.rank, in_words(used))
    count, ranks = len(cores(allowed)), config.local_world_size * max(1, config.data_parallel_size_local)
    idle = count - ranks * len(cores(used))
    if idle > 0 and shares_cores(allowed) and not chosen():
        logger().warning_once(
            "w4a8: %d of %d cores compute nothing: vLLM keeps them for its own processes, or no rank runs on their "
            "NUMA node. %s=0 lets ranks use the former, %s gives each rank the CPUs that you choose (docs/vllm.md)",
            idle,
            count,
            RESERVED,
            BIND,
        )
