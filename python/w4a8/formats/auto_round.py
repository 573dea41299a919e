"""AutoRound's own format: GPTQ's or AWQ's, and for 4-bit floats compressed-tensors' formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from w4a8.core.json_fields import check_field, shorten
from w4a8.core.matrix import Matrix
from w4a8.core.patterns import Pattern
from w4a8.formats.awq import from_awq
from w4a8.formats.checks import Tensors
from w4a8.formats.gptq import from_gptq
from w4a8.formats.mxfp4 import BLOCK as MX_BLOCK
from w4a8.formats.nvfp4 import BLOCK as NV_BLOCK
from w4a8.formats.rules import WHERE, BaseRules, Fields, objects, pattern, patterns, rules_for, strings
from w4a8.formats.scheme import NotRead, Scheme


def packing_of(packing: str) -> tuple[str, int] | None:
    """``gptq`` or ``awq``, and the version of GPTQ, for AutoRound's ``packing_format``; None if unknown."""
    kind = packing.rpartition(":")[2]
    if kind in ("awq", "auto_awq"):
        return "awq", 1
    if kind in ("gptq", "auto_gptq", "auto"):
        return "gptq", 1
    if kind in ("auto_round", "gptqmodel"):  # zero points are not stored minus 1
        return "gptq", 2
    return None


def from_auto_round(tensors: Tensors, name: str, group_size: int, symmetric: bool, packing: str) -> Matrix:
    """A matrix of AutoRound with codes of 4 bits: :func:`from_awq` or :func:`from_gptq`, as ``packing`` says.

    Args: as :func:`from_gptq`; ``packing`` is ``packing_format`` of the configuration.

    Raises:
        ValueError: an unknown ``packing``, and as the two functions.
    """
    found = packing_of(packing)
    if found is None:
        raise ValueError(f"{name}: packing_format {packing!r}, but one of auto_gptq and auto_awq is expected")
    if found[0] == "awq":
        return from_awq(tensors, name, group_size, symmetric)
    return from_gptq(tensors, name, group_size, symmetric, version=found[1])


@rules_for("auto-round")
class AutoRoundRules(BaseRules):
    """``quant_method: auto-round``: AutoRound's own format, packed as GPTQ or as AWQ."""

    _SPECIAL = frozenset("*+?^$()[]{}|\\")  # a key of extra_config with one of these is a regular expression

    def read_exceptions(self, config: Mapping[str, Any]) -> None:
        blocks = next((n for n in ("block_name_to_quantize", "to_quant_block_names") if config.get(n)), None)
        self._blocks = strings(config, blocks) if blocks is not None else []
        self._blocks_key = f"{WHERE}.{blocks}"
        self._skipped = patterns(config, "modules_to_not_convert")
        self._exact: dict[str, Scheme | NotRead] = {}
        self._by_pattern: list[tuple[Pattern, Scheme | NotRead]] = []
        for text, changes in objects(config, "extra_config").items():
            where = f"{WHERE}.extra_config[{shorten(text)}]"
            if changes.get("bits") in (16, 32):
                found: Scheme | NotRead = NotRead(f"{where}.bits is {changes['bits']}: not quantized", quantized=False)
            else:
                found = self.attempt(changes, f" (by {where})")
            self._exact[text] = found
            if any(char in self._SPECIAL for char in text):
                self._by_pattern.append((pattern(text, where), found))

    def of(self, module: str) -> Scheme | NotRead:
        """As :meth:`Rules.of`: by ``extra_config`` (whole name, end of the name, pattern), else by the other keys.

        These are ``modules_to_not_convert``, then the names of blocks, then ``lm_head``; else the default holds.
        """
        found = self._exact.get(module)
        if found is None:
            found = next((entry for name, entry in self._exact.items() if module.endswith(f".{name}")), None)
        if found is None:
            found = next((entry for pattern, entry in self._by_pattern if pattern.search(module)), None)
        if found is not None:
            return found
        if any(pattern.search(module) for pattern in self._skipped):
            return NotRead.not_quantized(module, f"{WHERE}.modules_to_not_convert names it")
        if self._blocks and not any(module == block or module.startswith(f"{block}.") for block in self._blocks):
            return NotRead.not_quantized(module, f"{self._blocks_key} does not name its block")
        return self.head_not_read(module) or self.default

    def scheme(self, fields: Fields) -> Scheme:
        kind, key = fields.first("data_type", default="int")
        if isinstance(kind, str) and ("mx_fp" in kind or "nv_fp" in kind):
            return self._floats(fields, "mxfp4" if "mx_fp" in kind else "nvfp4")
        bits = fields.bits("bits", allowed=(4, 8))
        check_field(kind == "int", key, kind, "'int'")
        group = fields.group_size("group_size")
        symmetric = fields.flag("sym", default=True)
        packing, key = fields.first("packing_format", default="auto_round:auto_gptq")
        found = packing_of(packing) if isinstance(packing, str) else None
        check_field(found is not None, key, packing, "auto_round:auto_gptq or auto_round:auto_awq")
        if found[0] == "awq":
            fields.bits("bits", allowed=(4,))
        inputs, key = fields.first("act_bits", default=16)
        valid = inputs in (16, 32) or (inputs == 8 and fields.first("act_dynamic")[0] is not False)
        check_field(valid, key, inputs, "16, or 8")
        weight_only = None if inputs == 8 else f"{WHERE}.act_bits is {inputs}"
        return Scheme(found[0], group, symmetric, found[1], weight_only=weight_only, bits=bits)

    def _floats(self, fields: Fields, form: str) -> Scheme:
        fields.bits("bits", allowed=(4,))
        block = MX_BLOCK if form == "mxfp4" else NV_BLOCK
        group, key = fields.first("group_size", default=block)
        check_field(group == block, key, group, str(block))
        packing, key = fields.first("packing_format", default="auto_round:llm_compressor")
        check_field(packing == "auto_round:llm_compressor", key, packing, "'auto_round:llm_compressor'")
        kind = "mx_fp" if form == "mxfp4" else "nv_fp"
        return Scheme(f"{form}-pack-quantized", block, True, weight_only=f"{WHERE}.data_type is {kind!r}")
