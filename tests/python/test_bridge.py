"""Experts called from a device: on a stream that runs late and in order, where nothing is there before its time."""

import queue
import threading
import time

import pytest
import torch
from common import assert_same_bits

from w4a8.core import bridge
from w4a8.core.bridge import Bridge, run_on_cpu
from w4a8.nn import W4A8Experts

HIDDEN, INTER, EXPERTS, TOP = 64, 32, 6, 2


class LateStream:
    """A stream whose device memory is the CPU's, and whose work a thread does, late and in order."""

    def __init__(self, seconds=0.0):
        self.seconds, self.work, self.waits, self.buffers = seconds, queue.SimpleQueue(), 0, []
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self):
        while True:
            what = self.work.get()
            time.sleep(self.seconds)
            what()

    def key(self):
        return id(self)

    def buffer(self, rows, like):
        """Filled with what no test expects."""
        made = torch.full((rows, *like.shape[1:]), 77, dtype=like.dtype)
        self.buffers.append(made)
        return made

    def copy(self, to, source):
        if to.numel() and not any(to.data_ptr() == made.data_ptr() for made in self.buffers):
            to.fill_(float("nan"))  # a result on the device: poison until its time has come
        self.work.put(lambda: to.copy_(source))

    def wait(self):
        event = threading.Event()
        self.work.put(event.set)
        event.wait()
        self.waits += 1


def experts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    w13 = torch.randn(EXPERTS, 2 * INTER, HIDDEN, generator=generator) / 8
    w2 = torch.randn(EXPERTS, HIDDEN, INTER, generator=generator) / 6
    return W4A8Experts.from_float(w13, w2)


def inputs(rows, dtype=torch.bfloat16):
    x = torch.randn(rows, HIDDEN).to(dtype)
    ids = torch.rand(rows, EXPERTS).topk(TOP)[1]
    return x, ids, torch.rand(rows, TOP)


@pytest.mark.parametrize("seconds", [0.0, 0.002])
def test_layers_share_buffers(seconds):
    """Growing and shrinking batches of two types in several layers; all results are read at the end."""
    stream, layers, got, want = LateStream(seconds), [experts(seed) for seed in range(3)], [], []
    call = Bridge(stream)
    with torch.no_grad():
        for rows in (1, 5, 3, 16, 17, 2):
            for dtype in (torch.bfloat16, torch.float32):
                given = inputs(rows, dtype)
                for layer in layers:
                    got.append(call(layer, *given))
                    want.append(layer(*given))
    assert stream.waits >= len(got)
    stream.wait()
    for mine, theirs in zip(got, want):
        assert_same_bits(mine, theirs)
    # Four each of 1, 8, 16 and 32 rows, for two types: a smaller batch takes those of a larger one.
    assert len(stream.buffers) == 2 * 4 * 4


def test_the_next_layer_needs_the_last():
    """A chain of layers whose inputs the late stream computes."""
    stream, layers = LateStream(0.001), [experts(seed) for seed in range(4)]
    call = Bridge(stream)
    x, ids, weights = inputs(3, torch.float32)
    want = x
    with torch.no_grad():
        for layer in layers:
            want = layer(want, ids, weights) + 1
        for layer in layers:
            out = call(layer, x, ids, weights)
            x = torch.full_like(out, float("nan"))
            stream.work.put(lambda to=x, source=out: to.copy_(source).add_(1))
    stream.wait()
    assert_same_bits(x, want)


def test_long_batches_go_in_parts(monkeypatch):
    monkeypatch.setattr(bridge, "MOST_ROWS", 4)
    stream, layer, given = LateStream(), experts(), inputs(11)
    cat = torch.cat

    def late_cat(parts):  # a kernel of the device
        stream.wait()
        return cat(parts)

    monkeypatch.setattr(torch, "cat", late_cat)
    with torch.no_grad():
        got = Bridge(stream)(layer, *given)
        assert_same_bits(got, layer(*given))
    assert max(len(made) for made in stream.buffers) == 4


def test_strides_of_the_input():
    """Columns in the memory instead of rows: the result is contiguous, as the operator's on the CPU."""
    stream, layer, (_, ids, weights) = LateStream(), experts(), inputs(3)
    x = torch.randn(HIDDEN, 3).T
    with torch.no_grad():
        got, want = Bridge(stream)(layer, x, ids, weights), layer(x, ids, weights)
    stream.wait()
    assert_same_bits(got, want)
    assert got.stride() == want.stride() == (HIDDEN, 1)


def test_no_rows():
    stream, layer, given = LateStream(), experts(), inputs(0)
    with torch.no_grad():
        assert_same_bits(Bridge(stream)(layer, *given), layer(*given))


def test_threads_have_buffers_of_their_own():
    """They share a stream, as all threads share the default stream of a GPU."""
    stream, layer, wrong = LateStream(), experts(), []
    call = Bridge(stream)

    def many(seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(20):
                x = torch.randn(3, HIDDEN, generator=generator)
                ids = torch.rand(3, EXPERTS, generator=generator).topk(TOP)[1]
                weights = torch.rand(3, TOP, generator=generator)
                got, want = call(layer, x, ids, weights), layer(x, ids, weights)
                stream.wait()
                if not torch.equal(got, want):
                    wrong.append(seed)

    threads = [threading.Thread(target=many, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(stream.buffers) == 3 * 4


def test_streams_have_buffers_of_their_own():
    stream = LateStream()
    keys = iter([1, 2, 1, 2])
    stream.key = lambda: next(keys)
    call, layer, given = Bridge(stream), experts(), inputs(2)
    with torch.no_grad():
        for _ in range(4):
            call(layer, *given)
    stream.wait()
    assert len(stream.buffers) == 2 * 4


def test_an_error_of_the_experts_is_raised():
    """And the next call works."""
    call, layer, (x, ids, weights) = Bridge(LateStream()), experts(), inputs(3)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="dynamic_4bit_int_moe"):
            call(layer, x, ids + 100, weights)
        got = call(layer, x, ids, weights)
        call.stream.wait()
        assert_same_bits(got, layer(x, ids, weights))


def test_gradients_are_refused():
    """By the operator, as on the CPU: the copies are ones that torch follows."""
    layer, (x, ids, weights) = experts(), inputs(3, torch.float32)
    with torch.enable_grad():
        out = run_on_cpu(layer, x.requires_grad_(), ids, weights)
        with pytest.raises(RuntimeError, match=r"derivative for .*dynamic_4bit_int_moe is not implemented"):
            out.sum().backward()
