"""The quantization method of compressed-tensors W4A8-int8 mixture-of-experts layers.

Mirrors ``CompressedTensorsW4A8Int8MoEMethod`` of vLLM 0.24
(``...compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a8_int8``). The calls, in order:

    create_weights                  makes int8 parameters, which a weight loader fills
    process_weights_after_loading   packs the parameters, frees the raw ones, builds the kernel
    apply_monolithic / apply        runs the layer
"""

from __future__ import annotations

from typing import Any

import torch

from w4a8.core.experts import ExpertSizes
from w4a8.core.quant_args import QuantizationStrategy
from w4a8.core.weight_utils import replace_parameter, set_weight_attrs
from w4a8.moe.config import (
    FusedMoEConfig,
    FusedMoEQuantConfig,
    GroupShape,
    QuantKey,
    int4_weight_key,
    weight_scale_dtype,
)
from w4a8.moe.modular_kernel import FusedMoEExperts, FusedMoEKernel
from w4a8.moe.oracle.w4a8_int8 import (
    convert_to_w4a8_int8_moe_format,
    make_w4a8_int8_moe_kernel,
    make_w4a8_int8_moe_quant_config,
    select_w4a8_int8_moe_backend,
)

# Attributes of a layer that the kernel takes as arguments of the same names: of the layer, and of its router.
_OF_LAYER = ("activation", "global_num_experts", "expert_map", "apply_router_weight_on_input")
_OF_ROUTER = ("num_expert_group", "topk_group", "e_score_correction_bias", "routed_scaling_factor")


class FusedMoEMethodBase:
    """Base of the methods of mixture-of-experts layers."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        self.moe = moe
        self.moe_quant_config: FusedMoEQuantConfig | None = None
        self.moe_kernel: FusedMoEKernel | None = None
        self.experts_cls: type[FusedMoEExperts] | None = None

    @property
    def is_monolithic(self) -> bool:
        """Whether the layer takes router logits (``apply_monolithic``); False until the experts are selected."""
        if self.moe_kernel is not None:
            return self.moe_kernel.is_monolithic
        return self.experts_cls is not None and self.experts_cls.is_monolithic()


class CompressedTensorsMoEMethod(FusedMoEMethodBase):
    """Base of the methods for compressed-tensors checkpoints."""


class CompressedTensorsW4A8Int8MoEMethod(CompressedTensorsMoEMethod):
    """int4 weights; the op quantizes activations to int8 per token.

    Weights are loaded as int8 in [-8, 7], scales as float32 (channelwise) or bfloat16 (groups), biases in the dtype of
    the model.
    """

    def __init__(self, weight_quant: Any, input_quant: Any, moe: FusedMoEConfig, layer_name: str | None = None) -> None:
        """Checks the scheme and selects the experts, with the errors of :func:`select_w4a8_int8_moe_backend`.

        Args:
            weight_quant: QuantizationArgs of the weights: 4 bits, symmetric, channelwise (no group size) or in groups.
            input_quant: QuantizationArgs of the activations: dynamic, per token.
            moe: the layer.
            layer_name: the layer's name in the model.

        Raises:
            ValueError: weights do not have 4 bits, or activations are not dynamic per token.
        """
        super().__init__(moe)
        self.has_bias = moe.has_bias
        self.weight_quant = weight_quant
        self.input_quant = input_quant
        self.layer_name = layer_name
        self.static_input_scales = False
        self.group_size: int = -1 if weight_quant.group_size is None else weight_quant.group_size
        if input_quant.strategy != QuantizationStrategy.TOKEN or not input_quant.dynamic:
            raise ValueError("W4A8-int MoE needs dynamic per-token activation quantization.")
        if weight_quant.num_bits != 4:
            raise ValueError("This method only supports 4-bit weights (num_bits=4).")
        self._select_experts(int4_weight_key(self.group_size, symmetric=getattr(weight_quant, "symmetric", True)))

    def _select_experts(self, weight_key: QuantKey) -> None:
        self.backend, self.experts_cls = select_w4a8_int8_moe_backend(self.moe, weight_key, activation_key=None)

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Gives a layer its sizes, and the parameters that a weight loader fills.

        With E experts on this rank, N = 2 I rows of w13 (I without a gate) and G(K) scales per row:

            w13_weight        int8 [E, N, H]          w2_weight        int8 [E, H, I]
            w13_weight_scale  [E, N, G(H)]            w2_weight_scale  [E, H, G(I)]
            w13_bias          [E, N], params_dtype    w2_bias          [E, H], params_dtype

        ``w13_weight_packed`` and ``w2_weight_packed`` are empty until the weights are packed. ``extra_weight_attrs``,
        such as ``weight_loader``, are set on every parameter.

        Raises:
            ValueError: H or I is no multiple of the group size, or odd.
        """
        gated, group_size = bool(self.moe.is_act_and_mul), self.group_size
        sizes = ExpertSizes(num_experts, hidden_size, intermediate_size_per_partition, group_size, gated)
        problem = sizes.unsupported()
        if problem is not None:
            raise ValueError(f"kernel does not support {problem}")
        # If bfloat16 would round the scales of a checkpoint, the loader makes the parameter float32.
        scale_dtype = weight_scale_dtype(group_size)
        scale_attrs = {"quant_method": "channel" if group_size == -1 else "group", **extra_weight_attrs}
        for name, rows, columns in sizes.stacks:
            scale_shape = (num_experts, rows, sizes.scale_columns(columns))
            tensors = {
                "weight": torch.empty(num_experts, rows, columns, dtype=torch.int8),
                "weight_scale": torch.ones(scale_shape, dtype=scale_dtype),
                "bias": torch.zeros(num_experts, rows, dtype=params_dtype) if self.has_bias else None,
                # An explicit dtype: a model's loader may have changed the default dtype.
                "weight_packed": torch.empty(0, dtype=torch.uint8),
            }
            for suffix, data in tensors.items():
                if data is not None:
                    parameter = torch.nn.Parameter(data, requires_grad=False)
                    layer.register_parameter(f"{name}_{suffix}", parameter)
                    set_weight_attrs(parameter, scale_attrs if suffix == "weight_scale" else extra_weight_attrs)
        layer.w13_in_features, layer.w13_out_features = hidden_size, sizes.w13_rows
        layer.w2_in_features, layer.w2_out_features = intermediate_size_per_partition, hidden_size
        layer.group_size = group_size

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the loaded weights in place, frees the raw weights, and builds the kernel.

        Rows of w13 alternate gate and up if ``layer.w13_interleaved``.
        """
        weights_and_scales = (layer.w13_weight, layer.w2_weight, layer.w13_weight_scale, layer.w2_weight_scale)
        biases = (getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None))
        how = {"w13_interleaved": getattr(layer, "w13_interleaved", False), "in_place": True}
        packed = convert_to_w4a8_int8_moe_format(*weights_and_scales, self.group_size, *biases, **how)
        self.take_packed(layer, *packed[:2])

    def take_packed(self, layer: torch.nn.Module, w13_packed: torch.Tensor, w2_packed: torch.Tensor) -> None:
        """Makes packed stacks, uint8 [E, bytes], the weights of a layer. The layer's raw parameters become empty."""
        for name, packed in (("w13", w13_packed), ("w2", w2_packed)):
            replace_parameter(layer, f"{name}_weight_packed", packed)
            replace_parameter(layer, f"{name}_weight", torch.empty(0, dtype=torch.int8))
            for rest in (f"{name}_weight_scale", f"{name}_bias"):
                if hasattr(layer, rest):
                    replace_parameter(layer, rest, torch.empty(0, dtype=torch.float32))
        self._make_kernel(layer)

    def _make_kernel(self, layer: torch.nn.Module) -> None:
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        assert self.moe_quant_config is not None and self.experts_cls is not None
        args = (self.moe_quant_config, self.moe, self.experts_cls, layer._expert_routing_tables())
        self.moe_kernel = make_w4a8_int8_moe_kernel(*args, allow_modular=True)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        """Quantization of the packed weights: block shape (-1, 1) if channelwise, (1, g) for groups of g."""
        return make_w4a8_int8_moe_quant_config(block_shape=GroupShape.of_weights(self.group_size))

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routes x by router_logits [T, global experts] and runs the experts. Returns [T, H] in the dtype of x.

        x: float32, bfloat16 or float16 [T, H]. ``input_ids`` are unused: routers of other methods read the tokens.
        """
        assert self.is_monolithic and self.moe_kernel is not None
        how = {name: getattr(layer, name) for name in (*_OF_LAYER, *_OF_ROUTER)}
        packed = (layer.w13_weight_packed, layer.w2_weight_packed)
        return self.moe_kernel.apply_monolithic(x, *packed, router_logits, **how)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: object | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs the experts that a router outside has chosen for x. Returns [T, H] in the dtype of x.

        x: float32, bfloat16 or float16 [T, H]. topk_weights: [T, k]. topk_ids: global, int32 or int64 [T, k].
        shared_experts: None; the caller runs shared experts.
        """
        assert self.moe_kernel is not None
        chosen = (layer.w13_weight_packed, layer.w2_weight_packed, topk_weights, topk_ids)
        how = {name: getattr(layer, name) for name in _OF_LAYER}
        return self.moe_kernel.apply(x, *chosen, **how, shared_experts=shared_experts)
