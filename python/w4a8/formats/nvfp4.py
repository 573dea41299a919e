"""NVFP4: 4-bit floats in blocks of 16 with a float8_e4m3fn scale, and a float32 one for the whole matrix."""

from __future__ import annotations

import torch

from w4a8.core.float8_scales import E4M3
from w4a8.core.kind import Kind
from w4a8.core.matrix import Matrix
from w4a8.formats.checks import Tensors, take, take_bias, take_blocks
from w4a8.formats.format import Format, Part, add_format

BLOCK = 16


def checked_block_scales(scales: torch.Tensor, name: str) -> torch.Tensor:
    """Scales of float8_e4m3fn (or uint8, its bits) to their bits, uint8.

    Raises:
        ValueError: a scale is not a number, or has a sign. Packed scales have no sign, and no tool writes one.
    """
    bits = scales.view(torch.uint8)
    if not bits.is_meta and (bits >= 0x7F).any():
        raise ValueError(f"{name}: not all scales are numbers without a sign")
    return bits


def checked_global_scale(scale: torch.Tensor, name: str, reciprocal: bool) -> torch.Tensor:
    """The factor of all block scales, float32 [1]: ``scale``, or with ``reciprocal`` 1 / scale, rounded once.

    Raises:
        ValueError: another shape than [] or [1], or ``scale`` or the factor is not finite.
    """
    if scale.numel() != 1 or scale.dim() > 1:
        raise ValueError(f"{name}: shape {tuple(scale.shape)}, but one number is expected")
    factor = (1 / scale if reciprocal else scale).reshape(1)
    if not scale.is_meta and not (torch.isfinite(scale).all() and torch.isfinite(factor).all()):
        raise ValueError(f"{name} is {float(scale):g}, of which no finite scales can be made")
    return factor


def _read(tensors: Tensors, name: str, suffixes: tuple[str, str], reciprocal: bool) -> Matrix:
    weight, global_scale = suffixes
    codes, scales = take_blocks(tensors, name, weight, BLOCK, (E4M3, torch.uint8))
    rows = len(codes)
    bits = checked_block_scales(scales, f"{name}.weight_scale")
    of_all = tensors.get(global_scale)
    of_all = take(tensors, name, global_scale, (torch.float32,), 0 if of_all is None else of_all.dim())
    factor = checked_global_scale(of_all, f"{name}.{global_scale}", reciprocal)
    bias = take_bias(tensors, name, rows)
    return Matrix(codes, bits.contiguous(), None, Kind.E2M1, bias, factor.repeat(rows))


def from_nvfp4(tensors: Tensors, name: str) -> Matrix:
    """A matrix in NVFP4 as nvidia-modelopt writes it.

        weight           uint8 [N, K/2]            codes in pairs, low nibble = even k
        weight_scale     float8_e4m3fn [N, K/16]
        weight_scale_2   float32 [] or [1]         a weight is code * weight_scale * weight_scale_2
        bias             [N]                       may be missing

    Args:
        tensors: by these names. ``weight_scale`` may also be uint8, the bits.
        name: of the matrix, for errors.

    Raises:
        ValueError: a tensor is missing, has another dtype or shape, a scale is not a number or has a sign, or a
            ``pre_quant_scale`` exists, by which inputs would be multiplied.
    """
    if tensors.get("pre_quant_scale") is not None:
        raise ValueError(f"{name}.pre_quant_scale: inputs that are scaled (NVFP4_AWQ) are not supported")
    return _read(tensors, name, ("weight", "weight_scale_2"), reciprocal=False)


def from_nvfp4_pack_quantized(tensors: Tensors, name: str) -> Matrix:
    """A matrix of compressed-tensors' ``nvfp4-pack-quantized``, which AutoRound writes as well.

        weight_packed         uint8 [N, K/2]            codes in pairs, low nibble = even k
        weight_scale          float8_e4m3fn [N, K/16]
        weight_global_scale   float32 [1] or []         a weight is code * weight_scale / weight_global_scale
        bias                  [N]                       may be missing

    Args: as :func:`from_nvfp4`.

    Raises:
        ValueError: a tensor is missing, has another dtype or shape, or a scale is not a number or has a sign.
    """
    return _read(tensors, name, ("weight_packed", "weight_global_scale"), reciprocal=True)


def _parts(suffixes: tuple[str, str], *more: Part) -> tuple[Part, ...]:
    weight, global_scale = suffixes
    return (
        Part(weight, "weight", torch.uint8, ("n", "k"), 1),
        Part("weight_scale", "weight_scale", E4M3, ("n", "g")),
        Part(global_scale, "global_scale", torch.float32),
        *more,
    )


NVFP4_PACK = add_format(
    Format(
        "nvfp4-pack-quantized",
        _parts(("weight_packed", "weight_global_scale")),
        lambda tensors, name, scheme: from_nvfp4_pack_quantized(tensors, name),
        kind=Kind.E2M1,
        unused=("input_global_scale",),
    )
)
MODELOPT_NVFP4 = add_format(
    Format(
        "modelopt-nvfp4",
        _parts(("weight", "weight_scale_2"), Part("pre_quant_scale", "input_scale", torch.float32, ("k",))),
        lambda tensors, name, scheme: from_nvfp4(tensors, name),
        kind=Kind.E2M1,
        unused=("input_scale",),
    )
)
