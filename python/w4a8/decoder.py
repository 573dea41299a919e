"""All layers of a decoder in one call (docs/decoder.md)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch


class Decoder:
    """The layers of a model, its last norm and its output layer, which the operator ``decoder_step`` runs.

    Add the layers in their order. Packed tensors, routers, k_up and v_up are used where they are, if contiguous. Norms,
    biases and other floats are kept as float32. All of this memory stays as long as the decoder, whatever the tensors
    are given in its place; a step is an error once it was resized or moved.

    Args:
        norm: floating [hidden_size], the weight of the last RMS norm.
        head: the packed output layer, uint8; None: a step returns rows of the last norm.
        hidden_size: a multiple of 16.
        eps: of all norms.

    Raises:
        RuntimeError: ``norm``, ``head``, ``hidden_size`` or ``eps`` does not fit; names the argument.
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
            qkv: packed q, k and v; q and k, k and v, or all three may be one matrix. Latent attention: docs/decoder.md.
            out: packed, the output projection of attention.
            gate_up: packed gate and up, or one matrix of both. Empty, without down, if :meth:`add_experts` follows.
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
        """Gives the last layer experts. The layer's gate_up and down, if given, become an expert that all tokens share.

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
        threads: int = 0,
    ) -> torch.Tensor:
        """Runs all layers for new tokens.

        Args:
            hidden: floating [tokens, hidden_size], the input of the first layer.
            positions: int64 [tokens], rows of the tables in ``ropes``.
            caches: one of each layer, uint8 or int8 [pages, kv_heads, bytes]; keys and values are written there.
            tables: block_table, seq_lens and query_start_loc of ``paged_attention``; block_table may be a sequence
                with one table of each layer.
            ropes: tables, float32 [positions, 2 * half]: cosines, then sines.
            rows: int64 [rows], the tokens that get a result; None: all tokens.
            normed: None, or an output, contiguous, of hidden's shape and dtype: the last norm's rows of all tokens.
            threads: number of threads that compute; 0: torch's number. A step makes the team of threads if torch has
                the same number of threads. Without a team the calling thread computes alone.

        Returns:
            [rows, out_features of the head] in hidden's dtype; without a head [rows, hidden_size].

        Raises:
            RuntimeError: a shape, type or number does not fit; names the argument.
        """
        pages, *lengths = tables
        pages = [pages] if isinstance(pages, torch.Tensor) else pages
        return torch.ops.w4a8.decoder_step(
            self._number, hidden, positions, caches, pages, *lengths, ropes, rows, normed, threads
        )


class StepThreads:
    """Torch's number of threads around the steps of one caller: one between steps of up to MOST_ROWS rows.

    Torch's own operators there, like sampling, are small. A second thread of OpenMP gains nothing for them, and if
    another process uses its CPU, each operator waits for milliseconds. The steps keep all threads, on the team.
    """

    MOST_ROWS = 8
    _taken = threading.local()  # .count: how many torch had before, while it has one in the calling thread; else 0

    def __init__(self) -> None:
        self.count = getattr(self._taken, "count", 0) or torch.get_num_threads()
        self._has_team = False

    def before(self, rows: int) -> int:
        """Sets torch's number of threads around a step of ``rows`` rows; returns the step's own number of threads."""
        if self._has_team and rows <= self.MOST_ROWS:
            self._taken.count = self.count
            self._set(1)
        else:
            self.restore()
        self._has_team = True  # the first step makes the team, while torch has all threads
        return self.count

    def restore(self) -> None:
        """Gives torch all threads."""
        self._taken.count = 0
        self._set(self.count)

    @staticmethod
    def _set(count: int) -> None:
        if torch.get_num_threads() != count:
            # vLLM makes torch.set_num_threads do nothing, lest there be threads that are not bound to CPUs. The next
            # step with all threads binds the new ones.
            torch._C.set_num_threads(count)
