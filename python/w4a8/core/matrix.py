"""A matrix of codes, the form to which all checkpoint formats are read, and its packing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from w4a8.core.activation_groups import PER_TOKEN, resolve_activation_group
from w4a8.core.float8_scales import exponents_of, multiplied_scales, powers_of_two
from w4a8.core.kind import Kind
from w4a8.core.memory import fresh_bytes, take_pages
from w4a8.core.nibbles import Codes, Words, apart
from w4a8.core.scale_types import E8M0, has_two_levels, kept_scale_dtypes, scale_type_name, scale_type_named
from w4a8.ops import dyn_quant_unpack_any_4bit_weight, form_bytes, form_problem, pack_words, read_header

GROUP_SIZES = "16 or a multiple of 32"
# Names of scales of two levels in a header: float8 beside channel scales, int8 beside super-scales.
_TWO_LEVELS, _SUPER = "e5m3", "super"
SUPER = 256  # values of k that share a super-scale


def is_group_size(size: object) -> bool:
    """Whether the operators have groups of ``size`` input features (GROUP_SIZES); -1 is channelwise."""
    if not isinstance(size, int) or size.bit_length() > 32:
        return False
    return size == -1 or not form_problem(size, 2 * size, 1)


@dataclass(frozen=True)
class PackedAs:
    """The form of a packed matrix: two matrices of the same form and shape can stand in each other's place.

    Attributes:
        kind: kind of the codes.
        scale_dtype: type of packed scales, as :func:`pack_codes` takes it.
        zero_points: the packed matrix has room for zero points.
        channel_scales: scales have a second level, for each row; ``scale_dtype`` is then unused.
        minimums: the packed matrix has minimums.
        super_scales: scales and minimums have a second level, for 256 values of k; ``scale_dtype`` is then unused.
        activation_group: how activations are quantized for the matrix: -1, 32, 64 or 128.
    """

    kind: Kind = Kind.INT4
    scale_dtype: torch.dtype = torch.bfloat16
    zero_points: bool = False
    channel_scales: bool = False
    activation_group: int = PER_TOKEN
    minimums: bool = False
    super_scales: bool = False

    @classmethod
    def of_header(cls, header: Mapping[str, object]) -> PackedAs:
        """The form that a header (:class:`w4a8.PackedHeader`) states."""
        name = header["scale_dtype"]
        dtype = torch.float32 if name in (_TWO_LEVELS, _SUPER) else scale_type_named(name)
        return cls(
            Kind(header["values"]),
            dtype,
            header["has_zero_points"],
            name == _TWO_LEVELS,
            header["activation_group"],
            header["has_minimums"],
            name == _SUPER,
        )

    def problem(self, rows: int, columns: int, group_size: int) -> str:
        """Why the operators cannot run matrices [rows, columns] of this form (:func:`form_problem`), or ""."""
        return form_problem(*self._sizes(rows, columns, group_size), **self._how())

    def bytes(self, rows: int, columns: int, group_size: int) -> int:
        """Bytes of a packed matrix [rows, columns] of this form."""
        return form_bytes(*self._sizes(rows, columns, group_size), **self._how())

    def _sizes(self, rows: int, columns: int, group_size: int) -> tuple[int, int, int]:
        return columns if group_size == -1 else group_size, columns, rows

    def _how(self) -> dict[str, Any]:
        one_level = scale_type_name(self.scale_dtype)
        return {
            "values": self.kind.value,
            "zero_points": self.zero_points,
            "minimums": self.minimums,
            "scale_dtype": _TWO_LEVELS if self.channel_scales else _SUPER if self.super_scales else one_level,
            "activation_group": self.activation_group,
        }

    def header(self, group_size: int, columns: int) -> dict[str, object]:
        """The fields of the header of a matrix in this form that :func:`w4a8.core.words.weights_in_words` reads."""
        return {
            "values": self.kind.value,
            "scale_dtype": self._how()["scale_dtype"],
            "group": columns if group_size == -1 else group_size,
            "k": columns,
            "has_zero_points": self.zero_points,
            "has_minimums": self.minimums,
        }


def pack_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    group_size: int,
    scale_dtype: torch.dtype | None = None,
    zero_points: torch.Tensor | None = None,
    kind: Kind = Kind.INT4,
    channel_scales: torch.Tensor | None = None,
    activation_group: int = PER_TOKEN,
    minimums: torch.Tensor | None = None,
    super_scales: torch.Tensor | None = None,
    super_minimums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Packs one matrix, or a stack of them in one call of the operator.

    Args:
        codes: uint8 [N, K/2] or [E, N, K/2], low nibble = even k; codes of 6 and 8 bits [..., N, K].
        scales: floating point [..., N, groups], one group if channelwise; with ``channel_scales`` uint8, bits of
            float8_e4m3fn.
        bias: floating point [..., N] or None; kept as float32.
        group_size: values of k per scale; -1 is channelwise.
        scale_dtype: type of packed scales: float32, bfloat16, float16 or :data:`E8M0`; None: the first of
            :func:`kept_scale_dtypes`. Unused for scales of two levels.
        zero_points: uint8 of the shape of ``scales``, in the range of codes; None: the kind's middle everywhere.
        kind: kind of the codes.
        channel_scales: float32 [..., N], factors of the scales of each row, or None. Where the operators have no
            channel scales (:func:`has_two_levels`), scales become the products, rounded to float32.
        activation_group: how activations are quantized for the matrix: -1, 32, 64 or 128.
        minimums: of the shape of ``scales``, subtracted from weights, or None; floating point, or int8 beside
            ``super_scales``.
        super_scales: float16 [..., N, K/256], factors of ``scales``, which are then int8; or None.
        super_minimums: the same for ``minimums``.

    Returns:
        uint8 [bytes] or [E, bytes].
    """
    rows, columns = codes.shape[-2], kind.codes_in_a_byte * codes.shape[-1]
    group = columns if group_size == -1 else group_size
    if channel_scales is not None and not has_two_levels(group, columns):
        scales, channel_scales = multiplied_scales(scales, channel_scales), None
    if channel_scales is None and super_scales is None:
        if scale_dtype is None:
            both = scales if minimums is None else torch.cat((scales, minimums), -1)
            scale_dtype = next(kept_scale_dtypes(both, kind, group, columns))
        scales = exponents_of(scales) if scale_dtype == E8M0 else scales.to(scale_dtype)
        minimums = None if minimums is None else minimums.to(scale_dtype)
    bias = None if bias is None else bias.detach()
    more = {"zero_points": zero_points, "values": kind.value, "channel_scales": channel_scales}
    more |= {"minimums": minimums, "super_scales": super_scales, "super_minimums": super_minimums}
    op = torch.ops.w4a8.dyn_quant_pack_4bit_weight
    return op(codes, scales, bias, group, columns, rows, **more, activation_group=activation_group)


def pack_as(tensors: Mapping[str, torch.Tensor | None], group_size: int, packed_as: PackedAs) -> torch.Tensor:
    """uint8 [bytes] of one matrix, or [E, bytes] of a stack, packed in a given form.

    Args:
        tensors: ``codes``, ``scales``, and the optional tensors of :class:`Matrix`. A form without room for zero points
            leaves them out. A form with room takes the kind's middle where none are given.
        group_size: values of k per scale; -1 is channelwise.
        packed_as: the form.
    """
    given = dict(tensors)
    zeros = given.pop("zero_points", None)
    if not packed_as.zero_points:
        zeros = None
    elif zeros is None:
        zeros = packed_as.kind.middles(given["scales"])
    return pack_codes(
        **{"bias": None, **given},
        group_size=group_size,
        scale_dtype=packed_as.scale_dtype,
        zero_points=zeros,
        kind=packed_as.kind,
        activation_group=packed_as.activation_group,
    )


def unpack_codes(packed: torch.Tensor, group_size: int, columns: int, rows: int) -> dict[str, torch.Tensor]:
    """The inverse of :func:`pack_codes`: the tensor arguments that the matrix has, by name.

    Args:
        packed: uint8 [bytes] or [E, bytes].
        group_size: values of k per scale; -1 is channelwise.
        columns: K.
        rows: N.

    Returns:
        ``codes``; ``scales``, floating point (e8m0 as float32), uint8 beside ``channel_scales`` or int8 beside
        ``super_scales``; the others if the matrix has them. Only the header has ``activation_group``.
    """
    group = columns if group_size == -1 else group_size
    found = dyn_quant_unpack_any_4bit_weight(packed, group, columns, rows)._asdict()
    del found["values"], found["activation_group"]
    found["codes"], found["scales"] = found.pop("weights"), found.pop("scales_zeros")
    tensors = {name: part for name, part in found.items() if part.numel() != 0}
    if tensors["scales"].dtype == torch.uint8 and "channel_scales" not in tensors:
        tensors["scales"] = powers_of_two(tensors["scales"])
    return tensors


@dataclass(frozen=True)
class Matrix:
    """One matrix of codes: N output features, K input features, G groups of g = K/G input features.

        int4, int8   weight[n, k] = (code[n, k] - zero[n, k // g]) * scale[n, k // g]
        int6         as int4, with 32 as the zero point everywhere
        e2m1, iq4    weight[n, k] = kind.table[code[n, k]] * scale[n, k // g]
        with minimums, where c is code[n, k], minus 128 for int8, minus 32 for int6:
                     weight[n, k] = c * scale[n, k // g] - minimum[n, k // g]

    With channel scales, scale means scale[n, k // g] * channel_scale[n]. With super-scales, scale means
    scale[n, k // g] * super_scale[n, k // 256], and minimum means minimum[n, k // g] * super_minimum[n, k // 256].

    Attributes:
        codes: uint8 [N, K/2], low nibble = even k; codes of 6 and 8 bits [N, K]. :class:`Words` are not decoded.
        scales: [N, G], of the checkpoint's type; MXFP4: float32 powers of two. With channel scales uint8, bits of
            float8_e4m3fn without a sign; with super-scales int8.
        zero_points: uint8 [N, G], in the range of codes. None: the kind's middle everywhere (integers), or no zero
            points (e2m1, iq4).
        kind: kind of the codes.
        bias: [N], of the checkpoint's type, or None.
        channel_scales: float32 [N], or None: 1 everywhere.
        minimums: [N, G], of the type of the scales, or None: 0 everywhere. Only for integers without zero points.
        super_scales: float16 [N, K/256], or None: 1 everywhere.
        super_minimums: the same for minimums.
    """

    codes: Codes
    scales: torch.Tensor
    zero_points: torch.Tensor | None = None
    kind: Kind = Kind.INT4
    bias: torch.Tensor | None = None
    channel_scales: torch.Tensor | None = None
    minimums: torch.Tensor | None = None
    super_scales: torch.Tensor | None = None
    super_minimums: torch.Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Kind(self.kind))
        assert self.minimums is None or (self.minimums.dtype, self.minimums.shape) == (
            self.scales.dtype,
            self.scales.shape,
        )
        assert (self.scales.dtype == torch.int8) == (self.super_scales is not None)
        assert (self.super_minimums is not None) == (self.super_scales is not None and self.minimums is not None)
        assert self.codes.dtype == torch.uint8 and len(self.codes.shape) == self.scales.dim() == 2
        assert self.zero_points is None or self.zero_points.shape == self.scales.shape
        assert (self.scales.dtype == torch.uint8) == (self.channel_scales is not None)
        if self.channel_scales is not None:
            assert self.channel_scales.dtype == torch.float32 and self.channel_scales.shape == self.codes.shape[:1]

    @property
    def rows(self) -> int:
        """N."""
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        """K."""
        return self.kind.codes_in_a_byte * self.codes.shape[1]

    @property
    def group(self) -> int:
        """Values of k that share a scale; K for one group."""
        return self.columns // self.scales.shape[1]

    @property
    def in_file(self) -> bool:
        """Whether codes are as in a file, and :meth:`pack_into` packs them."""
        return isinstance(self.codes, Words)

    def matrix(self) -> Matrix:
        """The same with decoded codes."""
        return replace(self, codes=self.codes.decoded()) if self.in_file else self

    def with_rows(self, rows: slice) -> Matrix:
        """The matrix of some rows: views for a slice; copies for a tensor of row numbers, in its order."""
        return replace(self, **{name: tensor[rows] for name, tensor in self.tensors().items()})

    def with_columns(self, begin: int, end: int) -> Matrix:
        """The matrix of columns [begin, end), with the same bias (views).

        Raises:
            ValueError: a cut inside a group, inside 256 columns of a super-scale, or, channelwise, inside a byte.
        """
        several, in_a_byte = self.scales.shape[1] > 1, self.kind.codes_in_a_byte
        unit = SUPER if self.super_scales is not None else self.group if several else in_a_byte
        if begin % unit != 0 or end % unit != 0:
            what = f"groups of {unit}" if several else "bytes of two"
            raise ValueError(f"columns [{begin}, {end}) of {self.columns} cut {what}")
        units = {"codes": in_a_byte}
        if several:
            group = self.group
            units.update(scales=group, zero_points=group, minimums=group, super_scales=SUPER, super_minimums=SUPER)
        parts = {name: tensor for name, tensor in self.tensors().items() if name in units}
        cut = {name: part[:, begin // units[name] : end // units[name]] for name, part in parts.items()}
        return replace(self, **cut)

    def one_level(self) -> Matrix:
        """The same weights without super-scales: scales and minimums are the products, exact in float32."""
        if self.super_scales is None:
            return self

        def products(values: torch.Tensor | None, supers: torch.Tensor | None) -> torch.Tensor | None:
            if values is None:
                return None
            return values.float() * supers.float().repeat_interleave(values.shape[1] // supers.shape[1], 1)

        scales, minimums = products(self.scales, self.super_scales), products(self.minimums, self.super_minimums)
        return replace(self, scales=scales, minimums=minimums, super_scales=None, super_minimums=None)

    def with_runs(self, order: torch.Tensor) -> Matrix:
        """The matrix with runs of columns in another order, the same bias, and one level of scales for super-scales.

        Args:
            order: int64 [R]: run order[i] becomes run i. A run is K / R columns, whole groups.

        Raises:
            ValueError: a run would cut a group.
        """
        run, same = self.columns // len(order), self.matrix().one_level()
        if run * len(order) != self.columns or run % self.group != 0:
            raise ValueError(f"{len(order)} runs of the {self.columns} columns cut groups of {self.group}")
        moved = {name: part for name, part in same.tensors().items() if name not in ("bias", "channel_scales")}
        return replace(
            same, **{name: part.unflatten(1, (len(order), -1))[:, order].flatten(1) for name, part in moved.items()}
        )

    def as_integers(self, kind: Kind, group: int) -> Matrix:
        """The same weights in codes of another kind, with one level of scales and with minimums.

        Not for INT8 with zero points: code - zero point may need 9 bits, and would wrap around.

        Args:
            kind: INT6, or INT8, which the codes of INT8 and IQ4 need.
            group: values of k per scale, a divisor of :attr:`group`.
        """
        same, times = self.matrix().one_level(), self.group // group
        scales = multiplied_scales(same.scales, same.channel_scales) if same.channel_scales is not None else same.scales
        scales = scales.float().repeat_interleave(times, 1)
        codes = same._apart()
        if self.kind.table is not None:
            halves = 2 if self.kind == Kind.E2M1 else 1  # e2m1 numbers are multiples of 1/2
            numbers = halves * torch.tensor(self.kind.table, device=codes.device)
            codes, scales = numbers[codes.long()].to(torch.int16), scales / halves
        else:
            codes = self._integers(codes)
        minimums = (
            torch.zeros_like(scales) if same.minimums is None else same.minimums.float().repeat_interleave(times, 1)
        )
        return Matrix((codes + kind.middle).to(torch.uint8), scales, None, kind, self.bias, minimums=minimums)

    def _apart(self) -> torch.Tensor:
        """The codes, one to an element."""
        codes = self.matrix().codes
        return codes if self.kind.codes_in_a_byte == 1 else apart(codes)

    def _integers(self, codes: torch.Tensor) -> torch.Tensor:
        """int16: integer codes, one to an element, minus their zero points, or as the class says beside minimums."""
        if self.zero_points is not None:
            return codes.to(torch.int16) - self.zero_points.to(torch.int16).repeat_interleave(self.group, 1)
        return codes.to(torch.int16) - (0 if self.minimums is not None and self.kind.bits == 4 else self.kind.middle)

    def zeros(self, rows: int) -> Matrix:
        """A matrix [rows, K] of zeros, of the same kind. MXFP4 has codes of 0 and scales of 1: e8m0 has no 0."""
        one = self.with_rows(slice(0, 8)).matrix()  # a word of rows
        tensors = {name: part.new_zeros(rows, *part.shape[1:]) for name, part in one.tensors().items()}
        if self.kind == Kind.E2M1 and self.channel_scales is None:
            tensors["scales"].fill_(1)
        return replace(self, **tensors)

    def on_meta(self) -> Matrix:
        """The matrix on the meta device."""
        return replace(self, **{name: tensor.to("meta") for name, tensor in self.tensors().items()})

    def pack(self, scale_dtype: torch.dtype | None = None, *, activation_group: int | None = PER_TOKEN) -> torch.Tensor:
        """uint8 [bytes], as the operators take it; ``scale_dtype`` as in :func:`pack_codes`.

        Zero points that are not needed (:meth:`Kind.needed_zero_points`) are left out. ``activation_group`` is -1, 32,
        64 or 128, or None for the default (:func:`resolve_activation_group`).

        Raises:
            ValueError: a scale is too large for float16, or ``activation_group`` does not fit.
        """
        activations = resolve_activation_group(activation_group, self.group, self.columns)
        if scale_dtype == torch.float16 and self.scales.is_floating_point() and not self.scales.is_meta:
            largest = float(self.scales.float().abs().max())
            if torch.finfo(torch.float16).max < largest < float("inf"):
                raise ValueError(f"scale_dtype is {scale_dtype}, but the largest scale is {largest}")
        zeros = self.kind.needed_zero_points(self.zero_points)
        if self.in_file:
            dtype = self.scale_dtypes()[0] if scale_dtype is None else scale_dtype
            form = PackedAs(self.kind, dtype, zeros is not None, activation_group=activations)
            packed = fresh_bytes(form.bytes(self.rows, self.columns, self.group), packed=True)
            take_pages(packed)
            self.pack_into(packed, 0, self.rows, form)
            return packed
        tensors = {"bias": None, **self.tensors(), "zero_points": zeros}
        how = {"scale_dtype": scale_dtype, "kind": self.kind, "activation_group": activations}
        return pack_codes(**tensors, group_size=self.group, **how)

    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """The :func:`kept_scale_dtypes` of a matrix without minimums."""
        return tuple(kept_scale_dtypes(self.scales, self.kind, self.group, self.columns))

    def pack_into(self, packed: torch.Tensor, row: int, rows: int, form: PackedAs) -> None:
        """Packs :class:`Words` by :func:`w4a8.pack_words`, as rows from ``row`` on of a matrix of ``rows`` rows.

        ``form``: with a type of :meth:`scale_dtypes`, and with zero points if the matrix needs them.
        """
        codes, zeros, scales = self.codes, self.zero_points, self.scales.to(form.scale_dtype)
        if zeros is None or not form.zero_points:
            zeros = self.kind.middles(scales) if form.zero_points else None
        sizes = row, self.group, self.columns, rows
        how = {"values": self.kind.value, "activation_group": form.activation_group}
        pack_words(packed, codes.words, scales, self.bias, zeros, codes.order, *sizes, **how)

    def floats(self) -> torch.Tensor:
        """The weights, float32 [N, K], by the formula of the class."""
        codes = self._apart()

        def by_weight(values: torch.Tensor) -> torch.Tensor:
            return values.float().repeat_interleave(self.group, 1)

        same = self.one_level()
        scales = same.scales
        if self.channel_scales is not None:
            scales = multiplied_scales(scales, self.channel_scales)
        if self.kind.table is not None:
            integers = torch.tensor(self.kind.table, dtype=torch.float32)[codes.long()]
        else:
            integers = self._integers(codes).float()
        weights = integers * by_weight(scales)
        return weights if self.minimums is None else weights - by_weight(same.minimums)

    def tensors(self) -> dict[str, Codes]:
        """The tensors that the matrix has, by attribute."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "kind"}
        return {name: value for name, value in found.items() if value is not None}


def matrix_of(packed: torch.Tensor, name: str) -> Matrix:
    """The matrix from which ``packed``, uint8 [bytes], was packed.

    Raises:
        ValueError: ``packed`` is no packed matrix; the message begins with ``name``.
    """
    try:
        header = read_header(packed)
        found = unpack_codes(packed, header["group"], header["k"], header["n"])
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name}: {error}") from error
    return Matrix(kind=header["values"], **found)


def concat_rows(matrices: Sequence[Matrix]) -> Matrix:
    """One matrix with the rows of all ``matrices``, which have the same K, without biases.

    Matrices of several kinds, groups or types are converted to INT6 or INT8 (:meth:`Matrix.as_integers`).
    """
    matrices = [replace(each.matrix(), bias=None) for each in matrices]
    forms = {(each.kind, each.group, *((k, v.dtype) for k, v in each.tensors().items())) for each in matrices}
    if len(forms) > 1:
        group, narrow = math.gcd(*(each.group for each in matrices)), (Kind.INT4, Kind.INT6)
        kind = Kind.INT6 if all(each.kind in narrow for each in matrices) else Kind.INT8
        matrices = [each.as_integers(kind, group) for each in matrices]
    tensors = {name: torch.cat([each.tensors()[name] for each in matrices]) for name in matrices[0].tensors()}
    return replace(matrices[0], **tensors)
