"""Several ranks of one model that run their layers in one call each (tensor, expert and pipeline parallelism).

Ranks with a part of each layer share memory for the sums of a step, and for those that vLLM makes between steps. Linux
frees it with the last of the processes, also if they are killed. Ranks that share none, as on several machines, send
each other their parts by vLLM's group.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from vllm import envs
from vllm.distributed import get_pp_group, get_tp_group

from w4a8.decoder import Decoder
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


class SharedSums:
    """What vLLM asks of ``torch.distributed`` for tensors of the tensor-parallel group, through memory that its ranks
    share: vLLM's own shared memory is in its builds for AVX-512 alone.

    Compiled forwards keep ``torch.distributed``, which torch.compile knows.
    """

    def __init__(self, memory: torch.Tensor, rank: int, ranks: int) -> None:
        """Arguments as of :meth:`w4a8.decoder.Decoder.gather_ranks`."""
        # Between steps a rank may compile, so this is the time that vLLM's engine gives it.
        self._place = (memory, rank, ranks, float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS))

    def _parts(self, part: torch.Tensor) -> torch.Tensor:
        return Decoder.gather_ranks(part, *self._place)

    def all_reduce(self, tensor: torch.Tensor, group: Any = None) -> None:
        """``tensor`` becomes the sum over the ranks in their order, each addition rounded to its type."""
        if torch.compiler.is_compiling():
            torch.distributed.all_reduce(tensor, group=group)
            return
        first, second, *others = self._parts(tensor)
        first += second
        for part in others:
            first += part
        tensor.copy_(first)

    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, group: Any = None) -> None:
        """``output`` becomes the tensors of all ranks, one behind the other."""
        if torch.compiler.is_compiling():
            torch.distributed.all_gather_into_tensor(output, tensor, group=group)
            return
        output.copy_(self._parts(tensor).view(output.shape))

    def gather(
        self, tensor: torch.Tensor, gather_list: list[torch.Tensor] | None = None, dst: int = 0, group: Any = None
    ) -> None:
        """The tensors of ``gather_list``, which rank ``dst`` gives, become those of the ranks."""
        if torch.compiler.is_compiling():
            torch.distributed.gather(tensor, gather_list, dst=dst, group=group)
            return
        for place, part in zip(gather_list or [], self._parts(tensor)):
            place.copy_(part)


def share_sums(model: Any, vllm_config: Any, model_config: Any) -> None:
    """Lets vLLM's sums and gathers of tensors go through shared memory, where they would go over TCP on one machine.

    Every rank calls this, at the same place between sums.
    """
    communicator = getattr(get_tp_group(), "device_communicator", None)
    theirs = getattr(communicator, "dist_module", None)
    if count() == 1 or agree(None if theirs is torch.distributed else "another way") is not None:
        return
    memory, _ = _shared(Decoder.ranks_bytes(count()))
    if memory is not None:
        communicator.dist_module = SharedSums(memory, own(), count())
        logger().info("w4a8: vLLM's sums of ranks go through shared memory")


def unname_memory(model: Any, vllm_config: Any, model_config: Any) -> None:
    """Lets vLLM's own shared memory go with its processes, also if they are killed. All ranks have mapped it."""
    for group in (get_tp_group(), get_pp_group()):
        unname(getattr(getattr(group, "device_communicator", None), "dist_module", None), group.world_size)


def unname(theirs: Any, count: int) -> None:
    """Removes the names of what ``count`` ranks share by ``theirs``, vLLM's way to share memory or another."""
    name = getattr(theirs, "group_name", None)
    for rank in range(count if name else 0):
        with suppress(FileNotFoundError):  # another rank was here
            os.unlink(f"/dev/shm/{name}_{rank}")


def share_memory(size: int) -> tuple[torch.Tensor, Callable[[list[torch.Tensor]], None] | None]:
    """``memory`` and ``gather`` of :meth:`w4a8.decoder.Decoder.set_ranks`. Every rank calls this."""
    memory, problem = _shared(size)
    if memory is not None:
        return memory, None
    logger().info("w4a8: ranks add by vLLM's group: %s", problem)
    return torch.zeros(size, dtype=torch.uint8), _gather


def _shared(size: int) -> tuple[torch.Tensor | None, str | None]:
    """Memory of zeros that all ranks of the group map, or why there is none. Every rank calls this."""
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
    return (memory, None) if problem is None else (None, problem)


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
