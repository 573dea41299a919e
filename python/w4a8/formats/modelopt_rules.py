"""Which modules of a checkpoint of nvidia-modelopt are quantized, and how."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from w4a8.core.json_fields import CheckpointError, check_field, json_field, shorten
from w4a8.formats.nvfp4 import BLOCK
from w4a8.formats.stored import NotOurs, Stored

_WHERE = "quantization_config"
NVFP4 = "modelopt-nvfp4"
# Of 4-bit weights with inputs in 4 bits, or in floats.
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")


class ModelOptRules:
    """``quant_method: modelopt``: NVFP4.

    Attributes:
        default: how a module is stored that no entry leaves out; NotOurs where nothing is.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Reads a quantization_config, or what hf_quant_config.json has (the same, inside of ``quantization``).

        Raises:
            CheckpointError: a value of another type than it should be.
        """
        self._where = _WHERE
        inside = json_field(config, "quantization", dict, f"{_WHERE}.quantization")
        if inside is not None:
            config, self._where = inside, f"{_WHERE}.quantization"
        skipped = "ignore" if config.get("ignore") is not None else "exclude_modules"
        self._skipped_key = f"{self._where}.{skipped}"
        self._skipped = json_field(config, skipped, list, self._skipped_key) or []
        for entry in self._skipped:
            check_field(isinstance(entry, str), f"an entry of {self._skipped_key}", entry, "a name")
        self.default: Stored | NotOurs
        try:
            self.default = self._stored(config)
        except CheckpointError as error:
            self.default = NotOurs(str(error), quantized=True)

    def of(self, module: str) -> Stored | NotOurs:
        """As :meth:`Rules.of`: a module is left out if an entry matches its name, or that of one it is part of."""
        for entry in self._skipped:
            if fnmatchcase(module, entry) or fnmatchcase(module, f"{entry}.*"):
                reason = f"{module} is not quantized: {self._skipped_key} has {shorten(entry)}"
                return NotOurs(reason, quantized=False)
        return self.default

    def _stored(self, config: Mapping[str, Any]) -> Stored:
        key = f"{self._where}.quant_algo"
        algorithm = config.get("quant_algo")
        algorithm = algorithm.upper() if isinstance(algorithm, str) else algorithm
        check_field(algorithm in ALGORITHMS, key, algorithm, " or ".join(map(repr, ALGORITHMS)))
        sizes = {f"{self._where}.group_size": config.get("group_size")}
        groups = json_field(config, "config_groups", dict, f"{self._where}.config_groups") or {}
        for name in groups:
            where = f"{self._where}.config_groups.{name}"
            weights = json_field(json_field(groups, name, dict, where) or {}, "weights", dict, f"{where}.weights") or {}
            sizes[f"{where}.weights.group_size"] = weights.get("group_size")
        for where, size in sizes.items():
            check_field(size in (None, BLOCK), where, size, str(BLOCK))
        return Stored(NVFP4, BLOCK, True, weight_only=f"{key} is {algorithm!r}")
