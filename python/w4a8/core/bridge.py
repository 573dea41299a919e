"""Calls the experts on the CPU with tensors of an accelerator."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any, Protocol

import torch

# Tokens of one call. More go in parts, so that the buffers stay small: 4,096 tokens of 2,048 bfloat16 are 16.8 MB.
MOST_ROWS = 4096
WAY = "W4A8_BRIDGE"  # in the environment: how experts are called
WAYS = ("queued", "staged")
PATIENCE = 600.0  # seconds that a wait lasts: torch's limit for operations among GPUs (NCCL)
_SPIN = 0.002  # seconds of a wait without sleep, which would take longer than the copies of a few tokens
_ERROR_BYTES = 512


class Experts(Protocol):
    """Experts on the CPU, such as :class:`w4a8.nn.W4A8Experts`."""

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], ids and weights [T, k] -> [T, H]."""

    def operator_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The other arguments of ``dynamic_4bit_int_moe``: by position, and by name."""


def without_compiling(function: Any) -> Any:
    """``torch.compiler.disable`` where torch has it: a graph ends before the function."""
    return getattr(getattr(torch, "compiler", None), "disable", lambda same: same)(function)


def launcher(device: torch.device) -> int:
    """The address of the driver's function by which a stream calls a function of the host; 0: there is none.

    The driver is CUDA's. Of AMD's it is not known whether such calls are right.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return 0
    try:
        return ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


class Stream:
    """The current stream of a device, whose copies and kernels run later and in order.

    Attributes:
        launch: what :func:`launcher` found.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.launch = launcher(device)
        self._torch = getattr(torch, device.type)  # torch.cuda, torch.xpu

    @staticmethod
    def can(device: torch.device) -> bool:
        """Whether torch has streams and events of the device."""
        found = getattr(torch, device.type, None)
        return hasattr(found, "current_stream") and hasattr(found, "Event")

    def key(self) -> object:
        """Tells the streams of a device apart."""
        return self._torch.current_stream(self.device)

    def buffer(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        """Pinned memory of the host for ``rows`` rows."""
        return torch.empty(rows, *like.shape[1:], dtype=like.dtype, pin_memory=True)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """In the order of the stream; returns at once."""
        to.copy_(source, non_blocking=True)

    def queue(self, *arguments: Any, **numbers: Any) -> None:
        """Calls the operator ``queue_experts`` in the order of the stream; returns at once."""
        if self._torch.is_current_stream_capturing():
            raise RuntimeError(f"experts on the CPU cannot be part of a graph of {self.device}")
        with self._torch.device(self.device):  # the driver's default stream is that of the current device
            handle = self.key().cuda_stream
            torch.ops.w4a8.queue_experts(*arguments, stream=handle, launch=self.launch, **numbers)

    def wait(self) -> None:
        """Until the stream has done all that it was given so far.

        Raises:
            RuntimeError: the stream has not done so within :data:`PATIENCE`.
        """
        event = self._torch.Event()
        event.record(self.key())
        begin = time.monotonic()
        while not event.query():
            waited = time.monotonic() - begin
            if waited > PATIENCE:
                raise RuntimeError(f"{self.device} has not done within {PATIENCE:g} seconds what its stream was given")
            if waited > _SPIN:
                time.sleep(1e-4)


class Bridge:
    """Calls experts on the CPU from a stream, by way of buffers on the host that all layers share.

    Each thread and each stream has buffers of its own. Within one stream, the next layer's copy to the host follows
    this layer's copy back, and the host writes a result only after the copy to the host: one set of buffers is enough.

    Attributes:
        way: ``queued``: the driver's thread calls the experts when the stream comes to them, and the caller goes on.
            An error is raised by the next call of the same thread and stream, and the result is NaN. ``staged``: the
            caller waits for the stream, and calls the experts.
    """

    def __init__(self, stream: Any) -> None:
        """Takes a :class:`Stream`.

        Raises:
            ValueError: the environment names another way.
            RuntimeError: the environment says ``queued``, and no driver can do so.
        """
        self.stream = stream
        self.way = os.environ.get(WAY) or WAYS[0 if stream.launch else 1]
        self._own = threading.local()
        if self.way not in WAYS:
            raise ValueError(f"{WAY} is {self.way!r}, expected {' or '.join(WAYS)}")
        if self.way == "queued" and not stream.launch:
            raise RuntimeError(f"{WAY} is queued, but there is no driver of CUDA that calls functions of the host")

    def _buffers(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """One for each tensor, and one for the result, of as many rows; and one for the text of an error."""
        slots = self._own.__dict__.setdefault("slots", {})
        rows = len(tensors[0])
        key = self.stream.key(), *((tensor.dtype, tensor.shape[1]) for tensor in tensors)
        if key not in slots or len(slots[key][0]) < rows:
            if key in slots:
                self.stream.wait()  # the copy back may still read the old one
            count = 1 << max(rows - 1, 0).bit_length()
            with torch.inference_mode(False):  # the next call may be outside of it, where such tensors are not written
                error = slots[key][-1] if key in slots else torch.zeros(_ERROR_BYTES, dtype=torch.uint8)
                slots[key] = [*(self.stream.buffer(count, tensor) for tensor in (*tensors, tensors[0])), error]
        *buffers, error = slots[key]
        return [*(buffer[:rows] for buffer in buffers), error]

    def __call__(self, experts: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``experts`` on the CPU for tensors of the device; [T, H] on the device."""
        if len(x) > MOST_ROWS:
            parts = zip(*(tensor.split(MOST_ROWS) for tensor in (x, ids, weights)))
            return torch.cat([self(experts, *part) for part in parts])
        given = x, ids, weights
        *on_host, result, error = self._buffers(given)
        for host, tensor in zip(on_host, given):
            self.stream.copy(host, tensor)
        if self.way == "queued":
            arguments, numbers = experts.operator_arguments()
            threads = max(1, torch.get_num_threads() - 1)  # the caller's thread has a core meanwhile
            self.stream.queue(*on_host, *arguments, result, error, threads=threads, **numbers)
        else:
            self.stream.wait()
            result.copy_(experts(*on_host))
        back = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # contiguous, whatever the strides of x
        self.stream.copy(back, result)
        return back


_bridges: dict[torch.device, Bridge] = {}


@without_compiling
def run_on_cpu(experts: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts on the CPU, for tensors of an accelerator.

    Args:
        experts: on the CPU.
        x: floating point [T, H].
        ids, weights: [T, k], on the device of ``x``.

    Returns:
        [T, H] on the device of ``x``.
    """
    # Where gradients are on, the copies must be ones that torch follows: then going back is the operator's error.
    follows = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
    if follows or not Stream.can(x.device):
        return experts(x.cpu(), ids.cpu(), weights.cpu()).to(x.device)
    if x.device not in _bridges:
        _bridges[x.device] = Bridge(Stream(x.device))
    with torch.no_grad():
        return _bridges[x.device](experts, x, ids, weights)
