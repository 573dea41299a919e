"""The parameters of a mirrored layer: what a weight loader fills, and how it becomes packed stacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from w4a8.core.experts import ExpertSizes, gate_and_up
from w4a8.core.matrix import pack_codes
from w4a8.core.nibbles import to_nibbles
from w4a8.core.weight_utils import replace_parameter, set_weight_attrs


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

    and ``w13_weight_packed``, ``w2_weight_packed``, empty until :func:`set_packed`.

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


def set_packed(layer: torch.nn.Module, name: str, packed: torch.Tensor) -> None:
    """Makes uint8 [E, bytes] the packed stack ``name`` of a layer, whose raw parameters become empty."""
    replace_parameter(layer, f"{name}_weight_packed", packed)
    replace_parameter(layer, f"{name}_weight", torch.empty(0, dtype=torch.int8))
    for rest in (f"{name}_weight_scale", f"{name}_bias"):
        if hasattr(layer, rest):
            replace_parameter(layer, rest, torch.empty(0, dtype=torch.float32))


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
        for half, source in zip(gate_and_up(rows, False), gate_and_up(rows, interleaved)):
            nibbles[expert, half] = packed[source]
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
        halves = gate_and_up(weights.shape[1], True)
        scales = torch.cat([scales[:, rows] for rows in halves], 1)
        bias = None if bias is None else torch.cat([bias[:, rows] for rows in halves], 1)
    return pack_codes(_nibble_stack(weights, interleaved, in_place), scales, bias, group_size, scale_dtype)
