"""Embeddings with 4-bit or 8-bit weights, which an output layer may share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from w4a8.core.kind import Kind
from w4a8.nn.linear import W4A8Linear, W8A8Linear
from w4a8.nn.packed import PackedLinear, PackedModule
from w4a8.ops import dequantize_rows, read_header


class PackedEmbedding(PackedModule):
    """Token ids to rows of a packed matrix, unpacked at each call.

    Attributes:
        rows_packed: uint8 [bytes] of dyn_quant_pack_4bit_weight, [num_embeddings, embedding_dim].
        dtype: of the rows; it follows ``.to(dtype)``.
        scale: factor of the rows (Gemma has one), or None.
    """

    rows_packed: torch.Tensor

    def __init__(
        self,
        rows_packed: torch.Tensor,
        num_embeddings: int,
        embedding_dim: int,
        group_size: int,
        dtype: torch.dtype,
        scale: float | None = None,
    ) -> None:
        """Takes a packed matrix.

        Args:
            rows_packed: uint8 [bytes].
            num_embeddings: rows, N.
            embedding_dim: K.
            group_size: values of k per scale.
            dtype: of the rows.
            scale: rounded to ``dtype``.

        Raises:
            ValueError: a matrix that is not of these sizes.
        """
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.group_size = num_embeddings, embedding_dim, group_size
        self.dtype, self.scale = dtype, scale
        self.check_packed("rows_packed", rows_packed)
        self.register_buffer("rows_packed", rows_packed)
        self._outputs: list[PackedLinear] = []  # that share the bytes; in a list they are no children

    def packed_shapes(self) -> dict[str, dict[str, int | str]]:
        """The required fields of the header."""
        return {"rows_packed": {"n": self.num_embeddings, "k": self.embedding_dim, "group": self.group_size}}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Integers [...] to ``dtype`` [..., embedding_dim].

        Raises:
            RuntimeError: an id outside of the rows.
        """
        rows = dequantize_rows(self.rows_packed, input, self.embedding_dim, self.num_embeddings, dtype=self.dtype)
        if self.scale is not None:
            rows *= torch.tensor(self.scale).to(self.dtype)
        return rows

    def output_layer(self) -> PackedLinear:
        """The linear layer of the same matrix. The layer shares the bytes, which are not in the layer's state dict."""
        is_int8 = not self.rows_packed.is_meta and read_header(self.rows_packed)["values"] == Kind.INT8
        layer = W8A8Linear if is_int8 else W4A8Linear
        output = layer(self.rows_packed, self.embedding_dim, self.num_embeddings, self.group_size)
        output.register_buffer("packed", self.rows_packed, persistent=False)
        self._outputs.append(output)
        return output

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        for output in self._outputs:
            output.packed = self.rows_packed

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: object, **kwargs: object) -> PackedEmbedding:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, *args, **kwargs)

    def extra_repr(self) -> str:
        """Sizes and kind, for print()."""
        return f"{self.num_embeddings}, {self.embedding_dim}, group_size={self.group_size}{self.kind_repr()}"
