"""The mixture-of-experts modules of :mod:`w4a8.mirror` under the names that vLLM gives them.

Each is the same module object under a second name; static readers follow its import of all names.
"""

from w4a8.mirror import *  # noqa: F403
from w4a8.mirror import __all__ as __all__
from w4a8.moe import config, layer, loader, method, modular_kernel, platforms, quant_key  # noqa: F401
from w4a8.moe.experts import cpu_int4_moe  # noqa: F401
from w4a8.moe.oracle import w4a8_int8  # noqa: F401
