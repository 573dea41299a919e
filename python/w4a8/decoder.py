"""All layers of a decoder in one call: docs/decoder.md."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch


class Decoder:
    """The layers of a model, its last norm and its output layer, as the operator ``decoder_step`` runs them.

    Layers are added in their order. Packed tensors are used where they are; norms and other floats are copied as
    float32.

    Args:
        norm: floating [hidden_size], the weight of the last RMS norm.
        head: the packed output layer, uint8; None: steps return rows of the last norm.
        hidden_size: a multiple of 16.
        eps: of all norms.
    """

    def __init__(self, norm: torch.Tensor, head: torch.Tensor | None, *, hidden_size: int, eps: float) -> None:
        with torch.no_grad():
            self._number = torch.ops.w4a8.decoder_create(norm, head, hidden_size=hidden_size, eps=eps)
        self._end = weakref.finalize(self, torch.ops.w4a8.decoder_destroy, self._number)
        self.hidden_size = hidden_size

    def add_layer(
        self,
        qkv: Sequence[torch.Tensor],
        out: torch.Tensor,
        gate_up: Sequence[torch.Tensor] = (),
        down: torch.Tensor | None = None,
        **fields: Any,
    ) -> None:
        """Adds a layer: ``x += attention(norm(x))``, then ``x += mlp(norm(x))``.

        Args:
            qkv: packed q, k and v, or one matrix of neighbours or of the three.
            out: packed, of attention.
            gate_up: packed gate and up, or one matrix of both; none, and no down: :meth:`add_experts` follows.
            down: packed.
            **fields: the other arguments of the operator ``decoder_add_layer`` (docs/decoder.md).

        Raises:
            RuntimeError: sizes do not fit; names the argument.
        """
        with torch.no_grad():
            torch.ops.w4a8.decoder_add_layer(self._number, list(qkv), out, list(gate_up), down, **fields)

    def add_experts(
        self, router: torch.Tensor, router_bias: torch.Tensor | None, w13: torch.Tensor, w2: torch.Tensor, **fields: Any
    ) -> None:
        """Gives the last layer experts. Its gate_up and down, if it has them, are an expert that all tokens share.

        Args:
            router: floating [experts, hidden_size].
            router_bias: floating [experts], added to the logits.
            w13, w2: packed, uint8 [experts, bytes].
            **fields: the other arguments of the operator ``decoder_add_experts``.

        Raises:
            RuntimeError: sizes do not fit; names the argument.
        """
        with torch.no_grad():
            torch.ops.w4a8.decoder_add_experts(self._number, router, router_bias, w13, w2, **fields)

    def step(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[torch.Tensor],
        tables: tuple[torch.Tensor | Sequence[torch.Tensor], torch.Tensor, torch.Tensor],
        ropes: Sequence[torch.Tensor],
        rows: torch.Tensor | None = None,
        normed: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs all layers for new tokens.

        Args:
            hidden: floating [tokens, hidden_size], what enters the first layer.
            positions: int64 [tokens], of ``ropes``.
            caches: of each layer, uint8 [pages, kv_heads, bytes]: the tokens are written to them.
            tables: block_table, seq_lens and query_start_loc, as ``paged_attention`` has them; a sequence of block
                tables is one for each layer.
            ropes: float32 [positions, 2 * half]: cosines, then sines.
            rows: int64, tokens whose results are wanted; None: all.
            normed: contiguous, as hidden; rows of the last norm of all tokens are written to it.

        Returns:
            [rows, out_features of the head] of hidden's type, or [rows, hidden_size] without a head.

        Raises:
            RuntimeError: a shape, type or number does not fit; names the argument.
        """
        pages, *lengths = tables
        pages = [pages] if isinstance(pages, torch.Tensor) else pages
        return torch.ops.w4a8.decoder_step(
            self._number, hidden, positions, caches, pages, *lengths, ropes, rows, normed
        )
