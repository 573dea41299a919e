"""One quantized matrix as every reader of a format gives it, and its packing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from w4a8.core.nibbles import from_nibbles


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
) -> torch.Tensor:
    """Packs one matrix, or a stack of them in one call of the operator.

    Args:
        nibbles: uint8 [N, K/2] or [E, N, K/2], each nibble a value + 8, the low one of even k.
        scales: floating point [..., N, groups], one group if channelwise.
        bias: floating point [..., N] or None; kept as float32.
        group_size: values of k per scale; -1 is channelwise.
        scale_dtype: that scales are kept in; :func:`kept_scale_dtype` if not given.

    Returns:
        uint8 [bytes] or [E, bytes].
    """
    rows, columns = nibbles.shape[-2], 2 * nibbles.shape[-1]
    return torch.ops.w4a8.dyn_quant_pack_4bit_weight(
        nibbles,
        scales.to(scale_dtype if scale_dtype is not None else kept_scale_dtype(scales)),
        None if bias is None else bias.detach().to(torch.float32),
        columns if group_size == -1 else group_size,
        columns,
        rows,
    )


@dataclass(frozen=True)
class QuantizedMatrix:
    """Symmetric int4 weights [N, K] with their scales.

    Attributes:
        nibbles: uint8 [N, K/2], each nibble a value + 8, the low one of even k.
        scales: floating point [N, K / group], or [N, 1] if channelwise.
        bias: floating point [N] or None.
    """

    nibbles: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None = None

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
        """Values of k that share a scale; K if channelwise."""
        return self.columns // self.scales.shape[1]

    def with_rows(self, rows: slice) -> QuantizedMatrix:
        """The matrix of some rows (views)."""
        return QuantizedMatrix(self.nibbles[rows], self.scales[rows], None if self.bias is None else self.bias[rows])

    def with_columns(self, begin: int, end: int) -> QuantizedMatrix:
        """The matrix of columns [begin, end), whole groups of them, with the bias as it is (views)."""
        scales = self.scales
        if scales.shape[1] > 1:
            scales = scales[:, begin // self.group : end // self.group]
        return QuantizedMatrix(self.nibbles[:, begin // 2 : end // 2], scales, self.bias)

    def dequantized(self) -> torch.Tensor:
        """float32 [N, K]: what the weights stand for."""
        groups = from_nibbles(self.nibbles).to(torch.float32).unflatten(1, (self.scales.shape[1], -1))
        return (groups * self.scales.to(torch.float32).unsqueeze(-1)).flatten(1)

    def pack(self) -> torch.Tensor:
        """uint8 [bytes], as the operators take it."""
        return pack_nibbles(self.nibbles, self.scales, self.bias, self.group)
