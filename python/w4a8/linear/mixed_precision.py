"""What a kernel for a linear layer with quantized weights is (upstream: ``...kernels.linear.mixed_precision``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from w4a8.linear.scalar_type import ScalarType


@dataclass
class MPLinearLayerConfig:
    """A linear layer with weights and activations of different types.

    Attributes:
        full_weight_shape: [in, out] of the whole layer.
        partition_weight_shape: [in, out] of what this rank holds.
        weight_type: of the quantized weights.
        act_type: of the activations.
        group_size: input features per scale; -1 is one scale per output feature.
        zero_points: the weights have zero points.
        has_g_idx: the input features are reordered.
        out_type: of the output; None is ``act_type``.
    """

    full_weight_shape: tuple[int, int]
    partition_weight_shape: tuple[int, int]
    weight_type: ScalarType
    act_type: torch.dtype
    group_size: int
    zero_points: bool
    has_g_idx: bool
    out_type: torch.dtype | None = None


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
