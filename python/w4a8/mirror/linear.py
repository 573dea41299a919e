"""A linear layer with int4 weights and int8 activations: the CPU sibling of vLLM 0.24's ``XPUW4A8IntLinearKernel``.

Mirrors ``...kernels.linear.mixed_precision`` and the types of weights that it names (``vllm.scalar_type``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from w4a8.core.matrix import GROUP_SIZES, is_group_size
from w4a8.core.nibbles import check_int4_range, to_nibbles
from w4a8.core.scale_types import SCALE_TYPES
from w4a8.core.weight_utils import replace_parameter
from w4a8.mirror.config import current_platform
from w4a8.ops import dyn_quant_pack_4bit_weight, dynamic_per_token_int8_quant, int4_gemm_w4a8

__all__ = ["CPUW4A8IntLinearKernel", "MPLinearKernel", "MPLinearLayerConfig", "ScalarType", "scalar_types"]


@dataclass(frozen=True)
class ScalarType:
    """An integer type of a few bits, which torch has no dtype for."""

    name: str  # as messages print it
    size_bits: int
    signed: bool  # a value may be negative once the bias is subtracted
    bias: int = 0  # added to a value to store it

    def __str__(self) -> str:
        return self.name


class scalar_types:
    """The types that weights of linear layers come in."""

    int4 = ScalarType("int4", 4, signed=True)
    uint4 = ScalarType("uint4", 4, signed=False)
    int8 = ScalarType("int8", 8, signed=True)
    uint4b8 = ScalarType("uint4b8", 4, signed=False, bias=8)
    uint8b128 = ScalarType("uint8b128", 8, signed=False, bias=128)


@dataclass
class MPLinearLayerConfig:
    """A linear layer with weights and activations of different types."""

    full_weight_shape: tuple[int, int]  # [in, out] of the whole layer
    partition_weight_shape: tuple[int, int]  # [in, out] of what this rank holds
    weight_type: ScalarType
    act_type: torch.dtype
    group_size: int  # input features per scale; -1 is one scale per output feature
    zero_points: bool
    has_g_idx: bool  # the input features are reordered
    out_type: torch.dtype | None = None  # None is act_type


class MPLinearKernel(ABC):
    """Base of the kernels: prepares the weights of a layer once and then applies them."""

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int:
        """Least capability of the device; -1 where there is no such number."""

    @classmethod
    @abstractmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether the kernel can run such a layer, and else why not."""

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
            ValueError: the kernel cannot implement it; says why.
        """
        possible, reason = self.can_implement(c)
        if not possible:
            raise ValueError(f"{type(self).__name__} cannot implement this layer: {reason}")
        self.config = c
        self.w_q_name = w_q_param_name
        self.w_s_name = w_s_param_name
        self.w_zp_name = w_zp_param_name
        self.w_gidx_name = w_gidx_param_name

    @abstractmethod
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Brings the layer's parameters into the form that ``apply_weights`` takes."""

    @abstractmethod
    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's output for x [..., in]: [..., out]."""


class CPUW4A8IntLinearKernel(MPLinearKernel):
    """Symmetric int4 weights in groups or per channel, times activations quantized per token to symmetric int8.

    Differs from upstream where CPUs allow more: float32 activations, any even input size, any output size. The output
    is rounded once, to the type of the activations; upstream rounds to float16 first.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        """-1: any CPU."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether the kernel can run such a layer, and else why not."""
        in_size, _ = c.partition_weight_shape
        if not current_platform.is_cpu():
            return False, "CPUW4A8Int only supported on CPU"
        if c.act_type not in (torch.float32, torch.bfloat16, torch.float16):
            return False, f"CPUW4A8Int requires FP32/BF16/FP16 activations, got {c.act_type}"
        if c.weight_type != scalar_types.int4:
            return False, f"CPUW4A8Int requires int4 weights, got {c.weight_type}"
        if c.zero_points:
            return False, "CPUW4A8Int only supports symmetric weight quantization"
        if c.has_g_idx:
            return False, "CPUW4A8Int does not support reordered input features (g_idx)"
        if not is_group_size(c.group_size):
            return False, f"Group size ({c.group_size}) not supported by CPUW4A8Int, must be {GROUP_SIZES}"
        if in_size <= 0 or in_size % 2 != 0:
            return False, f"in size ({in_size}) must be even"
        if c.group_size != -1 and in_size % c.group_size != 0:
            return False, f"in size ({in_size}) must be a multiple of the group size ({c.group_size})"
        return True, None

    def _pack_int4_weight(self, w: torch.Tensor) -> torch.Tensor:
        """int8 [N, K] in [-8, 7] to int32 [N, K/8], nibble i of a word = value + 8 of k = 8 j + i. K: multiple of 8.

        ``int4_gemm_w4a8`` takes its transpose; the layer itself keeps the packed form.
        """
        if w.shape[1] % 8 != 0:
            raise ValueError(f"int32 words hold 8 values each, but the weight has {w.shape[1]} input features")
        return to_nibbles(w).view(torch.int32)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the weight once and frees what it was made of.

        Args:
            layer: with the weight int8 [N, K] under the kernel's weight name and scales [N, K/g] under that of the
                scales. Afterwards the first is the packed weight, uint8 [bytes], the second is empty, [0, N], and
                ``weight_zero_point`` is 8. A second call changes nothing.
        """
        weight = getattr(layer, self.w_q_name)
        if weight.dtype == torch.uint8 and weight.dim() == 1:
            return
        scales = getattr(layer, self.w_s_name).detach()
        values = weight.detach()
        check_int4_range(values, self.w_q_name)
        n, k = values.shape
        if scales.dtype not in SCALE_TYPES:
            scales = scales.float()
        group = k if self.config.group_size == -1 else self.config.group_size
        packed = dyn_quant_pack_4bit_weight(to_nibbles(values), scales, None, group, k, n)
        replace_parameter(layer, self.w_q_name, packed)
        replace_parameter(layer, self.w_s_name, scales.new_empty(0, n))
        zero_point = torch.tensor([8], dtype=torch.int8)
        layer.register_parameter("weight_zero_point", torch.nn.Parameter(zero_point, requires_grad=False))
        if self.w_q_name != "weight":
            layer.register_parameter("weight", None)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] times the packed weight, plus bias [N]: [..., N] of the type of x."""
        quantized = dynamic_per_token_int8_quant(x, True, 8)
        weight, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        zero_point, group = layer.weight_zero_point, self.config.group_size
        return int4_gemm_w4a8(*quantized, weight, scales, zero_point, group, None, bias, out_dtype=x.dtype)
