"""A device without hardware, ``standin``: its tensors lie in the CPU's memory, and say that they are elsewhere.

For a process of its own: importing this takes torch's place for devices of others (PrivateUse1). An operator of w4a8
that gets a tensor of the device is an error. Computing gives the CPU's bits.
"""

import contextlib
import ctypes
import os
import threading

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _DummyBackendModule
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup

from w4a8.core import bridge

_counts = {"staged": 0, "queued": 0}


class _Event:
    def record(self, stream):
        pass

    def query(self):
        _counts["staged"] += 1
        return True


class _Stream(str):
    cuda_stream = 0


class _Module(_DummyBackendModule):
    """torch.standin: one stream, whose work is done at once."""

    Event = _Event

    @staticmethod
    def current_stream(device):
        return _Stream(device)

    @staticmethod
    def is_current_stream_capturing():
        return False

    @staticmethod
    def device(index):
        return contextlib.nullcontext()


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
def _launch(stream, function, data):
    """As cuLaunchHostFunc: another thread calls the function."""
    _counts["queued"] += 1
    thread = threading.Thread(target=ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function), args=(data,))
    thread.start()
    thread.join()
    return 0


def _buffer(self, rows, like):
    """In place of pinned memory, which needs a driver."""
    return torch.full((rows, *like.shape[1:]), 77, dtype=like.dtype)


def calls(way):
    """How often experts were called this way."""
    return _counts[way]


def use(way):
    """From now on experts are called this way."""
    os.environ[bridge.WAY] = way
    bridge._bridges.clear()


setup("standin", _Module())
bridge.Stream.buffer = _buffer
bridge.launcher = lambda device: ctypes.cast(_launch, ctypes.c_void_p).value
_library = torch.library.Library("aten", "IMPL")


def inside(value):
    """The tensor of the CPU in a tensor of the device."""
    return value.inside if isinstance(value, OnDevice) else value


class OnDevice(torch.Tensor):
    """A tensor of the device."""

    @staticmethod
    def __new__(cls, data, device="standin:0"):
        device = torch.device("standin", torch.device(device).index or 0)
        made = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
            device=device, requires_grad=False,
        )  # fmt: skip
        made.inside = data
        return made

    def tolist(self):
        """Numbers of Python, which torch refuses of a subclass."""
        return self.inside.tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function.namespace == "w4a8":
            raise NotImplementedError(f"{function} got a tensor of the device")
        kwargs = dict(kwargs or {})
        to = kwargs.get("device")
        inner_args, inner = tree_map(inside, args), tree_map(inside, kwargs)
        if to is not None:
            inner["device"] = "cpu" if torch.device(to).type == "standin" else to
        for tensor in [each for each in args if isinstance(each, torch.Tensor)]:
            # As on a GPU: apart from copies and numbers, everything is on one device.
            lies_here = isinstance(tensor, OnDevice) or tensor.dim() == 0
            assert lies_here or "copy" in function._schema.name, f"{function}: a tensor is on {tensor.device}"
        out = function(*inner_args, **inner)
        if to is not None and torch.device(to).type != "standin":
            return out
        if function._schema.name.endswith("_") and isinstance(args[0], torch.Tensor):
            return args[0]
        return tree_map(lambda each: OnDevice(each) if isinstance(each, torch.Tensor) else each, out)


def _copy_from(source, to, non_blocking=False):
    inside(to).copy_(inside(source))
    return to


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return OnDevice(torch.empty(size, dtype=dtype, device="cpu"), device)


def _empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return OnDevice(torch.empty_strided(size, stride, dtype=dtype, device="cpu"), device)


_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
