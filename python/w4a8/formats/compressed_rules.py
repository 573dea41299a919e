"""Which modules of a compressed-tensors checkpoint are quantized, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from w4a8.core.json_fields import CheckpointError, check_field, json_field, shorten
from w4a8.core.matrix import GROUP_SIZES, is_group_size
from w4a8.core.patterns import Pattern, name_or_pattern, names_field
from w4a8.core.quant_args import QuantizationArgs, QuantizationStrategy
from w4a8.formats.mxfp4 import BLOCK as MX_BLOCK
from w4a8.formats.nvfp4 import BLOCK as NV_BLOCK
from w4a8.formats.stored import LeftOut, Stored, stored_or_left_out

# Formats of 4-bit floats, and how many share a scale.
BLOCKS = {"mxfp4-pack-quantized": MX_BLOCK, "nvfp4-pack-quantized": NV_BLOCK}
FORMATS = ("int-quantized", "pack-quantized", *BLOCKS)


def _args(entry: Mapping[str, Any]) -> QuantizationArgs:
    names = ("num_bits", "type", "symmetric", "group_size", "strategy", "dynamic")
    return QuantizationArgs(**{name: entry[name] for name in names if entry.get(name) is not None})


def _check_bits(args: QuantizationArgs, key: str, bits: tuple[int, ...]) -> None:
    # 4.0 and True are equal to integers, and none of them.
    valid = type(args.num_bits) is int and args.num_bits in bits
    check_field(valid, f"{key}.num_bits", args.num_bits, " or ".join(map(str, bits)))


def _check_weights(args: QuantizationArgs, key: str, bits: tuple[int, ...]) -> None:
    _check_bits(args, key, bits)
    check_field(args.type == "int", f"{key}.type", args.type, "'int'")
    check_field(isinstance(args.symmetric, bool), f"{key}.symmetric", args.symmetric, "true or false")
    check_field(args.dynamic is False, f"{key}.dynamic", args.dynamic, "false")
    strategies = (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL)
    check_field(args.strategy in strategies, f"{key}.strategy", args.strategy, "'group' or 'channel'")
    if args.strategy == QuantizationStrategy.GROUP:
        size = args.group_size
        check_field(size != -1 and is_group_size(size), f"{key}.group_size", size, GROUP_SIZES)


def _check_floats(args: QuantizationArgs, key: str, block: int) -> None:
    _check_bits(args, key, (4,))
    check_field(args.type == "float", f"{key}.type", args.type, "'float'")
    check_field(args.symmetric is True, f"{key}.symmetric", args.symmetric, "true")
    check_field(args.dynamic is False, f"{key}.dynamic", args.dynamic, "false")
    check_field(args.group_size == block, f"{key}.group_size", args.group_size, str(block))


def _check_input(args: QuantizationArgs, key: str) -> None:
    # Declared symmetric or not, the op quantizes asymmetrically, which represents at least as much.
    _check_bits(args, key, (8,))
    check_field(args.type == "int", f"{key}.type", args.type, "'int'")
    check_field(args.strategy == QuantizationStrategy.TOKEN, f"{key}.strategy", args.strategy, "'token'")
    check_field(args.dynamic is True, f"{key}.dynamic", args.dynamic, "true")


def _compiled(entries: Iterable[str], key: str) -> dict[str, Pattern | None]:
    """Entries, and their expressions in the order in which ``compressed_tensors.utils.match_targets`` asks them."""
    return {entry: name_or_pattern(entry, key) for entry in sorted(entries)}


def _match(module: str, entries: Mapping[str, Pattern | None]) -> str | None:
    """The first that matches the name of a linear module, else its class or the class above."""
    if entries.get(module, False) is None:
        return module
    for entry, pattern in entries.items():
        if pattern is not None and pattern.match(module):
            return entry
    return next((name for name in ("Linear", "Module") if name in entries), None)


class CompressedTensorsRules:
    """What ``quant_method: compressed-tensors`` says of each module."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Reads a quantization_config.

        Raises:
            CheckpointError: rotated or sparse weights, or a value of another type than it should be.
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
        group_of: dict[str, str] = {}  # of several with one target, the last
        for name, group in self._groups.items():
            check_field(isinstance(group, dict), f"{key}.{name}", group, "an object")
            group_of.update(dict.fromkeys(names_field(group, "targets", f"{key}.{name}.targets"), name))
        self._group_of = group_of
        self._targets = _compiled(group_of, f"a target of {key}")

    def of(self, module: str) -> Stored | LeftOut:
        """How a linear module is stored, or why it is left out: its name beats a pattern, and that its class."""
        entry = _match(module, self._ignore)
        if entry is not None:
            return LeftOut.not_quantized(module, f"quantization_config.ignore has {shorten(entry)}")
        target = _match(module, self._targets)
        if target is None:
            key = "quantization_config.config_groups"
            why = f"no target in {key} matches it" if self._groups else f"{key} is missing"
            return LeftOut.not_quantized(module, why)
        return stored_or_left_out(partial(self._stored, self._group_of[target], module))

    def _stored(self, name: str, module: str) -> Stored:
        group = self._groups[name]
        key = f"quantization_config.config_groups.{name}"
        format_ = group.get("format") or self._format
        check_field(format_ in FORMATS, f"format of {key}", format_, f"one of {', '.join(map(repr, FORMATS))}")
        if not json_field(group, "weights", dict, f"{key}.weights"):
            raise CheckpointError(f"{key}.weights is missing: {module} is not quantized")
        weights = _args(group["weights"])
        activations = json_field(group, "input_activations", dict, f"{key}.input_activations")
        if format_ in BLOCKS:
            _check_floats(weights, f"{key}.weights", BLOCKS[format_])
            return Stored(format_, BLOCKS[format_], True, weight_only=f"{key}.input_activations is not int8")
        # Of 8 bits in int8, or with int8 inputs, is another kind of layer, which has kernels of its own everywhere.
        mixed = format_ == "pack-quantized" and not activations
        _check_weights(weights, f"{key}.weights", (4, 8) if mixed else (4,))
        if group["weights"].get("actorder") in (True, "group", "dynamic"):
            raise CheckpointError(
                f"{key}.weights.actorder is {group['weights']['actorder']!r}: reordered input features"
            )
        if group.get("output_activations"):
            raise CheckpointError(f"{key}.output_activations is set: outputs are not quantized here")
        if activations:
            _check_input(_args(activations), f"{key}.input_activations")
        weight_only = None if activations else f"{key}.input_activations is missing"
        group_size = weights.group_size if weights.strategy == QuantizationStrategy.GROUP else -1
        return Stored(format_, group_size, weights.symmetric, weight_only=weight_only, bits=weights.num_bits)
