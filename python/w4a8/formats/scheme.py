"""How the tensors of one module hold its quantized weights, or why the module is not read here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from w4a8.core.activation_groups import PER_TOKEN
from w4a8.core.json_fields import CheckpointError
from w4a8.core.kind import Kind, integers_of
from w4a8.core.matrix import Matrix
from w4a8.formats.format import FORMATS, Format, Part, parts_of
from w4a8.formats.matrix import Tensors, checked_zeros, stated_shape, take


@dataclass(frozen=True)
class Scheme:
    """How one module is stored, as the configuration of its checkpoint says.

    Attributes:
        format: a name of :data:`FORMATS`. AutoRound has ``gptq`` or ``awq``, or those of 4-bit floats with ``pack``.
        group_size: input features per scale, 16 or a multiple of 32; -1 is one group.
        symmetric: all zero points are 8, or 128 of 8 bits.
        version: of ``gptq``: 1, or 2 where zero points are stored as they are.
        activation_order: of ``gptq``: groups need not be consecutive input features, ``g_idx`` says what they are.
        weight_only: where the configuration says that inputs are not quantized; None if they are, to int8 per token.
        bits: of a code: 4, or 8 in ``gptq`` and ``pack-quantized``.
        activation_group: what the matrix was packed with, where a packed directory is read as another format.
    """

    format: str
    group_size: int
    symmetric: bool
    version: int = 1
    activation_order: bool = False
    weight_only: str | None = None
    bits: int = 4
    activation_group: int | None = None

    def wanted_activation_group(self, asked: int | None) -> int | None:
        """What :func:`w4a8.core.activation_groups.resolve_activation_group` is asked for.

        That of a packed directory; else ``asked``; else per token where the configuration says so of its inputs, and
        the default (None) where it does not.
        """
        if self.activation_group is not None:
            return self.activation_group
        return PER_TOKEN if asked is None and self.weight_only is None else asked

    @property
    def facts(self) -> Format:
        """What all matrices of the format have in common."""
        return FORMATS[self.format]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tensors of the format, the codes first."""
        return parts_of(self.format, self.bits)

    @property
    def kind(self) -> Kind:
        """Of the codes."""
        return self.facts.kind or integers_of(self.bits)

    @property
    def channel_scales(self) -> bool:
        """Whether scales have two levels (:class:`Matrix`)."""
        return any(part.kind == "global_scale" for part in self.parts)

    @property
    def states_shape(self) -> bool:
        """Whether a tensor ``weight_shape`` says (N, K): codes may fill more words than that."""
        return any(part.kind == "shape" for part in self.parts)

    def groups(self, columns: int) -> int:
        """Scales of a row of so many input features."""
        return 1 if self.group_size == -1 else columns // self.group_size

    @property
    def weight(self) -> str:
        """Last part of the name of the tensor of codes."""
        return self.parts[0].suffix

    def requires(self, part: Part) -> bool:
        """Whether the module cannot be read without a tensor.

        Zero points may be missing where the configuration says that there are none; most tools write them anyway, but
        for compressed-tensors.
        """
        if part.kind == "zero_points":
            return not self.symmetric
        if part.kind == "input_scale":
            return False
        return part.kind != "g_idx" or self.activation_order

    @property
    def required(self) -> tuple[str, ...]:
        """Last parts of the names of the tensors without which it cannot be read, the codes first."""
        return tuple(part.suffix for part in self.parts if self.requires(part))

    @property
    def optional(self) -> tuple[str, ...]:
        """Last parts of the names of those that are read if they are there, but for the bias."""
        return tuple(part.suffix for part in self.parts if not self.requires(part))

    def shape(self, codes: tuple[int, ...], name: str, weight_shape: torch.Tensor | None = None) -> tuple[int, int]:
        """(N, K) of a module, by the shape of its codes, or the tensor ``weight_shape`` if the format has one.

        Raises:
            ValueError: a tensor that has no such shape; names it.
        """
        if self.states_shape:
            return stated_shape({"weight_shape": weight_shape}, name)
        features = self.facts.features or self.parts[0].features
        return features(codes, name)

    def read(self, tensors: Tensors, name: str) -> Matrix:
        """The matrix of a module, once all of its :attr:`required` tensors are there; others are not looked at.

        Raises:
            ValueError: a tensor is missing, has another dtype or shape, or values that this format does not have;
                names it.
        """
        if self.format not in FORMATS:
            raise ValueError(f"{name}: the format {self.format!r} has no reader")
        return self.facts.read(tensors, name, self)

    def check_zero_points(self, tensor: torch.Tensor, name: str) -> None:
        """Looks at ``qzeros`` of a symmetric scheme, without which a matrix is read if they come late.

        Raises:
            ValueError: another dtype or number of dimensions, or one that is not in the middle of the codes.
        """
        part = next(part for part in self.parts if part.kind == "zero_points")
        words = take({part.suffix: tensor}, name, part.suffix, (part.dtype,), 2)
        checked_zeros(self.facts.spare_zeros(words, self), name, part.suffix, True, self.bits)


def wanted_by_all(schemes: Iterable[Scheme], asked: int | None) -> int | None:
    """As :meth:`Scheme.wanted_activation_group`, of one layer's experts: per token if that is wanted of any."""
    wanted = [each.wanted_activation_group(asked) for each in schemes]
    return PER_TOKEN if PER_TOKEN in wanted else wanted[0]


@dataclass(frozen=True)
class LeftOut:
    """A module that is not read here: it is not quantized, or in a way that the operators do not have.

    Attributes:
        reason: in words, with the key of the configuration.
        quantized: it is quantized in another way; otherwise it is not quantized at all.
    """

    reason: str
    quantized: bool

    @classmethod
    def not_quantized(cls, module: str, why: str) -> LeftOut:
        """Of a module that is not quantized at all."""
        return cls(f"{module} is not quantized: {why}", quantized=False)


def scheme_or_left_out(read: Callable[[], Scheme], where: str = "") -> Scheme | LeftOut:
    """What a part of a configuration says, or that it says something that is not read here.

    Args:
        read: raises CheckpointError for that, with the reason.
        where: put behind the reason.
    """
    try:
        return read()
    except CheckpointError as error:
        return LeftOut(f"{error}{where}", quantized=True)
