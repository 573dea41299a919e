"""The description of a format of quantized weights: one :class:`Format` in each format's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix

FLOAT8_SCALE = "weight_scale_inv"  # scales of FP8 checkpoints; despite the name, weights are multiplied by them


@dataclass(frozen=True)
class Part:
    """One tensor of a matrix.

    Attributes:
        suffix: the last part of the tensor's name.
        kind: ``weight`` (the codes), ``weight_scale``, ``zero_points``, ``shape``, ``g_idx``, ``global_scale`` (one
            number, a factor or divisor of all scales) or ``input_scale`` (refused by the reader).
        dtype: type of the tensor; float32 stands for all floats, except for ``global_scale``.
        axes: ``n`` output features, ``k`` input features, ``g`` groups of input features. (MXFP4's blocks count as a
            matrix of codes. A tensor of one number may have a dimension of size 1.)
        packed: the axis along which codes share an element (a word or a byte); None if codes do not.
        bits: bits of a code.
    """

    suffix: str
    kind: str
    dtype: torch.dtype
    axes: tuple[str, ...] = ()
    packed: int | None = None
    bits: int = 4

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether a tensor of a file may have this type."""
        floats = self.dtype == torch.float32 and self.kind != "global_scale"
        # Floats of 8 bits would need scales of their own.
        return dtype == self.dtype or (floats and dtype.is_floating_point and torch.finfo(dtype).bits > 8)

    @property
    def codes_in_an_element(self) -> int:
        """Codes in an element of a packed tensor."""
        return torch.iinfo(self.dtype).bits // self.bits

    def shape(self, rows: int, columns: int, groups: int) -> tuple[int, ...]:
        """The tensor's shape for a matrix [rows, columns].

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
        return tuple(sizes)

    def features(self, shape: tuple[int, ...], name: str) -> tuple[int, int]:
        """(N, K) of the codes of a matrix: the inverse of :meth:`shape`.

        Raises:
            ValueError: another number of dimensions.
        """
        if len(shape) != len(self.axes):
            raise ValueError(f"{name}.{self.suffix}: shape {shape}, but {len(self.axes)} dimensions are expected")
        sizes = dict(zip(self.axes, shape))
        if self.packed is not None:
            sizes[self.axes[self.packed]] *= self.codes_in_an_element
        return sizes["n"], sizes["k"]


@dataclass(frozen=True)
class Format:
    """The facts that all matrices of a format share.

    Attributes:
        name: the value of :attr:`Scheme.format`.
        parts: the tensors of a matrix, the codes first.
        read: (tensors by the last part of their names, name of the module, ``Scheme``) -> matrix.
        kind: kind of the codes; None: integers with the scheme's bits.
        features: (shape of the codes, name of the module) -> (N, K); None: :meth:`Part.features`.
        spare_zeros: (``zero_points`` tensor, ``Scheme``) -> zero points [N, K/g], for files of symmetric schemes that
            have zero points all the same. None: such files have no zero points.
        is_stacked: one tensor has the codes of all experts of a layer.
        spare_biases: some tools write biases of zeros for a model without biases.
        unused: last parts of the names of tensors in files that are not read: scales of inputs.
    """

    name: str
    parts: tuple[Part, ...]
    read: Callable[[Mapping[str, torch.Tensor], str, Any], Matrix]
    kind: Kind | None = None
    features: Callable[[tuple[int, ...], str], tuple[int, int]] | None = None
    spare_zeros: Callable[[torch.Tensor, Any], torch.Tensor] | None = None
    is_stacked: bool = False
    spare_biases: bool = False
    unused: tuple[str, ...] = ()


FORMATS: dict[str, Format] = {}


def add_format(made: Format) -> Format:
    """Adds a format to :data:`FORMATS`."""
    FORMATS[made.name] = made
    return made


@cache
def parts_of(form: str, bits: int) -> tuple[Part, ...]:
    """The tensors of a format with codes of 4 or 8 bits, the codes first.

    Raises:
        ValueError: there is no such format.
    """
    if form not in FORMATS:
        raise ValueError(f"the format {form!r} is not one of {', '.join(sorted(FORMATS))}")
    return tuple(replace(part, bits=bits) for part in FORMATS[form].parts)


@cache
def all_suffixes() -> tuple[str, ...]:
    """Last parts of the names of all tensors that a module may have in any format."""
    return (*quantized_suffixes(), "scales", "weight", "bias")


@cache
def quantized_suffixes() -> tuple[str, ...]:
    """Last parts of names that only quantized modules have. (Other layers may have ``weight`` and ``scales``.)"""
    suffixes = [part.suffix for each in FORMATS.values() for part in each.parts]
    return tuple(dict.fromkeys(suffix for suffix in [*suffixes, FLOAT8_SCALE] if suffix not in ("weight", "scales")))
