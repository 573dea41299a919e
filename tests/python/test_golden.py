"""Answers that PyTorch gave on Arm, where its 4-bit matmul is KleidiAI: tests/data/kleidiai_golden.npz."""

from pathlib import Path

import numpy as np
import pytest
import torch
from common import assert_same_bits, assert_within, from_numpy

import w4a8

DATA = np.load(Path(__file__).parents[1] / "data" / "kleidiai_golden.npz")
CASES = [tuple(str(line).split("|")[:3]) for line in DATA["names"]]


def tensor(name):
    """The array `name`, or None; bfloat16 is stored as its bits."""
    if name in DATA:
        return from_numpy(DATA[name])
    if name + "_bf16bits" in DATA:
        return from_numpy(DATA[name + "_bf16bits"].view(np.int16)).view(torch.bfloat16)
    return None


def test_all_cases_are_there():
    assert len(CASES) == 28
    assert {dtype for _, _, dtype in CASES} == {"torch.float32", "torch.bfloat16"}


@pytest.mark.parametrize(("name", "group", "dtype"), CASES, ids=[case[0] for case in CASES])
def test_golden(kernel, name, group, dtype):
    x, w, s, b, y = (tensor(f"{name}/{part}") for part in "xwsby")
    assert str(x.dtype) == str(y.dtype) == dtype
    n, k, group = w.shape[0], 2 * w.shape[1], int(group)
    packed = w4a8.dyn_quant_pack_4bit_weight(w, s, b, group, k, n)
    actual = w4a8.dyn_quant_matmul_4bit(x, packed, group, k, n)
    if group == k:
        assert_same_bits(actual, y, name)
    else:
        # Both round the sum over the groups in their own order: docs/numerics.md section 3.
        largest = float(y.abs().max())
        assert_within(actual.numpy(), y.numpy(), 3e-7 * largest, name)
