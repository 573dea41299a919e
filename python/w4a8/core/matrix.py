"""What every format becomes: one matrix of 4-bit codes; and its packing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from w4a8.core.float8 import multiplied_scales

GROUP_SIZES = "16 or a multiple of 32"


def is_group_size(size: object) -> bool:
    """Whether the operators have groups of so many input features: GROUP_SIZES; -1 is all."""
    return isinstance(size, int) and (size in (-1, 16) or (size > 0 and size % 32 == 0))


def has_two_levels(group_size: int, columns: int) -> bool:
    """Whether the operators have scales of two levels for such groups of so many input features."""
    return group_size == 16 and columns != 16


def kept_scale_dtype(*scales: torch.Tensor) -> torch.dtype:
    """The type that scales are packed in: bfloat16 if that holds every one exactly, else float32.

    Half the bytes to read at no loss; the one rule for linear layers and experts of every format.
    """
    for tensor in scales:
        if tensor.dtype == torch.bfloat16:
            continue
        # One matrix of a stack at a time: the temporaries stay small.
        for part in tensor if tensor.dim() == 3 else (tensor,):
            if not torch.equal(part.to(torch.bfloat16).to(part.dtype), part):
                return torch.float32
    return torch.bfloat16


def pack_nibbles(
    nibbles: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    group_size: int,
    scale_dtype: torch.dtype | None = None,
    zero_points: torch.Tensor | None = None,
    values: str = "int4",
    channel_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Packs one matrix, or a stack of them in one call of the operator.

    Args:
        nibbles: uint8 [N, K/2] or [E, N, K/2], codes, the low nibble of even k.
        scales: floating point [..., N, groups], one group if channelwise; with ``channel_scales`` uint8, bits of
            float8_e4m3fn.
        bias: floating point [..., N] or None; kept as float32.
        group_size: values of k per scale; -1 is channelwise.
        scale_dtype: that scales are kept in; :func:`kept_scale_dtype` if not given. Those of two levels stay what they
            are.
        zero_points: uint8 of the shape of ``scales`` in [0, 15]; None, or 8 everywhere: a code is a value + 8.
        values: ``int4`` or ``e2m1``, what a code is.
        channel_scales: float32 [..., N], by which the scales of a row are multiplied; None if there is one level. Where
            the operators have one level alone (:func:`has_two_levels`) the products are rounded to float32.

    Returns:
        uint8 [bytes] or [E, bytes].
    """
    rows, columns = nibbles.shape[-2], 2 * nibbles.shape[-1]
    group = columns if group_size == -1 else group_size
    if channel_scales is not None and not has_two_levels(group, columns):
        scales, channel_scales = multiplied_scales(scales, channel_scales), None
    if channel_scales is None:
        scales = scales.to(scale_dtype if scale_dtype is not None else kept_scale_dtype(scales))
    return torch.ops.w4a8.dyn_quant_pack_4bit_weight(
        nibbles,
        scales,
        None if bias is None else bias.detach().to(torch.float32),
        group,
        columns,
        rows,
        zero_points=zero_points,
        values=values,
        channel_scales=channel_scales,
    )


@dataclass(frozen=True)
class Matrix4:
    """One matrix of 4-bit codes, N output and K input features, G groups of K/G input features.

        int4   weight[n, k] = (code[n, k] - zero[n, k // g]) * scale[n, k // g]
        e2m1   weight[n, k] = E2M1[code[n, k]] * scale[n, k // g]

    With channel scales a scale is that number times channel_scale[n].

    Attributes:
        nibbles: uint8 [N, K/2], codes; low nibble = even k.
        scales: [N, G], of the type that the checkpoint has; of MXFP4 float32 powers of two. With channel scales uint8,
            bits of float8_e4m3fn, of numbers without a sign.
        zero_points: uint8 [N, G] in [0, 15], or None: 8 everywhere (int4), none (e2m1).
        kind: ``int4`` or ``e2m1``.
        bias: [N], of the type that the checkpoint has, or None.
        channel_scales: float32 [N], or None: 1 everywhere.
    """

    nibbles: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    kind: str
    bias: torch.Tensor | None = None
    channel_scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.kind in ("int4", "e2m1")
        assert self.nibbles.dtype == torch.uint8 and self.nibbles.dim() == self.scales.dim() == 2
        assert self.zero_points is None or self.zero_points.shape == self.scales.shape
        assert (self.scales.dtype == torch.uint8) == (self.channel_scales is not None)
        if self.channel_scales is not None:
            assert self.channel_scales.dtype == torch.float32 and self.channel_scales.shape == self.nibbles.shape[:1]

    @property
    def rows(self) -> int:
        """N."""
        return self.nibbles.shape[0]

    @property
    def columns(self) -> int:
        """K."""
        return 2 * self.nibbles.shape[1]

    @property
    def group(self) -> int:
        """Values of k that share a scale; K if there is one group."""
        return self.columns // self.scales.shape[1]

    def with_rows(self, rows: slice) -> Matrix4:
        """The matrix of some rows (views)."""
        parts = (self.nibbles, self.scales, self.zero_points, self.bias, self.channel_scales)
        nibbles, scales, zeros, bias, channels = (None if part is None else part[rows] for part in parts)
        return Matrix4(nibbles, scales, zeros, self.kind, bias, channels)

    def with_columns(self, begin: int, end: int) -> Matrix4:
        """The matrix of columns [begin, end): whole groups, or whole bytes of one group; the bias stays (views).

        Raises:
            ValueError: the cut is inside a group, or inside a byte.
        """
        scales, zeros = self.scales, self.zero_points
        unit = self.group if scales.shape[1] > 1 else 2
        if begin % unit != 0 or end % unit != 0:
            what = f"groups of {unit}" if scales.shape[1] > 1 else "bytes of two"
            raise ValueError(f"columns [{begin}, {end}) of {self.columns} cut {what}")
        if scales.shape[1] > 1:
            groups = slice(begin // unit, end // unit)
            scales, zeros = scales[:, groups], None if zeros is None else zeros[:, groups]
        nibbles = self.nibbles[:, begin // 2 : end // 2]
        return Matrix4(nibbles, scales, zeros, self.kind, self.bias, self.channel_scales)

    def pack(self, scale_dtype: torch.dtype | None = None) -> torch.Tensor:
        """uint8 [bytes], as the operators take it; ``scale_dtype`` as in :func:`pack_nibbles`."""
        zeros, channels = self.zero_points, self.channel_scales
        return pack_nibbles(self.nibbles, self.scales, self.bias, self.group, scale_dtype, zeros, self.kind, channels)
