"""Weights of float8_e4m3fn with scales, as FP8 checkpoints have them.

There is no packed form of such weights: they become floats, which the caller rounds. float8 is therefore not in
``FORMATS``, and ``read_layers`` does not read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from w4a8.core.float8_scales import E4M3
from w4a8.core.json_fields import check_field
from w4a8.formats.checks import FLOAT_TYPES, Tensors, expect_shape, take, take_bias
from w4a8.formats.compressed_tensors import CompressedTensorsRules
from w4a8.formats.format import FLOAT8_SCALE
from w4a8.formats.rules import WHERE, Rules, method_of, rules_of
from w4a8.formats.scheme import NotRead, Scheme

METHOD = "fp8"  # of DeepSeek-V3, MiniMax-M2 and Qwen3
_COMPRESSED = "compressed-tensors"


@dataclass(frozen=True)
class Float8Scheme(Scheme):
    """How a matrix of float8_e4m3fn is stored.

    Attributes:
        block: rows and columns that share a scale; None: one scale for each row, or for the matrix.
        scale: last part of the name of missing scales, for errors.
    """

    block: tuple[int, int] | None = None
    scale: str = FLOAT8_SCALE

    weight, required, optional = "weight", ("weight",), (FLOAT8_SCALE, "weight_scale")

    def floats(self, tensors: Tensors, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weights, float32 [N, K], each product rounded once; and the bias, [N] or None.

            weight              float8_e4m3fn [N, K]
            weight_scale_inv    or weight_scale: blocks have [ceil(N / rows), ceil(K / columns)], the last blocks may
                                be smaller; without blocks [N, 1], [N] or one number
            bias                [N], may be missing

        Raises:
            ValueError: a tensor is missing, has another dtype or shape, or a scale is not finite; names the tensor.
        """
        codes = take(tensors, name, "weight", (E4M3,), 2)
        suffix = next((each for each in self.optional if tensors.get(each) is not None), self.scale)
        found = tensors.get(suffix)
        dimensions = 2 if found is None or self.block is not None else found.dim()
        scales = take(tensors, name, suffix, FLOAT_TYPES, dimensions)
        rows, columns = codes.shape
        if self.block is not None:
            shape = tuple(-(-size // width) for size, width in zip(codes.shape, self.block))
            why = f"{rows} x {columns} weights in blocks of {' x '.join(map(str, self.block))}"
            expect_shape(scales.shape, name, suffix, shape, why)
        elif scales.numel() != 1 and tuple(scales.shape) not in ((rows,), (rows, 1)):
            found = tuple(scales.shape)
            raise ValueError(f"{name}.{suffix}: shape {found}, but one number or {(rows, 1)} is expected")
        if not scales.is_meta and not torch.isfinite(scales).all():
            raise ValueError(f"{name}.{suffix}: not all scales are finite")
        weights, scales = codes.to(torch.float32), scales.float()
        if self.block is None:
            weights *= scales.reshape(-1, 1)
        else:
            high, wide = self.block
            for begin, row in zip(range(0, rows, high), scales):
                weights[begin : begin + high] *= row.repeat_interleave(wide)[:columns]
        return weights, take_bias(tensors, name, rows)


class _Float8Rules:
    """``quant_method: fp8``. All modules have one scheme; the tensors in the files decide whether one is quantized."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises CheckpointError if ``weight_block_size`` is neither missing nor two positive integers."""
        size, block = config.get("weight_block_size"), None
        if size is not None:
            block = _block(size, f"{WHERE}.weight_block_size")
        scale = "weight_scale" if block is None else FLOAT8_SCALE
        why = f"{WHERE}.quant_method is {METHOD!r}"
        self._scheme = Float8Scheme("float8", -1, True, weight_only=why, bits=8, block=block, scale=scale)

    def of(self, module: str) -> Scheme | NotRead:
        """As :meth:`Rules.of`."""
        return self._scheme


class _CompressedRules(CompressedTensorsRules):
    """compressed-tensors' rules, some or all of whose groups are floats of 8 bits."""

    def _scheme(self, name: str, module: str) -> Scheme:
        weights, key = self._groups[name].get("weights"), f"{WHERE}.config_groups.{name}.weights"
        if not _is_float8(weights):
            return super()._scheme(name, module)
        strategy, block = weights.get("strategy"), None
        expected = "'tensor', 'channel' or 'block'"
        check_field(strategy in ("tensor", "channel", "block"), f"{key}.strategy", strategy, expected)
        if strategy == "block":
            block = _block(weights.get("block_structure"), f"{key}.block_structure")
        how = {"weight_only": f"{key}.type is 'float'", "bits": 8}
        return Float8Scheme("float8", -1, True, **how, block=block, scale="weight_scale")


def _block(value: Any, key: str) -> tuple[int, int]:
    valid = isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
    check_field(valid, key, value, "two positive integers")
    return tuple(value)


def _is_float8(weights: Any) -> bool:
    return isinstance(weights, Mapping) and weights.get("type") == "float" and weights.get("num_bits") == 8


def _are_float8(config: Mapping[str, Any]) -> set[bool]:
    """Of the groups of a quantization_config: whether their matrices are float8_e4m3fn."""
    if method_of(config) != _COMPRESSED:
        return {str(config.get("quant_method")).lower() == METHOD}
    groups = config.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    weights = [group.get("weights") for group in groups if isinstance(group, Mapping)]
    return {_is_float8(each) for each in weights if each is not None}


def has_float8(config: Mapping[str, Any]) -> bool:
    """Whether a quantization_config says that matrices are float8_e4m3fn."""
    return True in _are_float8(config)


def is_mixed(config: Mapping[str, Any]) -> bool:
    """Whether matrices are float8_e4m3fn and others are of another kind."""
    return len(_are_float8(config)) == 2


def rules_with_float8(config: Mapping[str, Any]) -> Rules:
    """As :func:`rules_of`, with a :class:`Float8Scheme` for modules that are float8_e4m3fn."""
    if not has_float8(config):
        return rules_of(config)
    return _CompressedRules(config) if method_of(config) == _COMPRESSED else _Float8Rules(config)
