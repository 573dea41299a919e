"""Matrices of one shape for all experts, each packed into its place as soon as its last piece is there."""

from __future__ import annotations

import torch

from w4a8.core.matrix import Matrix4, kept_scale_dtype, pack_nibbles
from w4a8.core.memory import fresh_bytes


class _Waiting:
    """The pieces of one matrix, until they are complete."""

    def __init__(self, rows: int, columns: int, scale_columns: int, has_bias: bool) -> None:
        # One block of pages. Scales and biases as float32, which holds those of every file.
        counts = (4 * rows * scale_columns, 4 * rows if has_bias else 0, rows * (columns // 2))
        scales, bias, nibbles = fresh_bytes(sum(counts)).split(counts)
        self._tensors = {
            "nibbles": nibbles.view(rows, columns // 2),
            "scales": scales.view(torch.float32).view(rows, scale_columns),
        }
        if has_bias:
            self._tensors["bias"] = bias.view(torch.float32)
        self.clear()

    def tensor(self, kind: str) -> torch.Tensor | None:
        """All pieces of a kind; None for a bias that there is none of."""
        return self._tensors.get(kind)

    def put(self, kind: str, rows: slice, piece: torch.Tensor) -> bool:
        """Copies a piece to its rows; returns whether the matrix is complete."""
        target = self._tensors[kind][rows]
        if target.shape != piece.shape:
            raise ValueError(f"{kind} have shape {tuple(piece.shape)}, but {tuple(target.shape)} is expected")
        target.copy_(piece)
        self._there[kind][rows] = b"\1" * len(piece)
        return all(0 not in there for there in self._there.values())

    def clear(self) -> None:
        """Nothing is there any more; the memory stays."""
        self._there = {kind: bytearray(len(tensor)) for kind, tensor in self._tensors.items()}  # by row


class MatrixStack:
    """Packed matrices [N, K] of E experts, uint8 [E, bytes], put in piece by piece in any order.

    A matrix is packed when its last piece comes; what is incomplete waits as nibbles and float32 scales. Scales are
    kept as :func:`kept_scale_dtype` says for all of the stack: the first one that bfloat16 would round makes those
    float32 that have been packed already.
    """

    def __init__(
        self,
        experts: int,
        rows: int,
        columns: int,
        group_size: int,
        bias_dtype: torch.dtype | None = None,
        scale_dtype: torch.dtype | None = None,
    ) -> None:
        """An empty stack.

        Args:
            experts: E.
            rows, columns: N and K of each matrix.
            group_size: values of k per scale; -1 is channelwise.
            bias_dtype: type of the model, which biases are rounded to; None if there are none.
            scale_dtype: that scales must be kept in; by exactness if not given.
        """
        self.experts, self.rows, self.columns, self.group_size = experts, rows, columns, group_size
        self.bias_dtype = bias_dtype
        self._scale_columns = 1 if group_size == -1 else columns // group_size
        self.scale_dtype = scale_dtype or torch.bfloat16
        self._may_widen = scale_dtype is None
        self._packed: torch.Tensor | None = None
        self._done: set[int] = set()
        # Experts are written from the first to the last, so that no memory is taken ahead: with huge pages, the first
        # byte of one takes that of its neighbours. What comes too early is held, packed.
        self._written = 0
        self._held: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._spare: _Waiting | None = None

    def put(self, expert: int, row: int, matrix: Matrix4, has_bias: bool = True) -> None:
        """Copies a matrix to rows [row, row + its rows) of an expert; it has a bias if and only if the stack has.

        Args:
            expert: index.
            row: of the stack.
            matrix: of the same columns and groups.
            has_bias: False puts zeros in place of the bias: another rank adds it.

        Raises:
            NotImplementedError: codes that the operators do not have.
            ValueError: a matrix of another shape.
        """
        matrix.check_packable()
        rows = slice(row, row + matrix.rows)
        if self.bias_dtype is not None:
            self.put_piece(
                expert, "bias", rows, matrix.bias if has_bias else torch.zeros(matrix.rows, dtype=torch.float32)
            )
        self.put_piece(expert, "scales", rows, matrix.scales)
        self.put_piece(expert, "nibbles", rows, matrix.nibbles)

    def put_piece(self, expert: int, kind: str, rows: slice, piece: torch.Tensor) -> None:
        """Copies one tensor to its rows of an expert's matrix.

        Args:
            expert: index.
            kind: ``nibbles`` (uint8 [rows, K/2]), ``scales`` ([rows, groups]) or ``bias`` ([rows]).
            rows: of the stack.
            piece: the values.

        Raises:
            ValueError: a piece of another shape, or the last one of scales that ``scale_dtype`` would round.
        """
        waiting = self._waiting.get(expert)
        if waiting is None:
            waiting, self._spare = self._spare or self._new_waiting(), None
            self._waiting[expert] = waiting
        if kind == "bias":
            piece = piece.to(self.bias_dtype)
        if waiting.put(kind, rows, piece):
            self._pack(expert, waiting)
            del self._waiting[expert]
            if len(self._done) < self.experts:
                waiting.clear()
                self._spare = waiting

    def _new_waiting(self) -> _Waiting:
        return _Waiting(self.rows, self.columns, self._scale_columns, self.bias_dtype is not None)

    def _pack(self, expert: int, matrix: _Waiting) -> None:
        scales = matrix.tensor("scales")
        if self.scale_dtype == torch.bfloat16 and kept_scale_dtype(scales) == torch.float32:
            if not self._may_widen:
                raise ValueError(f"the scales of expert {expert} are no bfloat16 values, which they are to be kept in")
            self._widen()
        self._store(expert, matrix.tensor("nibbles"), scales, matrix.tensor("bias"))

    def _store(self, expert: int, nibbles: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        packed = pack_nibbles(nibbles, scales, bias, self.group_size, self.scale_dtype)
        if self._packed is None:
            self._packed = fresh_bytes(self.experts, packed.numel(), huge_pages=True)
        self._done.add(expert)
        if expert > self._written:
            self._held[expert] = fresh_bytes(packed.numel()).copy_(packed)
            return
        self._packed[expert] = packed
        self._written = max(self._written, expert + 1)
        while self._written in self._held:
            self._packed[self._written] = self._held.pop(self._written)
            self._written += 1

    def _widen(self) -> None:
        """Makes all scales float32."""
        before, written, held = self._packed, self._written, self._held
        self._packed, self._written, self._held = None, 0, {}
        self.scale_dtype = torch.float32
        group = self.columns if self.group_size == -1 else self.group_size
        for expert in sorted(self._done):
            matrix = before[expert] if expert < written else held.pop(expert)
            nibbles, scales, bias = torch.ops.w4a8.dyn_quant_unpack_4bit_weight(matrix, group, self.columns, self.rows)
            self._store(expert, nibbles, scales, bias if self.bias_dtype is not None else None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come (since :meth:`pack`)."""
        return not self._done and not self._waiting

    def pack(self) -> torch.Tensor:
        """uint8 [E, bytes], once all matrices are there; the stack is empty afterwards.

        Raises:
            ValueError: a matrix is incomplete.
        """
        if len(self._done) < self.experts:
            lacking = min(set(range(self.experts)) - self._done)
            raise ValueError(f"the matrix of expert {lacking} is incomplete")
        if self._packed is None:  # a rank without experts
            nibbles = torch.empty(0, self.rows, self.columns // 2, dtype=torch.uint8)
            bias = None if self.bias_dtype is None else torch.empty(0, self.rows, dtype=torch.float32)
            scales = torch.empty(0, self.rows, self._scale_columns, dtype=torch.float32)
            return pack_nibbles(nibbles, scales, bias, self.group_size, self.scale_dtype)
        packed, self._packed, self._spare = self._packed, None, None
        self._done.clear()
        self._written = 0
        return packed
