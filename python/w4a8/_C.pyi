"""Kernels of w4a8 and the packed format. Importing it registers the ops of torch.ops.w4a8."""

from typing import Any, TypedDict

# Buffer protocol: typing has no name for it before Python 3.12.
_Buffer = Any

class _KernelInfo(TypedDict):
    name: str
    supported: bool
    needs: str
    turned_off: str

class _Header(TypedDict):
    version: int
    n: int
    k: int
    group: int
    scale_dtype: str
    has_bias: bool
    values: str
    has_zero_points: bool
    has_minimums: bool
    activation_group: int
    bytes: int

__version__: str

def kernels() -> list[_KernelInfo]: ...
def active_kernel() -> str: ...
def use_kernel(name: str) -> None: ...
def cpu_features() -> str: ...
def packed_memory() -> str: ...
def place_packed(data: _Buffer) -> None: ...
def take_pages(data: _Buffer) -> None: ...
def read_header(data: _Buffer) -> _Header: ...
