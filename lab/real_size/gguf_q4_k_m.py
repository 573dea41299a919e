"""The Q4_K_M file: random blocks of the types that llama.cpp chooses for that mix (src/llama-quant.cpp).

Values and downs of about half of the layers are Q6_K, and so is the output layer; the rest is Q4_K. Rows that are not
whole blocks of these are Q8_0 and Q5_0. Every bit that a real file uses is random. A scale of Q4_K is 7.5 steps below
its minimum, so that the weights of a group have no mean.
"""

from __future__ import annotations

import math

import numpy as np

from real_size.gguf_file import BLOCKS, Part
from real_size.gguf_shapes import GGUFShapes
from real_size.values import MOST_VALUES, generator

FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
# Root mean squares of a code beside its middle, times its integer scale.
_Q4_K_SIZE = math.sqrt((16**2 - 1) / 12) * math.sqrt(np.mean(np.arange(64.0) ** 2))
_Q5_0_SIZE = math.sqrt((32**2 - 1) / 12 + 0.25)
_Q8_0_SIZE = math.sqrt(np.mean(np.arange(-127.0, 128) ** 2))
_Q6_K_SIZE = math.sqrt((64**2 - 1) / 12 + 0.25) * math.sqrt(np.mean(np.arange(-127.0, 128) ** 2))


def _float16(value: float, blocks: int) -> np.ndarray:
    return np.full((blocks, 1), value, "<f2").view(np.uint8)


def q4_k(name: str, blocks: int, size: float) -> np.ndarray:
    """uint8 [blocks, 144]: d, dmin, 8 scales and minimums of 6 bits in 12 bytes, 128 bytes of codes.

    Args:
        name: of the tensor: its values are the same whatever else is written.
        blocks: how many.
        size: of a weight (root mean square), to the next power of two.
    """
    random = generator(name)
    step = 2.0 ** round(math.log2(size / _Q4_K_SIZE))
    scales = random.integers(0, 64, (blocks, 8), np.uint8)
    low, high = scales[:, :4], scales[:, 4:]
    out = np.empty((blocks, 144), np.uint8)
    out[:, :2], out[:, 2:4] = _float16(step, blocks), _float16(7.5 * step, blocks)
    out[:, 4:8] = out[:, 8:12] = low | high >> 4 << 6  # of scales, and of minimums, which are the same number
    out[:, 12:16] = high & 15 | high << 4
    out[:, 16:] = np.frombuffer(random.bytes(blocks * 128), np.uint8).reshape(blocks, 128)
    return out


def q6_k(name: str, blocks: int, size: float) -> np.ndarray:
    """uint8 [blocks, 210]: low nibbles (128 bytes), upper 2 bits (64), 16 int8 scales, d. Arguments as of q4_k."""
    random = generator(name)
    step = 2.0 ** round(math.log2(size / _Q6_K_SIZE))
    out = np.empty((blocks, 210), np.uint8)
    out[:, :192] = np.frombuffer(random.bytes(blocks * 192), np.uint8).reshape(blocks, 192)
    out[:, 192:208] = random.integers(-127, 128, (blocks, 16), np.int8).view(np.uint8)
    out[:, 208:] = _float16(step, blocks)
    return out


def q5_0(name: str, blocks: int, size: float) -> np.ndarray:
    """uint8 [blocks, 22]: d, the upper bits (4 bytes), low nibbles (16). Arguments as of q4_k."""
    return _of_one_scale(name, (blocks, 22), size / _Q5_0_SIZE, 0, np.uint8)


def q8_0(name: str, blocks: int, size: float) -> np.ndarray:
    """uint8 [blocks, 34]: d, 32 int8 codes. Arguments as of q4_k."""
    return _of_one_scale(name, (blocks, 34), size / _Q8_0_SIZE, -127, np.int8)


def _of_one_scale(name: str, shape: tuple[int, int], step: float, least: int, dtype: type) -> np.ndarray:
    """d, and random codes from `least` on, a part at a time."""
    random = generator(name)
    out = np.empty(shape, np.uint8)
    out[:, :2] = _float16(2.0 ** round(math.log2(step)), shape[0])
    for part in np.array_split(out[:, 2:], -(-out.size // MOST_VALUES)):
        part[:] = random.integers(least, np.iinfo(dtype).max, part.shape, dtype, endpoint=True).view(np.uint8)
    return out


MAKE = {"Q4_K": q4_k, "Q6_K": q6_k, "Q5_0": q5_0, "Q8_0": q8_0}


class RandomBlocks:
    """The data of a tensor, random. Matrices keep the size of what they multiply (values.py)."""

    def __init__(self, shapes: GGUFShapes) -> None:
        self.layers = shapes.layers
        self.output = next(name for name in ("output.weight", "token_embd.weight") if name in shapes.outer)

    def type_of(self, part: Part) -> str:
        """The type of a tensor that is not float32."""
        more = "attn_v." in part.name or "ffn_down" in part.name
        kind = "Q6_K" if part.name == self.output or (more and self._more_bits(part.layer)) else "Q4_K"
        return FALLBACK[kind] if part.shape[-1] % BLOCKS[kind][0] else kind

    def _more_bits(self, layer: int) -> bool:
        eighth = self.layers // 8
        return layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2

    def data(self, part: Part) -> np.ndarray:
        """float32, or uint8 blocks, rows first."""
        columns = part.shape[-1]
        if part.is_float:
            if len(part.shape) == 1 or columns == 1 or "_norm." in part.name:
                return np.full(part.shape, -0.1 if part.name.endswith("ssm_a") else 1.0, np.float32)
            return generator(part.name).standard_normal(part.shape, np.float32) / np.float32(math.sqrt(columns))
        kind = self.type_of(part)
        blocks = math.prod(part.shape) // BLOCKS[kind][0]
        size = 1.0 if part.name == "token_embd.weight" else 1 / math.sqrt(columns)
        return MAKE[kind](part.name, blocks, size).reshape(*part.shape[:-1], -1)
