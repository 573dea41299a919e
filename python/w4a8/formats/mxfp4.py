"""MXFP4: 4-bit floats in blocks of 32 that share a power of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from w4a8.core.float8_scales import powers_of_two
from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix
from w4a8.formats.checks import Tensors, expect_shape, take, take_bias, take_blocks
from w4a8.formats.format import Format, Part, add_format
from w4a8.formats.rules import WHERE, BaseRules, Fields, patterns, rules_for
from w4a8.formats.scheme import NotRead, Scheme

BLOCK = 32


def block_scales(exponents: torch.Tensor, name: str) -> torch.Tensor:
    """uint8 exponents s to float32 2^(s - 127), which packing stores as exponents again.

    Raises:
        ValueError: an exponent is 255, which is not a number.
    """
    if not exponents.is_meta and (exponents == 255).any():
        raise ValueError(f"{name}: 255, which is not a number")
    return powers_of_two(exponents)


def from_mxfp4_pack_quantized(tensors: Tensors, name: str) -> Matrix:
    """A matrix of compressed-tensors' ``mxfp4-pack-quantized``, which AutoRound writes as well.

        weight_packed   uint8 [N, K/2]    codes in pairs, low nibble = even k
        weight_scale    uint8 [N, K/32]   exponents: 2^(s - 127)
        bias            [N]               may be missing

    Args, Raises: as :func:`from_mxfp4`.
    """
    return _read(tensors, name, "weight_packed")


def from_quark_mxfp4(tensors: Tensors, name: str) -> Matrix:
    """A matrix in MXFP4 as AMD Quark writes it.

        weight          uint8 [N, K/2]    codes in pairs, low nibble = even k
        weight_scale    uint8 [N, K/32]   exponents: 2^(s - 127)
        bias            [N]               may be missing

    Args: as :func:`from_mxfp4`.

    Raises:
        ValueError: as :func:`from_mxfp4`; or an ``input_rotation`` exists, by which inputs would be multiplied.
    """
    if tensors.get("input_rotation") is not None:
        raise ValueError(f"{name}.input_rotation: inputs that are rotated are not supported")
    return _read(tensors, name, "weight")


def _read(tensors: Tensors, name: str, suffix: str) -> Matrix:
    """The matrix; ``suffix`` is the last part of the name of the codes."""
    codes, exponents = take_blocks(tensors, name, suffix, BLOCK, (torch.uint8,))
    scales = block_scales(exponents, f"{name}.weight_scale")
    return Matrix(codes, scales, None, Kind.E2M1, take_bias(tensors, name, len(codes)))


def from_mxfp4(tensors: Tensors, name: str) -> Matrix:
    """A matrix in MXFP4, or one matrix of a stack of experts.

        blocks   uint8 [N, K/32, 16]   codes in pairs, low nibble = even k
        scales   uint8 [N, K/32]       exponents: 2^(s - 127)
        bias     [N]                   may be missing

    Rows keep the checkpoint's order (gpt-oss alternates gate and up).

    Args:
        tensors: by these names.
        name: of the matrix, for errors.

    Raises:
        ValueError: a tensor is missing, has another dtype or shape, or a scale is 255 (not a number).
    """
    blocks = take(tensors, name, "blocks", (torch.uint8,), 3)
    rows, groups = blocks.shape[:2]
    expect_shape(blocks.shape, name, "blocks", (rows, groups, BLOCK // 2), f"blocks of {BLOCK}")
    exponents = take(tensors, name, "scales", (torch.uint8,), 2)
    expect_shape(exponents.shape, name, "scales", (rows, groups), f"{rows} x {groups} blocks")
    scales = block_scales(exponents, f"{name}.scales")
    return Matrix(blocks.flatten(1).contiguous(), scales, None, Kind.E2M1, take_bias(tensors, name, rows))


def _features(blocks: tuple[int, ...], name: str) -> tuple[int, int]:
    if len(blocks) != 3:
        raise ValueError(f"{name}.blocks: shape {blocks}, but 3 dimensions are expected")
    expect_shape(blocks, name, "blocks", (*blocks[:2], BLOCK // 2), f"blocks of {BLOCK}")
    return blocks[0], BLOCK * blocks[1]


def _register(name: str, read: Callable[[Tensors, str], Matrix], codes: str, scales: str, **facts: Any) -> Format:
    """A format of MXFP4 whose codes and exponents are tensors of these names; ``others`` are tensors besides."""
    parts = (
        Part(codes, "weight", torch.uint8, ("n", "k"), 1),
        Part(scales, "weight_scale", torch.uint8, ("n", "g")),
        *facts.pop("others", ()),
    )
    return add_format(Format(name, parts, lambda tensors, name, _: read(tensors, name), Kind.E2M1, **facts))


MXFP4 = _register("mxfp4", from_mxfp4, "blocks", "scales", features=_features, is_stacked=True)
MXFP4_PACK = _register("mxfp4-pack-quantized", from_mxfp4_pack_quantized, "weight_packed", "weight_scale")
QUARK_MXFP4 = _register(
    "quark-mxfp4",
    from_quark_mxfp4,
    "weight",
    "weight_scale",
    others=(Part("input_rotation", "input_scale", torch.float32, ("k", "k")),),
    unused=("input_scale",),
)


@rules_for("mxfp4")
class Mxfp4Rules(BaseRules):
    """``quant_method: mxfp4``: the experts of gpt-oss."""

    def read_exceptions(self, config: Mapping[str, Any]) -> None:
        self._skipped = patterns(config, "modules_to_not_convert")

    def of(self, module: str) -> Scheme | NotRead:
        """As :meth:`Rules.of`: experts alone, unless ``modules_to_not_convert`` matches from the start of the name."""
        if "experts" not in module.split("."):
            return NotRead.not_quantized(module, "MXFP4 is for experts")
        if any(pattern.match(module) for pattern in self._skipped):
            return NotRead.not_quantized(module, f"{WHERE}.modules_to_not_convert names it")
        return self.default

    def scheme(self, fields: Fields) -> Scheme:
        return Scheme(MXFP4.name, BLOCK, True, weight_only=f"{WHERE}.quant_method is 'mxfp4'")
