"""``libw4a8_stable.so`` by ctypes: the functions of ``w4a8._C``, and the operators, which loading this registers."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

_PATH = Path(__file__).resolve().with_name("libw4a8_stable.so")
_ARGUMENTS = {
    "w4a8_register": [],
    "w4a8_version": [],
    "w4a8_kernels": [],
    "w4a8_active_kernel": [],
    "w4a8_use_kernel": [ctypes.c_char_p],
    "w4a8_cpu_features": [],
    "w4a8_packed_memory": [],
    "w4a8_place_packed": [ctypes.c_void_p, ctypes.c_int64],
    "w4a8_take_pages": [ctypes.c_void_p, ctypes.c_int64],
    "w4a8_read_header": [ctypes.c_void_p, ctypes.c_int64],
}
_ERRORS = {1: ValueError, 2: RuntimeError}  # c_info.h


def _open() -> ctypes.CDLL:
    if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < (2, 10):
        raise ImportError(f"this build of w4a8 needs torch 2.10 or newer, and torch is {torch.__version__}")
    try:
        opened = ctypes.CDLL(str(_PATH))
        for name, arguments in _ARGUMENTS.items():
            getattr(opened, name).argtypes = arguments
        opened.w4a8_text.restype = ctypes.c_char_p
    except OSError as error:
        raise ImportError(f"{_PATH} could not be loaded with torch {torch.__version__}: {error}") from error
    except AttributeError as error:
        raise ImportError(f"{_PATH} is of another version than the Python files beside it: {error}") from error
    return opened


_library = _open()


def _ask(function: Any, *arguments: object) -> str:
    """The answer of a C function.

    Raises:
        ValueError, RuntimeError: with the library's message.
    """
    failed = function(*arguments)
    text = _library.w4a8_text().decode()
    if failed:
        raise _ERRORS[failed](text)
    return text


def _bytes_of(data: Any, writable: bool) -> tuple[Any, int]:
    """Where a buffer is, and its size. The first value keeps the buffer."""
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("data is not contiguous")
    if writable:
        return (ctypes.c_char * view.nbytes).from_buffer(view), view.nbytes
    # ctypes takes no read-only memory. numpy tells where it is, and is there wherever torch has buffers.
    import numpy

    return ctypes.c_void_p(numpy.frombuffer(view, numpy.uint8).ctypes.data if view.nbytes else 0), view.nbytes


__version__ = _ask(_library.w4a8_version)


def kernels() -> list[dict[str, Any]]:
    """All kernels, best first, as dicts with name, supported, needs and turned_off."""
    rows = (line.split("\t") for line in _ask(_library.w4a8_kernels).splitlines())
    return [
        {"name": name, "supported": supported == "1", "needs": needs, "turned_off": turned_off}
        for name, needs, supported, turned_off in rows
    ]


def active_kernel() -> str:
    """Name of the kernel that the ops run."""
    return _ask(_library.w4a8_active_kernel)


def use_kernel(name: str) -> None:
    """Forces a kernel for the process; '' returns to the default. Raises ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"use_kernel: name is {type(name).__name__}, expected str")
    _ask(_library.w4a8_use_kernel, name.encode())


def cpu_features() -> str:
    """CPU features that matter to kernels, separated by a space."""
    return _ask(_library.w4a8_cpu_features)


def packed_memory() -> str:
    """What W4A8_MEMORY asks for: '', 'map', 'copy' or 'interleave'. Raises ValueError."""
    return _ask(_library.w4a8_packed_memory)


def place_packed(data: Any) -> None:
    """Huge pages for a writable buffer of packed weights, on the NUMA nodes that W4A8_MEMORY asks for.

    Raises:
        ValueError, RuntimeError: W4A8_MEMORY has another value, or the system refuses.
    """
    memory, size = _bytes_of(data, writable=True)
    _ask(_library.w4a8_place_packed, ctypes.addressof(memory), size)


def take_pages(data: Any) -> None:
    """Takes the pages of a writable buffer of 4 MiB or more from the system, by all threads, before it is written."""
    memory, size = _bytes_of(data, writable=True)
    _ask(_library.w4a8_take_pages, ctypes.addressof(memory), size)


def read_header(data: Any) -> dict[str, Any]:
    """The header of one packed matrix (any buffer). Raises ValueError naming the field that is wrong."""
    try:
        memory, size = _bytes_of(data, writable=False)
    except ValueError as error:
        raise ValueError(f"read_header: {error}") from error
    fields = _ask(_library.w4a8_read_header, memory, size).split("\t")
    version, n, k, group, scale_dtype, has_bias, values, has_zero_points, has_minimums, activation_group, whole = fields
    return {
        "version": int(version),
        "n": int(n),
        "k": int(k),
        "group": int(group),
        "scale_dtype": scale_dtype,
        "has_bias": has_bias == "1",
        "values": values,
        "has_zero_points": has_zero_points == "1",
        "has_minimums": has_minimums == "1",
        "activation_group": int(activation_group),
        "bytes": int(whole),
    }


def _register() -> None:
    """Registers the operators, once in a process however often this module is imported."""
    if _ask(_library.w4a8_register) == "registered before":
        return
    from w4a8.stable import backward, meta

    # Torch takes back what a Library registered when the object goes: kept where no import replaces it.
    torch.ops.w4a8_internal.registrations = (backward.register_backward(), meta.register_meta())


_register()
