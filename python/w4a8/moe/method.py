"""The quantization method of compressed-tensors W4A8-int8 mixture-of-experts layers.

Mirrors ``CompressedTensorsW4A8Int8MoEMethod`` of vLLM 0.24
(``...compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a8_int8``). Its life:

    create_weights                  int8 parameters that a weight loader fills
    process_weights_after_loading   packs them, frees them, builds the kernel
    apply_monolithic / apply        runs the layer
"""

from __future__ import annotations

from typing import Any

import torch

from w4a8.core.experts import ExpertSizes
from w4a8.core.quant_args import QuantizationStrategy
from w4a8.moe.config import FusedMoEConfig, FusedMoEQuantConfig
from w4a8.moe.modular_kernel import FusedMoEExperts, FusedMoEKernel
from w4a8.moe.oracle.w4a8_int8 import (
    convert_to_w4a8_int8_moe_format,
    make_w4a8_int8_moe_kernel,
    make_w4a8_int8_moe_quant_config,
    select_w4a8_int8_moe_backend,
)
from w4a8.moe.parameters import register_parameters, set_packed
from w4a8.moe.quant_key import QuantKey, int4_weight_key


class FusedMoEMethodBase:
    """What every method of a mixture-of-experts layer has."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        self.moe = moe
        self.moe_quant_config: FusedMoEQuantConfig | None = None
        self.moe_kernel: FusedMoEKernel | None = None
        self.experts_cls: type[FusedMoEExperts] | None = None

    @property
    def is_monolithic(self) -> bool:
        """Whether the layer takes router logits (``apply_monolithic``); known once the experts are selected."""
        if self.moe_kernel is not None:
            return self.moe_kernel.is_monolithic
        return self.experts_cls is not None and self.experts_cls.is_monolithic()


class CompressedTensorsMoEMethod(FusedMoEMethodBase):
    """Base of the methods for compressed-tensors checkpoints."""


class CompressedTensorsW4A8Int8MoEMethod(CompressedTensorsMoEMethod):
    """int4 weights, activations quantized to int8 per token inside the op.

    Weights are loaded as int8 in [-8, 7], scales as float32 (channelwise) or bfloat16 (groups), biases in the dtype of
    the model.
    """

    def __init__(
        self,
        weight_quant: Any,
        input_quant: Any,
        moe: FusedMoEConfig,
        layer_name: str | None = None,
    ) -> None:
        """Checks the scheme and selects the experts.

        Args:
            weight_quant: QuantizationArgs of the weights: 4 bits, symmetric, channelwise (no group size) or in groups.
            input_quant: QuantizationArgs of the activations: dynamic, per token.
            moe: the layer.
            layer_name: of the layer in the model.

        Raises:
            ValueError: another scheme, or a layer that the demanded backend cannot run.
            NotImplementedError: a layer that no backend can run.
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
        weight_key = int4_weight_key(self.group_size, symmetric=getattr(weight_quant, "symmetric", True))
        self._select_experts(weight_key)

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
        """Registers the parameters a weight loader fills (:func:`register_parameters`), and the layer's sizes.

        Args:
            layer: gets the parameters.
            num_experts: E, on this rank.
            hidden_size: H.
            intermediate_size_per_partition: I.
            params_dtype: of the biases.
            **extra_weight_attrs: set on every parameter, ``weight_loader`` among them.

        Raises:
            ValueError: H or I is no multiple of the group size, or odd.
        """
        gated = bool(self.moe.is_act_and_mul)
        sizes = ExpertSizes(num_experts, hidden_size, intermediate_size_per_partition, self.group_size, gated)
        # As upstream. Where a checkpoint has scales that bfloat16 would round, the loader makes the parameter float32.
        scale_dtype = torch.float32 if self.group_size == -1 else torch.bfloat16
        bias_dtype = params_dtype if self.has_bias else None
        register_parameters(layer, sizes, scale_dtype, bias_dtype, extra_weight_attrs)
        layer.w13_in_features = sizes.hidden
        layer.w13_out_features = sizes.w13_rows
        layer.w2_in_features = sizes.intermediate
        layer.w2_out_features = sizes.hidden
        layer.group_size = sizes.group_size

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the loaded weights, frees them, and builds the kernel.

        Peak memory is the raw weights, the packed ones and the temporaries of one matrix: the int8 storage is
        overwritten, so nothing else may share it. Rows of w13 alternate gate and up if ``layer.w13_interleaved``.
        """
        w13_packed, w2_packed, *_ = convert_to_w4a8_int8_moe_format(
            layer.w13_weight,
            layer.w2_weight,
            layer.w13_weight_scale,
            layer.w2_weight_scale,
            self.group_size,
            getattr(layer, "w13_bias", None),
            getattr(layer, "w2_bias", None),
            w13_interleaved=getattr(layer, "w13_interleaved", False),
            in_place=True,
        )
        self.take_packed(layer, w13_packed, w2_packed)

    def take_packed(self, layer: torch.nn.Module, w13_packed: torch.Tensor, w2_packed: torch.Tensor) -> None:
        """Makes packed stacks, uint8 [E, bytes], the weights of a layer, whose raw parameters become empty."""
        set_packed(layer, "w13", w13_packed)
        set_packed(layer, "w2", w2_packed)
        self._make_kernel(layer)

    def _make_kernel(self, layer: torch.nn.Module) -> None:
        quant_config = self.get_fused_moe_quant_config(layer)
        assert quant_config is not None
        assert self.experts_cls is not None
        self.moe_quant_config = quant_config
        self.moe_kernel = make_w4a8_int8_moe_kernel(
            moe_quant_config=quant_config,
            moe_config=self.moe,
            experts_cls=self.experts_cls,
            routing_tables=layer._expert_routing_tables(),
            allow_modular=True,
        )

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        """Quantization of the packed weights: block shape (-1, 1) channelwise, (1, g) for groups."""
        block_shape = (-1, 1) if self.group_size == -1 else (1, self.group_size)
        return make_w4a8_int8_moe_quant_config(block_shape=block_shape)

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routes and runs.

        Args:
            layer: packed weights and routing attributes.
            x: float32, bfloat16 or float16 [T, H].
            router_logits: [T, global experts].
            input_ids: unused; some routers of other methods read the tokens.

        Returns:
            [T, H] in the dtype of x.
        """
        assert self.is_monolithic
        assert self.moe_kernel is not None
        return self.moe_kernel.apply_monolithic(
            x,
            layer.w13_weight_packed,
            layer.w2_weight_packed,
            router_logits,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            num_expert_group=layer.num_expert_group,
            topk_group=layer.topk_group,
            e_score_correction_bias=layer.e_score_correction_bias,
            routed_scaling_factor=layer.routed_scaling_factor,
        )

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: object | None,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs what a router outside has chosen.

        Args:
            layer: packed weights.
            x: float32, bfloat16 or float16 [T, H].
            topk_weights: [T, k].
            topk_ids: int32 or int64 [T, k], global.
            shared_experts: None; they are the caller's.
            shared_experts_input: None.

        Returns:
            [T, H] in the dtype of x.
        """
        assert self.moe_kernel is not None
        return self.moe_kernel.apply(
            x,
            layer.w13_weight_packed,
            layer.w2_weight_packed,
            topk_weights,
            topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
