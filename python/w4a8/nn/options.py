"""The options of quantizing floats, and the only place that checks the options."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from w4a8.core.activation_groups import check_activation_group
from w4a8.core.kind import Kind
from w4a8.core.matrix import GROUP_SIZES, PackedAs, is_group_size
from w4a8.packing import DEFAULT_EFFORT

# The default of weights that share a scale when floats are quantized.
DEFAULT_GROUP_SIZE = 32

_SCALE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class QuantOptions:
    """How float weights are rounded, and their inputs (docs/quantization.md).

    Attributes:
        group_size: weights that share a scale, 16 or a multiple of 32; -1 is one scale for each output feature.
        scale_dtype: of the weights' scales: float32 or bfloat16, as a torch.dtype or by name. None: float32, or with
            ``bits`` bfloat16.
        effort: 0 to 2: how long scales and zero points with a small squared error are searched for. 0 is a rule for
            each group. 1 and 2 never lose more in any group, and take 1 to 5 ns more per weight and thread.
        symmetric: False: int4 values get a zero point for each group, one byte more; better if the weights of a group
            are not spread evenly around 0.
        values: ``int4``, ``int6`` or ``int8``, or ``e2m1`` for the numbers of MXFP4, with scales of any value. All but
            ``int4`` are ``symmetric``.
        activation_group: values of k of an input that share a scale: 32, 64 or 128 that divides the group, or the input
            size in groups of 16; -1: all of a row, for less quality and less time. None: 32, or -1 if 32 does not fit.
        bits: of a weight of a model on average, scales included: matrices that matter more get zero points, int6 or
            int8 instead of ``values``. None, as for a single layer: all get ``values``.

    Raises:
        TypeError: an unknown option; ``group_size`` is no int, ``symmetric`` no bool or ``bits`` no number.
        ValueError: a value that is none of these; names the option.
    """

    group_size: int = DEFAULT_GROUP_SIZE
    scale_dtype: torch.dtype | None = None
    effort: int = DEFAULT_EFFORT
    symmetric: bool = True
    values: str = "int4"
    activation_group: int | None = None
    bits: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int):
            raise TypeError(f"group_size is {self.group_size!r}, expected an int")
        if not is_group_size(self.group_size):
            raise ValueError(f"group_size is {self.group_size}, expected -1, {GROUP_SIZES}")
        if self.bits is not None and (isinstance(self.bits, bool) or not isinstance(self.bits, (int, float))):
            raise TypeError(f"bits is {self.bits!r}, expected a number")
        if self.scale_dtype is None:
            object.__setattr__(self, "scale_dtype", torch.float32 if self.bits is None else torch.bfloat16)
        dtype = _SCALE_DTYPES.get(str(self.scale_dtype).removeprefix("torch."))
        if dtype is None:
            raise ValueError(f"scale_dtype is {self.scale_dtype}, expected torch.float32 or torch.bfloat16")
        object.__setattr__(self, "scale_dtype", dtype)
        if isinstance(self.effort, bool) or self.effort not in (0, 1, 2):
            raise ValueError(f"effort is {self.effort!r}, expected 0, 1 or 2")
        if not isinstance(self.symmetric, bool):
            raise TypeError(f"symmetric is {self.symmetric!r}, expected True or False")
        if self.values not in ("int4", "e2m1", "int6", "int8"):
            raise ValueError(f"values is {self.values!r}, expected 'int4', 'e2m1', 'int6' or 'int8'")
        if self.values != "int4" and not self.symmetric:
            raise ValueError(f"symmetric is False, expected True for values = {self.values!r}: no zero points are made")
        check_activation_group(self.activation_group, self.group_size)

    @classmethod
    def of(cls, given: QuantOptions | int | None, fields: dict[str, Any]) -> QuantOptions:
        """The options of a call, given as an object or by name.

        Args:
            given: options, or the group size alone, or None.
            fields: options by name, which replace fields of ``given``.

        Raises:
            TypeError, ValueError: as the constructor.
        """
        if isinstance(given, cls):
            return replace(given, **fields)
        return cls(**fields) if given is None else cls(given, **fields)

    @property
    def form(self) -> PackedAs:
        """The form in which matrices are packed, except for the activation group."""
        return PackedAs(Kind(self.values), self.scale_dtype, zero_points=not self.symmetric)

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON can hold them; the constructor takes the result."""
        found = {**asdict(self), "scale_dtype": str(self.scale_dtype).removeprefix("torch.")}
        return found if self.bits is not None else {key: value for key, value in found.items() if key != "bits"}
