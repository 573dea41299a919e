"""Random values of tensors, the same for a name whatever else is written.

bfloat16 is kept as its bits (uint16). Matrices keep the size of what they multiply and routers know no favourites, so
that activations stay finite through all layers and tokens go to all experts.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import numpy as np
from peers.problem import PAIRS, VALUES, dequantized, to_bfloat16
from qwen3_moe import Tensor

MOST_VALUES = 16 << 20  # at a time
# Scales are (8 to 15) / 8 times a power of two: exact in bfloat16 and in float16.
_DEVIATION = float(np.sqrt(np.mean(VALUES.astype(np.float64) ** 2) * np.mean((1 + np.arange(8) / 8) ** 2)))


def generator(name: str) -> np.random.Generator:
    """Of the tensor's values."""
    return np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))


def scale_step(columns: int) -> float:
    """The power of two that makes a row of `columns` weights keep the size of its input."""
    return 2.0 ** round(-math.log2(_DEVIATION * math.sqrt(columns)))


def words(module: str, rows: int, columns: int) -> np.ndarray:
    """int32 [rows, columns / 8], nibble i of a word = column i, value + 8."""
    raw = np.frombuffer(generator(f"{module}.weight_packed").bytes(rows * columns // 2), np.uint8)
    return PAIRS[raw].view("<i4").reshape(rows, columns // 8)


def scales(module: str, rows: int, columns: int, group: int) -> np.ndarray:
    """float32 [rows, columns / group]."""
    eighths = generator(f"{module}.weight_scale").integers(0, 8, (rows, columns // group), np.uint8)
    return (1 + eighths.astype(np.float32) / 8) * np.float32(scale_step(columns))


def chunks(tensor: Tensor, group: int) -> Iterator[np.ndarray]:
    """The values of a tensor in the order of the file, a part at a time."""
    module = tensor.name.rpartition(".")[0]
    rows, columns = tensor.matrix
    if tensor.content == "ones":
        yield to_bfloat16(np.ones(tensor.shape, np.float32))
    elif tensor.content == "shape":
        yield np.array(tensor.matrix, "<i8")
    elif tensor.content == "words":
        yield words(module, rows, columns)
    elif tensor.content == "scales":
        yield to_bfloat16(scales(module, rows, columns, group))
    elif tensor.content == "weights":
        yield to_bfloat16(dequantized(words(module, rows, columns), scales(module, rows, columns, group)))
    else:
        random = generator(tensor.name)
        size = np.float32(1 if tensor.content == "unit" else 1 / math.sqrt(columns))
        step = max(1, MOST_VALUES // columns)
        for start in range(0, rows, step):
            yield to_bfloat16(random.standard_normal((min(step, rows - start), columns), np.float32) * size)
