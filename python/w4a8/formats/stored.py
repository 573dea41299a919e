"""How the tensors of one module hold its 4-bit weights."""

from __future__ import annotations

from dataclasses import dataclass

from w4a8.core.matrix import Matrix4
from w4a8.formats.awq import from_awq
from w4a8.formats.compressed_tensors import from_int_quantized, from_pack_quantized
from w4a8.formats.gptq import from_gptq
from w4a8.formats.matrix import Tensors
from w4a8.formats.mxfp4 import BLOCK, from_mxfp4
from w4a8.formats.words import CODES

# Format -> the last parts of the names of its tensors: the weight, what else must be there, what may be there. A zero
# point that may be missing if the configuration says that there are none is in the second list: tools write it anyway,
# but for compressed-tensors.
_TENSORS = {
    "gptq": ("qweight", ("scales", "qzeros"), ("g_idx",)),
    "awq": ("qweight", ("scales", "qzeros"), ()),
    "int-quantized": ("weight", ("weight_scale",), ("weight_zero_point", "weight_g_idx")),
    "pack-quantized": ("weight_packed", ("weight_shape", "weight_scale"), ("weight_zero_point", "weight_g_idx")),
    "mxfp4": ("blocks", ("scales",), ()),
}
_ZEROS = ("qzeros", "weight_zero_point")
# What only a quantized module has. (Layers of other kinds may have ``scales``.)
QUANTIZED_SUFFIXES = (
    "qweight", "qzeros", "g_idx", "blocks",
    "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx",
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """How one module is stored, as the configuration of its checkpoint says.

    Attributes:
        format: ``gptq``, ``awq``, ``int-quantized``, ``pack-quantized`` or ``mxfp4``. AutoRound's modules are the first
            two.
        group_size: input features per scale, a multiple of 32; -1 is one group.
        symmetric: all zero points are 8.
        version: of ``gptq``: 1, or 2 where zero points are stored as they are.
        activation_order: of ``gptq``: groups need not be consecutive input features, ``g_idx`` says what they are.
        weight_only: where the configuration says that inputs are not quantized; None if they are, to int8 per token.
    """

    format: str
    group_size: int
    symmetric: bool
    version: int = 1
    activation_order: bool = False
    weight_only: str | None = None

    @property
    def weight(self) -> str:
        """Last part of the name of the tensor of codes."""
        return _TENSORS[self.format][0]

    @property
    def required(self) -> tuple[str, ...]:
        """Last parts of the names of the tensors without which it cannot be read, the codes first."""
        weight, others, optional = _TENSORS[self.format]
        if self.symmetric:
            others = tuple(name for name in others if name not in _ZEROS)
        else:
            others += tuple(name for name in optional if name in _ZEROS)
        return (weight, *others, *(("g_idx",) if self.activation_order else ()))

    @property
    def optional(self) -> tuple[str, ...]:
        """Last parts of the names of those that are read if they are there, but for the bias."""
        _, others, more = _TENSORS[self.format]
        return tuple(name for name in (*others, *more) if name not in self.required)

    def shape(self, tensors: Tensors) -> tuple[int, int]:
        """(N, K) of a module, of what says so: its codes, or ``weight_shape``. Nothing else is looked at.

        Raises:
            ValueError: a tensor that has no such shape; does not name the module.
        """
        if self.format == "pack-quantized":
            stated = tensors["weight_shape"]
            if stated.numel() != 2:
                raise ValueError(f"weight_shape has {stated.numel()} numbers, but 2 are expected")
            return int(stated[0]), int(stated[1])
        weight = tensors[self.weight]
        dim = 3 if self.format == "mxfp4" else 2
        if weight.dim() != dim:
            raise ValueError(f"{self.weight}: shape {tuple(weight.shape)}, but {dim} dimensions are expected")
        first, second = weight.shape[:2]
        sizes = {
            "gptq": (second, CODES * first),
            "awq": (CODES * second, first),
            "int-quantized": (first, second),
            "mxfp4": (first, BLOCK * second),
        }
        return sizes[self.format]

    def read(self, tensors: Tensors, name: str) -> Matrix4:
        """The matrix of a module.

        Args:
            tensors: by the last part of their names; others are not looked at.
            name: of the module, for errors.

        Raises:
            ValueError: a tensor is missing, has another dtype or shape, or values that this format does not have;
                names it.
        """
        if self.format == "mxfp4":
            return from_mxfp4(tensors, name)
        if self.format == "gptq":
            if self.activation_order and tensors.get("g_idx") is None:
                raise ValueError(f"{name}.g_idx is missing, though the configuration says desc_act")
            return from_gptq(tensors, name, self.group_size, self.symmetric, self.version)
        readers = {"awq": from_awq, "int-quantized": from_int_quantized, "pack-quantized": from_pack_quantized}
        return readers[self.format](tensors, name, self.group_size, self.symmetric)


@dataclass(frozen=True)
class NotOurs:
    """A module whose weights are not 4 bits that the operators have.

    Attributes:
        reason: in words, with the key of the configuration.
        quantized: it is quantized in another way; otherwise it is not quantized at all.
    """

    reason: str
    quantized: bool
