"""Configuration of a mixture-of-experts layer: sizes, routing, parallelism, quantization; and the platform.

Mirrors the classes that the W4A8 method, its oracle and its experts use of vLLM's ``...layers.fused_moe.config``,
``...quantization.utils.quant_utils`` and ``vllm.platforms``.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch

from w4a8.core.activation import MoEActivation, as_activation
from w4a8.core.experts import ExpertSizes
from w4a8.core.routing import RoutingMethodType

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of activations


def first_reason(checks: Iterable[tuple[bool | None, str]]) -> str | None:
    """The reason of the first (condition, reason) whose condition is false, or None if all conditions are true."""
    return next((reason for holds, reason in checks if not holds), None)


class CpuArchEnum(Enum):
    """Families of CPUs."""

    X86 = "x86"
    ARM = "arm"
    OTHER = "other"


_ARCHITECTURES = {
    **dict.fromkeys(("x86_64", "amd64", "i686"), CpuArchEnum.X86),
    **dict.fromkeys(("aarch64", "arm64"), CpuArchEnum.ARM),
}


class CpuPlatform:
    """The platform of this package: always the CPU."""

    device_name = "cpu"

    def is_cpu(self) -> bool:
        """Whether layers run on the CPU."""
        return True

    def get_cpu_architecture(self) -> CpuArchEnum:
        """Family of the CPU of this machine."""
        return _ARCHITECTURES.get(platform.machine().lower(), CpuArchEnum.OTHER)


current_platform = CpuPlatform()


class GroupShape(NamedTuple):
    """How many rows and columns of a matrix share one scale; -1 is all of them."""

    row: int
    col: int

    @classmethod
    def of_weights(cls, group_size: int) -> GroupShape:
        """The shape for weights with ``group_size`` input features per scale; -1 is channelwise."""
        return cls(-1, 1) if group_size == -1 else cls(1, group_size)

    @property
    def group_size(self) -> int:
        """``group_size`` of the op: -1 (channelwise) unless the shape is (1, g)."""
        return self.col if self.row == 1 else -1


GroupShape.PER_TENSOR = GroupShape(-1, -1)
GroupShape.PER_TOKEN = GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)
_SHAPE_NAMES = {
    GroupShape.PER_TENSOR: "per tensor",
    GroupShape.PER_TOKEN: "per token",
    GroupShape.PER_CHANNEL: "per channel",
}


@dataclass(frozen=True)
class ScaleDesc:
    """Scales of a quantized tensor. ``static`` scales, such as scales of weights, are known before the layer runs."""

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape

    def __str__(self) -> str:
        shape = _SHAPE_NAMES.get(self.group_shape, f"group {tuple(self.group_shape)}")
        return f"{str(self.dtype)[len('torch.') :]}, {'static' if self.static else 'dynamic'}, {shape}"


@dataclass(frozen=True)
class QuantKey:
    """A quantization scheme, as a value that can be compared."""

    dtype: torch.dtype  # of the tensor of quantized values; int4 weights are in int8
    scale: ScaleDesc
    scale2: ScaleDesc | None = None  # scales of the scales; no scheme here has any
    symmetric: bool = True  # zero is represented by zero

    def __str__(self) -> str:
        second = f", scale2({self.scale2})" if self.scale2 is not None else ""
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        return f"QuantKey({str(self.dtype)[len('torch.') :]}, scale({self.scale}){second}, {symmetry})"


def weight_scale_dtype(group_size: int) -> torch.dtype:
    """The dtype of scales of weights, as upstream: float32 if channelwise (-1), bfloat16 in groups."""
    return torch.float32 if group_size == -1 else torch.bfloat16


def int4_weight_key(group_size: int, scale_dtype: torch.dtype | None = None, symmetric: bool = True) -> QuantKey:
    """The key of int4 weights held as int8; ``symmetric`` weights have no zero points."""
    scale = ScaleDesc(scale_dtype or weight_scale_dtype(group_size), True, GroupShape.of_weights(group_size))
    return QuantKey(torch.int8, scale, symmetric=symmetric)


kInt4W4A8StaticGroup32Sym = int4_weight_key(32)
kInt4W4A8StaticGroup64Sym = int4_weight_key(64)
kInt4W4A8StaticGroup128Sym = int4_weight_key(128)
# The method never makes the shape of upstream's fourth group key, kInt4W4A8StaticGroupSym. Upstream has no key for the
# channelwise shape that the method makes. Here both names are the channelwise key.
kInt4W4A8StaticChannelSym = int4_weight_key(-1)
kInt4W4A8StaticGroupSym = kInt4W4A8StaticChannelSym


@dataclass(frozen=True)
class FusedMoEParallelConfig:
    """How a layer is spread over processes.

    Tensor parallel (``tp``): each rank holds a slice of every expert. Expert parallel (``ep``, if ``use_ep``): each
    rank holds whole experts, and tp_size is 1. ``pcp`` is prefill context parallel, ``dp`` data parallel.
    """

    tp_size: int = 1
    pcp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    tp_rank: int = 0
    ep_rank: int = 0
    use_ep: bool = False
    use_batched_activation_format: bool = False  # tokens arrive sorted into one batch per expert


@dataclass
class FusedMoEConfig:
    """One mixture-of-experts layer.

    Raises:
        ValueError: the activation is unknown or contradicts ``is_act_and_mul``, or ``tp_size`` does not divide
            ``intermediate_size``.
    """

    num_experts: int  # of the model (global)
    experts_per_token: int  # k
    hidden_dim: int  # H
    intermediate_size: int  # of one expert, before tensor parallelism
    num_local_experts: int  # experts that this rank holds
    activation: MoEActivation = MoEActivation.SILU
    device: torch.device | str = "cpu"
    routing_method: RoutingMethodType = RoutingMethodType.Renormalize
    moe_parallel_config: FusedMoEParallelConfig = field(default_factory=FusedMoEParallelConfig)
    in_dtype: torch.dtype = torch.bfloat16  # of the activations: float32, bfloat16 or float16
    router_logits_dtype: torch.dtype | None = None  # None if unknown
    moe_backend: str = "auto"  # or the name of the required backend
    has_bias: bool = False  # of w13 and w2
    # Whether w13 has a gate half. None: if the activation is gated. False: a gated activation becomes its ungated one.
    is_act_and_mul: bool | None = None

    def __post_init__(self) -> None:
        self.activation = as_activation(self.activation)
        if self.is_act_and_mul is None:
            self.is_act_and_mul = self.activation.is_gated
        elif not self.is_act_and_mul:
            self.activation = self.activation.without_mul()
        if self.is_act_and_mul != self.activation.is_gated:
            raise ValueError(f"is_act_and_mul={self.is_act_and_mul} contradicts activation {self.activation.value!r}")
        if self.intermediate_size % self.tp_size != 0:
            raise ValueError(
                f"intermediate_size {self.intermediate_size} cannot be cut for {self.tp_size} tensor-parallel ranks"
            )

    @property
    def tp_size(self) -> int:
        """The number of ranks that share each expert."""
        return self.moe_parallel_config.tp_size

    @property
    def intermediate_size_per_partition(self) -> int:
        """I: intermediate features of an expert on this rank."""
        return self.intermediate_size // self.tp_size

    def expert_sizes(self, group_size: int = -1) -> ExpertSizes:
        """Sizes of the experts of this rank, with weights of ``group_size`` input features per scale."""
        inner, gated = self.intermediate_size_per_partition, bool(self.is_act_and_mul)
        return ExpertSizes(self.num_local_experts, self.hidden_dim, inner, group_size, gated)


@dataclass(frozen=True)
class FusedMoEQuantDesc:
    """Quantization of one operand: its dtype, and the rows and columns that share a scale."""

    dtype: torch.dtype | str | None = None  # None: packed weights, or activations that the op quantizes
    shape: GroupShape | None = None


@dataclass(frozen=True)
class FusedMoEQuantConfig:
    """Quantization of the four operands of a layer: input, intermediate, w13, w2."""

    _a1: FusedMoEQuantDesc
    _a2: FusedMoEQuantDesc
    _w1: FusedMoEQuantDesc
    _w2: FusedMoEQuantDesc

    @property
    def is_per_act_token(self) -> bool:
        """Whether each row of activations has one scale."""
        return self._a1.shape == GroupShape.PER_TOKEN

    @property
    def block_shape(self) -> list[int] | None:
        """[rows, columns] that share a scale; None if the shape is per tensor, per token or not given."""
        shape = self._a1.shape
        return None if shape in (None, GroupShape.PER_TENSOR, GroupShape.PER_TOKEN) else list(shape)

    @property
    def group_size(self) -> int:
        """``group_size`` of the op. Upstream 0.24 passes ``block_shape[1]``: 1 for channelwise weights."""
        return -1 if self._a1.shape is None else self._a1.shape.group_size
