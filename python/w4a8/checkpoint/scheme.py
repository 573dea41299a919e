"""How a compressed-tensors checkpoint quantizes a module (``quantization_config`` of config.json)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from w4a8.checkpoint.tensors import CheckpointError
from w4a8.moe.quant_args import QuantizationArgs, QuantizationStrategy

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
        raise CheckpointError(f"{key} is {found!r}, but {expected} is expected")


def _check_weights(args: QuantizationArgs, key: str) -> None:
    _check(args.num_bits == 4, f"{key}.num_bits", args.num_bits, "4")
    _check(args.type == "int", f"{key}.type", args.type, "'int'")
    _check(args.symmetric, f"{key}.symmetric", args.symmetric, "true (int4 weights without zero points)")
    _check(args.dynamic is False, f"{key}.dynamic", args.dynamic, "false")
    strategies = (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL)
    _check(args.strategy in strategies, f"{key}.strategy", args.strategy, "'group' or 'channel'")
    if args.strategy == QuantizationStrategy.GROUP:
        size = args.group_size
        valid = isinstance(size, int) and size > 0 and size % 32 == 0
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
        for owner in (config, config.get("text_config") or {}):
            found = found or owner.get("quantization_config") or owner.get("compression_config")
        if not found:
            raise CheckpointError("config.json has no quantization_config: this is not a quantized checkpoint")
        method = found.get("quant_method")
        _check(method == "compressed-tensors", "quantization_config.quant_method", method, "'compressed-tensors'")
        for name, what in (("transform_config", "rotated"), ("sparsity_config", "sparse")):
            if (found.get(name) or {}).get("config_groups") or (found.get(name) or {}).get(
                "format", "dense"
            ) != "dense":
                raise CheckpointError(f"quantization_config.{name} is set: {what} weights are not supported")
        self._format = found.get("format")
        self._ignore: list[str] = list(found.get("ignore") or [])
        self._groups: dict[str, Mapping[str, Any]] = dict(found.get("config_groups") or {})

    def _group_of(self, module: str) -> str | None:
        """Name of the group that applies to a linear module: a target that matches its name beats its class."""
        if any(_matches(module, target) for target in self._ignore) or "Linear" in self._ignore:
            return None
        for by_class in (False, True):
            for name, group in self._groups.items():
                for target in group.get("targets") or []:
                    if (target == "Linear") if by_class else _matches(module, target):
                        return name
        return None

    def of(self, module: str) -> Scheme:
        """The scheme of a linear module of an expert.

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
        if not group.get("weights"):
            raise CheckpointError(f"{key}.weights is missing: {module} is not quantized")
        weights = _args(group["weights"])
        _check_weights(weights, f"{key}.weights")
        if group["weights"].get("actorder") in (True, "group", "dynamic"):
            raise CheckpointError(
                f"{key}.weights.actorder is {group['weights']['actorder']!r}: reordered input features"
            )
        if group.get("output_activations"):
            raise CheckpointError(f"{key}.output_activations is set: outputs are not quantized here")
        activations = group.get("input_activations")
        if activations:
            _check_input(_args(activations), f"{key}.input_activations")
        return Scheme(key, format_, weights, quantizes_input=bool(activations))
