"""The first rank in the process of vLLM's engine: no messages between two processes at each step of a single rank, one
process less that wants a CPU, and one less to start (docs/vllm.md, CPUs).

vLLM 0.32 starts a process for each rank on CPUs, because OpenMP reads where its threads run when a process starts. Here
the threads of the first are bound afterwards.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import connection
from typing import Any

import cloudpickle
import torch
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.utils.system_utils import get_mp_context
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc, set_multiprocessing_worker_envs
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from w4a8.integrations.vllm import hosts
from w4a8.integrations.vllm.binding import bind_openmp
from w4a8.integrations.vllm.log import logger


class InProcess(UniProcExecutor):
    """For ``--distributed-executor-backend``: the first rank computes here, on the CPUs that vLLM would give to its
    process. Other ranks, of tensor parallelism on one machine, have processes, as with vLLM's ``mp``.

    Raises:
        ValueError: there are stages or machines, or what moves caches between engines, which ``mp`` can do.
    """

    register_failure_callback = MultiprocExecutor.register_failure_callback
    _ensure_worker_termination = staticmethod(MultiprocExecutor._ensure_worker_termination)

    def _init_executor(self) -> None:
        config, parallel = self.vllm_config, self.vllm_config.parallel_config
        several = parallel.world_size > 1
        pictures = getattr(getattr(config, "model_config", None), "multimodal_config", None)
        moves = config.kv_transfer_config is not None or config.ec_transfer_config is not None
        moves = moves or getattr(pictures, "mm_processor_cache_type", None) == "shm"
        if several and (parallel.world_size != parallel.tensor_parallel_size or parallel.nnodes_within_dp > 1 or moves):
            name = f"{__name__}.{InProcess.__name__}"
            what = "stages, several machines or transferred caches"
            raise ValueError(f"distributed_executor_backend {name} is not for {what}: use mp")
        asks = multiprocessing.parent_process()
        if asks is not None and multiprocessing.current_process().name.startswith("EngineCore"):
            threading.Thread(target=_end_with, args=(asks.sentinel,), daemon=True).start()
        self._thread = threading.get_ident()
        self.driver_worker, self.workers, self.is_failed, self.failure_callback = None, [], False, None
        self._place, self.rpc_broadcast_mq = super()._distributed_args(), None
        self._owed = [0] * parallel.world_size  # answers of each rank that are still to be taken
        self._waits_for_none = threading.Event()
        manager, allowed = OMPProcessManager(config), os.sched_getaffinity(0)
        started: list[Any] = []
        try:
            if several:
                self._start_others(manager, started)
                ends = [each.proc.sentinel for each in started]
                threading.Thread(target=_end_after, args=(ends, self._waits_for_none), daemon=True).start()
            self._start_here(manager, allowed)
            if several:
                self._await_others(started)
            self._waits_for_none.set()
        except BaseException:
            self._waits_for_none.set()
            for each in started:
                each.death_writer.close()
            self._ensure_worker_termination([each.proc for each in started])
            raise

    def _start_here(self, manager: OMPProcessManager, allowed: set[int]) -> None:
        lists = manager.cpu_lists  # none: with the binding "nobind"
        cpus = lists[0] if lists else []
        if cpus:
            os.environ["OMP_NUM_THREADS"] = str(len(cpus))  # vLLM would go on with one thread of torch
            torch.set_num_threads(len(cpus))
            bind_openmp(cpus)
        self._first = set(cpus[:1])  # the calling thread's CPU; empty: it is where it should be
        os.sched_setaffinity(0, self._first or allowed)
        super()._init_executor()
        os.sched_setaffinity(0, allowed)  # for threads that the engine is about to start

    def _distributed_args(self) -> tuple[str, int, int]:
        return self._place

    def _start_others(self, manager: OMPProcessManager, started: list[Any]) -> None:
        """Adds the processes of all ranks but this one, which meet it while it loads its part."""
        ranks = range(1, self.parallel_config.world_size)
        set_multiprocessing_worker_envs(len(ranks))
        self.rpc_broadcast_mq = MessageQueue(len(ranks), len(ranks), list(ranks))
        self._lock = get_mp_context().Lock()  # it goes with its last owner, and a process that starts takes it later
        for rank in ranks:
            with manager.configure_omp_envs(rank=rank, local_rank=rank):
                started.append(
                    WorkerProc.make_worker_process(
                        vllm_config=self.vllm_config,
                        local_rank=rank,
                        rank=rank,
                        distributed_init_method=self._place[0],
                        input_shm_handle=self.rpc_broadcast_mq.export_handle(),
                        shared_worker_lock=self._lock,
                        is_driver_worker=False,
                    )
                )

    def _await_others(self, started: list[Any]) -> None:
        self.workers = sorted(WorkerProc.wait_for_ready(started), key=lambda worker: worker.rank)
        MultiprocExecutor.start_worker_monitor(self)
        self.rpc_broadcast_mq.wait_until_ready()
        for worker in self.workers:
            worker.worker_response_mq.wait_until_ready()

    def collective_rpc(
        self,
        method: str | Callable,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """As upstream's: the results of all ranks, or with ``single_value`` that of the first."""
        if self.is_failed:
            raise RuntimeError("Executor failed.")
        self._waits_for_none.clear()
        try:
            others = [] if single_value else self.workers
            if self.workers:
                sent = method if isinstance(method, str) else cloudpickle.dumps(method)
                self.rpc_broadcast_mq.enqueue((sent, args, kwargs or {}, 0 if single_value else None))
            for worker in others:
                self._owed[worker.rank] += 1
            found = super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
            if not others:
                return found
            answers = [self._answer_of(worker, timeout) for worker in others]
        finally:
            self._waits_for_none.set()
        if not non_block:
            return found + answers
        future: Future[Any] = Future()
        future.set_result(found.result() + answers)
        return future

    def _answer_of(self, worker: Any, timeout: float | None) -> Any:
        """Of another rank to the present call, without those to calls in which the first rank has failed."""
        while self._owed[worker.rank] > 0:
            status, answer = worker.worker_response_mq.dequeue(timeout=timeout)
            self._owed[worker.rank] -= 1
        if status != WorkerProc.ResponseStatus.SUCCESS:
            raise RuntimeError(f"rank {worker.rank} failed: {answer}")
        return answer

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream's."""
        if self._first:
            os.sched_setaffinity(0, self._first)
            self._first = set()
        return super().execute_model(*args, **kwargs)

    def check_health(self) -> None:
        """Raises RuntimeError if the process of a rank has ended."""
        if self.is_failed:
            raise RuntimeError("Executor failed.")

    def shutdown(self) -> None:
        """Ends the processes; also called by the thread that sees one of them end."""
        MultiprocExecutor.shutdown(self)
        if threading.get_ident() == self._thread:
            super().shutdown()


def _end_with(sentinel: int) -> None:
    """Ends the engine's process if the one that asks it has ended, which vLLM does not: it would keep its memory."""
    connection.wait([sentinel])
    logger().error("w4a8: the process that asks the engine has ended: the engine ends, too")
    hosts.end()


def _end_after(sentinels: list[int], waits_for_none: threading.Event) -> None:
    """Ends this process if that of another rank has ended and the first rank waits for it in a call without an end."""
    connection.wait(sentinels)
    if not waits_for_none.wait(hosts.GRACE):
        logger().error("w4a8: another rank has ended, and the first one waits for it: it ends, too")
        hosts.end()
