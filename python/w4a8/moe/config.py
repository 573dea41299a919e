"""What a mixture-of-experts layer is: sizes, routing, parallelism, quantization.

Mirrors what the W4A8 method, its oracle and its experts read of ``vllm.model_executor.layers.fused_moe.config``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from w4a8.core.activation import MoEActivation, as_activation
from w4a8.core.routing import RoutingMethodType
from w4a8.moe.quant_key import GroupShape


@dataclass(frozen=True)
class FusedMoEParallelConfig:
    """How a layer is spread over processes.

    With ``use_ep`` the experts are spread (``ep_size`` ranks) and tensor parallelism does not cut them: tp_size is 1.

    Attributes:
        tp_size, tp_rank: tensor parallel; each rank holds a slice of every expert.
        pcp_size, pcp_rank: prefill context parallel.
        dp_size, dp_rank: data parallel.
        ep_size, ep_rank: expert parallel; each rank holds some experts whole.
        use_ep: whether expert parallelism is on.
        use_batched_activation_format: tokens arrive sorted into one batch per expert.
    """

    tp_size: int = 1
    pcp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    tp_rank: int = 0
    pcp_rank: int = 0
    dp_rank: int = 0
    ep_rank: int = 0
    use_ep: bool = False
    use_batched_activation_format: bool = False


@dataclass
class FusedMoEConfig:
    """One mixture-of-experts layer.

    Attributes:
        num_experts: of the model (global).
        experts_per_token: k.
        hidden_dim: H.
        intermediate_size: of one expert, before tensor parallelism.
        num_local_experts: held by this rank.
        activation: between w13 and w2.
        device: where it runs.
        routing_method: how the router's logits are read.
        moe_parallel_config: how it is spread.
        in_dtype: of the activations: float32, bfloat16 or float16.
        router_logits_dtype: of the logits, None if unknown.
        moe_backend: ``auto``, or the backend the user demands.
        has_bias: w13 and w2 have biases.
        is_act_and_mul: gated. Follows from the activation if not given; False turns a gated activation into its
            ungated relative.
    """

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int
    num_local_experts: int
    activation: MoEActivation = MoEActivation.SILU
    device: torch.device | str = "cpu"
    routing_method: RoutingMethodType = RoutingMethodType.Renormalize
    moe_parallel_config: FusedMoEParallelConfig = field(default_factory=FusedMoEParallelConfig)
    in_dtype: torch.dtype = torch.bfloat16
    router_logits_dtype: torch.dtype | None = None
    moe_backend: str = "auto"
    has_bias: bool = False
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
        """Ranks that share each expert."""
        return self.moe_parallel_config.tp_size

    @property
    def intermediate_size_per_partition(self) -> int:
        """I: intermediate features of an expert on this rank."""
        return self.intermediate_size // self.tp_size


@dataclass(frozen=True)
class FusedMoEQuantDesc:
    """Quantization of one operand.

    Attributes:
        dtype: it is quantized to; None for packed weights and for activations that are quantized inside the kernel.
        shape: what shares a scale.
        scale, zp, bias: tensors, where they are not packed into the weights.
    """

    dtype: torch.dtype | str | None = None
    shape: GroupShape | None = None
    scale: torch.Tensor | None = None
    zp: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class FusedMoEQuantConfig:
    """Quantization of the four operands of a layer: input, intermediate, w13, w2."""

    _a1: FusedMoEQuantDesc
    _a2: FusedMoEQuantDesc
    _w1: FusedMoEQuantDesc
    _w2: FusedMoEQuantDesc

    @property
    def quant_dtype(self) -> torch.dtype | str | None:
        """Of the activations."""
        return self._a1.dtype

    @property
    def is_per_act_token(self) -> bool:
        """One scale per row of activations, and nothing said of columns."""
        return self._a1.shape == GroupShape.PER_TOKEN

    @property
    def block_shape(self) -> list[int] | None:
        """[rows, columns] that share a scale, or None for per-tensor, per-token and not given."""
        shape = self._a1.shape
        if shape is None or shape in (GroupShape.PER_TENSOR, GroupShape.PER_TOKEN):
            return None
        return [shape.row, shape.col]

    @property
    def group_size(self) -> int:
        """``group_size`` of the op: -1 (channelwise) unless the shape is (1, g).

        Upstream 0.24 hands its op ``block_shape[1]``, which is 1 for channelwise weights.
        """
        block_shape = self.block_shape
        return block_shape[1] if block_shape is not None and block_shape[0] == 1 else -1
