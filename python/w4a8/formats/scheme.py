"""How the tensors of one module hold its quantized weights, or why the module is not read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from w4a8.core.activation_groups import PER_TOKEN
from w4a8.core.json_fields import CheckpointError
from w4a8.core.kind import Kind, integers_of
from w4a8.core.matrix import Matrix
from w4a8.formats.checks import Tensors, checked_zeros, stated_shape, take
from w4a8.formats.format import FORMATS, Format, Part, parts_of


@dataclass(frozen=True)
class Scheme:
    """How one module is stored, by the configuration of its checkpoint.

    Attributes:
        format: a key of :data:`FORMATS`. AutoRound has ``gptq``, ``awq``, or a ``pack`` format of 4-bit floats.
        group_size: input features per scale, 16 or a multiple of 32; -1 is one group.
        symmetric: all zero points are 8 (8 bits: 128).
        version: version of ``gptq``: 1 (zero points are stored minus 1) or 2 (unchanged).
        activation_order: ``gptq`` only: the configuration says ``desc_act``, so ``g_idx`` is required.
        weight_only: the setting by which inputs are not int8, in words; None: inputs are int8 per token.
        bits: bits of a code: 4, or 8 in ``gptq`` and ``pack-quantized``.
    """

    format: str
    group_size: int
    symmetric: bool
    version: int = 1
    activation_order: bool = False
    weight_only: str | None = None
    bits: int = 4

    def wanted_activation_group(self, asked: int | None) -> int | None:
        """The ``asked`` argument for :func:`w4a8.core.activation_groups.resolve_activation_group`.

        ``asked``, if it is not None; else per token where the configuration has int8 inputs; else None, the default.
        """
        return PER_TOKEN if asked is None and self.weight_only is None else asked

    @property
    def file_format(self) -> Format:
        """The facts that all matrices of the format share."""
        return FORMATS[self.format]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tensors of the format, the codes first."""
        return parts_of(self.format, self.bits)

    @property
    def kind(self) -> Kind:
        """Kind of the codes."""
        return self.file_format.kind or integers_of(self.bits)

    @property
    def channel_scales(self) -> bool:
        """Whether scales have two levels (:class:`Matrix`)."""
        return any(part.kind == "global_scale" for part in self.parts)

    @property
    def states_shape(self) -> bool:
        """Whether the format has a tensor ``weight_shape`` with (N, K): words may have room for more codes."""
        return any(part.kind == "shape" for part in self.parts)

    def groups(self, columns: int) -> int:
        """Scales in a row of ``columns`` input features."""
        return 1 if self.group_size == -1 else columns // self.group_size

    @property
    def weight(self) -> str:
        """Last part of the name of the tensor of codes."""
        return self.parts[0].suffix

    def requires(self, part: Part) -> bool:
        """Whether the module cannot be read without the tensor ``part``.

        Zero points may be missing in a symmetric scheme. Most tools except compressed-tensors write them all the same.
        """
        if part.kind == "zero_points":
            return not self.symmetric
        if part.kind == "input_scale":
            return False
        return part.kind != "g_idx" or self.activation_order

    @property
    def required(self) -> tuple[str, ...]:
        """Last parts of the names of required tensors, the codes first."""
        return tuple(part.suffix for part in self.parts if self.requires(part))

    @property
    def optional(self) -> tuple[str, ...]:
        """Last parts of the names of optional tensors, without the bias."""
        return tuple(part.suffix for part in self.parts if not self.requires(part))

    def shape(self, codes: tuple[int, ...], name: str, weight_shape: torch.Tensor | None = None) -> tuple[int, int]:
        """(N, K) of a module, from the shape of its codes, or from ``weight_shape`` if the format has this tensor.

        Raises:
            ValueError: a tensor of the wrong shape; names the tensor.
        """
        if self.states_shape:
            return stated_shape({"weight_shape": weight_shape}, name)
        features = self.file_format.features or self.parts[0].features
        return features(codes, name)

    def read(self, tensors: Tensors, name: str) -> Matrix:
        """The matrix of a module, from its :attr:`required` and :attr:`optional` tensors and its bias.

        Raises:
            ValueError: a tensor is missing, has another dtype or shape, or values that this format does not have;
                names the tensor.
        """
        if self.format not in FORMATS:
            raise ValueError(f"{name}: the format {self.format!r} has no reader")
        return self.file_format.read(tensors, name, self)

    def check_zero_points(self, tensor: torch.Tensor, name: str) -> None:
        """Checks zero points of a symmetric scheme, for a matrix that was read before its zero points were loaded.

        Raises:
            ValueError: another dtype or number of dimensions, or a zero point that is not the middle of the codes.
        """
        part = next(part for part in self.parts if part.kind == "zero_points")
        words = take({part.suffix: tensor}, name, part.suffix, (part.dtype,), 2)
        checked_zeros(self.file_format.spare_zeros(words, self), name, part.suffix, True, self.bits)


@dataclass(frozen=True)
class NotRead:
    """A module that is not read: not quantized, or quantized in a way that the operators do not have.

    Attributes:
        reason: the reason in words, with the key of the configuration.
        quantized: True: quantized in another way; False: not quantized at all.
    """

    reason: str
    quantized: bool

    @classmethod
    def not_quantized(cls, module: str, why: str) -> NotRead:
        """For a module that is not quantized at all."""
        return cls(f"{module} is not quantized: {why}", quantized=False)


def scheme_or_not_read(read: Callable[[], Scheme], where: str = "") -> Scheme | NotRead:
    """The scheme that ``read`` returns, or NotRead if ``read`` raises CheckpointError.

    Args:
        read: reads a part of a configuration.
        where: text that follows the reason of NotRead.
    """
    try:
        return read()
    except CheckpointError as error:
        return NotRead(f"{error}{where}", quantized=True)
