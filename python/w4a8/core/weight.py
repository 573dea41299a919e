"""Weights in files, before anything is read, and the part of them that a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from w4a8.core.activation_groups import PER_TOKEN
from w4a8.core.matrix import Matrix


@dataclass(frozen=True)
class Weight:
    """A matrix [N, K] in files, or a stack of the matrices of all experts [E, N, K].

    Attributes:
        name: in the files, for errors.
        shape: (N, K) or (E, N, K).
        group: values of k that share a scale; -1 is one scale for each row.
        read: (begin, end) -> pieces of the rows [begin, end), counted through the experts of a stack: number of the
            first row, counted from ``begin``, and a matrix. Rows of one expert are one piece.
        form: weights of equal form can be rows of one packed matrix.
        type_name: the type as the files call it.
        unit: columns that a cut keeps together.
        bias: type of the bias, which :attr:`read` gives with the rows; None: there is none.
        activation_group: -1, 32, 64 or 128 of these files; None: the files say nothing.
        is_fixed: ``activation_group`` holds whatever a user asks for.
        packed: the whole weight as it is packed in the files, uint8 [bytes] or [E, bytes]; None: it is not.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    read: Callable[[int, int], Iterator[tuple[int, Matrix]]]
    form: Hashable = None
    type_name: str = ""
    unit: int = 2
    bias: torch.dtype | None = None
    activation_group: int | None = None
    is_fixed: bool = False
    packed: Callable[[], torch.Tensor] | None = None

    @classmethod
    def of(cls, matrix: Matrix, name: str, group: int) -> Weight:
        """A matrix that has been read as a weight."""
        return cls(
            name,
            (matrix.rows, matrix.columns),
            group,
            lambda begin, end: iter([(0, matrix.with_rows(slice(begin, end)))]),
        )

    @property
    def rows(self) -> int:
        """N."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """K."""
        return self.shape[-1]

    @property
    def experts(self) -> int | None:
        """E of a stack; None of a single matrix."""
        return self.shape[0] if len(self.shape) == 3 else None

    def matrix(self, expert: int = 0) -> Matrix:
        """The whole matrix, or one expert's; read in one piece."""
        [(_, found)] = self.read(expert * self.rows, (expert + 1) * self.rows)
        return found

    def of_rows(self, begin: int, end: int) -> Weight:
        """Rows [begin, end) of a matrix as a weight."""
        return replace(
            self,
            shape=(end - begin, self.columns),
            read=lambda first, last: self.read(begin + first, begin + last),
            packed=None,
        )


@dataclass(frozen=True)
class Floats:
    """A matrix [N, K] in files that is not quantized, beside weights in one layer of an engine.

    Attributes:
        name, type_name, bias: as of a :class:`Weight`.
        rows, columns: N and K.
        read: type -> the whole matrix in this type, and its bias or None.
    """

    name: str
    rows: int
    columns: int
    read: Callable[[torch.dtype], tuple[torch.Tensor, torch.Tensor | None]]
    type_name: str = ""
    bias: torch.dtype | None = None
    form: None = None
    unit: int = 1

    def of_rows(self, begin: int, end: int) -> Floats:
        """As :meth:`Weight.of_rows`."""

        def read(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
            weight, bias = self.read(dtype)
            return weight[begin:end], None if bias is None else bias[begin:end]

        return replace(self, rows=end - begin, read=read)


def wanted_activation_group(weights: Iterable[Weight], asked: int | None) -> int | None:
    """The argument ``asked`` of :func:`resolve_activation_group` for weights that run together.

    What the files say, if nothing else is asked for; per token if that holds for any of the weights.
    """
    found = [each.activation_group if each.is_fixed or asked is None else asked for each in weights]
    return PER_TOKEN if PER_TOKEN in found else found[0]


@dataclass(frozen=True)
class Cut:
    """Rows [begin, end) and columns [first, last) of a weight [N, K]: what one rank holds of it."""

    weight: Weight | Floats
    begin: int
    end: int
    first: int
    last: int

    @classmethod
    def whole(cls, weight: Weight) -> Cut:
        """All of a weight."""
        return cls(weight, 0, weight.rows, 0, weight.columns)

    @classmethod
    def of_rank(cls, weight: Weight | Floats, rows: int, columns: int, rank: int, ranks: int) -> Cut:
        """The part of a rank that holds ``rows`` rows and ``columns`` columns.

        With fewer parts than ranks (heads of keys and values) neighbours hold the same part.

        Raises:
            ValueError: the weight is not made of such parts, or the cut goes through a block.
        """
        cuts = weight.rows // rows if rows else 0
        if cuts < 1 or weight.rows != cuts * rows or ranks % cuts != 0:
            raise ValueError(
                f"{weight.name} has {weight.rows} rows, but parts of {rows} for {ranks} ranks are expected"
            )
        if columns != weight.columns and (columns * ranks != weight.columns or columns % weight.unit != 0):
            kind = f" ({weight.type_name})" if weight.type_name else ""
            raise ValueError(
                f"{columns} of the {weight.columns} columns of {weight.name} for each of {ranks} ranks cut blocks of "
                f"{weight.unit}{kind}"
            )
        begin = rank // (ranks // cuts) * rows
        first = 0 if columns == weight.columns else rank * columns
        return cls(weight, begin, begin + rows, first, first + columns)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.end - self.begin

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.last - self.first

    @property
    def is_whole(self) -> bool:
        """Whether nothing is cut off."""
        return (self.rows, self.columns) == (self.weight.rows, self.weight.columns)

    @property
    def has_bias(self) -> bool:
        """Whether this rank adds the bias: of ranks that split the columns, the first does."""
        return self.weight.bias is not None and self.first == 0

    def read(self) -> Iterator[tuple[int, Matrix]]:
        """As :attr:`Weight.read`, of this part."""
        for row, matrix in self.weight.read(self.begin, self.end):
            yield row, self._columns_of(matrix)

    def zeros(self, rows: int) -> Matrix:
        """Rows of zeros, of the kind of this part."""
        [(_, matrix)] = self.weight.read(0, 1)
        return self._columns_of(matrix).zeros(rows)

    def _columns_of(self, matrix: Matrix) -> Matrix:
        if self.columns != self.weight.columns:
            matrix = matrix.with_columns(self.first, self.last)
        return matrix if self.has_bias else replace(matrix, bias=None)


@dataclass(frozen=True)
class ExpertWeights:
    """The experts of one layer in files.

    Attributes:
        name: of the layer, for errors.
        shards: ``w1`` (gate), ``w3`` (up) and ``w2`` (down), or ``w13`` (gate and up in one) and ``w2``; without a gate
            ``w1`` and ``w2``: for each a stack of all experts, or the weights of the experts in their order.
        interleaved: rows of a ``w13`` alternate gate and up.
    """

    name: str
    shards: Mapping[str, Sequence[Weight]]
    interleaved: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError if weights do not fit each other; names the weight."""
        inner, hidden = self.intermediate, self.hidden
        shapes = {"w13": (2 * inner, hidden), "w2": (hidden, inner)}
        for shard, weights in self.shards.items():
            expected = shapes.get(shard, (inner, hidden))
            for weight in weights:
                if weight.shape[-2:] != expected:
                    raise ValueError(f"{weight.name} is {list(weight.shape[-2:])}, but {list(expected)} is expected")
            found = weights[0].experts or len(weights)
            if found != self.experts:
                raise ValueError(f"{weights[0].name} is of {found} experts, but {self.experts} are expected")

    @property
    def _down(self) -> Weight:
        return self.shards["w2"][0]

    @property
    def experts(self) -> int:
        """E."""
        return self._down.experts or len(self.shards["w2"])

    @property
    def hidden(self) -> int:
        """H."""
        return self._down.rows

    @property
    def intermediate(self) -> int:
        """I, of whole experts."""
        return self._down.columns

    @property
    def is_gated(self) -> bool:
        """Whether experts have a gate."""
        return len(self.shards) == 3 or "w13" in self.shards

    @property
    def bias(self) -> torch.dtype | None:
        """Type of the biases; None: there are none."""
        return self._down.bias

    @property
    def group_sizes(self) -> tuple[int, int]:
        """Values of k that share a scale, of w13 and of w2."""
        first = next(weights[0] for shard, weights in self.shards.items() if shard != "w2")
        return first.group, self._down.group

    @property
    def all(self) -> list[Weight]:
        """The weights of all experts."""
        return [weight for weights in self.shards.values() for weight in weights]

    def matrices(self, expert: int) -> Iterator[tuple[str, Matrix, str]]:
        """The matrices of one expert: shard, matrix, name for errors."""
        for shard, weights in self.shards.items():
            is_stack = weights[0].experts is not None
            weight = weights[0 if is_stack else expert]
            yield shard, weight.matrix(expert if is_stack else 0), weight.name
