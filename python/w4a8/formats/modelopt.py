"""Which modules of a checkpoint of nvidia-modelopt are quantized, and how."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from w4a8.core.json_fields import check_field, json_field, shorten
from w4a8.formats.nvfp4 import BLOCK, MODELOPT_NVFP4
from w4a8.formats.rules import WHERE, rules_for
from w4a8.formats.scheme import NotRead, Scheme, scheme_or_not_read

MIXED = "MIXED_PRECISION"
# ``quant_algo`` for 4-bit weights, with inputs in 4 bits and in floats.
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")


@rules_for("modelopt", file="hf_quant_config.json")
class ModelOptRules:
    """``quant_method: modelopt``: NVFP4 in all modules, or in MIXED_PRECISION in those that the configuration names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Reads a quantization_config, or hf_quant_config.json, which has the same keys inside ``quantization``.

        Raises:
            CheckpointError: a value of the wrong type.
        """
        self._where = WHERE
        inside = json_field(config, "quantization", dict, f"{WHERE}.quantization")
        if inside is not None:
            config, self._where = inside, f"{WHERE}.quantization"
        skipped = "ignore" if config.get("ignore") is not None else "exclude_modules"
        self._skipped_key = f"{self._where}.{skipped}"
        self._skipped = json_field(config, skipped, list, self._skipped_key) or []
        for entry in self._skipped:
            check_field(isinstance(entry, str), f"an entry of {self._skipped_key}", entry, "a name")
        self._layers: dict[str, Scheme | NotRead] | None = None
        self.default: Scheme | NotRead
        if _algorithm(config) == MIXED:
            key = f"{self._where}.quantized_layers"
            layers = json_field(config, "quantized_layers", dict, key) or {}
            where = {name: f"{key}[{shorten(name)}]" for name in layers}
            self._layers = {
                name: _found(json_field(layers, name, dict, where[name]) or {}, where[name]) for name in layers
            }
            self.default = NotRead(f"not quantized: {key} does not name it", quantized=False)
        else:
            self.default = _found(config, self._where)

    def of(self, module: str) -> Scheme | NotRead:
        """As :meth:`Rules.of`: a module is left out if an entry matches the name of the module or of an outer module.

        In MIXED_PRECISION the entry of ``quantized_layers`` with the longest such name decides.
        """
        for entry in self._skipped:
            if fnmatchcase(module, entry) or fnmatchcase(module, f"{entry}.*"):
                return NotRead.not_quantized(module, f"{self._skipped_key} has {shorten(entry)}")
        if self._layers is None:
            return self.default
        name = module
        while name and name not in self._layers:
            name = name.rpartition(".")[0]
        return self._layers[name] if name else NotRead(f"{module} is {self.default.reason}", quantized=False)


def _found(config: Mapping[str, Any], where: str) -> Scheme | NotRead:
    return scheme_or_not_read(partial(_scheme, config, where))


def _algorithm(config: Mapping[str, Any]) -> object:
    algorithm = config.get("quant_algo")
    return algorithm.upper() if isinstance(algorithm, str) else algorithm


def _scheme(config: Mapping[str, Any], where: str) -> Scheme:
    """The scheme that an object of the configuration states.

    Raises:
        CheckpointError: another algorithm or block size.
    """
    key, algorithm = f"{where}.quant_algo", _algorithm(config)
    check_field(algorithm in ALGORITHMS, key, algorithm, " or ".join(map(repr, ALGORITHMS)))
    sizes = {f"{where}.group_size": config.get("group_size")}
    groups = json_field(config, "config_groups", dict, f"{where}.config_groups") or {}
    for name in groups:
        group_key = f"{where}.config_groups.{name}"
        group = json_field(groups, name, dict, group_key) or {}
        weights = json_field(group, "weights", dict, f"{group_key}.weights") or {}
        sizes[f"{group_key}.weights.group_size"] = weights.get("group_size")
    for size_key, size in sizes.items():
        check_field(size in (None, BLOCK), size_key, size, str(BLOCK))
    return Scheme(MODELOPT_NVFP4.name, BLOCK, True, weight_only=f"{key} is {algorithm!r}")
