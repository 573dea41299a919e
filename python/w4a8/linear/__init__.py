"""Linear layers with int4 weights and int8 activations, shaped like vLLM's mixed-precision kernels, without vLLM."""

from w4a8.linear.cpu_w4a8_int import CPUW4A8IntLinearKernel
from w4a8.linear.mixed_precision import MPLinearKernel, MPLinearLayerConfig
from w4a8.linear.scalar_type import ScalarType, scalar_types

__all__ = ["CPUW4A8IntLinearKernel", "MPLinearKernel", "MPLinearLayerConfig", "ScalarType", "scalar_types"]
