"""Writes matrices as the formats store them, one code at a time, and multiplies files out the same way.

Everything is numpy on Python's integers, and shares nothing with w4a8.formats: a code is placed and found by the
formats' own definitions. `dequantized_*` read the tensors, not what they were made from.
"""

import numpy as np
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]

# The quantization_config of gpt-oss.
GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def words(rows: int, columns: int) -> np.ndarray:
    return np.zeros((rows, columns), dtype=np.int64)


def put(array: np.ndarray, row: int, column: int, i: int, code: int, bits: int = 4) -> None:
    assert 0 <= code < 1 << bits
    array[row, column] |= int(code) << (bits * i)


def get(array: np.ndarray, row: int, column: int, i: int, bits: int = 4) -> int:
    return (int(array[row, column]) & 0xFFFFFFFF) >> (bits * i) & ((1 << bits) - 1)


def numpy(tensors, *names):
    """int32 words as they are, floats as float64, what is missing as None; arrays are indexed faster than tensors."""
    found = [tensors.get(name) for name in names]
    return [None if t is None else (t.double() if t.is_floating_point() else t).numpy() for t in found]


def int32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.uint32).view(np.int32).copy())


def write_gptq(codes, zeros, scales, version, bits=4):
    """codes [N, K] and zeros [N, G] of 4 or 8 bits, scales [N, G]."""
    (n, k), g, c = codes.shape, zeros.shape[1], 32 // bits
    weight, zero = words(k // c, n), words(g, n // c)
    for row in range(n):
        for column in range(k):
            put(weight, column // c, row, column % c, codes[row, column], bits)
        for group in range(g):
            put(zero, group, row // c, row % c, zeros[row, group] - (1 if version == 1 else 0), bits)
    g_idx = torch.tensor([column * g // k for column in range(k)], dtype=torch.int32)
    return {"qweight": int32(weight), "qzeros": int32(zero), "scales": scales.T.contiguous(), "g_idx": g_idx}


def dequantized_gptq(tensors, version, bits=4):
    qweight, qzeros, scales = numpy(tensors, "qweight", "qzeros", "scales")
    c = 32 // bits
    k, n, g = c * qweight.shape[0], qweight.shape[1], scales.shape[0]
    out = np.empty((n, k))
    for row in range(n):
        for column in range(k):
            group = column * g // k
            zero = get(qzeros, group, row // c, row % c, bits) + (1 if version == 1 else 0)
            out[row, column] = (get(qweight, column // c, row, column % c, bits) - zero) * scales[group, row]
    return torch.from_numpy(out)


def write_awq(codes, zeros, scales):
    (n, k), g = codes.shape, zeros.shape[1]
    weight, zero = words(k, n // 8), words(g, n // 8)
    for row in range(n):
        i = AWQ_ORDER.index(row % 8)
        for column in range(k):
            put(weight, column, row // 8, i, codes[row, column])
        for group in range(g):
            put(zero, group, row // 8, i, zeros[row, group])
    return {"qweight": int32(weight), "qzeros": int32(zero), "scales": scales.T.contiguous()}


def dequantized_awq(tensors):
    qweight, qzeros, scales = numpy(tensors, "qweight", "qzeros", "scales")
    k, n, g = qweight.shape[0], 8 * qweight.shape[1], scales.shape[0]
    out = np.empty((n, k))
    for word in range(n // 8):
        for i in range(8):
            row = 8 * word + AWQ_ORDER[i]
            for column in range(k):
                group = column * g // k
                zero = 8 if qzeros is None else get(qzeros, group, word, i)
                out[row, column] = (get(qweight, column, word, i) - zero) * scales[group, row]
    return torch.from_numpy(out)


def write_int_quantized(codes, zeros, scales):
    made = {"weight": torch.from_numpy((codes - 8).astype(np.int8)), "weight_scale": scales}
    if zeros is not None:
        made["weight_zero_point"] = torch.from_numpy((zeros - 8).astype(np.int8))
    return made


def dequantized_int(tensors):
    weight, scales = tensors["weight"].double(), tensors["weight_scale"].double()
    g = scales.shape[1]
    zeros = tensors.get("weight_zero_point", torch.zeros(scales.shape)).double()
    width = weight.shape[1] // g
    return (weight - zeros.repeat_interleave(width, 1)) * scales.repeat_interleave(width, 1)


def write_pack_quantized(codes, zeros, scales, bits=4):
    (n, k), c = codes.shape, 32 // bits
    weight = words(n, -(-k // c))
    for row in range(n):
        for column in range(k):
            put(weight, row, column // c, column % c, codes[row, column], bits)
    made = {"weight_packed": int32(weight), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
    if zeros is not None:
        packed = words(-(-n // c), zeros.shape[1])
        for row in range(n):
            for group in range(zeros.shape[1]):
                put(packed, row // c, group, row % c, zeros[row, group], bits)
        made["weight_zero_point"] = int32(packed)
    return made


def dequantized_pack(tensors, bits=4):
    (n, k), c = (int(size) for size in tensors["weight_shape"]), 32 // bits
    packed, scales, zeros = numpy(tensors, "weight_packed", "weight_scale", "weight_zero_point")
    g = scales.shape[1]
    out = np.empty((n, k))
    for row in range(n):
        for column in range(k):
            group = column * g // k
            zero = 1 << bits - 1 if zeros is None else get(zeros, row // c, group, row % c, bits)
            out[row, column] = (get(packed, row, column // c, column % c, bits) - zero) * scales[row, group]
    return torch.from_numpy(out)


def write_mxfp4(codes, exponents):
    n, k = codes.shape
    blocks = np.zeros((n, k // 32, 16), dtype=np.uint8)
    for row in range(n):
        for column in range(k):
            blocks[row, column // 32, column % 32 // 2] |= int(codes[row, column]) << (4 * (column % 2))
    return {"blocks": torch.from_numpy(blocks), "scales": torch.from_numpy(exponents.astype(np.uint8))}


def dequantized_mxfp4(tensors):
    blocks, exponents = tensors["blocks"].numpy(), tensors["scales"].numpy()
    n, groups, _ = blocks.shape
    out = np.empty((n, groups * 32))
    for row in range(n):
        for column in range(groups * 32):
            code = int(blocks[row, column // 32, column % 32 // 2]) >> (4 * (column % 2)) & 15
            value = FP4[code & 7] * (-1 if code & 8 else 1)
            out[row, column] = value * 2.0 ** (int(exponents[row, column // 32]) - 127)
    return torch.from_numpy(out)


def e4m3(byte):
    """A float8_e4m3fn: sign, four bits of exponent (bias 7, denormals), three of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


def write_nvfp4(codes, scales, of_all, reciprocal):
    """codes [N, K], scales [N, K/16] as bytes, and a float32 number, or what compressed-tensors has in its place."""
    n, k = codes.shape
    weight = np.zeros((n, k // 2), dtype=np.uint8)
    for row in range(n):
        for column in range(k):
            weight[row, column // 2] |= int(codes[row, column]) << (4 * (column % 2))
    names = ("weight_packed", "weight_global_scale") if reciprocal else ("weight", "weight_scale_2")
    scales = torch.from_numpy(scales.astype(np.uint8))
    if hasattr(torch, "float8_e4m3fn"):
        scales = scales.view(torch.float8_e4m3fn)
    of_all = torch.tensor([of_all] if reciprocal else of_all, dtype=torch.float32)
    return {names[0]: torch.from_numpy(weight), "weight_scale": scales, names[1]: of_all}


def dequantized_nvfp4(tensors, one_level=False):
    """In float64, in which all products are exact; 1 / weight_global_scale is rounded to float32, once.

    ``one_level``: the product of the two scales is rounded to float32 as well.
    """
    reciprocal = "weight_global_scale" in tensors
    packed = tensors["weight_packed" if reciprocal else "weight"].numpy()
    scales = tensors["weight_scale"].view(torch.uint8).numpy()
    of_all = np.float32(tensors["weight_global_scale" if reciprocal else "weight_scale_2"].item())
    factor = float(np.float32(1) / of_all if reciprocal else of_all)
    n, k = packed.shape[0], 2 * packed.shape[1]
    out = np.empty((n, k))
    for row in range(n):
        for column in range(k):
            code = int(packed[row, column // 2]) >> (4 * (column % 2)) & 15
            value = FP4[code & 7] * (-1 if code & 8 else 1)
            scale = e4m3(int(scales[row, column // 16])) * factor
            out[row, column] = value * (float(np.float32(scale)) if one_level else scale)
    return torch.from_numpy(out)


def scales_of(matrix):
    """float64 [N, G] of a Matrix, of one level or two; products of two are exact."""
    if matrix.channel_scales is None:
        return matrix.scales.double().numpy()
    levels = np.array([[e4m3(int(byte)) for byte in row] for row in matrix.scales.numpy()])
    return levels.reshape(matrix.scales.shape) * matrix.channel_scales.double().numpy()[:, None]


def multiplied_out(matrix):
    """What a matrix means, by its documentation; float64 holds every product exactly."""
    if matrix.kind == "int8":
        return _multiplied_out8(matrix)
    nibbles, scales = matrix.codes.numpy(), scales_of(matrix)
    zeros = None if matrix.zero_points is None else matrix.zero_points.numpy()
    n, k = nibbles.shape[0], 2 * nibbles.shape[1]
    g = scales.shape[1]
    out = np.empty((n, k))
    for row in range(n):
        for column in range(k):
            code = int(nibbles[row, column // 2]) >> (4 * (column % 2)) & 15
            group = column * g // k
            if matrix.kind == "e2m1":
                value = FP4[code & 7] * (-1 if code & 8 else 1)
            else:
                value = code - (8 if zeros is None else int(zeros[row, group]))
            out[row, column] = value * scales[row, group]
    return torch.from_numpy(out)


def _multiplied_out8(matrix):
    codes, scales = matrix.codes.numpy(), matrix.scales.double().numpy()
    (n, k), g = codes.shape, scales.shape[1]
    out = np.empty((n, k))
    for row in range(n):
        for column in range(k):
            group = column * g // k
            zero = 128 if matrix.zero_points is None else int(matrix.zero_points[row, group])
            out[row, column] = (int(codes[row, column]) - zero) * scales[row, group]
    return torch.from_numpy(out)
