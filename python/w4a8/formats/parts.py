"""Which tensors a matrix has in each format: the one list of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from w4a8.core.float8 import E4M3


@dataclass(frozen=True)
class Part:
    """One tensor of a matrix.

    Attributes:
        suffix: the last part of its name.
        kind: ``weight`` (the codes), ``weight_scale``, ``zero_points``, ``shape``, ``g_idx``, ``global_scale`` (one
            number, of all scales) or ``input_scale`` (that must not be there).
        dtype: that holds it; float32 stands for all floats, but for ``global_scale``.
        axes: ``n`` output features, ``k`` input features, ``g`` groups of them. (MXFP4's codes as a matrix; one number
            may have a dimension of one.)
        packed: the axis along which codes share an element, a word or a byte; None if none do.
        bits: of a code.
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
        return dtype == self.dtype or (floats and dtype.is_floating_point)

    @property
    def codes_in_an_element(self) -> int:
        """Of the packed axis."""
        return torch.iinfo(self.dtype).bits // self.bits

    def shape(self, rows: int, columns: int, groups: int) -> tuple[int, ...]:
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
        return tuple(sizes)

    def features(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """(N, K) of the codes: the inverse of :meth:`shape`."""
        sizes = dict(zip(self.axes, shape))
        if self.packed is not None:
            sizes[self.axes[self.packed]] *= self.codes_in_an_element
        return sizes["n"], sizes["k"]


_G_IDX = Part("g_idx", "g_idx", torch.int32, ("k",))
_SCALES = Part("scales", "weight_scale", torch.float32, ("g", "n"))
_ZEROS = Part("qzeros", "zero_points", torch.int32, ("g", "n"), 1)
_CT_G_IDX = Part("weight_g_idx", "g_idx", torch.int32, ("k",))
_CT_SCALES = Part("weight_scale", "weight_scale", torch.float32, ("n", "g"))
# The codes first.
PARTS: dict[str, tuple[Part, ...]] = {
    "gptq": (Part("qweight", "weight", torch.int32, ("k", "n"), 0), _SCALES, _ZEROS, _G_IDX),
    "awq": (Part("qweight", "weight", torch.int32, ("k", "n"), 1), _SCALES, _ZEROS),
    "int-quantized": (
        Part("weight", "weight", torch.int8, ("n", "k")),
        _CT_SCALES,
        Part("weight_zero_point", "zero_points", torch.int8, ("n", "g")),
        _CT_G_IDX,
    ),
    "pack-quantized": (
        Part("weight_packed", "weight", torch.int32, ("n", "k"), 1),
        Part("weight_shape", "shape", torch.int64),
        _CT_SCALES,
        Part("weight_zero_point", "zero_points", torch.int32, ("n", "g"), 0),
        _CT_G_IDX,
    ),
    "mxfp4-pack-quantized": (
        Part("weight_packed", "weight", torch.uint8, ("n", "k"), 1),
        Part("weight_scale", "weight_scale", torch.uint8, ("n", "g")),
    ),
    "nvfp4-pack-quantized": (
        Part("weight_packed", "weight", torch.uint8, ("n", "k"), 1),
        Part("weight_scale", "weight_scale", E4M3, ("n", "g")),
        Part("weight_global_scale", "global_scale", torch.float32),
    ),
    "modelopt-nvfp4": (
        Part("weight", "weight", torch.uint8, ("n", "k"), 1),
        Part("weight_scale", "weight_scale", E4M3, ("n", "g")),
        Part("weight_scale_2", "global_scale", torch.float32),
        Part("pre_quant_scale", "input_scale", torch.float32, ("k",)),
    ),
    "quark-mxfp4": (
        Part("weight", "weight", torch.uint8, ("n", "k"), 1),
        Part("weight_scale", "weight_scale", torch.uint8, ("n", "g")),
        Part("input_rotation", "input_scale", torch.float32, ("k", "k")),
    ),
    "mxfp4": (
        Part("blocks", "weight", torch.uint8, ("n", "k"), 1),
        Part("scales", "weight_scale", torch.uint8, ("n", "g")),
    ),
}


@cache
def parts_of(form: str, bits: int) -> tuple[Part, ...]:
    """The tensors of a format with codes of 4 or 8 bits, the codes first."""
    return tuple(replace(part, bits=bits) for part in PARTS[form])


# What only a quantized module has. (Layers of other kinds may have ``scales``; ``weight`` says nothing.)
QUANTIZED_SUFFIXES = tuple(
    dict.fromkeys(part.suffix for parts in PARTS.values() for part in parts if part.suffix not in ("weight", "scales"))
)
