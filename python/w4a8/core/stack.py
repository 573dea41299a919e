"""Matrices of one shape for all experts. Each matrix is packed into its place when its last rows are put in."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from w4a8.core.activation_groups import PER_TOKEN
from w4a8.core.blocks import PANEL_ROWS, Blocks
from w4a8.core.float8_scales import multiplied_scales
from w4a8.core.matrix import Matrix, PackedAs, matrix_of, pack_as, unpack_codes
from w4a8.core.memory import fresh_bytes, take_pages
from w4a8.core.scale_types import has_two_levels, kept_scale_dtypes, scale_type_name

_TAKEN_AHEAD = 8 << 20  # bytes, at most an eighth of a stack: the experts of other layers may come first


class _Waiting:
    """A matrix of which some rows have not been put in."""

    def __init__(self, rows: int, like: Matrix, has_bias: bool) -> None:
        """Room for ``rows`` rows of each tensor that ``like`` has.

        Floats become float32, which holds the floats of every file. Super-scales stay float16. On the meta device
        scales and minimums keep their type, which later decides the packed type.
        """
        self._kind = like.kind
        kept = {name: tensor for name, tensor in like.tensors().items() if name not in ("zero_points", "bias")}
        if has_bias:
            kept["bias"] = torch.empty(0)
        shapes = {name: (rows, *tensor.shape[1:]) for name, tensor in kept.items()}
        widened = [name for name, each in kept.items() if each.is_floating_point() and not name.startswith("super_")]
        widened = [name for name in widened if name == "bias" or not like.codes.is_meta]
        types = {name: torch.float32 if name in widened else each.dtype for name, each in kept.items()}
        sizes = {name: torch.empty(0, dtype=dtype).element_size() for name, dtype in types.items()}
        # One allocation, the widest numbers first, so that all tensors are aligned.
        names = sorted(kept, key=lambda name: -sizes[name])
        counts = [math.prod(shapes[name]) * sizes[name] for name in names]
        parts = fresh_bytes(sum(counts), like=like.codes).split(counts)
        self.tensors = {name: part.view(types[name]).view(shapes[name]) for name, part in zip(names, parts)}
        if like.zero_points is not None:
            self.make_zero_points()
        self.clear()

    def make_zero_points(self) -> None:
        """Room for zero points, if there is none: all of them the kind's middle."""
        self.tensors.setdefault("zero_points", self._kind.middles(self.tensors["scales"]))

    def put(self, rows: slice, pieces: dict[str, torch.Tensor]) -> bool:
        """Copies rows. Returns whether the matrix is complete."""
        for name, piece in pieces.items():
            target = self.tensors[name][rows]
            if target.shape != piece.shape:
                raise ValueError(f"{name} have shape {tuple(piece.shape)}, but {tuple(target.shape)} is expected")
            target.copy_(piece)
        if "zero_points" in self.tensors and "zero_points" not in pieces:
            self.tensors["zero_points"][rows] = self._kind.middle
        self.come[rows] = b"\1" * len(pieces["codes"])
        return 0 not in self.come

    def clear(self) -> None:
        """Marks all rows as missing; keeps the memory."""
        self.come = bytearray(len(self.tensors["codes"]))  # 1 for each row that was put in


class MatrixStack:
    """Packed matrices [N, K] of E experts, uint8 [E, bytes], put in by rows, in any order.

    Rows in the form of a file, :class:`Blocks` and matrices of :class:`Words`, are packed at once, unless other rows of
    the matrix wait, parts do not begin at multiples of 16 rows, or the operator does not have the form of the stack.
    Then they are decoded, and the matrix is packed when its last rows are put in. Until then its codes and float32
    scales are copied and kept. All matrices of the stack have the same size, so their scales have one type: the first
    of :func:`kept_scale_dtypes` that holds the scales of all. The stack packs its matrices again when new scales need
    another type, or when the first zero point other than the kind's middle is put in. Earlier matrices then get the
    middle as zero points.
    """

    def __init__(
        self,
        experts: int,
        rows: int,
        columns: int,
        group_size: int,
        bias_dtype: torch.dtype | None = None,
        packed_as: PackedAs | None = None,
        *,
        activation_group: int = PER_TOKEN,
    ) -> None:
        """An empty stack.

        Args:
            experts: E.
            rows, columns: N and K of each matrix.
            group_size: values of k per scale; -1 is channelwise.
            bias_dtype: type of the model, to which biases are rounded; None: no biases.
            packed_as: the form to pack in. None: the form that the matrices need; the first matrix decides the kind of
                all, and whether scales have two levels.
            activation_group: how activations are quantized: -1, 32, 64 or 128. Unused if ``packed_as`` is given.
        """
        self.experts, self.rows, self.columns, self.group_size = experts, rows, columns, group_size
        self.bias_dtype = bias_dtype
        self._scale_columns = 1 if group_size == -1 else columns // group_size
        self._kind = None if packed_as is None else packed_as.kind
        self.packed_as = packed_as or PackedAs(activation_group=activation_group)
        self._is_fixed = packed_as is not None
        self._scale_dtypes: tuple[torch.dtype, ...] = ()  # that hold all scales so far, the best first
        self._zero_points = False
        self._two_levels: bool | None = None  # whether the given matrices have channel scales
        self._keeps_levels = has_two_levels(group_size, columns)
        self._packed: torch.Tensor | None = None
        self._done: set[int] = set()
        # Experts are written from the first to the last: with huge pages, writing an expert also takes memory of its
        # neighbours. An expert that is packed before its turn is held.
        self._written = self._taken = 0
        self._held: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._spare: _Waiting | None = None
        self._come: dict[int, bytearray] = {}  # by expert, of which rows are packed: 1 for each

    def put(self, expert: int, row: int, matrix: Matrix | Blocks, has_bias: bool = True) -> None:
        """Copies ``matrix`` to the rows of an expert from ``row`` on.

        The matrix needs a bias if and only if the stack has biases; ``has_bias`` False puts zeros in its place, because
        another rank adds the bias. If other matrices have zero points, a matrix without zero points gets the middle
        everywhere, which means the same.

        Raises:
            ValueError: a matrix of another shape or kind than the stack, or a complete expert that cannot be packed as
                ``packed_as`` says.
        """
        blocks = isinstance(matrix, Blocks)
        groups = matrix.columns // matrix.type.group if blocks else matrix.scales.shape[1]
        self._agree_on(matrix.form if blocks else matrix, matrix.columns, groups)
        bias = None
        if self.bias_dtype is not None:
            bias = (matrix.bias if has_bias else torch.zeros(matrix.rows)).to(self.bias_dtype)
        matrix = replace(matrix, bias=bias)
        if self._pack_part(expert, row, matrix):
            return
        self._unpack_parts(expert)
        matrix = matrix.matrix()
        if matrix.zero_points is not None and not self._zero_points:
            self._zero_points = True
            for waiting in (*self._waiting.values(), self._spare):
                if waiting is not None:
                    waiting.make_zero_points()
        pieces = matrix.tensors()
        waiting = self._waiting.get(expert)
        is_whole = waiting is None and (row, matrix.rows) == (0, self.rows)
        if is_whole and not matrix.codes.is_meta:  # there, the types of the first matrix stand for all
            self._pack(expert, pieces)
            return
        if waiting is None:
            waiting, self._spare = self._spare or self._new_waiting(matrix), None
            self._waiting[expert] = waiting
        if waiting.put(slice(row, row + matrix.rows), pieces):
            self._pack(expert, dict(waiting.tensors))
            del self._waiting[expert]
            if len(self._done) < self.experts:
                waiting.clear()
                self._spare = waiting

    def _pack_part(self, expert: int, row: int, part: Matrix | Blocks) -> bool:
        """Packs rows as they are in a file into their place; False: they must be decoded."""
        end = row + part.rows
        is_panels = row % PANEL_ROWS == 0 and (end % PANEL_ROWS == 0 or end == self.rows) and end <= self.rows
        if expert in self._waiting or not is_panels or not part.in_file:
            return False
        supers = self.packed_as.super_scales
        dtypes = () if supers else part.scale_dtypes()
        if not dtypes and not supers:
            return False
        needed = self._form_with(expert, dtypes, part.zero_points)
        if isinstance(part, Blocks) and not part.packs_in(needed):
            return False
        if needed != self.packed_as:
            self._repack(needed, {})
        part.pack_into(self._place(expert), row, self.rows, needed)
        come = self._come.setdefault(expert, bytearray(self.rows))
        come[row:end] = b"\1" * part.rows
        if 0 not in come:
            del self._come[expert]
            self._done.add(expert)
        return True

    def _unpack_parts(self, expert: int) -> None:
        """Lets an expert wait of which some rows are packed, for rows that are not packed as they are."""
        come = self._come.pop(expert, None)
        if come is None:
            return
        found = matrix_of(self._place(expert), f"expert {expert}")
        self._waiting[expert] = waiting = self._new_waiting(found)
        waiting.put(slice(None), found.tensors())
        waiting.come = come

    def _agree_on(self, matrix: Matrix, columns: int, groups: int) -> None:
        """Records the kind and tensors of the first matrix, and refuses a matrix with others, or of other sizes."""
        kind, two_levels = matrix.kind, matrix.channel_scales is not None
        if self._kind is None:
            self._kind = kind
            minimums, supers = matrix.minimums is not None, matrix.super_scales is not None
            self.packed_as = replace(self.packed_as, kind=kind, minimums=minimums, super_scales=supers)
        for what, there, expected in (
            ("minimums", matrix.minimums is not None, self.packed_as.minimums),
            ("super-scales", matrix.super_scales is not None, self.packed_as.super_scales),
        ):
            if there != expected:
                given = "has" if there else "has no"
                raise ValueError(f"the matrix {given} {what}, unlike those before: a stack is of one kind")
        if kind != self._kind:
            raise ValueError(f"the codes are {kind}, but {self._kind} is expected: a stack is of one kind")
        kept = two_levels and self._keeps_levels
        if self._two_levels is None:
            self._two_levels = two_levels
            if not self._is_fixed:
                self.packed_as = replace(self.packed_as, channel_scales=kept)
        if two_levels != self._two_levels or kept != self.packed_as.channel_scales:
            found, expected = ("two levels", "one") if two_levels else ("one level", "two")
            raise ValueError(f"scales have {found}, but {expected} is expected: a stack is of one kind")
        found, expected = (columns, groups), (self.columns, self._scale_columns)
        if found != expected:
            raise ValueError(f"the matrix has (columns, groups) {found}, but {expected} are expected")

    def _new_waiting(self, like: Matrix) -> _Waiting:
        waiting = _Waiting(self.rows, like, self.bias_dtype is not None)
        if self._zero_points and like.zero_points is None:
            waiting.make_zero_points()
        return waiting

    def _pack(self, expert: int, tensors: dict[str, torch.Tensor]) -> None:
        if self._two_levels and not self._keeps_levels:
            tensors["scales"] = multiplied_scales(tensors["scales"], tensors.pop("channel_scales"))
        form, dtypes = self.packed_as, ()
        if not form.channel_scales and not form.super_scales:
            both = [tensors[name] for name in ("scales", "minimums") if name in tensors]
            both = torch.cat(both, 1) if len(both) > 1 else both[0]
            dtypes = tuple(kept_scale_dtypes(both, form.kind, self.group_size, self.columns))
        needed = self._form_with(expert, dtypes, tensors.get("zero_points"))
        if needed != form:
            self._repack(needed, tensors)
        self._store(expert, tensors)
        self._done.add(expert)

    def _form_with(self, expert: int, dtypes: tuple[torch.dtype, ...], zero_points: torch.Tensor | None) -> PackedAs:
        """The form that also holds zero points, and scales that ``dtypes`` hold; (): scales of two levels."""
        needed, kind = self.packed_as, self.packed_as.kind
        needs_zeros = not needed.zero_points and kind.needed_zero_points(zero_points) is not None
        if self._is_fixed:
            if dtypes and needed.scale_dtype not in (*dtypes, torch.float32):
                name = scale_type_name(needed.scale_dtype)
                raise ValueError(f"the scales of expert {expert} are no {name} values, but the stack keeps such")
            if needs_zeros:
                raise ValueError(
                    f"the zero points of expert {expert} are not {kind.middle}, but the stack has no zero points"
                )
            return needed
        if dtypes:
            self._scale_dtypes = tuple(dtype for dtype in self._scale_dtypes or dtypes if dtype in dtypes)
            needed = replace(needed, scale_dtype=self._scale_dtypes[0])
        return replace(needed, zero_points=needed.zero_points or needs_zeros)

    def _store(self, expert: int, tensors: dict[str, torch.Tensor]) -> None:
        packed = pack_as(tensors, self.group_size, self.packed_as)
        self._place(expert, packed).copy_(packed)

    def _place(self, expert: int, like: torch.Tensor | None = None) -> torch.Tensor:
        """Where the bytes of an expert's matrix are written."""
        count = self.packed_as.bytes(self.rows, self.columns, self.group_size)
        if self._packed is None:
            self._packed, self._taken = fresh_bytes(self.experts, count, packed=True, like=like), 0
        if expert > self._written:
            if expert not in self._held:
                self._held[expert] = fresh_bytes(count, like=like)
            return self._held[expert]
        if self._taken <= expert and not self._packed.is_meta:
            self._taken = expert + max(1, min(_TAKEN_AHEAD // count, self.experts // 8))
            take_pages(self._packed[expert : self._taken])
        self._written = max(self._written, expert + 1)
        while self._written in self._held:
            self._packed[self._written] = self._held.pop(self._written)
            self._written += 1
        return self._packed[expert]

    def _repack(self, packed_as: PackedAs, like: dict[str, torch.Tensor]) -> None:
        """Packs all packed rows again in another form; on the meta device packs ``like`` in place of each."""
        before, written, held = self._packed, self._written, self._held
        self._packed, self._written, self._held = None, 0, {}
        self.packed_as = packed_as
        for expert in sorted({*self._done, *self._come}):
            matrix = before[expert] if expert < written else held.pop(expert)
            sizes = self.group_size, self.columns, self.rows
            self._store(expert, like if matrix.is_meta else unpack_codes(matrix, *sizes))

    @property
    def is_empty(self) -> bool:
        """Whether no matrix was put in since :meth:`pack`."""
        return not self._done and not self._waiting and not self._come

    def pack(self) -> torch.Tensor:
        """uint8 [E, bytes]. All matrices must be complete. The stack is empty afterwards.

        Raises:
            ValueError: a matrix is incomplete.
        """
        if len(self._done) < self.experts:
            lacking = min(set(range(self.experts)) - self._done)
            raise ValueError(f"the matrix of expert {lacking} is incomplete")
        if self._packed is None:  # a rank without experts
            return torch.empty(0, self.packed_as.bytes(self.rows, self.columns, self.group_size), dtype=torch.uint8)
        packed, self._packed, self._spare = self._packed, None, None
        self._done.clear()
        self._written = 0
        return packed
