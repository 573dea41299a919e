"""Against PyTorch's own operators, aten::_dyn_quant_*: on x86 a scalar reference of the same quantization."""

import platform

import numpy as np
import pytest
import reference
import torch
from common import TORCH_VERSION, assert_within, make_matrix, matmul

pytestmark = [
    pytest.mark.skipif(not hasattr(torch.ops.aten, "_dyn_quant_matmul_4bit"), reason=f"not in torch {TORCH_VERSION}"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="on Arm it is KleidiAI: see test_golden.py"),
]


def aten(x, matrix):
    """Without a bias, which ATen's reference leaves out."""
    sizes = (matrix.group, matrix.k, matrix.n)
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(matrix.weights, matrix.scales, None, *sizes)
    return torch.ops.aten._dyn_quant_matmul_4bit(x, packed, *sizes)


def tolerance(x, matrix):
    """What may differ, element by element.

    ATen rounds x * scale halves away from zero, this project half to even: only an exact tie (x * scale in float32 is
    n + 1/2) quantizes differently, by one step, which moves y[m, n] by recip[m] * |w[n, k] * s[n]|. Everything else is
    integer or one and the same float operation, except the order of those after the integer sums: ATen has
    at most K + 2 of them per output, this project G + 4, each off by at most U times the sum of the absolute terms.
    """
    weights, scales, *_ = matrix.arrays()
    q, zp, recip = reference.quantize(x)
    size = np.abs(reference.dequantize(weights, scales))
    span = np.maximum(0, x.max(1)) - np.minimum(0, x.min(1))
    scale = np.where(span == 0, reference.F32(1), reference.F32(255) / span).astype(np.float32)
    scaled = x * scale[:, None]
    ties = np.abs(scaled - np.trunc(scaled)) == 0.5
    steps = ties.astype(np.float64) @ size.T * recip[:, None]
    terms = (np.abs(q) + np.abs(zp)[:, None] + 1) @ size.T * recip[:, None]
    return steps + (matrix.k + 2 + scales.shape[1] + 4) * reference.U * terms, ties


SHAPES = [(1, 32, 64, 64), (7, 48, 256, 256), (5, 32, 128, 32), (4, 64, 256, 64), (3, 32, 512, 128)]


@pytest.mark.parametrize(("m", "n", "k", "group"), SHAPES)
@pytest.mark.parametrize("rows", ["normal", "ties"])
def test_against_aten(kernel, m, n, k, group, rows):
    matrix = make_matrix(n, k, group, torch.float32 if group == k else torch.bfloat16)
    x = torch.randn(m, k)
    if rows == "ties":  # a span of 255 makes the scale 1
        x = torch.randint(-200, 200, (m, k)) / 2.0
        x[:, 0], x[:, 1] = -127.5, 127.5
    allowed, ties = tolerance(x.numpy(), matrix)
    assert ties.any() or rows == "normal"
    assert_within(matmul(x, matrix, matrix.pack()).numpy(), aten(x, matrix).numpy(), allowed)
