"""The checks that readers share. Values of tensors on the meta device are not checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from w4a8.formats.format import Part

Tensors = Mapping[str, torch.Tensor]


def take(tensors: Tensors, name: str, suffix: str, dtypes: tuple[torch.dtype, ...], dim: int) -> torch.Tensor:
    """A required tensor of a matrix, by the last part of its name.

    Raises:
        ValueError: the tensor is missing, of none of ``dtypes``, not of ``dim`` dimensions, or empty.
    """
    tensor = tensors.get(suffix)
    if tensor is None:
        raise ValueError(f"{name}.{suffix} is missing")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}.{suffix}: dtype {tensor.dtype}, but {expected} is expected")
    if tensor.dim() != dim:
        raise ValueError(f"{name}.{suffix}: shape {tuple(tensor.shape)}, but {dim} dimensions are expected")
    check_not_empty(tensor, f"{name}.{suffix}")
    return tensor


def check_not_empty(tensor: torch.Tensor, name: str) -> None:
    """Raises ValueError if a tensor has no element."""
    if tensor.numel() == 0:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, which holds nothing")


def expect_shape(found: tuple[int, ...], name: str, suffix: str, shape: tuple[int, ...], why: str) -> None:
    """Raises ValueError if a tensor has another shape than ``shape``; ``why`` names the reason for ``shape``."""
    if tuple(found) != shape:
        raise ValueError(f"{name}.{suffix}: shape {tuple(found)}, but {why} make {shape}")


def groups_of(features: int, group_size: int, name: str, suffix: str) -> int:
    """Number of groups of K = ``features`` input features; a ``group_size`` of -1 is one group.

    Raises:
        ValueError: K is no multiple of the group size, or odd (two codes share a byte).
    """
    if features < 1 or features % 2 != 0:
        raise ValueError(f"{name}.{suffix}: {features} input features, but an even number is expected")
    if group_size == -1:
        return 1
    if group_size < 1 or features % group_size != 0:
        raise ValueError(f"{name}.{suffix}: {features} input features are not groups of {group_size}")
    return features // group_size


FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def take_scales(tensors: Tensors, name: str, suffix: str, shape: tuple[int, int], why: str) -> torch.Tensor:
    """Scales: floats of shape ``shape``, all finite."""
    scales = take(tensors, name, suffix, FLOAT_TYPES, 2)
    expect_shape(scales.shape, name, suffix, shape, why)
    if not scales.is_meta and not torch.isfinite(scales).all():
        raise ValueError(f"{name}.{suffix}: not all scales are finite")
    return scales


def take_blocks(
    tensors: Tensors, name: str, suffix: str, block: int, scales: tuple[torch.dtype, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in pairs, uint8 [N, K/2], and their ``weight_scale`` [N, K/block], of one of the types ``scales``."""
    codes = take(tensors, name, suffix, (torch.uint8,), 2)
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    groups = groups_of(columns, block, name, suffix)
    found = take(tensors, name, "weight_scale", scales, 2)
    expect_shape(found.shape, name, "weight_scale", (rows, groups), f"{columns} x {rows} features in blocks of {block}")
    return codes.contiguous(), found


def take_bias(tensors: Tensors, name: str, rows: int) -> torch.Tensor | None:
    """The bias, if there is one: floats [N]."""
    if tensors.get("bias") is None:
        return None
    bias = take(tensors, name, "bias", FLOAT_TYPES, 1)
    expect_shape(bias.shape, name, "bias", (rows,), f"{rows} output features")
    return bias


def checked_zeros(zeros: torch.Tensor, name: str, suffix: str, symmetric: bool, bits: int = 4) -> torch.Tensor | None:
    """Zero points [N, G] as uint8; None if all are the middle of the codes: 8 of 4 bits, 128 of 8 bits.

    Raises:
        ValueError: a zero point is outside the codes, or not the middle although the configuration says ``symmetric``.
    """
    if zeros.is_meta:
        return None if symmetric else zeros.to(torch.uint8).contiguous()
    middle, most = 1 << (bits - 1), (1 << bits) - 1
    low, high = (int(bound) for bound in torch.aminmax(zeros))
    if low < 0 or high > most:
        raise ValueError(f"{name}.{suffix}: zero points in [{low}, {high}], but [0, {most}] is expected")
    if low == high == middle:
        return None
    if symmetric:
        raise ValueError(
            f"{name}.{suffix}: zero points in [{low}, {high}], but the configuration says symmetric, which is {middle}"
        )
    return zeros.to(torch.uint8).contiguous()


SCALES_AND_ZEROS = (
    Part("scales", "weight_scale", torch.float32, ("g", "n")),
    Part("qzeros", "zero_points", torch.int32, ("g", "n"), 1),
)


def scales_and_zeros(
    tensors: Tensors,
    name: str,
    shape: tuple[int, int],
    group_size: int,
    symmetric: bool,
    zeros_of: Callable[[torch.Tensor], torch.Tensor],
    bits: int = 4,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales [N, G] and zero points uint8 [N, G] of GPTQ and AWQ, from :data:`SCALES_AND_ZEROS`.

    Args:
        tensors: by the last parts of their names.
        name: of the matrix, for errors.
        shape: (K, N).
        group_size: -1 for one group.
        symmetric: the configuration says that zero points are the middle of the codes; then ``qzeros`` may be missing.
        zeros_of: makes zero points [N, G] of ``qzeros``, int32 [G, N / codes in a word].
        bits: of a code.

    Raises:
        ValueError: a tensor is missing, has another dtype or shape, or values that the formats do not have.
    """
    features, rows = shape
    groups, in_word = groups_of(features, group_size, name, "qweight"), 32 // bits
    why = f"{features} x {rows} features in groups of {group_size}"
    scales = take_scales(tensors, name, "scales", (groups, rows), why).T.contiguous()
    if tensors.get("qzeros") is None and symmetric:
        return scales, None
    if rows % in_word != 0:
        raise ValueError(f"{name}.qzeros: {rows} output features are not whole words of {in_word}")
    words = take(tensors, name, "qzeros", (torch.int32,), 2)
    expect_shape(words.shape, name, "qzeros", (groups, rows // in_word), why)
    return scales, checked_zeros(zeros_of(words), name, "qzeros", symmetric, bits)


def check_g_idx(tensors: Tensors, name: str, suffix: str, features: int, group_size: int) -> None:
    """Raises ValueError if ``g_idx`` exists and is not k // g: activation order is not supported."""
    if tensors.get(suffix) is None:
        return
    g_idx = take(tensors, name, suffix, (torch.int32, torch.int64), 1)
    expect_shape(g_idx.shape, name, suffix, (features,), f"{features} input features")
    check_consecutive(g_idx, f"{name}.{suffix}", features if group_size == -1 else group_size)


def check_consecutive(g_idx: torch.Tensor, name: str, width: int | None = None) -> None:
    """Checks that ``g_idx``, integers [K], has groups of ``width`` consecutive input features; None: of any one width.

    Raises:
        ValueError: ``g_idx`` is empty or has other groups: activation order is not supported.
    """
    check_not_empty(g_idx, name)
    features = g_idx.numel()
    if g_idx.is_meta:
        return
    if width is None:
        width = -(-features // (int(g_idx.max()) + 1))
    if not torch.equal(g_idx.flatten().long(), torch.arange(features) // width):
        raise ValueError(
            f"{name}: groups are not consecutive input features (activation order, desc_act), which is not supported"
        )


def stated_shape(tensors: Tensors, name: str, codes: tuple[int, int] | None = None) -> tuple[int, int]:
    """(N, K) from ``weight_shape``, int64 or int32 [2].

    Args:
        tensors: by the last parts of their names.
        name: of the matrix, for errors.
        codes: (N, K) for which the words have room, the result for a ``weight_shape`` on the meta device.

    Raises:
        ValueError: ``weight_shape`` is missing, or has another dtype or shape.
    """
    shape = take(tensors, name, "weight_shape", (torch.int64, torch.int32), 1)
    expect_shape(shape.shape, name, "weight_shape", (2,), "rows and columns")
    if shape.is_meta and codes is not None:
        return codes
    return int(shape[0]), int(shape[1])
