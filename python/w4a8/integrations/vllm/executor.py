"""One rank in the process of vLLM's engine: no messages between two processes at each step, and one process less to
start (docs/vllm.md, CPUs).

vLLM 0.32 starts a process for the rank on CPUs, because OpenMP reads where its threads run when a process starts. Here
the threads are bound afterwards.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from w4a8.integrations.vllm.binding import bind_openmp


class InProcess(UniProcExecutor):
    """For ``--distributed-executor-backend``: the rank computes on the CPUs that vLLM would give to its process.

    Raises:
        ValueError: there are several ranks; names their number.
    """

    def _init_executor(self) -> None:
        ranks = self.vllm_config.parallel_config.world_size
        if ranks != 1:
            name = f"{__name__}.{InProcess.__name__}"
            raise ValueError(f"distributed_executor_backend {name} runs one rank, and there are {ranks}: use mp")
        allowed = os.sched_getaffinity(0)
        lists = OMPProcessManager(self.vllm_config).cpu_lists  # none: with the binding "nobind"
        cpus = lists[0] if lists else []
        if cpus:
            os.environ["OMP_NUM_THREADS"] = str(len(cpus))  # vLLM would go on with one thread of torch
            torch.set_num_threads(len(cpus))
            bind_openmp(cpus)
        self._first = set(cpus[:1])  # the calling thread's CPU; empty: it is where it should be
        os.sched_setaffinity(0, self._first or allowed)
        super()._init_executor()
        os.sched_setaffinity(0, allowed)  # for threads that the engine is about to start

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's."""
        if self._first:
            os.sched_setaffinity(0, self._first)
            self._first = set()
        return super().execute_model(*args, **kwargs)
