"""A linear layer with int4 weights and int8 activations: the CPU sibling of vLLM 0.24's ``XPUW4A8IntLinearKernel``.

Mirrors ``...kernels.linear.mixed_precision`` and its types of weights (``vllm.scalar_type``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

import torch

from w4a8.core.matrix import PackedAs, pack_codes
from w4a8.core.nibbles import check_int4_range, to_nibbles
from w4a8.core.scale_types import SCALE_TYPES
from w4a8.core.weight_utils import replace_parameter
from w4a8.moe.config import INPUT_DTYPES, current_platform, first_reason
from w4a8.ops import dynamic_per_token_int8_quant, int4_gemm_w4a8

__all__ = ["CPUW4A8IntLinearKernel", "MPLinearKernel", "MPLinearLayerConfig", "scalar_types"]


class scalar_types(Enum):
    """Types of weights of linear layers, integers of a few bits. b8 and b128: 8 or 128 is added to each value."""

    int4 = "int4"
    uint4 = "uint4"
    int8 = "int8"
    uint4b8 = "uint4b8"
    uint8b128 = "uint8b128"

    def __str__(self) -> str:
        return self.value


@dataclass
class MPLinearLayerConfig:
    """A linear layer with weights and activations of different types."""

    full_weight_shape: tuple[int, int]  # [in, out] of the whole layer
    partition_weight_shape: tuple[int, int]  # [in, out] of this rank's part
    weight_type: scalar_types
    act_type: torch.dtype
    group_size: int  # input features per scale; -1 is one scale per output feature
    zero_points: bool
    has_g_idx: bool  # the input features are reordered


class MPLinearKernel(ABC):
    """Base of the kernels. A kernel prepares the weights of a layer once and then applies them."""

    @classmethod
    @abstractmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether the kernel can run such a layer; if not, the reason."""

    def __init__(
        self,
        c: MPLinearLayerConfig,
        w_q_param_name: str,
        w_s_param_name: str,
        w_zp_param_name: str | None = None,
        w_gidx_param_name: str | None = None,
    ) -> None:
        """Takes a configuration and the names of the layer's parameters.

        Raises:
            ValueError: the kernel cannot run such a layer; says why.
        """
        possible, reason = self.can_implement(c)
        if not possible:
            raise ValueError(f"{type(self).__name__} cannot implement this layer: {reason}")
        self.config = c
        self.w_q_name = w_q_param_name
        self.w_s_name = w_s_param_name
        self.w_zp_name = w_zp_param_name
        self.w_gidx_name = w_gidx_param_name


class CPUW4A8IntLinearKernel(MPLinearKernel):
    """Symmetric int4 weights, in groups or per channel. Activations are quantized per token to symmetric int8."""

    @classmethod
    def get_min_capability(cls) -> int:
        """The least compute capability of the device: -1, as a CPU has none."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        in_size, out_size = c.partition_weight_shape
        problem = PackedAs().problem(out_size, in_size, c.group_size)
        checks = (
            (current_platform.is_cpu(), "CPUW4A8Int only supported on CPU"),
            (c.act_type in INPUT_DTYPES, f"CPUW4A8Int requires FP32/BF16/FP16 activations, got {c.act_type}"),
            (c.weight_type == scalar_types.int4, f"CPUW4A8Int requires int4 weights, got {c.weight_type}"),
            (not c.zero_points, "CPUW4A8Int only supports symmetric weight quantization"),
            (not c.has_g_idx, "CPUW4A8Int does not support reordered input features (g_idx)"),
            (not problem, f"CPUW4A8Int: {problem}"),
        )
        reason = first_reason(checks)
        return reason is None, reason

    def _pack_int4_weight(self, w: torch.Tensor) -> torch.Tensor:
        """int8 [N, K] in [-8, 7] to int32 [N, K/8]: nibble i of word j is value + 8 of k = 8 j + i. K: multiple of 8.

        ``int4_gemm_w4a8`` takes the transpose of the result. The layer does not use this form.
        """
        if w.shape[1] % 8 != 0:
            raise ValueError(f"int32 words hold 8 values each, but the weight has {w.shape[1]} input features")
        return to_nibbles(w).view(torch.int32)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the weight int8 [N, K] and its scales [N, K/g], and frees both. A second call changes nothing.

        Afterwards the parameter of the weight is the packed weight, uint8 [bytes], and the parameter of the scales is
        empty, [0, N]. ``weight_zero_point`` is 8.
        """
        weight = getattr(layer, self.w_q_name)
        if weight.dtype == torch.uint8 and weight.dim() == 1:
            return
        scales = getattr(layer, self.w_s_name).detach()
        values = weight.detach()
        check_int4_range(values, self.w_q_name)
        scale_dtype = scales.dtype if scales.dtype in SCALE_TYPES else torch.float32
        packed = pack_codes(to_nibbles(values), scales, None, self.config.group_size, scale_dtype)
        replace_parameter(layer, self.w_q_name, packed)
        replace_parameter(layer, self.w_s_name, scales.new_empty(0, len(values), dtype=scale_dtype))
        zero_point = torch.tensor([8], dtype=torch.int8)
        layer.register_parameter("weight_zero_point", torch.nn.Parameter(zero_point, requires_grad=False))
        if self.w_q_name != "weight":
            layer.register_parameter("weight", None)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] times the packed weight, plus bias [N]. Returns [..., N] in the dtype of x."""
        quantized = dynamic_per_token_int8_quant(x, True, 8)
        weight, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        zero_point, group = layer.weight_zero_point, self.config.group_size
        return int4_gemm_w4a8(*quantized, weight, scales, zero_point, group, None, bias, out_dtype=x.dtype)
