"""What from_pretrained is given, and what config.json says of a directory with packed weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

from w4a8.core.activation_groups import check_activation_group
from w4a8.core.matrix import GROUP_SIZES, is_group_size
from w4a8.formats.packed_directory import FORMAT, METHOD, VERSION, check_stated
from w4a8.nn.grids import DEFAULT_GROUP_SIZE, most_in_features
from w4a8.nn.rounding import check_rounding
from w4a8.ops import DEFAULT_EFFORT
from w4a8.quantization.skip import Skipped

_SCALE_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class W4A8Config(QuantizationConfigMixin):
    """Options of quantizing while loading: those of ``w4a8.quantize_``, as JSON can hold them."""

    def __init__(
        self,
        group_size: int = DEFAULT_GROUP_SIZE,
        *,
        skip: str | Iterable[str] = (),
        default_skip: bool = True,
        scale_dtype: str | torch.dtype = "float32",
        effort: int = DEFAULT_EFFORT,
        symmetric: bool = True,
        values: str = "int4",
        activation_group: int | None = None,
        **saved: Any,
    ) -> None:
        """Takes the options.

        Args:
            group_size: weights per scale, 16 or a multiple of 32; -1 is one scale per output feature.
            skip: names of modules to leave alone besides, and ``re:`` with regular expressions.
            default_skip: leave output layers and routers alone as well; False quantizes those that are linear layers.
            scale_dtype: of the weights' scales: float32 or bfloat16.
            effort: 0 to 2: how long scales, and zero points, are searched for.
            symmetric: False: int4 values with a zero point for each group.
            values: ``int4``, or ``e2m1`` for the numbers of MXFP4; then ``symmetric``.
            activation_group: values of k of an input that share a scale when it is quantized to int8: 32, 64 or 128;
                -1, all of a row. None: what the checkpoint says, and 32 (-1 where that does not fit) if it says
                nothing. Of a packed directory the packed tensors say it.
            **saved: what a config.json has besides: quant_method, format, version.

        Raises:
            TypeError: an unknown option; a function as ``skip``, which no config.json could hold.
            ValueError: a bad value; a directory in a format that this version does not know.
        """
        self.quant_method = METHOD
        if isinstance(group_size, bool) or not isinstance(group_size, int):
            raise TypeError(f"group_size is {group_size!r}, expected an int")
        if not is_group_size(group_size):
            raise ValueError(f"group_size is {group_size}, expected -1, {GROUP_SIZES}")
        self.group_size = group_size
        if callable(skip):
            raise TypeError("skip is a function, which config.json cannot hold: give names or 're:' and a pattern")
        self.skip = [skip] if isinstance(skip, str) else list(skip)
        if not isinstance(default_skip, bool):
            raise TypeError(f"default_skip is {default_skip!r}, expected True or False")
        self.default_skip = default_skip
        self.skipped()  # refuses what is neither a name nor a pattern
        self.scale_dtype = str(scale_dtype).removeprefix("torch.")
        if self.scale_dtype not in _SCALE_TYPES:
            raise ValueError(f"scale_dtype is {scale_dtype}, expected float32 or bfloat16")
        check_rounding(_SCALE_TYPES[self.scale_dtype], effort)
        self.effort = effort
        if not isinstance(symmetric, bool):
            raise TypeError(f"symmetric is {symmetric!r}, expected True or False")
        self.symmetric, self.values = symmetric, values
        most_in_features(symmetric, values)  # refuses what is none
        # Of a checkpoint that others have quantized, group_size says nothing: matrix by matrix then.
        check_activation_group(activation_group)
        self.activation_group = activation_group
        self.format = self._check_saved(dict(saved))
        self.source: dict[str, Any] | None = None

    def for_source(self, source: dict[str, Any]) -> W4A8Config:
        """The config for a checkpoint that another method quantized: ``source`` is its quantization_config."""
        other = copy.deepcopy(self)
        other.source = source
        return other

    def skipped(self) -> Skipped:
        """What to leave alone."""
        return Skipped(self.skip, self.default_skip)

    @property
    def most_in_features(self) -> int:
        """K that can be quantized."""
        return most_in_features(self.symmetric, self.values)

    def _check_saved(self, saved: dict[str, Any]) -> str | None:
        """The format of a directory, None where the weights are floats."""
        method, version = saved.pop("quant_method", METHOD), saved.pop("version", VERSION)
        kind = saved.pop("format", None)
        if saved:
            raise TypeError(f"W4A8Config has no option {next(iter(saved))!r}")
        check_stated(method, FORMAT if kind is None else kind, version)
        return kind

    def options(self) -> dict[str, Any]:
        """What from_float takes besides the group size."""
        return {
            "scale_dtype": _SCALE_TYPES[self.scale_dtype],
            "effort": self.effort,
            "symmetric": self.symmetric,
            "values": self.values,
            "activation_group": self.activation_group,
        }

    def to_dict(self) -> dict[str, Any]:
        """As config.json gets it: a model is saved packed, whatever it was loaded from."""
        return {
            "quant_method": METHOD,
            "format": FORMAT,
            "version": VERSION,
            "group_size": self.group_size,
            "skip": list(self.skip),
            "default_skip": self.default_skip,
            "scale_dtype": self.scale_dtype,
            "effort": self.effort,
            "symmetric": self.symmetric,
            "values": self.values,
            "activation_group": self.activation_group,
        }
