"""Formats one tensor at a time, for loaders that get the tensors of a matrix in any order.

``Packing`` says which tensors a format has and what each is; :meth:`Packing.piece` turns one into the common form, and
:meth:`Packing.matrix` all of a matrix, by the reader of the format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from w4a8.core.matrix import Matrix4
from w4a8.formats.awq import output_features, output_nibbles
from w4a8.formats.matrix import checked_zeros
from w4a8.formats.mxfp4 import powers_of_two
from w4a8.formats.stored import Stored
from w4a8.formats.words import CODES, codes, word_bytes


@dataclass(frozen=True)
class Part:
    """One tensor of a matrix.

    Attributes:
        suffix: the last part of its name.
        kind: ``weight``, ``weight_scale`` or ``zero_points``.
        dtype: that holds it.
        axes: ``n`` output features, ``k`` input features, ``g`` groups of them.
        packed: the axis along which eight 4-bit codes share a word (two a byte in uint8); None if none do.
    """

    suffix: str
    kind: str
    dtype: torch.dtype
    axes: tuple[str, str]
    packed: int | None = None

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether a tensor of a file may have this type: float32 stands for all floats."""
        return dtype == self.dtype or (self.dtype == torch.float32 and dtype.is_floating_point)

    @property
    def codes_in_an_element(self) -> int:
        """Of the packed axis."""
        return CODES if self.dtype == torch.int32 else 2

    def shape(self, rows: int, columns: int, groups: int) -> tuple[int, int]:
        """Of a matrix [rows, columns].

        Raises:
            ValueError: the packed axis does not fill whole words.
        """
        sizes = [{"n": rows, "k": columns, "g": groups}[axis] for axis in self.axes]
        if self.packed is not None:
            width, size = self.codes_in_an_element, sizes[self.packed]
            if size % width != 0:
                which = "output" if self.axes[self.packed] == "n" else "input"
                raise ValueError(f"{size} {which} features are not whole words of {width} ({self.suffix})")
            sizes[self.packed] = size // width
        return sizes[0], sizes[1]


_SCALES_LAST = Part("scales", "weight_scale", torch.float32, ("g", "n"))
_ZEROS_LAST = Part("qzeros", "zero_points", torch.int32, ("g", "n"), 1)
_CT_SCALES = Part("weight_scale", "weight_scale", torch.float32, ("n", "g"))
_GPTQ = (Part("qweight", "weight", torch.int32, ("k", "n"), 0), _ZEROS_LAST, _SCALES_LAST)
_TENSORS = {
    "gptq": _GPTQ,
    "gptq_v2": _GPTQ,
    "awq": (Part("qweight", "weight", torch.int32, ("k", "n"), 1), _ZEROS_LAST, _SCALES_LAST),
    "int-quantized": (
        Part("weight", "weight", torch.int8, ("n", "k")),
        Part("weight_zero_point", "zero_points", torch.int8, ("n", "g")),
        _CT_SCALES,
    ),
    "pack-quantized": (
        Part("weight_packed", "weight", torch.int32, ("n", "k"), 1),
        Part("weight_zero_point", "zero_points", torch.int32, ("n", "g"), 0),
        _CT_SCALES,
    ),
    "mxfp4": (
        Part("weight", "weight", torch.uint8, ("n", "k"), 1),
        Part("weight_scale", "weight_scale", torch.uint8, ("n", "g")),
    ),
}
# Files of these have zero points, all 8, where the configuration says symmetric.
_ALWAYS_WITH_ZEROS = ("gptq", "gptq_v2", "awq")


@dataclass(frozen=True)
class Packing:
    """How the matrices of a layer are stored.

    Attributes:
        name: ``gptq``, ``gptq_v2``, ``awq``, ``int-quantized``, ``pack-quantized`` or ``mxfp4``.
        group_size: input features that share a scale; -1 is all.
        symmetric: what the configuration says: int4 whose zero points are 8.
    """

    name: str
    group_size: int
    symmetric: bool = True

    @property
    def values(self) -> str:
        """``int4`` or ``e2m1``."""
        return "e2m1" if self.name == "mxfp4" else "int4"

    @property
    def tensors(self) -> tuple[Part, ...]:
        """Those that a file has; of a symmetric format the zero points may be missing."""
        stored = _TENSORS[self.name]
        if self.symmetric and self.name not in _ALWAYS_WITH_ZEROS:
            stored = tuple(tensor for tensor in stored if tensor.kind != "zero_points")
        return stored

    @property
    def required(self) -> tuple[Part, ...]:
        """Those without which nothing can be computed."""
        return tuple(tensor for tensor in self.tensors if tensor.kind != "zero_points" or not self.symmetric)

    def groups(self, columns: int) -> int:
        """Scales of a row of so many input features."""
        return 1 if self.group_size == -1 else columns // self.group_size

    def piece(self, part: Part, tensor: torch.Tensor, name: str) -> torch.Tensor | None:
        """One tensor of a matrix in the form that :class:`w4a8.core.packer.ExpertPacker` takes.

        Args:
            part: which.
            tensor: as it is in the file.
            name: of the matrix, for errors.

        Returns:
            Codes uint8 [N, K/2], or what the packer makes them of (int8 [N, K], int32 [N, K/8]); scales [N, G]; zero
            points uint8 [N, G], None if the format is symmetric.

        Raises:
            ValueError: another dtype or number of dimensions, or values that this format does not have.
        """
        full = f"{name}.{part.suffix}"
        floats = part.dtype == torch.float32
        if not part.takes(tensor.dtype):
            expected = "a float" if floats else str(part.dtype).removeprefix("torch.")
            raise ValueError(f"{full}: dtype {tensor.dtype}, but {expected} is expected")
        if tensor.dim() != 2:
            raise ValueError(f"{full}: shape {tuple(tensor.shape)}, but 2 dimensions are expected")
        if part.kind == "weight":
            return self._codes(tensor)
        if part.kind == "zero_points":
            stored = self._zeros(tensor)
            zeros = checked_zeros(stored, name, part.suffix, self.symmetric)
            if zeros is None and not self.symmetric:
                zeros = torch.full(stored.shape, 8, dtype=torch.uint8)
            return zeros
        if not floats:
            return powers_of_two(tensor, full)
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{full}: not all scales are finite")
        return tensor.T if part.axes[0] == "g" else tensor

    def _codes(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.name in ("gptq", "gptq_v2"):
            return word_bytes(tensor.T)
        if self.name == "awq":
            return output_nibbles(tensor)
        return tensor

    def _zeros(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.name == "awq":
            return output_features(tensor).T
        if self.name in ("gptq", "gptq_v2"):
            return codes(tensor).T.to(torch.int32) + (1 if self.name == "gptq" else 0)
        if self.name == "pack-quantized":
            return codes(tensor.T).T
        return tensor.to(torch.int32) + 8

    def matrix(self, tensors: Mapping[str, torch.Tensor], name: str) -> Matrix4:
        """All tensors of a matrix, by suffix, as :mod:`w4a8.formats` reads them. Not for ``mxfp4``.

        Raises:
            ValueError: as the readers do.
        """
        version = 2 if self.name == "gptq_v2" else 1
        stored = Stored(self.name.removesuffix("_v2"), self.group_size, self.symmetric, version)
        return stored.read(tensors, name)
