"""How weights are quantized, as a value that can be compared (upstream: ``...quantization.utils.quant_utils``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch


class _Shape(NamedTuple):
    row: int
    col: int


class GroupShape(_Shape):
    """How many rows and columns of a matrix share one scale; -1 is all of them."""

    PER_TENSOR: ClassVar[GroupShape]
    PER_TOKEN: ClassVar[GroupShape]
    PER_CHANNEL: ClassVar[GroupShape]

    def is_per_tensor(self) -> bool:
        """One scale for the whole matrix."""
        return self == GroupShape.PER_TENSOR

    def is_per_token(self) -> bool:
        """One scale per row of activations."""
        return self == GroupShape.PER_TOKEN

    def is_per_channel(self) -> bool:
        """One scale per output channel of a weight."""
        return self == GroupShape.PER_CHANNEL

    def is_per_group(self) -> bool:
        """One scale per output channel and run of ``col`` input features."""
        return self.row == 1 and self.col >= 1


GroupShape.PER_TENSOR = GroupShape(-1, -1)
GroupShape.PER_TOKEN = GroupShape(1, -1)
GroupShape.PER_CHANNEL = GroupShape(-1, 1)


@dataclass(frozen=True)
class ScaleDesc:
    """Scales of a quantized tensor.

    Attributes:
        dtype: of the scales.
        static: known before the layer runs, as those of weights are.
        group_shape: what shares a scale.
    """

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape

    def __str__(self) -> str:
        named = {
            GroupShape.PER_TENSOR: "per tensor",
            GroupShape.PER_TOKEN: "per token",
            GroupShape.PER_CHANNEL: "per channel",
        }
        shape = named.get(self.group_shape, f"group {tuple(self.group_shape)}")
        return f"{str(self.dtype)[len('torch.') :]}, {'static' if self.static else 'dynamic'}, {shape}"


@dataclass(frozen=True)
class QuantKey:
    """A quantization scheme.

    Attributes:
        dtype: that holds the quantized values; int4 weights travel in int8.
        scale: their scales.
        scale2: scales of the scales, which no scheme here has.
        symmetric: zero is represented by zero.
    """

    dtype: torch.dtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True

    def __str__(self) -> str:
        second = f", scale2({self.scale2})" if self.scale2 is not None else ""
        symmetry = "symmetric" if self.symmetric else "asymmetric"
        return f"QuantKey({str(self.dtype)[len('torch.') :]}, scale({self.scale}){second}, {symmetry})"


def int4_weight_key(group_size: int, scale_dtype: torch.dtype | None = None, symmetric: bool = True) -> QuantKey:
    """The key of int4 weights held as int8.

    Args:
        group_size: input features per scale; -1 is channelwise.
        scale_dtype: float32 for channelwise and bfloat16 for groups if not given.
        symmetric: whether the weights have no zero points.
    """
    channelwise = group_size == -1
    if scale_dtype is None:
        scale_dtype = torch.float32 if channelwise else torch.bfloat16
    shape = GroupShape(-1, 1) if channelwise else GroupShape(1, group_size)
    return QuantKey(torch.int8, ScaleDesc(scale_dtype, static=True, group_shape=shape), symmetric=symmetric)


kInt4W4A8StaticGroup32Sym = int4_weight_key(32)
kInt4W4A8StaticGroup64Sym = int4_weight_key(64)
kInt4W4A8StaticGroup128Sym = int4_weight_key(128)
# Upstream has a fourth group key whose shape the method never makes, and no key for what the method makes for
# channelwise weights. Here both names are the channelwise key.
kInt4W4A8StaticChannelSym = int4_weight_key(-1)
kInt4W4A8StaticGroupSym = kInt4W4A8StaticChannelSym
