"""Layers of experts: vLLM's interface in front of :mod:`w4a8.core`, which packs, routes and runs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any, Protocol

import torch
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from w4a8.core.activation import GateNumbers, MoEActivation
from w4a8.core.experts import ExpertSizes, run_experts
from w4a8.core.routing import select_experts
from w4a8.core.weight_utils import replace_parameter
from w4a8.formats import Scheme
from w4a8.formats.mxfp4 import MXFP4
from w4a8.integrations.vllm.experts_loader import ExpertsLoader, is_dummy_load, load_expert, loaded_parts
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.products import Product
from w4a8.integrations.vllm.settings import activation_group

# Limit, slope of the sigmoid and addend of the up half, and which of these vLLM lets an activation have.
_SWIGLU = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
_HAS = {
    MoEActivation.SILU: _SWIGLU[:1],
    MoEActivation.SWIGLUSTEP: _SWIGLU[:1],
    MoEActivation.SWIGLUOAI: _SWIGLU,
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: _SWIGLU,
}


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
    for name, given in zip(_SWIGLU, [getattr(moe, name) for name in _SWIGLU]):
        if given is None:
            if activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE:
                return f"{name} not given with activation {activation.value}"
            continue
        good = math.isfinite(given) if name != "swiglu_limit" else given > 0
        if name not in _HAS.get(activation, ()) or not good:
            return f"{name} {given} with activation {activation.value}"
    if not hasattr(moe, "has_hash_routing") and getattr(moe.routing_method, "name", None) == "DeepseekV4":
        return "experts that may be selected by token id"
    if moe.is_lora_enabled:
        return "LoRA"
    if parallel.enable_eplb:
        return "expert load balancing"
    for name in ("dp_size", "pcp_size", "sp_size"):
        if getattr(parallel, name) != 1:
            return f"{name} {getattr(parallel, name)}"
    return None


def allow_no_gate() -> None:
    """Lets vLLM's FusedMoEConfig be made of experts without a gate, which it refuses on CPUs."""
    made = FusedMoEConfig.__post_init__

    @wraps(made)
    def make(self: FusedMoEConfig) -> None:
        try:
            made(self)
        except NotImplementedError:  # its last check
            if self.is_act_and_mul:
                raise

    FusedMoEConfig.__post_init__ = make


class ExpertsFiller(Protocol):
    """Where the weights of a layer of experts come from."""

    def group_sizes(self, intermediate: int, ranks: int) -> tuple[int, int]:
        """Values of k that share a scale, of w13 and of w2; -1 is one scale for each row.

        Raises ValueError if ``ranks`` parts of ``intermediate`` columns cut blocks.
        """

    def add_parameters(self, layer: torch.nn.Module, method: W4A8MoEMethod, params_dtype: torch.dtype) -> None:
        """Registers the parameters of a layer with a method that knows the sizes."""

    def finish(self, layer: torch.nn.Module) -> None:
        """Lets the layer have its two stacks; raises ValueError if weights are missing. May be called again."""


class W4A8MoEMethod(FusedMoEMethodBase):
    """4-bit or 8-bit experts with activations quantized to int8, per token or in groups.

    The method also routes, because vLLM's router for CPUs lacks some combinations. vLLM routes only layers that select
    experts by token id.
    """

    def __init__(self, filler: ExpertsFiller, layer: torch.nn.Module, layer_name: str) -> None:
        """A method for one layer.

        Args:
            filler: where the weights come from.
            layer: vLLM's RoutedExperts, whose ``moe_config`` is not :func:`unsupported`.
            layer_name: for errors.

        Raises:
            ValueError: groups that do not fit this rank's part of an expert; names the sizes.
        """
        super().__init__(layer.moe_config)
        self.filler, self.layer_name = filler, layer_name
        moe, self.activation = layer.moe_config, _activation(layer.moe_config)
        # "silu" with a limit is the clamped form.
        self.numbers = GateNumbers(*(getattr(moe, name) for name in _SWIGLU))
        inner, gated = moe.intermediate_size // moe.moe_parallel_config.tp_size, self.activation.is_gated
        first, second = filler.group_sizes(inner, moe.moe_parallel_config.tp_size)
        self.sizes = ExpertSizes(moe.num_local_experts, moe.hidden_dim, inner, first, gated, second)
        problem = self.sizes.unsupported()
        if problem is not None:
            raise ValueError(f"w4a8: {layer_name}: kernel does not support {problem}")
        self.routes = not getattr(moe, "has_hash_routing", False)  # vLLM has it since 0.31

    @property
    def is_monolithic(self) -> bool:
        """Whether the layer gives router logits; otherwise vLLM has routed."""
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
        """Takes the sizes of this rank's experts, and registers the parameters (upstream's contract).

        Raises:
            ValueError: the activation group does not fit this rank's part of an expert; the weights do not fit.
        """
        self.sizes = replace(
            self.sizes, experts=num_experts, hidden=hidden_size, intermediate=intermediate_size_per_partition
        )
        groups = self.sizes.group_sizes
        layer.w4a8 = [
            Product(f"{stack}_weight_packed", rows, columns, columns if groups[stack] == -1 else groups[stack])
            for stack, rows, columns in self.sizes.stacks
        ]
        layer.w4a8_filler = self.filler
        self.filler.add_parameters(layer, self, params_dtype)

    def groups_of_activations(self, asked: int | None) -> dict[str, int]:
        """As :meth:`ExpertSizes.activation_groups`; an error names the layer."""
        try:
            return self.sizes.activation_groups(asked)
        except ValueError as error:
            raise ValueError(f"w4a8: {self.layer_name}: {error}") from None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """As :meth:`ExpertsFiller.finish`; vLLM calls this again after loading other weights."""
        self.filler.finish(layer)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> Any:
        """vLLM only asks whether there is a config; the packed weights have its content."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routes and runs: tokens [T, H] and router logits [T, E] to this rank's part of the sum, [T, H]."""
        weights, ids = select_experts(
            x,
            router_logits,
            layer.top_k,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
            topk_group=layer.topk_group,
            num_expert_group=layer.num_expert_group,
            custom_routing_function=layer.custom_routing_function,
            scoring_func=layer.scoring_func,
            routed_scaling_factor=layer.routed_scaling_factor,
            e_score_correction_bias=layer.e_score_correction_bias,
        )
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
        packed, on_input = (layer.w13_weight_packed, layer.w2_weight_packed), layer.apply_router_weight_on_input
        how = (self.sizes, self.activation, layer.expert_map, on_input, self.numbers)
        return run_experts(x, topk_weights, topk_ids, *packed, *how)


class ReceivedExperts:
    """A filler of a layer of experts: tensors that vLLM's loaders push."""

    def __init__(self, scheme: Scheme) -> None:
        """Takes the scheme of the matrices."""
        self.scheme = scheme

    def group_sizes(self, intermediate: int, ranks: int) -> tuple[int, int]:
        """As :meth:`ExpertsFiller.group_sizes`."""
        return self.scheme.group_size, self.scheme.group_size

    def add_parameters(self, layer: torch.nn.Module, method: W4A8MoEMethod, params_dtype: torch.dtype) -> None:
        """Registers the parameters for vLLM's loader, and empty packed parameters."""
        self.layer_name, sizes, moe = method.layer_name, method.sizes, method.moe
        parallel, num_experts = moe.moe_parallel_config, sizes.experts
        # vLLM itself cuts stacks of all experts.
        cut = self.scheme.file_format.is_stacked
        layer.w4a8_loader = ExpertsLoader(
            layer,
            sizes,
            self.scheme,
            params_dtype if moe.has_bias else None,
            tp_rank=0 if cut else parallel.tp_rank,
            tp_size=1 if cut else parallel.tp_size,
            w13_interleaved=method.activation == MoEActivation.SWIGLUOAI,
            activation_groups=method.groups_of_activations(self.scheme.wanted_activation_group(activation_group())),
        )
        self._raw: list[str] = []
        for stack, rows, columns in sizes.stacks:
            halves = 2 if stack == "w13" and sizes.gated else 1
            for suffix, part in loaded_parts(self.scheme).items():
                number = part.kind == "global_scale"  # one for each matrix of a file
                shape = (halves,) if number else part.shape(rows, columns, self.scheme.groups(columns))
                counted = self.scheme.requires(part)
                self._register(layer, f"{stack}_{suffix}", (num_experts, *shape), part.dtype, counted)
            for suffix in self.scheme.file_format.unused:
                self._register(layer, f"{stack}_{suffix}", (num_experts, halves), torch.float32, False)
            if moe.has_bias or self.scheme.file_format.spare_biases:
                self._register(layer, f"{stack}_bias", (num_experts, rows), params_dtype, moe.has_bias)
            if self.scheme.states_shape:
                # Stays when the rest is packed: when other weights are loaded, the last shapes come to a complete
                # layer.
                self._register(layer, f"{stack}_weight_shape", (num_experts, 2), torch.int64, False, meta=False)
            elif self.scheme.weight != "weight_packed":
                self._register(layer, f"{stack}_weight_packed", (0,), torch.uint8, True, meta=False)
        self.dummy = is_dummy_load()

    def _register(
        self,
        layer: torch.nn.Module,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        counted: bool,
        meta: bool = True,
    ) -> None:
        """Registers a parameter; on "meta", its tensors go to the packer. vLLM waits for all counted values."""
        data = torch.zeros(shape, dtype=dtype, device="meta" if meta else "cpu")
        param = torch.nn.Parameter(data, requires_grad=False)
        param.weight_loader = MethodType(load_expert, layer)
        if not counted:
            param.weight_loader_numel = 0
        layer.register_parameter(name, param)
        if meta:
            self._raw.append(name)

    def finish(self, layer: torch.nn.Module) -> None:
        """Takes the stacks packed while loading. vLLM calls this again after loading other weights.

        Raises:
            ValueError: the checkpoint did not have all weights of the layer.
        """
        loader = layer.w4a8_loader
        if loader.nothing_new:
            return
        if self.dummy:
            loader.fill_randomly()
            self.dummy = False
        else:
            missing = loader.missing()
            if missing:
                raise ValueError(f"w4a8: {self.layer_name}: the checkpoint lacks weights: {', '.join(missing)}")
        for name in self._raw:
            replace_parameter(layer, name, torch.empty(0, dtype=torch.uint8))
        for stack, packed in loader.pack().items():
            replace_parameter(layer, f"{stack}_weight_packed", packed)


def _nothing(name: str) -> float:
    """Values of a parameter that is not filled: codes of -0, exponents that are no numbers, NaN for biases."""
    if name.endswith("_weight"):
        return 0x88
    return 255 if name.endswith("_weight_scale") else float("nan")


class QuarkGptOssExperts(ReceivedExperts):
    """gpt-oss's experts in AMD Quark's form: with tensor parallelism, without expert parallelism.

    vLLM's model calls no loader for these experts: it copies tensors, cut for the rank, to global indices of parameters
    with the names of vLLM's own method. So the parameters have memory here, and are packed layer by layer after
    loading.
    """

    def __init__(self, scheme: Scheme) -> None:
        """Takes the scheme. vLLM's model gives its tensors the shapes of gpt-oss's own MXFP4."""
        super().__init__(replace(scheme, format=MXFP4.name))

    def add_parameters(self, layer: torch.nn.Module, method: W4A8MoEMethod, params_dtype: torch.dtype) -> None:
        """Registers the parameters that vLLM's model fills."""
        super().add_parameters(layer, method, params_dtype)
        self.experts = method.sizes.experts
        for name in self._raw:
            meta = getattr(layer, name)
            data = torch.full(meta.shape, _nothing(name), dtype=meta.dtype, device="cpu")
            layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
        for stack in ("w13", "w2"):  # of inputs that are FP8 in other engines; nothing here needs it
            scales = torch.zeros(self.experts, dtype=torch.float32, device="cpu")
            layer.register_parameter(f"{stack}_input_scale", torch.nn.Parameter(scales, requires_grad=False))

    def finish(self, layer: torch.nn.Module) -> None:
        """Packs the filled parameters; once.

        Raises:
            ValueError: the checkpoint did not have all weights of the layer.
        """
        if not self.dummy and getattr(layer, self._raw[0]).numel() > 0:
            for name in self._raw:
                nothing = torch.tensor(_nothing(name))
                for expert, part in enumerate(getattr(layer, name).data):
                    if (part.isnan() if nothing.isnan() else part == nothing).all():
                        message = f"the checkpoint lacks weights: {name} of expert {expert}"
                        raise ValueError(f"w4a8: {self.layer_name}: {message}")
            for expert in range(self.experts):
                for name in self._raw:
                    param = getattr(layer, name)
                    shard = f"gpt_oss_{name.partition('_')[0]}"
                    layer.w4a8_loader(param, param.data[expert], name, shard_id=shard, expert_id=expert)
        super().finish(layer)


class W4A8QuarkGptOssMethod(W4A8MoEMethod):
    """The method of these experts."""

    weight_dtype = MXFP4.name  # vLLM's model asks for it


def experts_method(
    filler: ExpertsFiller, layer: torch.nn.Module, prefix: str, method: type[W4A8MoEMethod] = W4A8MoEMethod
) -> W4A8MoEMethod | None:
    """The method of a layer of vLLM's RoutedExperts; None, with a warning, if it cannot be run here."""
    reason = unsupported(layer.moe_config)
    if reason is not None:
        logger().warning_once("w4a8: leaves layers of experts to vLLM, because of %s", reason)
        return None
    return method(filler, layer, prefix)
