"""Several ranks of one model that run their layers in one call each (tensor, expert and pipeline parallelism).

Ranks with a part of each layer share memory for the sums of a step. Linux frees it with the last of the processes, also
if they are killed. Ranks that share none, as on several machines, send each other their parts by vLLM's group.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tp_group

from w4a8.integrations.vllm.log import logger

_TIMEOUT = timedelta(seconds=60)  # as of Decoder.set_ranks


def count() -> int:
    """Ranks that have a part each of every layer."""
    return get_tp_group().world_size


def own() -> int:
    """The number of this rank among them."""
    return get_tp_group().rank_in_group


def agree(problem: str | None, stages: bool = False) -> str | None:
    """What one of the ranks says against something that all do or none; None: none does. Every rank calls this.

    ``stages``: those of all stages, not of this one alone.
    """
    for group in (get_tp_group(), get_pp_group())[: 2 if stages else 1]:
        if group.world_size > 1:
            said: list[str | None] = [None] * group.world_size
            torch.distributed.all_gather_object(said, problem, group=group.cpu_group)
            problem = next((each for each in said if each is not None), None)
    return problem


def is_first_stage() -> bool:
    """Whether this rank has the first layers."""
    return get_pp_group().is_first_rank


def is_last_stage() -> bool:
    """Whether this rank has the last layers."""
    return get_pp_group().is_last_rank


def share_memory(size: int) -> tuple[torch.Tensor, Callable[[list[torch.Tensor]], None] | None]:
    """``memory`` and ``gather`` of :meth:`w4a8.decoder.Decoder.set_ranks`. Every rank calls this."""
    group = get_tp_group()
    place: list[Any] = [None]
    file, memory, problem = -1, None, None
    try:
        if group.rank_in_group == 0:
            try:
                file = os.memfd_create("w4a8 ranks", os.MFD_CLOEXEC)
                os.ftruncate(file, size)
                place[0] = (f"/proc/{os.getpid()}/fd/{file}", _identity(file))
            except OSError as error:
                problem = f"the ranks share no memory: {error}"
        torch.distributed.broadcast_object_list(place, src=group.ranks[0], group=group.cpu_group)
        try:
            if place[0] is not None:
                memory = _mapped(*place[0], size)
        except OSError as error:
            problem = f"the ranks share no memory: {error}"
        problem = agree(problem)  # after which the file may go
    finally:
        if file >= 0:
            os.close(file)
    if memory is not None and problem is None:
        return memory, None
    logger().info("w4a8: ranks add by vLLM's group: %s", problem)
    return torch.zeros(size, dtype=torch.uint8), _gather


def _gather(parts: list[torch.Tensor]) -> None:
    """Gets the part of each rank.

    Raises:
        RuntimeError: a rank has ended, or does not come in time.
    """
    group = get_tp_group()
    own = parts[group.rank_in_group]
    torch.distributed.all_gather(parts, own, group=group.cpu_group, async_op=True).wait(_TIMEOUT)


def _identity(file: int) -> tuple[str, int, int]:
    """Another machine, or another namespace of processes, may have a file of the same path."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        state = os.fstat(file)
        return boot.read(), state.st_dev, state.st_ino


def _mapped(path: str, identity: tuple[str, int, int], size: int) -> torch.Tensor:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _identity(file) != identity:
            raise OSError(f"{path} is another file, expected one machine")
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)
