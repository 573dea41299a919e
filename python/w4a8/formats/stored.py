"""How the tensors of one module hold its quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from w4a8.core.activation_groups import PER_TOKEN
from w4a8.core.json_fields import CheckpointError
from w4a8.core.kind import Kind, integers_of
from w4a8.core.matrix import Matrix
from w4a8.formats.awq import from_awq, output_features
from w4a8.formats.compressed_tensors import from_int_quantized, from_pack_quantized, stated_shape
from w4a8.formats.gptq import from_gptq, stored_zeros
from w4a8.formats.matrix import Tensors, checked_zeros, expect_shape, take
from w4a8.formats.mxfp4 import BLOCK, from_mxfp4, from_mxfp4_pack_quantized, from_quark_mxfp4
from w4a8.formats.nvfp4 import from_nvfp4, from_nvfp4_pack_quantized
from w4a8.formats.parts import Part, parts_of

# Readers of 4-bit floats, which need no configuration.
_FLOAT_READERS: dict[str, Callable[[Tensors, str], Matrix]] = {
    "mxfp4": from_mxfp4,
    "mxfp4-pack-quantized": from_mxfp4_pack_quantized,
    "quark-mxfp4": from_quark_mxfp4,
    "nvfp4-pack-quantized": from_nvfp4_pack_quantized,
    "modelopt-nvfp4": from_nvfp4,
}


@dataclass(frozen=True)
class Stored:
    """How one module is stored, as the configuration of its checkpoint says.

    Attributes:
        format: ``gptq``, ``awq``, ``int-quantized``, ``pack-quantized``, ``mxfp4-pack-quantized``,
            ``nvfp4-pack-quantized``, ``modelopt-nvfp4``, ``quark-mxfp4`` or ``mxfp4``. AutoRound has the
            first two, or those of 4-bit floats with ``pack``.
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
    def parts(self) -> tuple[Part, ...]:
        """The tensors of the format, the codes first."""
        return parts_of(self.format, self.bits)

    @property
    def kind(self) -> Kind:
        """Of the codes."""
        return Kind.E2M1 if self.format in _FLOAT_READERS else integers_of(self.bits)

    @property
    def channel_scales(self) -> bool:
        """Whether scales have two levels (:class:`Matrix`)."""
        return any(part.kind == "global_scale" for part in self.parts)

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
        """(N, K) of a module.

        Args:
            codes: shape of the tensor of codes.
            name: of the module, for errors.
            weight_shape: the tensor of this name, which says it of ``pack-quantized``.

        Raises:
            ValueError: a tensor that has no such shape; names it.
        """
        if self.format == "pack-quantized":
            return stated_shape({"weight_shape": weight_shape}, name)
        dim = 3 if self.format == "mxfp4" else 2
        if len(codes) != dim:
            raise ValueError(f"{name}.{self.weight}: shape {codes}, but {dim} dimensions are expected")
        if self.format == "mxfp4":
            expect_shape(codes, name, self.weight, (*codes[:2], BLOCK // 2), f"blocks of {BLOCK}")
            return codes[0], BLOCK * codes[1]
        return self.parts[0].features(codes)

    def read(self, tensors: Tensors, name: str) -> Matrix:
        """The matrix of a module, once all of its tensors are there that are :attr:`required`.

        Args:
            tensors: by the last part of their names; others are not looked at.
            name: of the module, for errors.

        Raises:
            ValueError: a tensor is missing, has another dtype or shape, or values that this format does not have;
                names it.
        """
        if self.format in _FLOAT_READERS:
            return _FLOAT_READERS[self.format](tensors, name)
        if self.format == "gptq":
            if self.activation_order and tensors.get("g_idx") is None:
                raise ValueError(f"{name}.g_idx is missing, though the configuration says desc_act")
            return from_gptq(tensors, name, self.group_size, self.symmetric, self.version, self.bits)
        if self.format == "pack-quantized":
            return from_pack_quantized(tensors, name, self.group_size, self.symmetric, self.bits)
        read = {"awq": from_awq, "int-quantized": from_int_quantized}.get(self.format)
        if read is None:
            raise ValueError(f"{name}: the format {self.format!r} has no reader")
        return read(tensors, name, self.group_size, self.symmetric)

    def check_zero_points(self, tensor: torch.Tensor, name: str) -> None:
        """Looks at zero points of a symmetric ``gptq`` or ``awq``, without which a matrix is read if they come late.

        Args:
            tensor: ``qzeros``.
            name: of the matrix, for errors.

        Raises:
            ValueError: another dtype or number of dimensions, or one that is not in the middle of the codes.
        """
        words = take({"qzeros": tensor}, name, "qzeros", (torch.int32,), 2)
        zeros = output_features(words) if self.format == "awq" else stored_zeros(words, self.version, self.bits)
        checked_zeros(zeros, name, "qzeros", True, self.bits)


def wanted_by_all(stored: Iterable[Stored], asked: int | None) -> int | None:
    """As :meth:`Stored.wanted_activation_group`, of one layer's experts: per token if that is wanted of any."""
    wanted = [each.wanted_activation_group(asked) for each in stored]
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


def stored_or_left_out(read: Callable[[], Stored], where: str = "") -> Stored | LeftOut:
    """What a part of a configuration says, or that it says something that is not read here.

    Args:
        read: raises CheckpointError for that, with the reason.
        where: put behind the reason.
    """
    try:
        return read()
    except CheckpointError as error:
        return LeftOut(f"{error}{where}", quantized=True)
