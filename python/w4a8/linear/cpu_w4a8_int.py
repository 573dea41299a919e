"""The CPU sibling of vLLM's ``XPUW4A8IntLinearKernel``."""

from __future__ import annotations

import torch

from w4a8.core.matrix import GROUP_SIZES, is_group_size
from w4a8.core.nibbles import check_int4_range, to_nibbles
from w4a8.core.scale_types import SCALE_TYPES
from w4a8.core.weight_utils import replace_parameter
from w4a8.linear.mixed_precision import MPLinearKernel, MPLinearLayerConfig
from w4a8.linear.scalar_type import scalar_types
from w4a8.moe.platforms import current_platform
from w4a8.ops import dyn_quant_pack_4bit_weight, dynamic_per_token_int8_quant, int4_gemm_w4a8

_ACT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


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
        if c.act_type not in _ACT_TYPES:
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
        quant_x, x_scale, x_zero = dynamic_per_token_int8_quant(x, True, 8)
        return int4_gemm_w4a8(
            quant_x,
            x_scale,
            x_zero,
            getattr(layer, self.w_q_name),
            getattr(layer, self.w_s_name),
            layer.weight_zero_point,
            self.config.group_size,
            None,
            bias,
            out_dtype=x.dtype,
        )
