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

from w4a8.core.quant_args import QuantizationStrategy
from w4a8.core.weight_utils import replace_parameter, set_weight_attrs
from w4a8.moe.config import FusedMoEConfig, FusedMoEQuantConfig
from w4a8.moe.experts.cpu_int4_moe import unsupported_width
from w4a8.moe.modular_kernel import FusedMoEExperts, FusedMoEKernel
from w4a8.moe.oracle.w4a8_int8 import (
    convert_to_w4a8_int8_moe_format,
    make_w4a8_int8_moe_kernel,
    make_w4a8_int8_moe_quant_config,
    select_w4a8_int8_moe_backend,
)
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
        # Set it between create_weights and loading to keep group scales that a checkpoint has in float32.
        self.scale_dtype = weight_key.scale.dtype
        self._select_experts(weight_key)

    def _select_experts(self, weight_key: QuantKey) -> None:
        self.backend, self.experts_cls = select_w4a8_int8_moe_backend(self.moe, weight_key, activation_key=None)

    def _scale_columns(self, in_features: int) -> int:
        return 1 if self.group_size == -1 else in_features // self.group_size

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers the parameters a weight loader fills, and the layer's sizes.

        With E experts, N = 2 I rows of w13 (I without a gate) and G(K) = K / group_size scales per row (1 channelwise):

            w13_weight        int8 [E, N, H]           w2_weight        int8 [E, H, I]
            w13_weight_scale  [E, N, G(H)]             w2_weight_scale  [E, H, G(I)]
            w13_bias          params_dtype [E, N]      w2_bias          params_dtype [E, H]      if the layer has biases

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
        hidden, intermediate = hidden_size, intermediate_size_per_partition
        problem = unsupported_width("hidden size", hidden, self.group_size) or unsupported_width(
            "intermediate size per partition", intermediate, self.group_size
        )
        if problem is not None:
            raise ValueError(f"kernel does not support {problem}")
        rows = 2 * intermediate if self.moe.is_act_and_mul else intermediate

        def register(name: str, data: torch.Tensor, attrs: dict[str, Any]) -> None:
            param = torch.nn.Parameter(data, requires_grad=False)
            set_weight_attrs(param, attrs)
            layer.register_parameter(name, param)

        scale_attrs = {"quant_method": "channel" if self.group_size == -1 else "group", **extra_weight_attrs}
        for name, out_features, in_features in (("w13", rows, hidden), ("w2", hidden, intermediate)):
            weight = torch.empty(num_experts, out_features, in_features, dtype=torch.int8)
            register(f"{name}_weight", weight, extra_weight_attrs)
            scale = torch.ones(num_experts, out_features, self._scale_columns(in_features), dtype=self.scale_dtype)
            register(f"{name}_weight_scale", scale, scale_attrs)
            if self.has_bias:
                bias = torch.zeros(num_experts, out_features, dtype=params_dtype)
                register(f"{name}_bias", bias, extra_weight_attrs)
            # Explicit, because a model's loader may have changed the default dtype.
            register(f"{name}_weight_packed", torch.empty(0, dtype=torch.uint8), extra_weight_attrs)

        layer.w13_in_features = hidden
        layer.w13_out_features = rows
        layer.w2_in_features = intermediate
        layer.w2_out_features = hidden
        layer.group_size = self.group_size

    def _pack(self, layer: torch.nn.Module) -> None:
        """Replaces the loaded parameters by the packed ones; the int8 storage is used up on the way."""
        w13_packed, w2_packed, w13_scale, w2_scale, w13_bias, w2_bias = convert_to_w4a8_int8_moe_format(
            w13_weight=layer.w13_weight,
            w2_weight=layer.w2_weight,
            w13_weight_scale=layer.w13_weight_scale,
            w2_weight_scale=layer.w2_weight_scale,
            group_size=self.group_size,
            w13_bias=layer.w13_bias if self.has_bias else None,
            w2_bias=layer.w2_bias if self.has_bias else None,
            w13_interleaved=getattr(layer, "w13_interleaved", False),
            in_place=True,
            scale_dtype=self.scale_dtype,
        )
        replacements = {
            "w13_weight_packed": w13_packed,
            "w2_weight_packed": w2_packed,
            "w13_weight": torch.empty(0, dtype=torch.int8),
            "w2_weight": torch.empty(0, dtype=torch.int8),
            "w13_weight_scale": w13_scale,
            "w2_weight_scale": w2_scale,
        }
        if self.has_bias:
            replacements.update(w13_bias=w13_bias, w2_bias=w2_bias)
        for name, tensor in replacements.items():
            replace_parameter(layer, name, tensor)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs the loaded weights, frees them, and builds the kernel.

        Peak memory is the raw weights, the packed ones and the temporaries of one matrix: the int8 storage is
        overwritten, so nothing else may share it. Rows of w13 alternate gate and up if ``layer.w13_interleaved``.
        """
        self._pack(layer)
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
