"""The experts of one mixture-of-experts layer as a module (upstream: ``RoutedExperts``), and the loader of its
parameters from the tensors of a checkpoint (upstream: ``FusedMoE.weight_loader``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from w4a8.core.experts import gate_and_up, slice_of_rank
from w4a8.core.nibbles import from_int32
from w4a8.core.routing import RoutingMethodType
from w4a8.core.scale_types import holds_scales
from w4a8.moe.config import FusedMoEConfig
from w4a8.moe.method import CompressedTensorsW4A8Int8MoEMethod
from w4a8.nn.experts import PackedStacks


class MoEWeightLoader:
    """Copies one tensor of one expert into its parameter, cut for tensor parallelism.

    :class:`w4a8.core.packer.ExpertPacker` has the table of places. Scales and biases are cut with the rows and groups
    of their weights. Every rank gets all channel scales of w2. With w13_interleaved the rows of the parameter
    alternate, too: w1 goes to the even rows and w3 to the odd rows. Packed int32 words (``weight_packed``) are
    unpacked. If bfloat16 would round a tensor of scales, the whole parameter of scales becomes float32. Packing then
    finds the smallest type that holds all scales.
    """

    def __init__(
        self,
        tp_rank: int = 0,
        tp_size: int = 1,
        expert_map: torch.Tensor | None = None,
        w13_interleaved: bool = False,
        gated: bool = True,
    ) -> None:
        """A loader for rank ``tp_rank`` of the ``tp_size`` ranks that share each expert.

        ``expert_map`` and ``w13_interleaved``: as in :class:`RoutedExperts`. If not ``gated``, w1 is all of w13.
        """
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self.expert_map = expert_map
        self.w13_interleaved = w13_interleaved
        self.gated = gated

    def local_expert(self, expert_id: int) -> int:
        """Index of a global expert on this rank; -1 if another rank holds the expert."""
        return expert_id if self.expert_map is None else int(self.expert_map[expert_id])

    def __call__(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Loads one tensor.

        Args:
            param: from create_weights: [E, rows, columns] (weights, scales) or [E, rows] (biases).
            loaded_weight: the checkpoint's tensor of one expert: [rows, columns], [rows], or for weights int32
                [rows, ceil(columns / 8)].
            weight_name: for errors.
            shard_id: ``w1``, ``w2``, ``w3``, or ``w13`` for a fused matrix.
            expert_id: global.
            return_success: return whether this rank holds the expert, instead of None.

        Raises:
            ValueError: an unknown shard, or a tensor of the wrong dtype or shape.
        """
        if shard_id not in ("w1", "w2", "w3", "w13"):
            raise ValueError(f"shard_id must be ['w1','w2','w3','w13'] but got {shard_id}.")
        expert = self.local_expert(expert_id)
        if expert == -1:
            return False if return_success else None
        is_scale = param.dtype == torch.bfloat16 and hasattr(param, "quant_method")
        if is_scale and not holds_scales(torch.bfloat16, loaded_weight):
            param.data = param.data.to(torch.float32)
        target = param.data[expert]
        loaded = self._unpacked(param, loaded_weight, weight_name, shard_id)
        if loaded.dim() != target.dim():
            raise ValueError(f"{weight_name}: shape {tuple(loaded.shape)}, but {target.dim()} dimensions are expected")
        for place, part, dim in self._places(param, target, loaded, weight_name, shard_id):
            if dim is not None:
                part = slice_of_rank(part, dim, place.shape[dim], self.tp_rank, self.tp_size, weight_name)
            if place.shape != part.shape:
                shape, expected = tuple(part.shape), tuple(place.shape)
                raise ValueError(f"{weight_name}: shape {shape}, but {expected} is expected")
            place.copy_(part)
        if shard_id == "w2" and target.dim() == 1 and self.tp_rank != 0:
            target.zero_()
        return True if return_success else None

    def _unpacked(self, param: torch.Tensor, loaded: torch.Tensor, weight_name: str, shard_id: str) -> torch.Tensor:
        if param.dtype != torch.int8:
            if not loaded.dtype.is_floating_point:
                raise ValueError(f"{weight_name}: dtype {loaded.dtype}, but a float is expected")
            return loaded
        if loaded.dtype == torch.int32:
            columns = param.shape[-1] * (self.tp_size if shard_id == "w2" else 1)
            shape, words = tuple(loaded.shape), (columns + 7) // 8
            if len(shape) != 2 or shape[-1] != words:
                raise ValueError(f"{weight_name}: shape {shape}, but {columns} columns make {words} words")
            return from_int32(loaded, columns)
        if loaded.dtype != torch.int8:
            raise ValueError(f"{weight_name}: dtype {loaded.dtype}, but int8 or packed int32 is expected")
        return loaded

    def _places(
        self, param: torch.Tensor, target: torch.Tensor, loaded: torch.Tensor, weight_name: str, shard_id: str
    ) -> list[tuple[torch.Tensor, torch.Tensor, int | None]]:
        """Of each part of a tensor: place in the parameter, part, dimension to cut for tensor parallelism or None."""
        if shard_id == "w2":
            whole = target.dim() == 1 or getattr(param, "quant_method", None) == "channel"
            return [(target, loaded, None if whole else 1)]
        if not self.gated and shard_id != "w1":
            raise ValueError(f"{weight_name}: a layer without a gate has w1 and w2, but no {shard_id}")
        if not self.gated or (shard_id == "w13" and self.w13_interleaved):
            # Pairs of interleaved rows stay together: a cut by rows is a cut by features.
            return [(target, loaded, 0)]
        gate, up = (target[mine] for mine in gate_and_up(len(target), self.w13_interleaved))
        if shard_id == "w13":
            half = len(loaded) // 2
            return [(gate, loaded[:half], 0), (up, loaded[half:], 0)]
        return [(gate if shard_id == "w1" else up, loaded, 0)]


class RoutedExperts(PackedStacks):
    """Weights of experts, the settings of routing, and the method that runs the layer.

    A new layer has the int8 parameters of ``create_weights``, each with a ``weight_loader``. Load all parameters and
    call ``process_weights_after_loading()``; then the layer can run. Under tensor or expert parallelism the output is
    this rank's summand: all-reduce the output. The state dict of a packed layer loads into any layer, packed or not,
    and makes the layer packed. Loading checks the shapes of the stacks.
    """

    suffix = "weight_packed"

    def __init__(
        self,
        moe: FusedMoEConfig,
        quant_method: CompressedTensorsW4A8Int8MoEMethod,
        params_dtype: torch.dtype | None = None,
        *,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        e_score_correction_bias: torch.Tensor | None = None,
        routed_scaling_factor: float | None = None,
        w13_interleaved: bool = False,
    ) -> None:
        """Creates the parameters.

        Args:
            moe: the layer.
            quant_method: made for the same ``moe``.
            params_dtype: of the biases; None: ``moe.in_dtype``.
            expert_map: int32 [global experts], local index or -1; None if this rank has all experts.
            apply_router_weight_on_input: the router's weights multiply the input instead of the output.
            num_expert_group: groups of experts to route in; None for no groups.
            topk_group: groups that are kept.
            e_score_correction_bias: float32 [global experts], or None.
            routed_scaling_factor: multiplies the router's weights; None is 1.
            w13_interleaved: the rows of a loaded fused w13 alternate gate and up.
        """
        super().__init__()
        if expert_map is None and moe.num_local_experts != moe.num_experts:
            raise ValueError(f"{moe.num_local_experts} of {moe.num_experts} experts are local: an expert_map is needed")
        if w13_interleaved and not moe.is_act_and_mul:
            raise ValueError(f"w13_interleaved needs a gate, which activation {moe.activation.value!r} does not have")
        self.moe_config = moe
        self.sizes = moe.expert_sizes(quant_method.group_size)
        self.quant_method = quant_method
        self.activation = moe.activation
        self.global_num_experts = moe.num_experts
        self.top_k = moe.experts_per_token
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.num_expert_group = num_expert_group
        self.topk_group = topk_group
        self.routed_scaling_factor = routed_scaling_factor
        self.w13_interleaved = w13_interleaved
        self.register_buffer("expert_map", expert_map, persistent=False)
        self.register_buffer("e_score_correction_bias", e_score_correction_bias)
        tp_rank, tp_size, sizes = moe.moe_parallel_config.tp_rank, moe.tp_size, self.sizes
        self.weight_loader = MoEWeightLoader(tp_rank, tp_size, expert_map, w13_interleaved, sizes.gated)
        args = (sizes.experts, sizes.hidden, sizes.intermediate, params_dtype or moe.in_dtype)
        quant_method.create_weights(self, *args, weight_loader=self.weight_loader)

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        given = [state_dict.get(prefix + name) for name in self.packed_shapes()]
        if all(packed is not None and packed.shape == (0,) for packed in given):  # from a layer that is not packed yet
            torch.nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)
            return
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _make_room(self, given: Mapping[str, torch.Tensor]) -> None:
        own = {name: getattr(self, name) for name in given}
        if len(given) == 2 and any(given[name].shape != own[name].shape for name in given):
            room = (torch.empty_like(packed, device=own[name].device) for name, packed in given.items())
            self.quant_method.take_packed(self, *room)

    @property
    def use_grouped_topk(self) -> bool:
        """Whether experts are routed in groups."""
        return self.num_expert_group is not None

    @property
    def renormalize(self) -> bool:
        """Whether softmax weights are divided by their sum (read by the method of vLLM 0.17)."""
        return self.moe_config.routing_method in (RoutingMethodType.Renormalize, RoutingMethodType.RenormalizeNaive)

    def _expert_routing_tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """None: experts are placed in order, which needs no tables."""
        return None

    def process_weights_after_loading(self) -> None:
        """Packs the loaded weights; afterwards the layer can run."""
        self.quant_method.process_weights_after_loading(self)

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs the layer with the router's logits; if the routing method is custom, with the choice of a router.

        hidden_states and the result are float32, bfloat16 or float16 [..., H]. router_logits: [..., global experts].
        topk_weights: [..., k]. topk_ids: global, int32 or int64 [..., k].
        """
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.quant_method.is_monolithic:
            if router_logits is None:
                raise ValueError("this layer routes by itself: it needs router_logits")
            out = self.quant_method.apply_monolithic(self, x, router_logits.reshape(-1, router_logits.shape[-1]))
        else:
            if topk_weights is None or topk_ids is None:
                raise ValueError("this layer's router is outside: it needs topk_weights and topk_ids")
            k = topk_ids.shape[-1]
            out = self.quant_method.apply(self, x, topk_weights.reshape(-1, k), topk_ids.reshape(-1, k), None, None)
        return out.view(hidden_states.shape)

    def extra_repr(self) -> str:
        """Sizes and activation, for print()."""
        sizes = self.routed_repr(self.global_num_experts, self.top_k)
        return f"{sizes}, activation={self.moe_config.activation.value}"
