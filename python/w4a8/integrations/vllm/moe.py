"""Layers of experts: vLLM's interface in front of :mod:`w4a8.core`, which packs, routes and runs."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from w4a8.core.activation import MoEActivation
from w4a8.core.experts import ExpertSizes, register_parameters, run_experts, set_packed
from w4a8.cpu import active_kernel
from w4a8.integrations.vllm.loading import ExpertsLoader, is_dummy_load, load_expert, pack_dummy
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.routing import select
from w4a8.integrations.vllm.scheme import describe, group_size

# Of the clamped SwiGLU: limit, slope of the sigmoid, what is added to the up half.
_SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
_CLAMPED = (MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUOAI_UNINTERLEAVE)


def _activation(moe: Any) -> MoEActivation | None:
    try:
        return MoEActivation(moe.activation.value)
    except ValueError:
        return None


def unsupported(moe: Any) -> str | None:
    """Why a layer of vLLM's FusedMoEConfig cannot be run here, or None."""
    parallel, activation = moe.moe_parallel_config, _activation(moe)
    if activation is None:
        return f"activation {moe.activation.value}"
    for name, value in _SWIGLU.items():
        given = getattr(moe, name)
        if given is not None and (activation not in _CLAMPED or given != value):
            return f"{name} {given} with activation {activation.value}"
    if activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE and moe.swiglu_alpha is None:
        return "swiglu_alpha not given with activation swigluoai_uninterleave"
    if moe.is_lora_enabled:
        return "LoRA"
    if parallel.enable_eplb:
        return "expert load balancing"
    for name in ("dp_size", "pcp_size", "sp_size"):
        if getattr(parallel, name) != 1:
            return f"{name} {getattr(parallel, name)}"
    return None


def expert_sizes(moe: Any, group: int) -> ExpertSizes:
    """Of what this rank holds of a layer of vLLM's FusedMoEConfig; ``group`` is -1 if channelwise."""
    return ExpertSizes(
        moe.num_local_experts,
        moe.hidden_dim,
        moe.intermediate_size // moe.moe_parallel_config.tp_size,
        group,
        _activation(moe).is_gated,
    )


class W4A8MoEMethod(FusedMoEMethodBase):
    """int4 experts with activations quantized to int8 per token.

    It routes by itself, because vLLM's router for CPUs does not know every combination that models ask for; only
    layers that select experts by token id are routed by vLLM.
    """

    def __init__(self, weights: Any, format_: str, layer: torch.nn.Module, layer_name: str) -> None:
        """A method for one layer.

        Args:
            weights: QuantizationArgs, checked by ``is_w4a8``.
            format_: ``pack-quantized`` (int32 words) or another, which has one int8 per value.
            layer: vLLM's RoutedExperts, whose ``moe_config`` is not :func:`unsupported`.
            layer_name: of the layer, for errors.

        Raises:
            ValueError: groups that do not fit this rank's part of an expert; names the sizes.
        """
        super().__init__(layer.moe_config)
        self.sizes = expert_sizes(layer.moe_config, group_size(weights))
        self.activation = _activation(layer.moe_config)
        problem = self.sizes.unsupported()
        if problem is not None:
            raise ValueError(f"w4a8: {layer_name}: kernel does not support {problem}")
        self.layer_name = layer_name
        self.words = format_ == "pack-quantized"
        self.routes = not layer.moe_config.has_hash_routing

    @property
    def is_monolithic(self) -> bool:
        """Whether the layer hands over router logits; otherwise vLLM has routed."""
        return self.routes

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers the parameters; with words, ``w13_weight_shape`` and ``w2_weight_shape`` as well."""
        parallel = self.moe.moe_parallel_config
        bias_dtype = params_dtype if self.moe.has_bias else None
        self.sizes = replace(
            self.sizes, experts=num_experts, hidden=hidden_size, intermediate=intermediate_size_per_partition
        )
        layer.w13_interleaved = self.activation == MoEActivation.SWIGLUOAI
        layer.w4a8_loader = ExpertsLoader(
            layer,
            self.sizes,
            bias_dtype,
            tp_rank=parallel.tp_rank,
            tp_size=parallel.tp_size,
            w13_interleaved=layer.w13_interleaved,
        )
        attrs = {"weight_loader": MethodType(load_expert, layer)}
        with torch.device("meta"):  # vLLM knows tensors by parameters; what comes for them goes to the packer
            register_parameters(layer, self.sizes, torch.float32, bias_dtype, attrs)
        if self.words:
            self._register_words(layer, num_experts)
        self.dummy = is_dummy_load()

    def _register_words(self, layer: torch.nn.Module, num_experts: int) -> None:
        """What a checkpoint with int32 words has besides: vLLM's loader looks for parameters of the same names."""
        for stack in ("w13", "w2"):
            # Stays when the rest is packed: the last shapes of other weights come when their layer is complete.
            shape = torch.nn.Parameter(torch.zeros(num_experts, 2, dtype=torch.int64), requires_grad=False)
            shape.weight_loader = MethodType(load_expert, layer)
            layer.register_parameter(f"{stack}_weight_shape", shape)
            # vLLM counts what a layer still lacks, by the parameter that it hands to the loader.
            weight = getattr(layer, f"{stack}_weight")
            getattr(layer, f"{stack}_weight_packed").weight_loader_numel = weight.numel()
            weight.weight_loader_numel = shape.weight_loader_numel = 0

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Takes what was packed while it was loaded; again when vLLM has loaded other weights.

        Raises:
            ValueError: the checkpoint did not have all weights of the layer.
        """
        if layer.w13_weight.numel() == 0:
            return  # packed, and nothing has come since
        stacks = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
        if self.moe.has_bias:
            stacks += ("w13_bias", "w2_bias")
        loader = layer.w4a8_loader
        if self.dummy:
            pack_dummy(loader.packer)
            self.dummy = False
        else:
            missing = loader.missing(stacks)
            if missing:
                raise ValueError(f"w4a8: {self.layer_name}: the checkpoint lacks weights: {', '.join(missing)}")
        for stack, packed in loader.pack().items():
            set_packed(layer, stack, packed)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        logger().info_once(
            "w4a8: runs layers of int4 experts (%s, %s), kernel %s",
            describe(self.sizes.group_size),
            self.activation.value,
            active_kernel(),
        )

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> Any:
        """vLLM only asks whether there is one; what it would say is in the packed weights."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routes and runs: tokens [T, H] and router logits [T, E] to this rank's part of the sum, [T, H]."""
        weights, ids = select(layer, x, router_logits)
        return self.apply(layer, x, weights, ids)

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs: tokens [T, H], weights and global expert ids [T, k] to [T, H]. vLLM adds shared experts itself."""
        return run_experts(
            x,
            topk_weights,
            topk_ids,
            layer.w13_weight_packed,
            layer.w2_weight_packed,
            self.sizes,
            self.activation,
            layer.expert_map,
            layer.apply_router_weight_on_input,
        )
