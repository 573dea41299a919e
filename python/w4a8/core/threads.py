"""CPUs of the process, threads of torch, and several calls at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

_Item, _Result = TypeVar("_Item"), TypeVar("_Result")


def cpus() -> int:
    """The number of CPUs that the calling thread may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch use one thread, for very many tiny operations, whose threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def call_each(call: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """``[call(item) for item in items]``, on as many threads as torch has; in each of them torch uses one thread.

    For calls of many small operations of torch, which gain little from several threads each. The calls run one after
    the other if the caller's thread is bound to one CPU: threads that it starts are bound to the same CPU.

    Raises:
        What the first failing ``call`` raises, in the order of ``items``. Calls that have not begun are left out.
    """
    threads = min(torch.get_num_threads(), cpus(), len(items))
    if threads < 2:
        return [call(item) for item in items]
    with one_thread(), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(call, items))
