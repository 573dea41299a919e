"""w4a8: int4-weight, int8-activation matmul and mixture-of-experts operators for CPUs.

Importing this package registers the operators ``torch.ops.w4a8.*`` with PyTorch. ``w4a8.ops`` has typed wrappers of the
operators, exported here. ``quantize_``, ``Decoder`` and the packages ``checkpoint``, ``formats``, ``nn`` and
``quantization`` are imported at their first use. The command ``w4a8 doctor`` shows what this machine can run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from w4a8 import compiled, ops
from w4a8.cpu import active_kernel, cpu_features, kernels, use_kernel
from w4a8.ops import *  # noqa: F403

if TYPE_CHECKING:
    from w4a8.decoder import Decoder
    from w4a8.quantization import quantize_

__version__: str = compiled.__version__
compiled.check_operators(getattr(ops, name) for name in ops.OPERATORS)

__all__ = [
    "Decoder",
    "__version__",
    "active_kernel",
    "cpu_features",
    "kernels",
    "quantize_",
    "use_kernel",
]
__all__ += ops.__all__

_FUNCTIONS = {"Decoder": "w4a8.decoder", "quantize_": "w4a8.quantization"}
_PACKAGES = ("checkpoint", "formats", "nn", "quantization")


def __getattr__(name: str) -> Any:
    """Imports ``_FUNCTIONS`` and ``_PACKAGES`` at their first use (PEP 562)."""
    if name in _PACKAGES:
        return import_module(f"w4a8.{name}")
    if name in _FUNCTIONS:
        return getattr(import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module 'w4a8' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_FUNCTIONS, *_PACKAGES})
