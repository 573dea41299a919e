"""call_each: several calls at a time."""

import os
import threading

import pytest
import torch

from w4a8.core.threads import call_each


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_two_calls_run_at_once_with_one_thread_of_torch_each():
    both = threading.Barrier(2)

    def call(item):
        both.wait(timeout=30)  # BrokenBarrierError if the calls run one after the other
        return item, torch.get_num_threads()

    assert call_each(call, [3, 4, 5, 6]) == [(3, 1), (4, 1), (5, 1), (6, 1)]
    assert torch.get_num_threads() == 2


def test_the_first_error_in_order_is_raised_and_the_rest_is_left_out():
    called, second_failed = [], threading.Event()

    def call(item):
        called.append(item)
        if item == 0:
            assert second_failed.wait(timeout=30)
        if item == 1:
            second_failed.set()
        if item in (0, 1):
            raise ValueError(f"item {item}")
        threading.Event().wait(0.01)  # the calls of all items take 5 s

    with pytest.raises(ValueError, match=r"^item 0$"):
        call_each(call, list(range(1000)))
    assert 999 not in called
    assert torch.get_num_threads() == 2


def test_a_thread_bound_to_one_cpu_calls_in_turns(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    here = threading.get_ident()
    assert call_each(lambda item: (item, threading.get_ident()), [1, 2]) == [(1, here), (2, here)]


def test_nothing_to_call():
    assert call_each(lambda item: item, []) == []
