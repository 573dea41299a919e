"""AWQ: AutoAWQ's GEMM packing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from w4a8.core.json_fields import check_field, shorten
from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix
from w4a8.core.nibbles import CODES, Words, pairs, word_codes
from w4a8.formats.checks import SCALES_AND_ZEROS, Tensors, scales_and_zeros, take, take_bias
from w4a8.formats.format import Format, Part, add_format
from w4a8.formats.rules import WHERE, BaseRules, Fields, named, rules_for, strings
from w4a8.formats.scheme import NotRead, Scheme

# Code i of word c is output feature 8 c + ORDER[i]; output feature 8 c + j is code INVERSE[j] of word c.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
INVERSE = tuple(ORDER.index(j) for j in range(CODES))


def output_features(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N/8] to uint8 codes [R, N] in the order of output features."""
    return word_codes(words).unflatten(-1, (-1, CODES))[..., list(INVERSE)].flatten(-2)


def from_awq(tensors: Tensors, name: str, group_size: int, symmetric: bool = False) -> Matrix:
    """A matrix of an AWQ checkpoint.

        qweight   int32 [K, N/8]     output features of a word in the order 0, 2, 4, 6, 1, 3, 5, 7
        qzeros    int32 [K/g, N/8]   in the same order
        scales    [K/g, N]
        bias      [N]                may be missing

    Args:
        tensors: by these names.
        name: of the matrix, for errors.
        group_size: g, -1 for one group.
        symmetric: the configuration says ``zero_point: false``: zero points are 8, and ``qzeros`` may be missing.

    Raises:
        ValueError: a tensor is missing, has another dtype or shape, or values that this format does not have.
    """
    weight = take(tensors, name, "qweight", (torch.int32,), 2)
    features, rows = weight.shape[0], CODES * weight.shape[1]
    scales, zeros = scales_and_zeros(
        tensors, name, (features, rows), group_size, symmetric, lambda words: output_features(words).T
    )
    codes = Words.of(weight, "awq", 4, lambda words: pairs(output_features(words).T.contiguous()))
    return Matrix(codes, scales, zeros, Kind.INT4, take_bias(tensors, name, rows))


AWQ = add_format(
    Format(
        "awq",
        (
            Part("qweight", "weight", torch.int32, ("k", "n"), 1),
            *SCALES_AND_ZEROS,
        ),
        lambda tensors, name, scheme: from_awq(tensors, name, scheme.group_size, scheme.symmetric),
        spare_zeros=lambda words, scheme: output_features(words).T,
        spare_biases=True,
    )
)


@rules_for("awq", file="quant_config.json")
class AwqRules(BaseRules):
    """``quant_method: awq``: AutoAWQ's GEMM packing."""

    def read_exceptions(self, config: Mapping[str, Any]) -> None:
        self._skipped = strings(config, "modules_to_not_convert")

    def of(self, module: str) -> Scheme | NotRead:
        """As :meth:`Rules.of`: a module whose name contains an entry of ``modules_to_not_convert`` is left out."""
        entry = named(module, self._skipped)
        if entry is not None:
            return NotRead.not_quantized(module, f"{WHERE}.modules_to_not_convert has {shorten(entry)}")
        return self.head_not_read(module) or self.default

    def scheme(self, fields: Fields) -> Scheme:
        fields.bits("bits", "w_bit", allowed=(4,))
        group = fields.group_size("group_size", "q_group_size")
        zeros = fields.flag("zero_point", default=True)
        version, key = fields.first("version", "format", default="gemm")
        valid = isinstance(version, str) and version.lower() == "gemm"
        check_field(valid, key, version, "'gemm'")
        return Scheme("awq", group, not zeros, weight_only=f"{WHERE}.quant_method is 'awq'")
