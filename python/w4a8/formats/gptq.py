"""GPTQ: the format of AutoGPTQ, GPTQModel and others."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from w4a8.core.json_fields import check_field, shorten
from w4a8.core.kind import integers_of
from w4a8.core.matrix import Matrix
from w4a8.core.nibbles import Words, word_bytes, word_codes
from w4a8.core.patterns import Pattern
from w4a8.formats.checks import SCALES_AND_ZEROS, Tensors, check_g_idx, scales_and_zeros, take, take_bias
from w4a8.formats.format import Format, Part, add_format
from w4a8.formats.rules import WHERE, BaseRules, Fields, named, objects, pattern, rules_for, strings
from w4a8.formats.scheme import NotRead, Scheme


def from_gptq(tensors: Tensors, name: str, group_size: int, symmetric: bool, version: int = 1, bits: int = 4) -> Matrix:
    """A matrix of a GPTQ checkpoint.

        qweight   int32 [K/c, N]     code i of row r: input feature c r + i, with c = 32 / bits codes in a word
        qzeros    int32 [K/g, N/c]   code i of column j: output feature c j + i; version 1 has the zero point minus 1
        scales    [K/g, N]
        g_idx     int32 [K]          the group of each input feature; may be missing
        bias      [N]                may be missing

    Args:
        tensors: by these names.
        name: of the matrix, for errors.
        group_size: g, -1 for one group.
        symmetric: the configuration says that zero points are 8 (8 bits: 128); then ``qzeros`` may be missing.
        version: 1, or 2 for ``checkpoint_format: gptq_v2``.
        bits: of a code, 4 or 8.

    Raises:
        ValueError: a tensor is missing, has another dtype or shape, or values that this format does not have.
    """
    if bits not in (4, 8):
        raise ValueError(f"{name}: codes of {bits} bits, but 4 or 8 are expected")
    if version not in (1, 2):
        raise ValueError(f"{name}: GPTQ version {version}, but 1 or 2 is expected")
    weight = take(tensors, name, "qweight", (torch.int32,), 2)
    in_word = 32 // bits
    features, rows = in_word * weight.shape[0], weight.shape[1]
    scales, zeros = scales_and_zeros(
        tensors, name, (features, rows), group_size, symmetric, partial(stored_zeros, version=version, bits=bits), bits
    )
    check_g_idx(tensors, name, "g_idx", features, group_size)
    bias = take_bias(tensors, name, rows)
    codes = Words.of(weight, "gptq", bits, lambda words: word_bytes(words.T))
    return Matrix(codes, scales, zeros, integers_of(bits), bias)


def stored_zeros(words: torch.Tensor, version: int, bits: int) -> torch.Tensor:
    """``qzeros``, int32 [K/g, N/c], as zero points int32 [N, K/g]. 1 more than the largest code is possible."""
    return word_codes(words, bits).T.to(torch.int32) + (2 - version)


def _read(tensors: Tensors, name: str, scheme: Scheme) -> Matrix:
    if scheme.activation_order and tensors.get("g_idx") is None:
        raise ValueError(f"{name}.g_idx is missing, though the configuration says desc_act")
    return from_gptq(tensors, name, scheme.group_size, scheme.symmetric, scheme.version, scheme.bits)


GPTQ = add_format(
    Format(
        "gptq",
        (
            Part("qweight", "weight", torch.int32, ("k", "n"), 0),
            *SCALES_AND_ZEROS,
            Part("g_idx", "g_idx", torch.int32, ("k",)),
        ),
        _read,
        spare_zeros=lambda words, scheme: stored_zeros(words, scheme.version, scheme.bits),
        spare_biases=True,
    )
)


@rules_for("gptq", file="quantize_config.json")
class GptqRules(BaseRules):
    """``quant_method: gptq``: AutoGPTQ, GPTQModel, AutoRound's export to GPTQ."""

    def read_exceptions(self, config: Mapping[str, Any]) -> None:
        self._inside = strings(config, "modules_in_block_to_quantize")
        self._dynamic: list[tuple[Pattern, str, Scheme | NotRead | None]] = []
        for text, changes in objects(config, "dynamic").items():
            where = f"{WHERE}.dynamic[{shorten(text)}]"
            expression = pattern(text[2:] if text[:2] in ("+:", "-:") else text, where)
            found = None if text.startswith("-:") else self.attempt(changes, f" (by {where})")
            self._dynamic.append((expression, where, found))

    def of(self, module: str) -> Scheme | NotRead:
        """As :meth:`Rules.of`: the first entry of ``dynamic`` that matches from the name's start decides.

        Other modules have the default. Left out are ``lm_head`` unless the key of this name is true, and modules that
        ``modules_in_block_to_quantize`` does not name.
        """
        for expression, where, found in self._dynamic:
            if expression.match(module):
                return found or NotRead.not_quantized(module, f"{where} leaves it out")
        head = self.head_not_read(module)
        if head is not None:
            return head
        if self._inside and named(module, self._inside) is None and module.rpartition(".")[2] != "lm_head":
            return NotRead.not_quantized(module, f"{WHERE}.modules_in_block_to_quantize does not name it")
        return self.default

    def scheme(self, fields: Fields) -> Scheme:
        bits = fields.bits("bits", allowed=(4, 8))
        group = fields.group_size("group_size")
        symmetric = fields.flag("sym", default=True)
        ordered = fields.flag("desc_act", default=False)
        words, key = fields.first("pack_dtype", default="int32")
        check_field(words == "int32", key, words, "'int32'")
        form, key = fields.first("checkpoint_format", "format", default="gptq")
        form = form.lower() if isinstance(form, str) else form
        check_field(form in ("gptq", "gptq_v2"), key, form, "'gptq' or 'gptq_v2'")
        version = 2 if form == "gptq_v2" else 1
        weight_only = f"{WHERE}.quant_method is 'gptq'"
        return Scheme("gptq", group, symmetric, version, ordered and group != -1, weight_only, bits)
