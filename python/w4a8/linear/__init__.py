"""vLLM's CPUW4A8IntLinearKernel, mirrored without vLLM, as :mod:`w4a8.moe` is (docs/vllm_mirror.md)."""

from w4a8.linear import mixed_precision, scalar_type  # noqa: F401
from w4a8.linear.cpu_w4a8_int import *  # noqa: F403
from w4a8.linear.cpu_w4a8_int import __all__ as __all__
