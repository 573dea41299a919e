"""All layers of a decoder in one call (docs/decoder.md)."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

_FIELDS_OF_LAYER = {
    "input_norm", "attention_norm", "mlp_input_norm", "mlp_norm", "activation_kind", "residual", "parallel",
    "output_scale", "alpha", "beta",
}  # fmt: skip


class States(NamedTuple):
    """The states of a step's layers with linear attention, which are changed in place (:mod:`w4a8.linear_attention`).

    Attributes:
        conv_states: one of each of these layers, [slots, width - 1, channels].
        states: one of each that has a state beside the convolution's, float32 [slots, heads, rows, columns].
        slots: int32 [B], the slot of each sequence in all of them; one tensor for all layers, or one of each.
        fresh: bool [B]: the sequence begins here.
        out_slots, accepted: of sequences with guessed tokens; as many tensors of out_slots as of slots, or none.
    """

    conv_states: Sequence[torch.Tensor]
    states: Sequence[torch.Tensor]
    slots: Sequence[torch.Tensor]
    fresh: torch.Tensor | None
    out_slots: Sequence[torch.Tensor] = ()
    accepted: torch.Tensor | None = None


class Decoder:
    """The layers of a model, its last norm and its output layer, which the operator ``decoder_step`` runs.

    Add the layers in their order. Packed tensors, routers, k_up and v_up are used where they are, if contiguous. Norms,
    biases and other floats are kept as float32. All of this memory stays as long as the decoder, whatever the tensors
    are given in its place; a step is an error once it was resized or moved.

    Args:
        norm: floating [hidden_size], the weight of the last norm; or [2, hidden_size], weight and bias. None: the last
            layer's rows are not normed.
        head: the packed output layer, uint8; None: a step returns rows of the last norm.
        hidden_size: a multiple of 16.
        eps: of all norms.
        centered: all norms subtract the mean (LayerNorm); False: none does (RMS norm).

    Raises:
        RuntimeError: ``norm``, ``head``, ``hidden_size`` or ``eps`` does not fit; names the argument.
    """

    def __init__(
        self,
        norm: torch.Tensor | None,
        head: torch.Tensor | None,
        *,
        hidden_size: int,
        eps: float,
        centered: bool = False,
    ) -> None:
        with torch.no_grad():
            self._number = torch.ops.w4a8.decoder_create(
                torch.empty(0) if norm is None else norm, head, hidden_size=hidden_size, eps=eps, centered=centered
            )
        self._end = weakref.finalize(self, torch.ops.w4a8.decoder_destroy, self._number)
        self.hidden_size = hidden_size
        self._failures: list[BaseException] = []  # of ``gather``

    def add_layer(
        self,
        qkv: Sequence[torch.Tensor] = (),
        out: torch.Tensor | None = None,
        gate_up: Sequence[torch.Tensor] = (),
        down: torch.Tensor | None = None,
        **fields: Any,
    ) -> None:
        """Adds a layer: ``x += attention(norm(x))``, then ``x += mlp(norm(x))``.

        :meth:`add_linear_attention`, :meth:`add_experts` and :meth:`add_layer_input` may follow. What a layer does not
        get is left out.

        Args:
            qkv: packed q, k and v, or less (``projected``); q and k, k and v, or all three may be one matrix. Latent
                attention: docs/decoder.md. Empty, without out: no attention.
            out: packed, the output projection of attention.
            gate_up: packed gate and up, or one matrix of both. Empty, without down: no MLP.
            down: packed.
            **fields: the other arguments of the operators ``decoder_add_layer`` and ``decoder_add_attention``
                (docs/decoder.md).

        Raises:
            RuntimeError: sizes do not fit; names the argument. The decoder then cannot be used any more.
        """
        of_layer = {name: fields.pop(name) for name in _FIELDS_OF_LAYER & fields.keys()}
        try:
            with torch.no_grad():
                torch.ops.w4a8.decoder_add_layer(self._number, list(gate_up), down, **of_layer)
                if qkv or out is not None or fields:
                    torch.ops.w4a8.decoder_add_attention(self._number, list(qkv), out, **fields)
        except Exception:
            self._end()  # a part of the layer may be there
            raise

    def add_linear_attention(
        self,
        projections: Sequence[torch.Tensor],
        gates: torch.Tensor | None,
        out: torch.Tensor,
        conv_weight: torch.Tensor,
        **fields: Any,
    ) -> None:
        """Gives the last layer linear attention (:mod:`w4a8.linear_attention`).

        Args:
            projections: packed, of what the operator of ``kind`` takes: ``gated_delta`` q, k, v, z, b and
                a; ``state_space`` z, xbc and dt; ``short_conv`` B, C and x. Neighbours may be one matrix. With ``z_up``
                a row that is multiplied with it, in place of z. With ``decay_up`` behind z such a row, then b.
            gates: floating [n, hidden_size], the projections b and a, or b, or dt, which ``projections`` then end
                without.
            out: packed, the output projection.
            conv_weight: floating [channels, width].
            **fields: ``kind``, and the other arguments of the operator ``decoder_add_linear_attention``. With
                ``norm_groups`` 0 the norm of ``state_space`` is one of the heads of all ranks.

        Raises:
            RuntimeError: sizes do not fit; names the argument.
        """
        with torch.no_grad():
            torch.ops.w4a8.decoder_add_linear_attention(
                self._number, list(projections), gates, out, conv_weight, **fields
            )

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

    def set_factors(self, product: str, factors: torch.Tensor) -> None:
        """Multiplies the results of a product of the last layer, with the matrix's bias, by factors of their own.

        Args:
            product: "qkv" or "out" of attention, "projections" or "linear_out" of linear attention, "gate_up" or "down"
                of the MLP.
            factors: floating [columns of the product], kept as float32.

        Raises:
            RuntimeError: the layer has no such product, or a shape or type does not fit; names the argument.
        """
        with torch.no_grad():
            torch.ops.w4a8.decoder_set_factors(self._number, product, factors)

    def add_layer_input(self, gate: torch.Tensor, down: torch.Tensor, **fields: Any) -> None:
        """Gives the last layer numbers of its own for each token: ``x += norm(down(activation(gate(x)) * numbers))``.

        Args:
            gate: packed, or floating [n, hidden_size], n a multiple of 16.
            down: packed, or floating [hidden_size, n].
            **fields: ``norm``, floating [hidden_size] or None, and ``activation_kind``.

        Raises:
            RuntimeError: sizes do not fit; names the argument.
        """
        with torch.no_grad():
            torch.ops.w4a8.decoder_add_layer_input(self._number, gate, down, **fields)

    @staticmethod
    def ranks_bytes(ranks: int) -> int:
        """Bytes that so many ranks share; raises RuntimeError if a decoder cannot have so many."""
        return torch.ops.w4a8.decoder_ranks_bytes(ranks)

    @staticmethod
    def gather_ranks(
        part: torch.Tensor, memory: torch.Tensor, rank: int, ranks: int, timeout: float = 60.0
    ) -> torch.Tensor:
        """The ``part`` of every rank, [ranks, ...]. Each rank calls this with a part of the same type and shape.

        Args:
            part: of any type.
            memory: as of :meth:`set_ranks`, but not that of a decoder.
            rank, ranks, timeout: as of :meth:`set_ranks`.

        Raises:
            RuntimeError: an argument does not fit; another rank has ended or does not come.
        """
        return torch.ops.w4a8.decoder_ranks_gather(part, memory, rank=rank, ranks=ranks, timeout=timeout)

    def set_ranks(
        self,
        memory: torch.Tensor,
        rank: int,
        ranks: int,
        timeout: float = 60.0,
        gather: Callable[[list[torch.Tensor]], None] | None = None,
    ) -> None:
        """Makes the decoder one of several, each in a process of its own with a part of the same model.

        A rank has a part of the heads, of the columns of gate and up and rows of down, or of the experts
        (``expert_map`` of :meth:`add_experts`). Steps add what ``out`` and ``down`` make, of all ranks in their order,
        so that all ranks have the same rows. Every rank runs the same steps. A bias of ``out`` or ``down`` is given to
        one rank alone. What is not cut, such as norms, routers and inputs of layers, is the same on all ranks, which
        share the rows of a prompt out for it. Call this behind the last layer.

        Args:
            memory: uint8, :meth:`ranks_bytes` zeros that the processes share; with ``gather`` each has its own.
            rank: 0..ranks - 1.
            ranks: number of processes, at least 2.
            timeout: seconds that a step waits for another rank. With ``gather`` that one's affair.
            gather: called for each sum, with the parts of all ranks, float32 [n] each, of which it sends this rank's
                to the others and fills theirs. What it raises is the cause of the step's error.

        Raises:
            RuntimeError: an argument does not fit, or the decoder has norms of all heads at once that are layer norms
                or come behind a bias or the rotation. A step raises it if another rank has ended or does not come.
        """
        exchange = 0
        if gather is not None:
            self._exchange = _exchange_by(gather, memory, ranks, self._failures)
            exchange = ctypes.cast(self._exchange, ctypes.c_void_p).value
        torch.ops.w4a8.decoder_set_ranks(
            self._number, memory, rank=rank, ranks=ranks, timeout=timeout, exchange=exchange
        )

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
        states: States | None = None,
        layer_inputs: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Runs all layers for new tokens.

        Args:
            hidden: floating [tokens, hidden_size], the input of the first layer.
            positions: int64 [tokens], rows of the tables in ``ropes``.
            caches: one of each layer with attention, uint8 or int8 [pages, kv_heads, bytes]; keys and values are
                written there. A layer that makes none has the cache of the earlier layer whose keys and values it
                takes.
            tables: block_table, seq_lens and query_start_loc of ``paged_attention``; block_table may be a sequence
                with one table of each layer with attention.
            ropes: tables, float32 [positions, 2 * half]: cosines, then sines.
            rows: int64 [rows], the tokens that get a result; None: all tokens.
            normed: None, or an output, contiguous, of hidden's shape and ``dtype``: the last norm's rows of all tokens.
            threads: number of threads that compute; 0: torch's number. A step makes the team of threads if torch has
                the same number of threads. Without a team the calling thread computes alone.
            states: of the layers with linear attention, if there are any.
            layer_inputs: floating [tokens, numbers], those of all layers that take some, side by side.
            dtype: of the result: float32, bfloat16 or float16; None: hidden's.

        Returns:
            [rows, out_features of the head] of ``dtype``; without a head [rows, hidden_size].

        Raises:
            RuntimeError: a shape, type or number does not fit; names the argument.
        """
        pages, *lengths = tables
        pages = [pages] if isinstance(pages, torch.Tensor) else pages
        states = states or States([], [], [], None)
        try:
            return torch.ops.w4a8.decoder_step(
                self._number, hidden, positions, caches, pages, *lengths, ropes, *states, rows, normed, threads,
                layer_inputs, dtype,
            )  # fmt: skip
        except RuntimeError as error:
            if self._failures:
                raise error from self._failures.pop()
            raise


_Exchange = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def _exchange_by(
    gather: Callable[[list[torch.Tensor]], None], memory: torch.Tensor, ranks: int, failures: list[BaseException]
) -> Any:
    """``gather`` as the operators call it, ``Ranks::Exchange``; what it raises goes to ``failures``."""

    def exchange(first: int, stride: int, count: int) -> int:
        try:
            parts = [memory[at : at + 4 * count] for at in range(first, first + ranks * stride, stride)]
            gather([part.view(torch.float32) for part in parts])
        except BaseException as error:  # it cannot go through the operator
            failures.append(error)
            return 1
        return 0

    return _Exchange(exchange)


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
