"""How the tensors of one module hold its quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from w4a8.core.activation_groups import PER_TOKEN
from w4a8.core.matrix import Matrix, Matrix4, middle_codes
from w4a8.formats.awq import from_awq, output_features, output_nibbles
from w4a8.formats.compressed_tensors import from_int_quantized, from_pack_quantized, stated_shape
from w4a8.formats.gptq import from_gptq
from w4a8.formats.matrix import Tensors, check_not_empty, checked_zeros, expect_shape
from w4a8.formats.mxfp4 import BLOCK, block_scales, from_mxfp4, from_mxfp4_pack_quantized, from_quark_mxfp4
from w4a8.formats.nvfp4 import checked_block_scales, checked_global_scale, from_nvfp4, from_nvfp4_pack_quantized
from w4a8.formats.parts import Part, parts_of
from w4a8.formats.words import codes, word_bytes

# Formats of 4-bit floats, which need no configuration.
_FLOATS: dict[str, Callable[[Tensors, str], Matrix4]] = {
    "mxfp4": from_mxfp4,
    "mxfp4-pack-quantized": from_mxfp4_pack_quantized,
    "quark-mxfp4": from_quark_mxfp4,
    "nvfp4-pack-quantized": from_nvfp4_pack_quantized,
    "modelopt-nvfp4": from_nvfp4,
}


@dataclass(frozen=True)
class Stored:
    """How one module is stored, as the configuration of its checkpoint says.

    A matrix is read as a whole (:meth:`read`), or tensor by tensor for loaders that get them in any order
    (:meth:`piece`).

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
    def values(self) -> str:
        """``int4``, ``e2m1`` or ``int8``."""
        return "e2m1" if self.format in _FLOATS else f"int{self.bits}"

    @property
    def channel_scales(self) -> bool:
        """Whether scales have two levels (:class:`Matrix4`)."""
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
        """The matrix of a module: a Matrix4, or a Matrix8 if codes have 8 bits.

        Args:
            tensors: by the last part of their names; others are not looked at.
            name: of the module, for errors.

        Raises:
            ValueError: a tensor is missing, has another dtype or shape, or values that this format does not have;
                names it.
        """
        if self.format in _FLOATS:
            return _FLOATS[self.format](tensors, name)
        if self.format == "gptq":
            if self.activation_order and tensors.get("g_idx") is None:
                raise ValueError(f"{name}.g_idx is missing, though the configuration says desc_act")
            return from_gptq(tensors, name, self.group_size, self.symmetric, self.version, self.bits)
        if self.format == "pack-quantized":
            return from_pack_quantized(tensors, name, self.group_size, self.symmetric, self.bits)
        read = from_awq if self.format == "awq" else from_int_quantized
        return read(tensors, name, self.group_size, self.symmetric)

    def piece(self, part: Part, tensor: torch.Tensor, name: str) -> torch.Tensor | None:
        """One tensor of a matrix in the form that :class:`w4a8.core.packer.ExpertPacker` takes.

        Args:
            part: which: codes, scales (also the one of all) or zero points.
            tensor: as it is in the file; MXFP4's codes as a matrix.
            name: of the matrix, for errors.

        Returns:
            Codes uint8 [N, K/2] or of 8 bits [N, K], or what the packer makes them of (int8 [N, K], int32 words);
            scales [N, G]; zero points uint8 [N, G], None if the format is symmetric.

        Raises:
            ValueError: another dtype or number of dimensions, or values that this format does not have.
        """
        full = f"{name}.{part.suffix}"
        floats = part.dtype == torch.float32 and part.kind != "global_scale"
        if not part.takes(tensor.dtype):
            expected = "a float" if floats else str(part.dtype).removeprefix("torch.")
            raise ValueError(f"{full}: dtype {tensor.dtype}, but {expected} is expected")
        if part.kind == "global_scale":
            return checked_global_scale(tensor, full, self.format == "nvfp4-pack-quantized")
        if tensor.dim() != 2:
            raise ValueError(f"{full}: shape {tuple(tensor.shape)}, but 2 dimensions are expected")
        check_not_empty(tensor, full)
        if part.kind == "weight":
            return self._codes(tensor)
        if part.kind == "zero_points":
            stored = self._zeros(tensor)
            zeros = checked_zeros(stored, name, part.suffix, self.symmetric, self.bits)
            if zeros is None and not self.symmetric:
                zeros = middle_codes(stored, self.values)
            return zeros
        if not floats:
            return (checked_block_scales if self.channel_scales else block_scales)(tensor, full)
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{full}: not all scales are finite")
        return tensor.T if part.axes[0] == "g" else tensor

    def _codes(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.format == "gptq":
            return word_bytes(tensor.T)
        return output_nibbles(tensor) if self.format == "awq" else tensor

    def _zeros(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.format == "awq":
            return output_features(tensor).T
        if self.format == "gptq":
            return codes(tensor, self.bits).T.to(torch.int32) + (2 - self.version)
        if self.format == "pack-quantized":
            return codes(tensor.T, self.bits).T
        return tensor.to(torch.int32) + 8


def wanted_by_all(stored: Iterable[Stored], asked: int | None) -> int | None:
    """As :meth:`Stored.wanted_activation_group`, of one layer's experts: per token if that is wanted of any."""
    wanted = [each.wanted_activation_group(asked) for each in stored]
    return PER_TOKEN if PER_TOKEN in wanted else wanted[0]


@dataclass(frozen=True)
class NotOurs:
    """A module whose weights are not 4 bits that the operators have.

    Attributes:
        reason: in words, with the key of the configuration.
        quantized: it is quantized in another way; otherwise it is not quantized at all.
    """

    reason: str
    quantized: bool
