"""The types of GGUF tensors: their blocks, unpacked into the codes, scales and minimums that the operators take.

A row is quantized along k, in blocks of 32, 64 or 256 weights. Every type here is converted exactly. Docstrings have
the formula and the fields of a block, with ggml's names (``ggml-common.h`` of llama.cpp): d and m are float16, qs the
low bits of codes, qh the high bits. In "halves", byte j of n/2 has code j in the low nibble, j + n/2 in the high one.
"""

from __future__ import annotations

from functools import partial

import torch

from w4a8.core.blocks import BlockType
from w4a8.core.float8_scales import powers_of_two
from w4a8.core.kind import Kind
from w4a8.core.matrix import SUPER, Matrix

# Bits are moved in int64, eight bytes at once: PyTorch shifts single bytes as slowly as whole words.


def _every(byte: int, step: int = 1) -> int:
    """An int64 with ``byte`` in every ``step``-th byte, from the lowest on."""
    return int.from_bytes(bytes(byte if i % step == 0 else 0 for i in range(8)), "little", signed=True)


def _words(block: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] as int64 [..., n / 8]."""
    flat = block.reshape(-1)  # of a single block a view, at any offset
    flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()
    return flat.view(torch.int64).view(*block.shape[:-1], -1)


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_words`."""
    return words.contiguous().view(torch.uint8)


def _halves(block: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] in halves to codes of 4 bits [..., 2n], one a byte."""
    words = _words(block)
    return _bytes(torch.cat((words & _every(15), words >> 4 & _every(15)), -1))


def _halves_in_pairs(block: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] to nibbles [..., n] of the codes that :func:`_halves` gives."""
    words = _words(block)
    low, high = words & _every(15, 2), words >> 4 & _every(15, 2)  # nibbles of even bytes
    low |= words >> 4 & _every(0xF0, 2)  # nibbles of odd bytes
    high |= words >> 8 & _every(0xF0, 2)
    return torch.cat((low, high), -1).view(torch.int16).to(torch.uint8)


def _in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits [..., n], one a byte, to nibbles [..., n / 2]."""
    words = _words(codes)
    return (words | words >> 4).view(torch.int16).to(torch.uint8)


def _runs(block: torch.Tensor, run: int, bits: int) -> torch.Tensor:
    """Bytes [N, B, n] to codes [N, B, 8 / bits * n]: for each ``run`` bytes, the codes in their lowest bits first."""
    parts = _words(block.unflatten(-1, (-1, 1, run)))
    shifts = torch.arange(0, 8, bits)[:, None]
    return _bytes(parts >> shifts & _every((1 << bits) - 1)).flatten(-3)


def _float16(block: torch.Tensor) -> torch.Tensor:
    """Bytes [N, B, 2] to float16 [N, B]."""
    return block.contiguous().view(torch.float16).squeeze(-1)


def _minus_float16(block: torch.Tensor) -> torch.Tensor:
    """Likewise, with the other sign. By the bits: torch changes a signaling NaN, or not, by its place in a tensor."""
    return (_float16(block).view(torch.int16) ^ -0x8000).view(torch.float16)


def _matrix(codes: torch.Tensor, scales: torch.Tensor, kind: Kind = Kind.INT6, **more: torch.Tensor) -> Matrix:
    """A matrix of codes, scales and other tensors, each [N, B, ...] flattened to [N, ...]."""
    tensors = {name: each.reshape(len(codes), -1) for name, each in {"scales": scales, **more}.items()}
    return Matrix(codes.flatten(1), kind=kind, **tensors)


def _q4_0(block: torch.Tensor, kind: Kind = Kind.INT4) -> Matrix:
    """d (q - 8), or of IQ4_NL d iq4[q]: d, qs."""
    return _matrix(_halves_in_pairs(block[..., 2:]), _float16(block[..., :2]), kind)


def _q4_1(block: torch.Tensor) -> Matrix:
    """d q + m: d, m, qs."""
    codes, minimums = _halves_in_pairs(block[..., 4:]), _minus_float16(block[..., 2:4])
    return _matrix(codes, _float16(block[..., :2]), Kind.INT4, minimums=minimums)


def _fifth_bits(block: torch.Tensor) -> torch.Tensor:
    """Bytes [N, B, 4] to the fifth bits of 32 codes [N, B, 32], as 0 and 16."""
    spread = torch.arange(256).unsqueeze(-1) >> torch.arange(8) & 1  # [256, 8]
    words = _words(spread.to(torch.uint8) << 4).squeeze(-1)
    return _bytes(words.index_select(0, block.flatten().int()).view(*block.shape))


def _q5_0(block: torch.Tensor) -> Matrix:
    """d (q - 16): d, qh [4], qs."""
    codes = _halves(block[..., 6:]) | _fifth_bits(block[..., 2:6])
    return _matrix(codes + (32 - 16), _float16(block[..., :2]))


def _q5_1(block: torch.Tensor) -> Matrix:
    """d q + m: d, m, qh [4], qs."""
    codes = _halves(block[..., 8:]) | _fifth_bits(block[..., 4:8])
    return _matrix(codes + 32, _float16(block[..., :2]), minimums=_minus_float16(block[..., 2:4]))


def _q8_0(block: torch.Tensor) -> Matrix:
    """d q: d, int8 qs."""
    return _matrix(block[..., 2:] ^ 128, _float16(block[..., :2]), Kind.INT8)


def _six_bits(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [N, B, 12] of Q4_K and Q5_K to 8 scales and 8 minimums of 6 bits, each [N, B, 8], int8."""
    low, middle, high = block.split(4, -1)
    scales = torch.cat((low & 63, high & 15 | low >> 6 << 4), -1)
    minimums = torch.cat((middle & 63, high >> 4 | middle >> 6 << 4), -1)
    return scales.view(torch.int8), minimums.view(torch.int8)


def _k_quant(codes: torch.Tensor, kind: Kind, block: torch.Tensor) -> Matrix:
    """d sc q - dmin m in groups of 32: d, dmin, 12 bytes of sc and m, then the codes."""
    scales, minimums = _six_bits(block[..., 4:16])
    supers = {"super_scales": _float16(block[..., :2]), "super_minimums": _float16(block[..., 2:4])}
    return _matrix(codes, scales, kind, minimums=minimums, **supers)


def _q4_k(block: torch.Tensor) -> Matrix:
    """d sc q - dmin m: d, dmin, 12 bytes, qs."""
    return _k_quant(_halves_in_pairs(block[..., 16:].unflatten(-1, (4, 32))).flatten(-2), Kind.INT4, block)


def _q5_k(block: torch.Tensor) -> Matrix:
    """d sc q - dmin m with q of 5 bits: d, dmin, 12 bytes, qh [32], qs."""
    codes = _runs(block[..., 48:], 32, 4) | _runs(block[..., 16:48], 32, 1) << 4
    return _k_quant(codes + 32, Kind.INT6, block)


def _q2_k(block: torch.Tensor) -> Matrix:
    """d sc q - dmin m in groups of 16: 16 bytes, low nibble sc, high nibble m; qs of 2 bits, d, dmin."""
    both = block[..., :16]
    supers = {"super_scales": _float16(block[..., 80:82]), "super_minimums": _float16(block[..., 82:84])}
    scales, minimums = (part.view(torch.int8) for part in (both & 15, both >> 4))
    codes = _in_pairs(_runs(block[..., 16:80], 32, 2))
    return _matrix(codes, scales, Kind.INT4, minimums=minimums, **supers)


def _q3_k(block: torch.Tensor) -> Matrix:
    """d (sc - 32) (q - 4) in groups of 16: third bits [32], qs of 2 bits, 16 sc of 6 bits in 12 bytes, d."""
    codes = _runs(block[..., 32:96], 32, 2) | _runs(block[..., :32], 32, 1) << 2
    high = (block[..., None, 104:108] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3).flatten(-2)
    scales = _runs(block[..., 96:104], 8, 4) | high << 4
    # The codes below get 8 - 4 added: int4 subtracts 8.
    scales = (scales.view(torch.int8) - 32).contiguous()
    return _matrix(_in_pairs(codes + (8 - 4)), scales, Kind.INT4, super_scales=_float16(block[..., 108:]))


def _q6_k(block: torch.Tensor) -> Matrix:
    """d sc (q - 32) in groups of 16: low nibbles [128], upper 2 bits [64], int8 sc [16], d."""
    codes = _runs(block[..., :128], 64, 4) | _runs(block[..., 128:192], 32, 2) << 4
    scales = block[..., 192:208].contiguous().view(torch.int8)
    return _matrix(codes, scales, super_scales=_float16(block[..., 208:]))


def _iq4_xs(block: torch.Tensor) -> Matrix:
    """d (sc - 32) iq4[q] in groups of 32: d, upper 2 bits of sc (uint16), low nibbles [4], qs, halves of 32."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = (block[..., 2:4].unsqueeze(-1) >> shifts & 3).flatten(-2)
    low = torch.stack((block[..., 4:8] & 15, block[..., 4:8] >> 4), -1).flatten(-2)
    scales = ((low | high << 4).view(torch.int8) - 32).contiguous()
    codes = _halves_in_pairs(block[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return _matrix(codes, scales, Kind.IQ4, super_scales=_float16(block[..., :2]))


def _mxfp4(block: torch.Tensor) -> Matrix:
    """e2m1 times 2^(e - 127): e, qs."""
    return _matrix(_halves_in_pairs(block[..., 1:]), powers_of_two(block[..., :1]), Kind.E2M1)


def _nvfp4(block: torch.Tensor) -> Matrix:
    """e2m1 times a float8_e4m3 without sign in groups of 16: 4 scales, qs in halves of 16."""
    codes = _halves_in_pairs(block[..., 4:].unflatten(-1, (4, 8))).flatten(-2)
    return Matrix(codes.flatten(1), block[..., :4].flatten(1), None, Kind.E2M1, None, torch.ones(len(block)))


TYPES = {
    each.id: each
    for each in (
        BlockType("Q4_0", 2, 32, 18, 32, _q4_0, 1),
        BlockType("Q4_1", 3, 32, 20, 32, _q4_1, 2),
        BlockType("Q5_0", 6, 32, 22, 32, _q5_0, 1),
        BlockType("Q5_1", 7, 32, 24, 32, _q5_1, 2),
        BlockType("Q8_0", 8, 32, 34, 32, _q8_0, 1),
        BlockType("Q2_K", 10, SUPER, 84, 16, _q2_k),
        BlockType("Q3_K", 11, SUPER, 110, 16, _q3_k),
        BlockType("Q4_K", 12, SUPER, 144, 32, _q4_k),
        BlockType("Q5_K", 13, SUPER, 176, 32, _q5_k),
        BlockType("Q6_K", 14, SUPER, 210, 16, _q6_k),
        BlockType("IQ4_NL", 20, 32, 18, 32, partial(_q4_0, kind=Kind.IQ4), 1),
        BlockType("IQ4_XS", 23, SUPER, 136, 32, _iq4_xs),
        BlockType("MXFP4", 39, 32, 17, 32, _mxfp4),
        BlockType("NVFP4", 40, 64, 36, 16, _nvfp4, is_packed=False),
    )
}
