"""The module :mod:`w4a8.mirror.linear` under the names that vLLM gives its parts, as in :mod:`w4a8.moe`."""

from w4a8.linear import cpu_w4a8_int, mixed_precision, scalar_type  # noqa: F401
from w4a8.mirror.linear import *  # noqa: F403
from w4a8.mirror.linear import __all__ as __all__
