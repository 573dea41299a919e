"""The experts of one layer: their sizes, parameters to load into, packing, and the call of the operator.

What the mirror of vLLM, ``w4a8.load`` and the plugin for vLLM have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from w4a8.core.activation import MoEActivation, as_activation, kernel_activation_kind
from w4a8.core.activation_groups import resolve_activation_group
from w4a8.core.matrix import pack_codes
from w4a8.core.nibbles import check_int4_range, to_nibbles
from w4a8.core.weight_utils import replace_parameter, set_weight_attrs


def unsupported_width(name: str, features: int, group_size: int) -> str | None:
    """Why rows of ``features`` codes cannot be packed in groups of ``group_size`` (-1: one), or None."""
    if group_size != -1 and features % group_size != 0:
        return f"{name} {features}, which is not a multiple of the group size {group_size}"
    if features % 2 != 0:
        return f"{name} {features}, which is odd (two int4 values share a byte)"
    return None


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of the experts that a rank holds.

    Attributes:
        experts: E.
        hidden: H.
        intermediate: I, of this rank.
        group_size: input features per scale; -1 is channelwise.
        gated: w13 has a gate half and an up half.
    """

    experts: int
    hidden: int
    intermediate: int
    group_size: int = -1
    gated: bool = True

    @property
    def w13_rows(self) -> int:
        """2 I, or I without a gate."""
        return 2 * self.intermediate if self.gated else self.intermediate

    @property
    def stacks(self) -> tuple[tuple[str, int, int], ...]:
        """(name, rows, columns) of the two stacks."""
        return (("w13", self.w13_rows, self.hidden), ("w2", self.hidden, self.intermediate))

    def scale_columns(self, columns: int) -> int:
        """Scales per row of so many columns."""
        return 1 if self.group_size == -1 else columns // self.group_size

    def activation_groups(self, asked: int | None) -> dict[str, int]:
        """What each of the two stacks is packed with, by name (:func:`resolve_activation_group`).

        Raises:
            ValueError: ``asked`` does not fit one; names it.
        """
        found = {}
        for name, _, columns in self.stacks:
            try:
                found[name] = resolve_activation_group(asked, self.group_size, columns)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return found

    def unsupported(self) -> str | None:
        """Why such experts cannot be packed, in words, or None."""
        names = {"w13": "hidden size", "w2": "intermediate size per partition"}
        found = (unsupported_width(names[stack], columns, self.group_size) for stack, _, columns in self.stacks)
        return next(filter(None, found), None)


def register_parameters(
    layer: torch.nn.Module,
    sizes: ExpertSizes,
    scale_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    attrs: Mapping[str, Any],
) -> None:
    """Gives a layer the parameters that a weight loader fills.

    With N = 2 I rows of w13 (I without a gate) and G(K) scales per row:

        w13_weight        int8 [E, N, H]          w2_weight        int8 [E, H, I]
        w13_weight_scale  [E, N, G(H)]            w2_weight_scale  [E, H, G(I)]
        w13_bias          [E, N]                  w2_bias          [E, H]

    and ``w13_weight_packed``, ``w2_weight_packed``, empty until :func:`pack_parameters`.

    Args:
        layer: gets them.
        sizes: of the experts.
        scale_dtype: of the scales.
        bias_dtype: of the biases; None if there are none.
        attrs: set on every parameter, ``weight_loader`` among them.

    Raises:
        ValueError: H or I is no multiple of the group size, or odd.
    """
    problem = sizes.unsupported()
    if problem is not None:
        raise ValueError(f"kernel does not support {problem}")

    def register(name: str, data: torch.Tensor, more: Mapping[str, Any]) -> None:
        param = torch.nn.Parameter(data, requires_grad=False)
        set_weight_attrs(param, more)
        layer.register_parameter(name, param)

    scale_attrs = {"quant_method": "channel" if sizes.group_size == -1 else "group", **attrs}
    for name, rows, columns in sizes.stacks:
        register(f"{name}_weight", torch.empty(sizes.experts, rows, columns, dtype=torch.int8), attrs)
        scale = torch.ones(sizes.experts, rows, sizes.scale_columns(columns), dtype=scale_dtype)
        register(f"{name}_weight_scale", scale, scale_attrs)
        if bias_dtype is not None:
            register(f"{name}_bias", torch.zeros(sizes.experts, rows, dtype=bias_dtype), attrs)
        # Explicit, because a model's loader may have changed the default dtype.
        register(f"{name}_weight_packed", torch.empty(0, dtype=torch.uint8), attrs)


def pack_parameters(layer: torch.nn.Module, group_size: int, w13_interleaved: bool) -> None:
    """Replaces what was loaded by ``w13_weight_packed`` and ``w2_weight_packed``, uint8 [E, bytes], and empty ones.

    Peak memory is the raw weights, the packed ones and the temporaries of one matrix: the int8 storage is overwritten,
    so nothing else may share it.

    Args:
        layer: with the parameters of :func:`register_parameters`, filled.
        group_size: input features per scale; -1 is channelwise.
        w13_interleaved: rows of w13 (weights, scales, bias) alternate gate and up.

    Raises:
        ValueError: a weight outside [-8, 7] (before anything is overwritten).
    """
    check_int4_range(layer.w13_weight, "w13_weight")
    check_int4_range(layer.w2_weight, "w2_weight")
    for name in ("w13", "w2"):
        packed = pack_stack(
            getattr(layer, f"{name}_weight").data,
            getattr(layer, f"{name}_weight_scale").data,
            getattr(layer, f"{name}_bias", None),
            group_size,
            interleaved=w13_interleaved and name == "w13",
            in_place=True,
        )
        set_packed(layer, name, packed)


def set_packed(layer: torch.nn.Module, name: str, packed: torch.Tensor) -> None:
    """Makes uint8 [E, bytes] the packed stack ``name`` of a layer, whose raw parameters become empty."""
    replace_parameter(layer, f"{name}_weight_packed", packed)
    replace_parameter(layer, f"{name}_weight", torch.empty(0, dtype=torch.int8))
    for rest in (f"{name}_weight_scale", f"{name}_bias"):
        if hasattr(layer, rest):
            replace_parameter(layer, rest, torch.empty(0, dtype=torch.float32))


def _halves(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows g0 u0 g1 u1 ... as g0 g1 ... u0 u1 ... (a copy)."""
    return rows.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _nibble_stack(weights: torch.Tensor, interleaved: bool, in_place: bool) -> torch.Tensor:
    """A stack of int8 matrices [E, N, K] as nibbles [E, N, K / 2], with one matrix of temporaries.

    In place, matrix e goes to bytes [e * N * K / 2, (e + 1) * N * K / 2) of the stack's own storage. That is never
    beyond matrix e itself, so going upwards no matrix is overwritten before it has been read.
    """
    experts, rows, columns = weights.shape
    if in_place:
        if not weights.is_contiguous():
            raise ValueError("weights must be contiguous to be packed in place")
        flat = weights.view(-1)[: weights.numel() // 2].view(torch.uint8)
        nibbles = flat.view(experts, rows, columns // 2)
    else:
        nibbles = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device=weights.device)
    for expert in range(experts):
        packed = to_nibbles(weights[expert])
        if interleaved:
            nibbles[expert, : rows // 2] = packed[0::2]
            nibbles[expert, rows // 2 :] = packed[1::2]
        else:
            nibbles[expert] = packed
    return nibbles


def pack_stack(
    weights: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    group_size: int,
    *,
    interleaved: bool = False,
    in_place: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Packs int8 weights by one call of the operator.

    Args:
        weights: int8 [E, N, K], checked to be in [-8, 7].
        scales: [E, N, groups].
        bias: [E, N] or None.
        group_size: input features per scale; -1 is channelwise.
        interleaved: rows alternate gate and up; they are packed as a gate half and an up half.
        in_place: the contents of ``weights`` are destroyed; they must be contiguous and writable.
        scale_dtype: as in :func:`pack_codes`.

    Returns:
        uint8 [E, bytes].
    """
    if interleaved:
        scales = _halves(scales, 1)
        bias = None if bias is None else _halves(bias, 1)
    return pack_codes(_nibble_stack(weights, interleaved, in_place), scales, bias, group_size, scale_dtype)


def local_expert_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Indices into this rank's experts, -1 for experts of other ranks.

    Args:
        topk_ids: int32 or int64 [T, k], global; -1 stays -1.
        expert_map: int32 or int64 [global experts], local index or -1; None if this rank holds all.

    Returns:
        int64 [T, k]; ``topk_ids`` itself without a map.
    """
    if expert_map is None:
        return topk_ids
    ids = topk_ids.to(torch.long)
    mapped = expert_map.to(torch.long)[ids.clamp(min=0)]
    return torch.where(ids < 0, ids, mapped)


def run_experts(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_packed: torch.Tensor,
    w2_packed: torch.Tensor,
    sizes: ExpertSizes,
    activation: MoEActivation | str,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """Runs what a router has chosen: one call of the operator.

    Args:
        hidden_states: float32, bfloat16 or float16 [T, H].
        topk_weights: [T, k].
        topk_ids: int32 or int64 [T, k], global; -1 is a slot without an expert.
        w13_packed, w2_packed: uint8 [E, bytes].
        sizes: of the experts; ``experts`` is not read.
        activation: between w13 and w2.
        expert_map: [global experts], local index or -1; None if this rank holds all.
        apply_router_weight_on_input: the weights multiply the input instead of the output.

    Returns:
        [T, H] in the dtype of hidden_states.
    """
    return torch.ops.w4a8.dynamic_4bit_int_moe(
        hidden_states,
        local_expert_ids(topk_ids, expert_map),
        topk_weights,
        w13_packed,
        w2_packed,
        sizes.hidden,
        sizes.intermediate,
        sizes.w13_rows,
        sizes.group_size,
        apply_router_weight_on_input,
        kernel_activation_kind(as_activation(activation)),
    )
