"""compressed-tensors (llm-compressor). Weights are the same with int8 inputs (W4A8) and without (W4A16)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from w4a8.core.json_fields import CheckpointError, check_field, json_field, shorten
from w4a8.core.kind import integers_of
from w4a8.core.matrix import GROUP_SIZES, Matrix, is_group_size
from w4a8.core.nibbles import check_int4_range, to_nibbles, word_bytes, word_codes
from w4a8.core.patterns import Pattern, name_or_pattern, names_field
from w4a8.core.quant_args import QuantizationArgs
from w4a8.formats.checks import (
    Tensors,
    check_g_idx,
    checked_zeros,
    expect_shape,
    groups_of,
    stated_shape,
    take,
    take_bias,
    take_scales,
)
from w4a8.formats.format import Format, Part, add_format
from w4a8.formats.mxfp4 import BLOCK as MX_BLOCK
from w4a8.formats.mxfp4 import MXFP4_PACK
from w4a8.formats.nvfp4 import BLOCK as NV_BLOCK
from w4a8.formats.nvfp4 import NVFP4_PACK
from w4a8.formats.rules import rules_for
from w4a8.formats.scheme import NotRead, Scheme, scheme_or_not_read


def _rest(
    tensors: Tensors,
    name: str,
    stored: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    symmetric: bool,
    bits: int = 4,
) -> Matrix:
    """The matrix of nibbles, or of codes of 8 bits, with the tensors that both integer formats share."""
    rows, features = stored.shape[0], stored.shape[1] * 8 // bits
    groups = groups_of(features, group_size, name, "weight_scale")
    why = f"{features} x {rows} features in groups of {group_size}"
    scales = take_scales(tensors, name, "weight_scale", (rows, groups), why)
    if zeros is not None:
        expect_shape(zeros.shape, name, "weight_zero_point", (rows, groups), why)
        zeros = checked_zeros(zeros, name, "weight_zero_point", symmetric, bits)
    check_g_idx(tensors, name, "weight_g_idx", features, group_size)
    return Matrix(stored, scales, zeros, integers_of(bits), take_bias(tensors, name, rows))


def from_int_quantized(tensors: Tensors, name: str, group_size: int, symmetric: bool) -> Matrix:
    """A matrix in the format ``int-quantized``.

        weight              int8 [N, K] in [-8, 7]
        weight_scale        [N, K/g]
        weight_zero_point   int8 [N, K/g] in [-8, 7]; may be missing if symmetric
        weight_g_idx        int32 [K], the group of each input feature; may be missing
        bias                [N], may be missing

    Args:
        tensors: by these names.
        name: of the matrix, for errors.
        group_size: g, -1 for one group (``channel``).
        symmetric: the configuration says that there are no zero points.

    Raises:
        ValueError: a tensor is missing, has another dtype or shape, or values that this format does not have.
    """
    weight = take(tensors, name, "weight", (torch.int8,), 2)
    groups_of(weight.shape[1], group_size, name, "weight")
    check_int4_range(weight, f"{name}.weight")
    zeros = None
    if tensors.get("weight_zero_point") is not None or not symmetric:
        zeros = take(tensors, name, "weight_zero_point", (torch.int8,), 2).to(torch.int32) + 8
    return _rest(tensors, name, to_nibbles(weight), zeros, group_size, symmetric)


def from_pack_quantized(tensors: Tensors, name: str, group_size: int, symmetric: bool, bits: int = 4) -> Matrix:
    """A matrix in the format ``pack-quantized``.

        weight_packed       int32 [N, ceil(K/c)]     code i of column j: input feature c j + i (c = 32 / bits)
        weight_scale        [N, K/g]
        weight_zero_point   int32 [ceil(N/c), K/g]   code i of row r: output feature c r + i; optional if symmetric
        weight_shape        int64 or int32 [2]: N, K
        weight_g_idx, bias  as in :func:`from_int_quantized`

    Args, Raises: as :func:`from_int_quantized`; ``bits`` of a code are 4 or 8.
    """
    in_word = 32 // bits
    words = take(tensors, name, "weight_packed", (torch.int32,), 2)
    rows, features = stated_shape(tensors, name, (len(words), in_word * words.shape[1]))
    groups_of(features, group_size, name, "weight_shape")
    size = f"{rows} x {features} features"
    expect_shape(words.shape, name, "weight_packed", (rows, -(-features // in_word)), size)
    zeros = None
    if tensors.get("weight_zero_point") is not None or not symmetric:
        packed = take(tensors, name, "weight_zero_point", (torch.int32,), 2)
        expect_shape(packed.shape, name, "weight_zero_point", (-(-rows // in_word), packed.shape[1]), size)
        zeros = word_codes(packed.T, bits).T[:rows]
    stored = word_bytes(words)[:, : features * bits // 8].contiguous()
    return _rest(tensors, name, stored, zeros, group_size, symmetric, bits)


_SCALES = Part("weight_scale", "weight_scale", torch.float32, ("n", "g"))
_G_IDX = Part("weight_g_idx", "g_idx", torch.int32, ("k",))
INT_QUANTIZED = add_format(
    Format(
        "int-quantized",
        (
            Part("weight", "weight", torch.int8, ("n", "k")),
            _SCALES,
            Part("weight_zero_point", "zero_points", torch.int8, ("n", "g")),
            _G_IDX,
        ),
        lambda tensors, name, scheme: from_int_quantized(tensors, name, scheme.group_size, scheme.symmetric),
    )
)
PACK_QUANTIZED = add_format(
    Format(
        "pack-quantized",
        (
            Part("weight_packed", "weight", torch.int32, ("n", "k"), 1),
            Part("weight_shape", "shape", torch.int64),
            _SCALES,
            Part("weight_zero_point", "zero_points", torch.int32, ("n", "g"), 0),
            _G_IDX,
        ),
        lambda tensors, name, scheme: from_pack_quantized(
            tensors, name, scheme.group_size, scheme.symmetric, scheme.bits
        ),
    )
)

# Formats of 4-bit floats, and the number of floats that share a scale.
_BLOCKS = {MXFP4_PACK.name: MX_BLOCK, NVFP4_PACK.name: NV_BLOCK}
_FORMATS = (INT_QUANTIZED.name, PACK_QUANTIZED.name, *_BLOCKS)


def _args(entry: Mapping[str, Any]) -> QuantizationArgs:
    names = ("num_bits", "type", "symmetric", "group_size", "strategy", "dynamic", "actorder")
    return QuantizationArgs(**{name: entry[name] for name in names if entry.get(name) is not None})


def scheme_of_args(format_: object, weights: Any, inputs: Any, key: str) -> Scheme:
    """The scheme of QuantizationArgs, compressed-tensors' own or this package's. inputs None: inputs are not quantized.

    Raises:
        CheckpointError: weights or inputs that the operators do not have; names ``key``, the key of the group.
    """
    check_field(format_ in _FORMATS, f"format of {key}", format_, f"one of {', '.join(map(repr, _FORMATS))}")
    block, where = _BLOCKS.get(format_), f"{key}.weights"
    if block is not None:
        _check_fields(weights, where, type="float", symmetric=True, dynamic=False, group_size=block, num_bits=(4,))
        return Scheme(format_, block, True, weight_only=f"{key}.input_activations is not int8")
    # Weights of 8 bits in int-quantized, or with int8 inputs, are refused: frameworks have kernels for such layers.
    both = format_ == PACK_QUANTIZED.name and inputs is None
    _check_fields(weights, where, num_bits=(4, 8) if both else (4,), type="int", dynamic=False)
    check_field(isinstance(weights.symmetric, bool), f"{where}.symmetric", weights.symmetric, "true or false")
    strategy, order, size = _text(weights.strategy), _text(getattr(weights, "actorder", None)), weights.group_size
    check_field(strategy in ("group", "channel"), f"{where}.strategy", strategy, "'group' or 'channel'")
    if strategy == "group":
        check_field(size != -1 and is_group_size(size), f"{where}.group_size", size, GROUP_SIZES)
    if order in (True, "group", "dynamic"):
        raise CheckpointError(f"{where}.actorder is {order!r}: reordered input features")
    if inputs is not None:
        # inputs.symmetric is not checked: per token the op quantizes asymmetrically, with at least the same values.
        _check_fields(inputs, f"{key}.input_activations", num_bits=(8,), type="int", strategy="token", dynamic=True)
    weight_only = None if inputs is not None else f"{key}.input_activations is missing"
    group = size if strategy == "group" else -1
    return Scheme(format_, group, weights.symmetric, weight_only=weight_only, bits=weights.num_bits)


def _text(value: object) -> object:
    """The string of an enum member of compressed-tensors; other values as they are."""
    return getattr(value, "value", value)


def _check_fields(args: Any, key: str, **wanted: Any) -> None:
    """Raises CheckpointError if an attribute has not the wanted value; a tuple lists the integers that are allowed."""
    for name, value in wanted.items():
        found = _text(getattr(args, name))
        if isinstance(value, tuple):
            # 4.0 and True equal integers, but are not integers.
            valid, expected = type(found) is int and found in value, " or ".join(map(str, value))
        else:
            valid = found is value if isinstance(value, bool) else found == value
            expected = str(value).lower() if isinstance(value, bool) else repr(value)
        check_field(valid, f"{key}.{name}", found, expected)


def _compiled(entries: Iterable[str], key: str) -> dict[str, Pattern | None]:
    """Entry -> its expression or None, in the order in which ``compressed_tensors.utils.match_targets`` tries them."""
    return {entry: name_or_pattern(entry, key) for entry in sorted(entries)}


def _match(module: str, entries: Mapping[str, Pattern | None]) -> str | None:
    """The entry for a linear module: its name, else the first matching pattern, else ``Linear`` or ``Module``."""
    if entries.get(module, False) is None:
        return module
    for entry, pattern in entries.items():
        if pattern is not None and pattern.match(module):
            return entry
    return next((name for name in ("Linear", "Module") if name in entries), None)


@rules_for("compressed-tensors")
class CompressedTensorsRules:
    """The rules of ``quant_method: compressed-tensors``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Reads a quantization_config.

        Raises:
            CheckpointError: rotated or sparse weights, or a value of the wrong type.
        """
        for name, what in (("transform_config", "rotated"), ("sparsity_config", "sparse")):
            entry = json_field(config, name, dict, f"quantization_config.{name}") or {}
            if entry.get("config_groups") or entry.get("format", "dense") != "dense":
                raise CheckpointError(f"quantization_config.{name} is set: {what} weights are not supported")
        self._format = config.get("format")
        key = "quantization_config.ignore"
        self._ignore = _compiled(names_field(config, "ignore", key), f"an entry of {key}")
        key = "quantization_config.config_groups"
        self._groups: dict[str, Mapping[str, Any]] = json_field(config, "config_groups", dict, key) or {}
        group_of: dict[str, str] = {}  # target -> group; of several groups with one target, the last
        for name, group in self._groups.items():
            check_field(isinstance(group, dict), f"{key}.{name}", group, "an object")
            group_of.update(dict.fromkeys(names_field(group, "targets", f"{key}.{name}.targets"), name))
        self._group_of = group_of
        self._targets = _compiled(group_of, f"a target of {key}")

    def of(self, module: str) -> Scheme | NotRead:
        """How a linear module is stored, or why it is left out. Names go before patterns, patterns before classes."""
        entry = _match(module, self._ignore)
        if entry is not None:
            return NotRead.not_quantized(module, f"quantization_config.ignore has {shorten(entry)}")
        target = _match(module, self._targets)
        if target is None:
            key = "quantization_config.config_groups"
            why = f"no target in {key} matches it" if self._groups else f"{key} is missing"
            return NotRead.not_quantized(module, why)
        return scheme_or_not_read(partial(self._scheme, self._group_of[target], module))

    def _scheme(self, name: str, module: str) -> Scheme:
        group = self._groups[name]
        key = f"quantization_config.config_groups.{name}"
        if not json_field(group, "weights", dict, f"{key}.weights"):
            raise CheckpointError(f"{key}.weights is missing: {module} is not quantized")
        activations = json_field(group, "input_activations", dict, f"{key}.input_activations")
        if group.get("output_activations"):
            raise CheckpointError(f"{key}.output_activations is set: outputs are not quantized here")
        inputs = _args(activations) if activations else None
        return scheme_of_args(group.get("format") or self._format, _args(group["weights"]), inputs, key)
