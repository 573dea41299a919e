"""How a compressed-tensors checkpoint quantizes a module (``quantization_config`` of config.json)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from w4a8.checkpoint.tensors import CheckpointError, json_field, shorten
from w4a8.core.quant_args import QuantizationArgs, QuantizationStrategy

FORMATS = ("int-quantized", "pack-quantized")


@dataclass(frozen=True)
class Scheme:
    """One quantization scheme.

    Attributes:
        key: where config.json states it.
        format: one of FORMATS.
        weights: int4, symmetric, channelwise or in groups.
        quantizes_input: W4A8; False is W4A16.
    """

    key: str
    format: str
    weights: QuantizationArgs
    quantizes_input: bool


def _args(entry: Mapping[str, Any]) -> QuantizationArgs:
    names = ("num_bits", "type", "symmetric", "group_size", "strategy", "dynamic")
    return QuantizationArgs(**{name: entry[name] for name in names if entry.get(name) is not None})


def _check(condition: bool, key: str, found: object, expected: str) -> None:
    if not condition:
        raise CheckpointError(f"{key} is {shorten(found)}, but {expected} is expected")


def _check_weights(args: QuantizationArgs, key: str) -> None:
    _check(args.num_bits == 4, f"{key}.num_bits", args.num_bits, "4")
    _check(args.type == "int", f"{key}.type", args.type, "'int'")
    _check(args.symmetric is True, f"{key}.symmetric", args.symmetric, "true (int4 weights without zero points)")
    _check(args.dynamic is False, f"{key}.dynamic", args.dynamic, "false")
    strategies = (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL)
    _check(args.strategy in strategies, f"{key}.strategy", args.strategy, "'group' or 'channel'")
    if args.strategy == QuantizationStrategy.GROUP:
        size = args.group_size
        valid = isinstance(size, int) and not isinstance(size, bool) and size > 0 and size % 32 == 0
        _check(valid, f"{key}.group_size", size, "a multiple of 32")


def _check_input(args: QuantizationArgs, key: str) -> None:
    # Declared symmetric or not, the op quantizes asymmetrically, which represents at least as much.
    _check(args.num_bits == 8, f"{key}.num_bits", args.num_bits, "8")
    _check(args.type == "int", f"{key}.type", args.type, "'int'")
    _check(args.strategy == QuantizationStrategy.TOKEN, f"{key}.strategy", args.strategy, "'token'")
    _check(args.dynamic is True, f"{key}.dynamic", args.dynamic, "true")


def _matches(name: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return name == target


def _targets(owner: Mapping[str, Any], name: str, key: str) -> list[str]:
    """A list of module names, classes and regular expressions (``re:...``)."""
    targets = json_field(owner, name, list, key) or []
    for target in targets:
        try:
            valid = isinstance(target, str) and (not target.startswith("re:") or bool(re.compile(target[3:])))
        except (re.error, RecursionError, OverflowError):
            valid = False
        _check(valid, f"an entry of {key}", target, "a name or a regular expression (re:...)")
    return targets


class QuantizationScheme:
    """Schemes of all modules of a checkpoint."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Reads config.json.

        Args:
            config: its content; the quantization may be stated for the text part of a larger model.

        Raises:
            CheckpointError: no quantization, or not by compressed-tensors.
        """
        found = None
        for owner in (config, json_field(config, "text_config", dict, "text_config") or {}):
            for name in ("quantization_config", "compression_config"):
                found = found or json_field(owner, name, dict, name)
        if not found:
            raise CheckpointError("config.json has no quantization_config: this is not a quantized checkpoint")
        method = found.get("quant_method")
        _check(method == "compressed-tensors", "quantization_config.quant_method", method, "'compressed-tensors'")
        for name, what in (("transform_config", "rotated"), ("sparsity_config", "sparse")):
            entry = json_field(found, name, dict, f"quantization_config.{name}") or {}
            if entry.get("config_groups") or entry.get("format", "dense") != "dense":
                raise CheckpointError(f"quantization_config.{name} is set: {what} weights are not supported")
        self._format = found.get("format")
        self._ignore = _targets(found, "ignore", "quantization_config.ignore")
        key = "quantization_config.config_groups"
        self._groups: dict[str, Mapping[str, Any]] = json_field(found, "config_groups", dict, key) or {}
        self._targets: dict[str, list[str]] = {}
        for name, group in self._groups.items():
            _check(isinstance(group, dict), f"{key}.{name}", group, "an object")
            self._targets[name] = _targets(group, "targets", f"{key}.{name}.targets")

    def _group_of(self, module: str) -> str | None:
        """Name of the group that applies to a linear module: a target that matches its name beats its class."""
        if any(_matches(module, target) for target in self._ignore) or "Linear" in self._ignore:
            return None
        for by_class in (False, True):
            for name, targets in self._targets.items():
                for target in targets:
                    if (target == "Linear") if by_class else _matches(module, target):
                        return name
        return None

    def is_quantized(self, module: str) -> bool:
        """Whether a linear module is quantized at all, as config.json says."""
        return self._group_of(module) is not None

    def of(self, module: str) -> Scheme:
        """The scheme of a linear module.

        Raises:
            CheckpointError: it is not quantized, or not as int4 weights with int8 or unquantized activations; names
                what in config.json says so.
        """
        name = self._group_of(module)
        if name is None:
            raise CheckpointError(f"{module} is not quantized: no target matches it, or it is ignored")
        group = self._groups[name]
        key = f"quantization_config.config_groups.{name}"
        format_ = group.get("format") or self._format
        _check(format_ in FORMATS, f"format of {key}", format_, " or ".join(map(repr, FORMATS)))
        if not json_field(group, "weights", dict, f"{key}.weights"):
            raise CheckpointError(f"{key}.weights is missing: {module} is not quantized")
        weights = _args(group["weights"])
        _check_weights(weights, f"{key}.weights")
        if group["weights"].get("actorder") in (True, "group", "dynamic"):
            raise CheckpointError(
                f"{key}.weights.actorder is {group['weights']['actorder']!r}: reordered input features"
            )
        if group.get("output_activations"):
            raise CheckpointError(f"{key}.output_activations is set: outputs are not quantized here")
        activations = json_field(group, "input_activations", dict, f"{key}.input_activations")
        if activations:
            _check_input(_args(activations), f"{key}.input_activations")
        return Scheme(key, format_, weights, quantizes_input=bool(activations))
