"""Experts called from a device: on a stream that runs late and in order, where nothing is there before its time."""

import ctypes
import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from common import assert_same_bits

from w4a8.core import bridge
from w4a8.core.bridge import Bridge, Stream, run_on_cpu
from w4a8.nn import W4A8Experts

HIDDEN, INTER, EXPERTS, TOP = 64, 32, 6, 2
HANDLE = 5  # of a stream, which the driver gets
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


@pytest.fixture(params=bridge.WAYS)
def way(request, monkeypatch):
    """Each way to call the experts."""
    monkeypatch.setenv(bridge.WAY, request.param)
    return request.param


class LateStream:
    """A stream whose device memory is the CPU's, and whose work a thread does, late and in order."""

    def __init__(self, seconds=0.0):
        self.seconds, self.work, self.waits, self.buffers = seconds, queue.SimpleQueue(), 0, []
        self.launched, self.answer = [], 0
        self._launch = LAUNCH(self._launch_host_function)
        self.launch = ctypes.cast(self._launch, ctypes.c_void_p).value
        threading.Thread(target=self._loop, daemon=True).start()

    def _launch_host_function(self, stream, function, data):
        """As cuLaunchHostFunc."""
        self.launched.append(stream)
        if not self.answer:
            self.work.put(lambda: HOST_FUNCTION(function)(data))
        return self.answer

    def queue(self, *arguments, **numbers):
        torch.ops.w4a8.queue_experts(*arguments, stream=HANDLE, launch=self.launch, **numbers)

    def hold(self):
        """Nothing is done before the event is set."""
        event = threading.Event()
        self.work.put(event.wait)
        return event

    @torch.inference_mode()
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
        to[:0].copy_(source[:0])  # in the caller's mode: torch does not write every tensor in each
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
def test_layers_share_buffers(seconds, way):
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
    grown = 2 * 3  # times that buffers of a type were replaced: for nothing else waits a caller that queues
    assert stream.waits == (grown if way == "queued" else len(got) + grown)
    assert stream.launched == ([HANDLE] * len(got) if way == "queued" else [])
    stream.wait()
    for mine, theirs in zip(got, want):
        assert_same_bits(mine, theirs)
    # Four each of 1, 8, 16 and 32 rows, for two types: a smaller batch takes those of a larger one.
    assert len(stream.buffers) == 2 * 4 * 4


def test_the_next_layer_needs_the_last(way):
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


def test_long_batches_go_in_parts(monkeypatch, way):
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


def test_strides_of_the_input(way):
    """Columns in the memory instead of rows: the result is contiguous, as the operator's on the CPU."""
    stream, layer, (_, ids, weights) = LateStream(), experts(), inputs(3)
    x = torch.randn(HIDDEN, 3).T
    with torch.no_grad():
        got, want = Bridge(stream)(layer, x, ids, weights), layer(x, ids, weights)
    stream.wait()
    assert_same_bits(got, want)
    assert got.stride() == want.stride() == (HIDDEN, 1)


def test_no_rows(way):
    stream, layer, given = LateStream(), experts(), inputs(0)
    with torch.no_grad():
        got = Bridge(stream)(layer, *given)
        stream.wait()
        assert_same_bits(got, layer(*given))


def test_threads_have_buffers_of_their_own(way):
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


def test_streams_have_buffers_of_their_own(way):
    stream = LateStream()
    keys = iter([1, 2, 1, 2])
    stream.key = lambda: next(keys)
    call, layer, given = Bridge(stream), experts(), inputs(2)
    with torch.no_grad():
        for _ in range(4):
            call(layer, *given)
    stream.wait()
    assert len(stream.buffers) == 2 * 4


def test_an_error_of_the_experts_is_raised(monkeypatch):
    """And the next call works."""
    monkeypatch.setenv(bridge.WAY, "staged")
    call, layer, (x, ids, weights) = Bridge(LateStream()), experts(), inputs(3)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="dynamic_4bit_int_moe"):
            call(layer, x, ids + 100, weights)
        got = call(layer, x, ids, weights)
        call.stream.wait()
        assert_same_bits(got, layer(x, ids, weights))


@pytest.mark.parametrize("rows", [3, 9])  # the same buffers, and larger ones
def test_an_error_of_a_queued_call_is_raised_by_the_next(rows):
    """Once; its own result is NaN, and a thread without an error has none."""
    call, layer, (x, ids, weights) = Bridge(LateStream()), experts(), inputs(3)
    larger = inputs(rows)
    with torch.no_grad():
        bad = call(layer, x, ids + 100, weights)
        call.stream.wait()
        assert bad.isnan().all()
        good = []
        thread = threading.Thread(target=lambda: good.append(run_without_gradients(call, layer, x, ids, weights)))
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="queue_experts: an earlier call, whose result is NaN, failed: topk"):
            call(layer, *larger)
        got = call(layer, *larger)
        call.stream.wait()
        assert_same_bits(got, layer(*larger))
        assert_same_bits(good[0], layer(x, ids, weights))


def run_without_gradients(call, *arguments):
    """In a thread of its own, which has gradients on."""
    with torch.no_grad():
        return call(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_result_of_a_failed_call_is_nan(dtype):
    stream, layer = LateStream(), experts()
    x, ids, weights = inputs(5, dtype)
    with torch.no_grad():
        got = Bridge(stream)(layer, x, ids, weights[:, :1])  # what the operator alone finds
    stream.wait()
    assert got.isnan().all()


def test_the_caller_goes_on():
    """Layers are queued while the stream has not begun."""
    stream, layers, given = LateStream(), [experts(seed) for seed in range(5)], inputs(2)
    call, go = Bridge(stream), stream.hold()
    with torch.no_grad():
        got = [call(layer, *given) for layer in layers]
        assert all(each.isnan().all() for each in got)
        go.set()
        stream.wait()
        for mine, layer in zip(got, layers):
            assert_same_bits(mine, layer(*given))


def test_a_missing_wait_is_noticed(monkeypatch):
    """The stream that these tests use tells a bridge that waits from one that does not: experts are 77."""
    monkeypatch.setenv(bridge.WAY, "staged")
    stream = LateStream()
    call, go, stream.wait = Bridge(stream), stream.hold(), lambda: None
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"topk_ids.* has the expert id 77"):
        call(experts(), *inputs(2))
    go.set()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_without_an_expert(dtype, way):
    """-1, or the number of experts."""
    stream, layer, (x, _, weights) = LateStream(), experts(), inputs(3)
    ids = torch.tensor([[0, EXPERTS], [-1, 3], [EXPERTS, EXPERTS]], dtype=dtype)
    with torch.no_grad():
        got = Bridge(stream)(layer, x, ids, weights)
        stream.wait()
        assert_same_bits(got, layer(x, ids, weights))
    assert not got[2].any() and got[:2].any()


def test_in_and_out_of_inference_mode(way):
    """The same buffers serve both."""
    stream, layer, given = LateStream(), experts(), inputs(3)
    call = Bridge(stream)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            got = call(layer, *given)
            stream.wait()
            assert_same_bits(got, layer(*given))
    assert len(stream.buffers) == 4


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_thread_is_left_to_the_caller(threads):
    stream, layer, given, seen = LateStream(), experts(), inputs(40), []
    queue_it, before = stream.queue, torch.get_num_threads()
    stream.queue = lambda *arguments, **numbers: (seen.append(numbers["threads"]), queue_it(*arguments, **numbers))
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            got = Bridge(stream)(layer, *given)
            stream.wait()
            assert_same_bits(got, layer(*given))
    finally:
        torch.set_num_threads(before)
    assert seen == [max(1, threads - 1)]


def test_a_driver_that_refuses():
    stream, layer, given = LateStream(), experts(), inputs(2)
    call, stream.answer = Bridge(stream), 700
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="queue_experts: the driver refused the call with error 700"):
            call(layer, *given)
        stream.answer = 0
        got = call(layer, *given)
        stream.wait()
        assert_same_bits(got, layer(*given))


REFUSED = {
    "launch is 0": {"launch": 0},
    "threads is 0": {"threads": 0},
    r"error has dtype Byte and 63 elements, expected at least 64": {"error": torch.zeros(63, dtype=torch.uint8)},
    "error has dtype Float": {"error": torch.zeros(64)},
    r"out has dtype Float and shape \[2, 64\], expected those of x, BFloat16": {"out": torch.empty(2, HIDDEN)},
    r"shape \[3, 64\], expected those of x, BFloat16 and \[2, 64\]": {"out": torch.empty(3, HIDDEN).bfloat16()},
    "topk_ids is not contiguous": {"topk_ids": torch.zeros(TOP, 2, dtype=torch.int64).T},
}


@pytest.mark.parametrize("message", REFUSED)
def test_arguments_that_queueing_refuses(message):
    """At once, before the driver is asked."""
    stream, layer, (x, ids, weights) = LateStream(), experts(), inputs(2)
    positional, numbers = layer.operator_arguments()
    names = ("w13_packed", "w2_packed", "H", "I", "I2", "group_size", "apply_router_weight_on_input", "activation_kind")
    good = {
        "x": x, "topk_ids": ids, "topk_weights": weights, "out": torch.empty_like(x), "launch": stream.launch,
        "error": torch.zeros(64, dtype=torch.uint8), "stream": HANDLE, "threads": 1,
        **dict(zip(names, positional)), **numbers,
    }  # fmt: skip
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        torch.ops.w4a8.queue_experts(**{**good, **REFUSED[message]})
    assert not stream.launched


def test_ways(monkeypatch):
    """Queued where a driver can, unless the environment says otherwise."""
    monkeypatch.delenv(bridge.WAY, raising=False)
    stream = LateStream()
    assert Bridge(stream).way == "queued"
    stream.launch = 0
    assert Bridge(stream).way == "staged"
    monkeypatch.setenv(bridge.WAY, "queued")
    with pytest.raises(RuntimeError, match="W4A8_BRIDGE is queued, but there is no driver"):
        Bridge(stream)
    monkeypatch.setenv(bridge.WAY, "graph")
    with pytest.raises(ValueError, match="W4A8_BRIDGE is 'graph', expected queued or staged"):
        Bridge(stream)


def test_the_driver_is_looked_for(monkeypatch):
    """In CUDA's library, with a torch for CUDA."""
    cuda = torch.device("cuda")
    missing = bridge.ctypes.CDLL

    def library(name):
        assert name == "libcuda.so.1"
        return SimpleNamespace(cuLaunchHostFunc=missing(None).malloc)

    monkeypatch.setattr(torch.version, "cuda", None)
    assert bridge.launcher(cuda) == 0
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert bridge.launcher(torch.device("xpu")) == 0
    monkeypatch.setattr(ctypes, "CDLL", library)
    assert bridge.launcher(cuda) == ctypes.cast(missing(None).malloc, ctypes.c_void_p).value
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert bridge.launcher(cuda) == 0
    monkeypatch.setattr(ctypes, "CDLL", lambda name: missing("no such library"))
    assert bridge.launcher(cuda) == 0


def stream_of(**functions):
    """A Stream of a torch.cuda with these functions."""
    stream = Stream.__new__(Stream)
    stream.device, stream.launch, stream._torch = torch.device("cuda:0"), 1, SimpleNamespace(**functions)
    return stream


def test_a_wait_ends(monkeypatch):
    """When the event has come, or after ten minutes, here none."""
    answers = iter([False, False, True])
    event = SimpleNamespace(record=lambda stream: None, query=lambda: next(answers))
    stream = stream_of(Event=lambda: event, current_stream=lambda device: None)
    stream.wait()
    event.query = lambda: False
    monkeypatch.setattr(bridge, "PATIENCE", 0.0)
    with pytest.raises(RuntimeError, match="cuda:0 has not done within 0 seconds what its stream was given"):
        stream.wait()


def test_graphs_are_refused():
    """A graph would call what is freed after the first call."""
    with pytest.raises(RuntimeError, match="experts on the CPU cannot be part of a graph of cuda:0"):
        stream_of(is_current_stream_capturing=lambda: True).queue()


def test_gradients_are_refused():
    """By the operator, as on the CPU: the copies are ones that torch follows."""
    layer, (x, ids, weights) = experts(), inputs(3, torch.float32)
    with torch.enable_grad():
        out = run_on_cpu(layer, x.requires_grad_(), ids, weights)
        with pytest.raises(RuntimeError, match=r"derivative for .*dynamic_4bit_int_moe is not implemented"):
            out.sum().backward()
