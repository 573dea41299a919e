"""What a ``quantization_config`` says of each module: how its weights are stored, or why it is left out.

The one reading of it: ``w4a8.load`` and the integration in transformers ask :func:`rules_of`. (In vLLM its own
configuration classes read it, whose rules are to hold there.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from w4a8.core.json_fields import CheckpointError, check_field, json_field, read_json, shorten
from w4a8.core.matrix import GROUP_SIZES, is_group_size
from w4a8.core.patterns import Pattern
from w4a8.formats.awq import packing_of
from w4a8.formats.compressed_rules import CompressedTensorsRules
from w4a8.formats.modelopt_rules import ModelOptRules
from w4a8.formats.mxfp4 import BLOCK as MX_BLOCK
from w4a8.formats.nvfp4 import BLOCK as NV_BLOCK
from w4a8.formats.parts import QUANTIZED_SUFFIXES
from w4a8.formats.quark_rules import QuarkRules
from w4a8.formats.stored import LeftOut, Stored, stored_or_left_out

_WHERE = "quantization_config"


class Rules(Protocol):
    """What a configuration says of each module."""

    def of(self, module: str) -> Stored | LeftOut:
        """How a module is stored.

        Args:
            module: its name in the files, of a linear layer: ``model.layers.0.mlp.experts.3.gate_proj`` say; of MXFP4
                also of all experts of a layer, ``model.layers.0.mlp.experts``.
        """


def rules_of(config: Mapping[str, Any]) -> Rules:
    """Reads a quantization_config.

    Args:
        config: the object ``quantization_config`` of config.json.

    Raises:
        CheckpointError: a method that is not known here, or a value that is missing or of another type than it should
            be; names the key.
    """
    method = method_of(config)
    if method is None:
        stated = shorten(config.get("quant_method"))
        raise CheckpointError(f"{_WHERE}.quant_method is {stated}, but one of {', '.join(METHODS)} is expected")
    return _RULES[method](config)


def method_of(config: Mapping[str, Any]) -> str | None:
    """The one of METHODS that a quantization_config names, in any of the spellings that tools have; None if none."""
    method = config.get("quant_method")
    name = method.lower().replace("_", "-").rpartition("/")[2] if isinstance(method, str) else None
    return name if name in METHODS else None


def find_config(config: Mapping[str, Any], directory: Path | None = None) -> Mapping[str, Any]:
    """The quantization_config in config.json, which may state it for the text part of a larger model.

    Args:
        config: the object in config.json.
        directory: of the checkpoint, whose other files are looked at if config.json has none (:func:`older_config`).

    Raises:
        CheckpointError: there is none.
    """
    found = _in_config(config)
    if found is None and directory is not None:
        found = older_config(directory)
    if found is None:
        raise CheckpointError("config.json has no quantization_config: this is not a quantized checkpoint")
    return found


def config_in(directory: Path) -> Mapping[str, Any] | None:
    """What the files of a directory say, config.json first; None if they say nothing.

    Raises:
        CheckpointError: a file is no JSON object.
    """
    path = directory / "config.json"
    found = _in_config(read_json(path)) if path.is_file() else None
    return older_config(directory) if found is None else found


def _in_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for owner in (config, json_field(config, "text_config", dict, "text_config") or {}):
        for name in ("quantization_config", "compression_config"):
            found = json_field(owner, name, dict, name)
            if found:
                return found
    return None


def older_config(directory: Path) -> dict[str, Any] | None:
    """The quantization_config in a file of its own, as tools wrote it before config.json had it; None if none is there.

    Raises:
        CheckpointError: the file is no JSON object.
    """
    for name, method in _OLDER.items():
        if (directory / name).is_file():
            return {"quant_method": method, **read_json(directory / name)}
    return None


_OLDER = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def stored_as(
    rules: Rules,
    module: str,
    suffixes: Collection[str],
    is_int8: Callable[[], bool] = lambda: False,
) -> Stored | LeftOut:
    """How a module is stored whose tensors are known.

    Files decide whether a module is quantized: where methods name what is left out, they do so by parts of names, and
    differently from version to version.

    Args:
        rules: of the checkpoint.
        module: its name.
        suffixes: last parts of the names of its tensors.
        is_int8: whether the tensor ``weight`` is; asked where nothing else says that a module is quantized whose codes
            it may be.
    """
    found = rules.of(module)
    quantized = any(suffix in suffixes for suffix in QUANTIZED_SUFFIXES)
    if isinstance(found, Stored):
        quantized = quantized or (found.weight == "weight" and "weight" in suffixes and is_int8())
        return found if quantized else LeftOut.not_quantized(module, "it has weights without scales")
    default = getattr(rules, "default", None)
    if not found.quantized and quantized and isinstance(default, Stored) and default.weight in suffixes:
        return default
    return found


def _group_size(value: object, key: str) -> int:
    check_field(is_group_size(value), key, value, f"-1, {GROUP_SIZES}")
    return value


def _bits(value: object, key: str, *allowed: int) -> int:
    valid = isinstance(value, int) and not isinstance(value, bool) and value in allowed
    check_field(valid, key, value, " or ".join(map(str, allowed)))
    return value


def _flag(value: object, key: str) -> bool:
    check_field(isinstance(value, bool), key, value, "true or false")
    return value


def _first(config: Mapping[str, Any], names: Iterable[str], default: object = None) -> tuple[Any, str]:
    """The first of some values that is there, and its key."""
    names = tuple(names)
    name = next((name for name in names if config.get(name) is not None), names[0])
    value = config.get(name)
    return default if value is None else value, f"{_WHERE}.{name}"


def _strings(config: Mapping[str, Any], name: str) -> list[str]:
    """A list of strings, or of lists of them; a string is one with commas."""
    key = f"{_WHERE}.{name}"
    value = config.get(name)
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    found: list[str] = []
    for entry in json_field(config, name, list, key) or []:
        for part in entry if isinstance(entry, list) else [entry]:
            check_field(isinstance(part, str), f"an entry of {key}", part, "a name")
            found.append(part)
    return found


def _pattern(text: str, key: str) -> Pattern:
    return Pattern(text, f"{key} is {shorten(text)}")


def _patterns(config: Mapping[str, Any], name: str) -> list[Pattern]:
    """A list of regular expressions."""
    return [_pattern(text, f"{_WHERE}.{name}") for text in _strings(config, name)]


def _objects(config: Mapping[str, Any], name: str) -> dict[str, Mapping[str, Any]]:
    """An object of objects."""
    found = json_field(config, name, dict, f"{_WHERE}.{name}") or {}
    return {key: json_field(found, key, dict, f"{_WHERE}.{name}[{shorten(key)}]") or {} for key in found}


class _Rules:
    """One way of storing for all modules, and exceptions.

    Attributes:
        default: how a module is stored that no rule names; LeftOut where nothing is.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Reads a quantization_config.

        Raises:
            CheckpointError: a value of another type than it should be.
        """
        self.config = config
        self.default = self._try({}, "")
        self._read_exceptions(config)

    def _read_exceptions(self, config: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _try(self, changes: Mapping[str, Any], where: str) -> Stored | LeftOut:
        """How a module is stored for which some values are others; ``where`` they are stated, for messages."""
        return stored_or_left_out(partial(self._stored, {**self.config, **changes}), where)

    def _stored(self, config: Mapping[str, Any]) -> Stored:
        raise NotImplementedError

    def _head(self, module: str) -> LeftOut | None:
        """Why the head of the model is not quantized, where nothing says that it is."""
        if module.rpartition(".")[2] != "lm_head" or self.config.get("lm_head") is True:
            return None
        return LeftOut.not_quantized(module, f"{_WHERE}.lm_head is not true")


def _named(module: str, entries: Iterable[str]) -> str | None:
    """The entry that a name contains."""
    return next((entry for entry in entries if entry in module), None)


class GptqRules(_Rules):
    """``quant_method: gptq``: AutoGPTQ, GPTQModel, AutoRound's export."""

    def _read_exceptions(self, config: Mapping[str, Any]) -> None:
        self._inside = _strings(config, "modules_in_block_to_quantize")
        self._dynamic: list[tuple[Pattern, str, Stored | LeftOut | None]] = []
        for text, changes in _objects(config, "dynamic").items():
            where = f"{_WHERE}.dynamic[{shorten(text)}]"
            pattern = _pattern(text[2:] if text[:2] in ("+:", "-:") else text, where)
            found = None if text.startswith("-:") else self._try(changes, f" (by {where})")
            self._dynamic.append((pattern, where, found))

    def of(self, module: str) -> Stored | LeftOut:
        """As :meth:`Rules.of`: the first entry of ``dynamic`` that matches from the start, else the default."""
        for pattern, where, found in self._dynamic:
            if pattern.match(module):
                return found or LeftOut.not_quantized(module, f"{where} leaves it out")
        head = self._head(module)
        if head is not None:
            return head
        if self._inside and _named(module, self._inside) is None and module.rpartition(".")[2] != "lm_head":
            return LeftOut.not_quantized(module, f"{_WHERE}.modules_in_block_to_quantize does not name it")
        return self.default

    def _stored(self, config: Mapping[str, Any]) -> Stored:
        bits = _bits(*_first(config, ("bits",)), 4, 8)
        group = _group_size(*_first(config, ("group_size",), 128))
        symmetric = _flag(*_first(config, ("sym",), True))
        ordered = _flag(*_first(config, ("desc_act",), False))
        words, key = _first(config, ("pack_dtype",), "int32")
        check_field(words == "int32", key, words, "'int32'")
        form, key = _first(config, ("checkpoint_format", "format"), "gptq")
        form = form.lower() if isinstance(form, str) else form
        check_field(form in ("gptq", "gptq_v2"), key, form, "'gptq' or 'gptq_v2'")
        version = 2 if form == "gptq_v2" else 1
        weight_only = f"{_WHERE}.quant_method is 'gptq'"
        return Stored("gptq", group, symmetric, version, ordered and group != -1, weight_only, bits)


class AwqRules(_Rules):
    """``quant_method: awq``: AutoAWQ's GEMM packing."""

    def _read_exceptions(self, config: Mapping[str, Any]) -> None:
        self._skipped = _strings(config, "modules_to_not_convert")

    def of(self, module: str) -> Stored | LeftOut:
        """As :meth:`Rules.of`: a module whose name contains an entry of ``modules_to_not_convert`` is left out."""
        entry = _named(module, self._skipped)
        if entry is not None:
            return LeftOut.not_quantized(module, f"{_WHERE}.modules_to_not_convert has {shorten(entry)}")
        return self._head(module) or self.default

    def _stored(self, config: Mapping[str, Any]) -> Stored:
        _bits(*_first(config, ("bits", "w_bit")), 4)
        group = _group_size(*_first(config, ("group_size", "q_group_size"), 128))
        zeros = _flag(*_first(config, ("zero_point",), True))
        version, key = _first(config, ("version", "format"), "gemm")
        valid = isinstance(version, str) and version.lower() == "gemm"
        check_field(valid, key, version, "'gemm'")
        return Stored("awq", group, not zeros, weight_only=f"{_WHERE}.quant_method is 'awq'")


class AutoRoundRules(_Rules):
    """``quant_method: auto-round``: AutoRound's own format, packed as GPTQ or as AWQ."""

    _SPECIAL = frozenset("*+?^$()[]{}|\\")  # with one of them, a key of extra_config is a regular expression

    def _read_exceptions(self, config: Mapping[str, Any]) -> None:
        blocks = next((n for n in ("block_name_to_quantize", "to_quant_block_names") if config.get(n)), None)
        self._blocks = _strings(config, blocks) if blocks is not None else []
        self._blocks_key = f"{_WHERE}.{blocks}"
        self._skipped = _patterns(config, "modules_to_not_convert")
        self._exact: dict[str, Stored | LeftOut] = {}
        self._by_pattern: list[tuple[Pattern, Stored | LeftOut]] = []
        for text, changes in _objects(config, "extra_config").items():
            where = f"{_WHERE}.extra_config[{shorten(text)}]"
            if changes.get("bits") in (16, 32):
                found: Stored | LeftOut = LeftOut(f"{where}.bits is {changes['bits']}: not quantized", quantized=False)
            else:
                found = self._try(changes, f" (by {where})")
            self._exact[text] = found
            if any(char in self._SPECIAL for char in text):
                self._by_pattern.append((_pattern(text, where), found))

    def of(self, module: str) -> Stored | LeftOut:
        """As :meth:`Rules.of`: an entry of ``extra_config`` by its whole name, its end or a pattern, else by block."""
        found = self._exact.get(module)
        if found is None:
            found = next((entry for name, entry in self._exact.items() if module.endswith(f".{name}")), None)
        if found is None:
            found = next((entry for pattern, entry in self._by_pattern if pattern.search(module)), None)
        if found is not None:
            return found
        if any(pattern.search(module) for pattern in self._skipped):
            return LeftOut.not_quantized(module, f"{_WHERE}.modules_to_not_convert names it")
        if self._blocks and not any(module == block or module.startswith(f"{block}.") for block in self._blocks):
            return LeftOut.not_quantized(module, f"{self._blocks_key} does not name its block")
        return self._head(module) or self.default

    def _stored(self, config: Mapping[str, Any]) -> Stored:
        kind, key = _first(config, ("data_type",), "int")
        if isinstance(kind, str) and ("mx_fp" in kind or "nv_fp" in kind):
            return self._floats(config, "mxfp4" if "mx_fp" in kind else "nvfp4")
        bits = _bits(*_first(config, ("bits",)), 4, 8)
        check_field(kind == "int", key, kind, "'int'")
        group = _group_size(*_first(config, ("group_size",), 128))
        symmetric = _flag(*_first(config, ("sym",), True))
        packing, key = _first(config, ("packing_format",), "auto_round:auto_gptq")
        found = packing_of(packing) if isinstance(packing, str) else None
        check_field(found is not None, key, packing, "auto_round:auto_gptq or auto_round:auto_awq")
        if found[0] == "awq":
            _bits(*_first(config, ("bits",)), 4)
        inputs, key = _first(config, ("act_bits",), 16)
        valid = inputs in (16, 32) or (inputs == 8 and config.get("act_dynamic") is not False)
        check_field(valid, key, inputs, "16, or 8")
        weight_only = None if inputs == 8 else f"{_WHERE}.act_bits is {inputs}"
        return Stored(found[0], group, symmetric, found[1], weight_only=weight_only, bits=bits)

    def _floats(self, config: Mapping[str, Any], form: str) -> Stored:
        _bits(*_first(config, ("bits",)), 4)
        block = MX_BLOCK if form == "mxfp4" else NV_BLOCK
        group, key = _first(config, ("group_size",), block)
        check_field(group == block, key, group, str(block))
        packing, key = _first(config, ("packing_format",), "auto_round:llm_compressor")
        check_field(packing == "auto_round:llm_compressor", key, packing, "'auto_round:llm_compressor'")
        kind = "mx_fp" if form == "mxfp4" else "nv_fp"
        return Stored(f"{form}-pack-quantized", block, True, weight_only=f"{_WHERE}.data_type is {kind!r}")


class Mxfp4Rules(_Rules):
    """``quant_method: mxfp4``: the experts of gpt-oss."""

    def _read_exceptions(self, config: Mapping[str, Any]) -> None:
        self._skipped = _patterns(config, "modules_to_not_convert")

    def of(self, module: str) -> Stored | LeftOut:
        """As :meth:`Rules.of`: experts that no entry of ``modules_to_not_convert`` matches from the start."""
        if "experts" not in module.split("."):
            return LeftOut.not_quantized(module, "MXFP4 is for experts")
        if any(pattern.match(module) for pattern in self._skipped):
            return LeftOut.not_quantized(module, f"{_WHERE}.modules_to_not_convert names it")
        return self.default

    def _stored(self, config: Mapping[str, Any]) -> Stored:
        return Stored("mxfp4", MX_BLOCK, True, weight_only=f"{_WHERE}.quant_method is 'mxfp4'")


_RULES: dict[str, Callable[[Mapping[str, Any]], Rules]] = {
    "compressed-tensors": CompressedTensorsRules,
    "gptq": GptqRules,
    "awq": AwqRules,
    "auto-round": AutoRoundRules,
    "mxfp4": Mxfp4Rules,
    "modelopt": ModelOptRules,
    "quark": QuarkRules,
}
# Whose checkpoints are read.
METHODS = tuple(_RULES)
