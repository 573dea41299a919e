"""Loads the compiled part of w4a8. A package has one of two builds, which have the same functions.

* The extension ``w4a8._C`` and ``libw4a8_torch.so``: built from source, for one version of torch and of Python, and
  for C++.
* ``libw4a8_stable.so``: in the wheel, for torch 2.10 and newer and for every Python.

Each build registers the operators of ``torch.ops.w4a8``. A process can have the operators of one build only.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch

_FOLDER = Path(__file__).resolve().parent
_AN_OP = "dyn_quant_matmul_4bit"
_FUNCTIONS = (
    "active_kernel",
    "cpu_features",
    "kernels",
    "packed_memory",
    "place_packed",
    "read_header",
    "take_pages",
    "use_kernel",
)
_Arguments, _Result = ParamSpec("_Arguments"), TypeVar("_Result")
_REINSTALL = "Install w4a8 again, all of it: `pip install --force-reinstall --no-deps` and its wheel or source folder"


def _is_loaded(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


def _loaded_libraries() -> str:
    """The files of w4a8's builds that this process has mapped, as text, if the system lists mapped files."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return "an unknown file"
    found = sorted(set(re.findall(r"/.*(?:libw4a8_(?:torch|stable)|/w4a8/_C)[^/\n]*\.so", maps)))
    return ", ".join(found) or "an unknown file"


def _refuse_second(library: Path) -> None:
    """Raises ImportError if a build other than `library` has registered operators: a second build would crash."""
    if hasattr(torch.ops.w4a8, _AN_OP) and not _is_loaded(library):
        raise ImportError(
            f"this process has the operators of another build of w4a8, from {_loaded_libraries()}; {library} cannot be "
            "loaded beside it. Start a new process, and keep one of the two builds on its path"
        )


def _load() -> ModuleType:
    """Loads the build that the package has."""
    stable_library = _FOLDER / "stable" / "libw4a8_stable.so"
    if importlib.util.find_spec("w4a8._C") is not None:
        _refuse_second(_FOLDER / "libw4a8_torch.so")
        try:
            from w4a8 import _C as module
        except ImportError as error:
            raise ImportError(
                f"the compiled part of w4a8 could not be loaded with torch {torch.__version__}: {error}. It must be "
                "built against the torch it runs with: reinstall with `pip install --no-build-isolation --no-deps .`"
            ) from error
    elif stable_library.exists():
        _refuse_second(stable_library)
        from w4a8.stable import library as module
    else:
        raise ImportError(f"w4a8 has no compiled part in {_FOLDER}. {_REINSTALL}")
    missing = [name for name in _FUNCTIONS if not hasattr(module, name)]
    if missing:
        raise ImportError(f"{module.__file__} lacks {', '.join(missing)}: it is of another version. {_REINSTALL}")
    return module


def operator(declared: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Calls the operator of the name of ``declared``, a function of the same arguments that only documents it."""
    name = declared.__name__

    @wraps(declared)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return getattr(torch.ops.w4a8, name).default(*args, **kwargs)

    return call


def check_operators(wrappers: Iterable[Callable[..., object]]) -> None:
    """Compares the registered operators with their Python wrappers.

    Args:
        wrappers: functions with the names and the arguments of operators.

    Raises:
        ImportError: an operator is missing or has other arguments: the library is older or newer than the Python files.
    """
    for wrapper in wrappers:
        name, expected = wrapper.__name__, list(inspect.signature(wrapper).parameters)
        schemas = [s for s in torch._C._jit_get_schemas_for_operator(f"w4a8::{name}") if not s.overload_name]
        found = [argument.name for schema in schemas for argument in schema.arguments]
        if found != expected:
            has = f"takes ({', '.join(found)})" if schemas else "is missing"
            raise ImportError(
                f"the compiled part of w4a8, {library.__file__}, is of another version than the Python files beside "
                f"it: operator {name} {has}, expected ({', '.join(expected)}). {_REINSTALL}"
            )


library = _load()
__version__: str = library.__version__
active_kernel = library.active_kernel
cpu_features = library.cpu_features
kernels = library.kernels
packed_memory = library.packed_memory
place_packed = library.place_packed
read_header = library.read_header
take_pages = library.take_pages
use_kernel = library.use_kernel
