"""Which modules of a checkpoint of AMD Quark are quantized, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from w4a8.core.json_fields import CheckpointError, check_field, json_field, shorten
from w4a8.core.patterns import Pattern, name_or_pattern, names_field
from w4a8.formats.mxfp4 import BLOCK, QUARK_MXFP4
from w4a8.formats.rules import WHERE, rules_for
from w4a8.formats.scheme import NotRead, Scheme, scheme_or_not_read


@rules_for("quark")
class QuarkRules:
    """``quant_method: quark``: MXFP4 weights, in all modules or in those that the configuration names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Reads a quantization_config.

        Raises:
            CheckpointError: a value of the wrong type; weights that were quantized and dequantized to floats; an
                algorithm that needs more than a product with the weights.
        """
        _check_algorithms(config)
        export = json_field(config, "export", dict, f"{WHERE}.export") or {}
        form = export.get("weight_format")
        check_field(form in (None, "real_quantized"), f"{WHERE}.export.weight_format", form, "'real_quantized'")
        self._cached = names_field(export, "kv_cache_group", f"{WHERE}.export.kv_cache_group")
        key = f"{WHERE}.exclude"
        self._excluded = _Entries(names_field(config, "exclude", key), f"an entry of {key}")
        self._layers = self._entries(config, "layer_quant_config")
        self._named = _Entries(self._layers, f"a key of {WHERE}.layer_quant_config")
        self._types = self._entries(config, "layer_type_quant_config")
        key = f"{WHERE}.global_quant_config"
        self.default = self._try(json_field(config, "global_quant_config", dict, key) or {}, key)

    def of(self, module: str) -> Scheme | NotRead:
        """As :meth:`Rules.of`: a module is left out if ``exclude`` matches its whole name (with ``re:`` its start).

        Other modules are stored as the first matching entry of ``layer_quant_config`` says, else as
        ``layer_type_quant_config`` says for linear layers, else as the default.
        """
        entry = self._excluded.first(module)
        if entry is not None:
            return NotRead.not_quantized(module, f"{WHERE}.exclude has {shorten(entry)}")
        entry = self._named.first(module)
        found = self._types.get("Linear", self.default) if entry is None else self._layers[entry]
        if isinstance(found, NotRead):
            return NotRead(f"{module}: {found.reason}", found.quantized)
        return found

    def _entries(self, config: Mapping[str, Any], name: str) -> dict[str, Scheme | NotRead]:
        """Reads an object of objects: entry -> how the modules of the entry are stored."""
        key = f"{WHERE}.{name}"
        found = json_field(config, name, dict, key) or {}
        for entry in found:
            name_or_pattern(entry, f"a key of {key}")
        where = {entry: f"{key}[{shorten(entry)}]" for entry in found}
        return {
            entry: self._try(json_field(found, entry, dict, where[entry]) or {}, where[entry], entry) for entry in found
        }

    def _try(self, entry: Mapping[str, Any], where: str, name: str = "") -> Scheme | NotRead:
        if entry.get("weight") is None:
            return NotRead(f"{where}.weight is missing: not quantized", quantized=False)
        # Quantized outputs for the KV cache, and of q_proj beside it, are ignored: the cache has its own type here.
        outputs = any(fnmatchcase(name, cached) for cached in self._cached)
        outputs = outputs or (bool(self._cached) and name.endswith("q_proj"))
        return scheme_or_not_read(partial(_scheme, entry, where, outputs))


def _check_algorithms(config: Mapping[str, Any]) -> None:
    """Refuses algorithms that are not merged into the weights. (One rotation in a file may be for all layers.)"""
    found = config.get("algo_config")
    for entry in found if isinstance(found, list) else [found]:
        if not isinstance(entry, dict):
            continue
        for name in ("online_r1_rotation", "r4"):
            if entry.get(name):
                raise CheckpointError(f"{WHERE}.algo_config has {name}: inputs that are rotated are not supported")
        if entry.get("name") == "svdquant":
            raise CheckpointError(f"{WHERE}.algo_config has 'svdquant', whose corrections are not supported")


class _Entries:
    """Names of modules, of which there may be thousands, and patterns among them.

    Quark's own patterns are names with wildcards; vLLM also knows regular expressions.
    """

    def __init__(self, entries: Iterable[str], key: str) -> None:
        self._exact: dict[str, int] = {}
        self._patterns: list[tuple[int, str, Pattern | None]] = []
        for index, entry in enumerate(entries):
            if entry.startswith("re:") or any(char in "*?[" for char in entry):
                self._patterns.append((index, entry, name_or_pattern(entry, key)))
            else:
                self._exact.setdefault(entry, index)

    def first(self, module: str) -> str | None:
        """The first entry that matches the whole name, or, with ``re:``, the start of the name."""
        exact = self._exact.get(module)
        for index, entry, pattern in self._patterns:
            if exact is not None and exact < index:
                break
            if pattern.match(module) if pattern is not None else fnmatchcase(module, entry):
                return entry
        return None if exact is None else module


def _scheme(entry: Mapping[str, Any], where: str, outputs: bool) -> Scheme:
    """The scheme that an object of the configuration with a ``weight`` states.

    Raises:
        CheckpointError: other weights than MXFP4, quantized biases, or quantized outputs unless ``outputs`` is true.
    """
    key = f"{where}.weight"
    weight = entry["weight"]
    if isinstance(weight, list):
        if len(weight) != 1:
            raise CheckpointError(f"{key} has {len(weight)} stages, but one is expected: MXFP4")
        weight = weight[0]
    check_field(isinstance(weight, dict), key, weight, "an object")
    wanted = {"dtype": "fp4", "qscheme": "per_group", "group_size": BLOCK, "scale_format": "e8m0"}
    for name, value in wanted.items():
        check_field(weight.get(name) == value, f"{key}.{name}", weight.get(name), f"{value!r} (MXFP4)")
    dynamic, axis = weight.get("is_dynamic"), weight.get("ch_axis")
    check_field(dynamic in (None, False), f"{key}.is_dynamic", dynamic, "false")
    check_field(axis in (None, -1, 1), f"{key}.ch_axis", axis, "-1")
    for name in ("bias",) if outputs else ("bias", "output_tensors"):
        if entry.get(name):
            raise CheckpointError(f"{where}.{name} is set: only weights are quantized here")
    return Scheme(QUARK_MXFP4.name, BLOCK, True, weight_only=f"{where}.input_tensors is not int8")
