"""Calls the experts on the CPU with tensors of an accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

# Tokens of one call. More go in parts, so that the buffers stay small: 4,096 tokens of 2,048 bfloat16 are 16.8 MB.
MOST_ROWS = 4096

# hidden_states [T, H], ids [T, k] and weights [T, k] on the CPU -> [T, H] there.
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def without_compiling(function: Any) -> Any:
    """``torch.compiler.disable`` where torch has it: a graph ends before the function."""
    return getattr(getattr(torch, "compiler", None), "disable", lambda same: same)(function)


class Stream:
    """The current stream of a device, whose copies and kernels run later and in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
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

    def wait(self) -> None:
        """Until the stream has done all that it was given so far."""
        event = self._torch.Event()
        event.record(self.key())
        event.synchronize()


class Bridge:
    """Calls experts on the CPU from a stream, by way of buffers on the host that all layers share.

    Each thread and each stream has buffers of its own. Within one stream, the next layer's copy to the host follows
    this layer's copy back, and the host writes a result only after the copy to the host: one set of buffers is enough.
    """

    def __init__(self, stream: Any) -> None:
        """Takes a :class:`Stream`."""
        self.stream = stream
        self._own = threading.local()

    def _buffers(self, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """One for each tensor, and one for the result; of as many rows."""
        slots = self._own.__dict__.setdefault("slots", {})
        rows = len(tensors[0])
        key = self.stream.key(), *((tensor.dtype, tensor.shape[1]) for tensor in tensors)
        if key not in slots or len(slots[key][0]) < rows:
            if key in slots:
                self.stream.wait()  # the copy back may still read the old one
            count = 1 << max(rows - 1, 0).bit_length()
            slots[key] = [self.stream.buffer(count, tensor) for tensor in (*tensors, tensors[0])]
        return [buffer[:rows] for buffer in slots[key]]

    def __call__(self, run: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``run`` on the CPU for tensors of the device; [T, H] on the device."""
        if len(x) > MOST_ROWS:
            parts = zip(*(tensor.split(MOST_ROWS) for tensor in (x, ids, weights)))
            return torch.cat([self(run, *part) for part in parts])
        given = x, ids, weights
        *on_host, result = self._buffers(given)
        for host, tensor in zip(on_host, given):
            self.stream.copy(host, tensor)
        self.stream.wait()
        result.copy_(run(*on_host))
        back = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # contiguous, whatever the strides of x
        self.stream.copy(back, result)
        return back


_bridges: dict[torch.device, Bridge] = {}


@without_compiling
def run_on_cpu(run: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts on the CPU, for tensors of an accelerator.

    Args:
        run: the experts.
        x: floating point [T, H].
        ids, weights: [T, k], on the device of ``x``.

    Returns:
        [T, H] on the device of ``x``.
    """
    # Where gradients are on, the copies must be ones that torch follows: then going back is the operator's error.
    follows = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
    if follows or not Stream.can(x.device):
        return run(x.cpu(), ids.cpu(), weights.cpu()).to(x.device)
    if x.device not in _bridges:
        _bridges[x.device] = Bridge(Stream(x.device))
    with torch.no_grad():
        return _bridges[x.device](run, x, ids, weights)
