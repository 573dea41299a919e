"""The W4A8-int8 method with the interface of vLLM 0.17 (``...compressed_tensors.compressed_tensors_moe``).

Layers of vLLM 0.17 have ``top_k``, ``renormalize`` and ``use_grouped_topk`` as attributes. The method calls the op
without a kernel object. Construction, parameters and packing are inherited from :mod:`w4a8.moe.method`.
"""

from __future__ import annotations

import torch

from w4a8.core.activation import MoEActivation, as_activation
from w4a8.core.experts import ExpertSizes, run_experts
from w4a8.core.routing import select_experts
from w4a8.moe import method
from w4a8.moe.config import FusedMoEQuantConfig, QuantKey, current_platform


class CompressedTensorsW4A8Int8MoEMethod(method.CompressedTensorsW4A8Int8MoEMethod):
    """The W4A8-int8 method for layers of vLLM 0.17."""

    def _select_experts(self, weight_key: QuantKey) -> None:
        if not current_platform.is_cpu():
            raise ValueError("CompressedTensorsW4A8Int8MoEMethod is CPU-only.")
        super()._select_experts(weight_key)

    @property
    def is_monolithic(self) -> bool:
        """The layer always takes router logits."""
        return True

    def _make_kernel(self, layer: torch.nn.Module) -> None:
        """Does nothing: this method has no kernel object."""

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        """None: this method reads no quantization config."""
        return None

    def apply_monolithic(  # type: ignore[override]
        self, layer: torch.nn.Module, x: torch.Tensor, router_logits: torch.Tensor
    ) -> torch.Tensor:
        """As ``apply_monolithic`` of :mod:`w4a8.moe.method`.

        The layer has top_k, use_grouped_topk, renormalize, activation, expert_map, apply_router_weight_on_input. It may
        have sizes of groups, a scoring function (default: softmax), a correction bias and a scaling factor.

        Raises:
            NotImplementedError: the layer moves experts between ranks (EPLB).
            ValueError: the activation does not exist.
        """
        if getattr(layer, "enable_eplb", False):
            raise NotImplementedError("EPLB not supported for W4A8-int MoE yet.")
        activation = as_activation(layer.activation)
        if not isinstance(activation, MoEActivation):
            raise ValueError(f"Unknown activation '{activation}'")
        topk_weights, topk_ids = select_experts(
            hidden_states=x,
            router_logits=router_logits,
            top_k=layer.top_k,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
            topk_group=getattr(layer, "topk_group", None),
            num_expert_group=getattr(layer, "num_expert_group", None),
            custom_routing_function=getattr(layer, "custom_routing_function", None),
            scoring_func=getattr(layer, "scoring_func", "softmax"),
            routed_scaling_factor=getattr(layer, "routed_scaling_factor", None) or 1.0,
            e_score_correction_bias=getattr(layer, "e_score_correction_bias", None),
        )
        packed, inner = (layer.w13_weight_packed, layer.w2_weight_packed), layer.w2_in_features
        gated = layer.w13_out_features == 2 * inner
        sizes = ExpertSizes(len(packed[0]), layer.w2_out_features, inner, layer.group_size, gated)
        on_input = layer.apply_router_weight_on_input
        return run_experts(x, topk_weights, topk_ids, *packed, sizes, activation, layer.expert_map, on_input)
