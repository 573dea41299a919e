"""w4a8.nn.rounding: rounding to nearest bit for bit, the search of scales against loops over scales in NumPy."""

import numpy as np
import pytest
import reference
import torch
from common import DTYPES, assert_same_bits, from_numpy

import w4a8
from w4a8.nn import W4A8Linear, rounding
from w4a8.nn.rounding import round_weight

F32 = np.float32
SCALE_TYPES = [torch.float32, torch.bfloat16]


def awkward_weights(n, k):
    """Normal rows, and rows of zeros, of one outlier, of multiples of a number, of denormal and of huge values."""
    weight = torch.randn(n, k)
    weight[0] = 0
    weight[1, :] /= 100
    weight[1, 3] = -5
    weight[2] = torch.randint(-2, 3, (k,)) * 0.75
    weight[3] *= 1e-40
    weight[4] *= 5e37
    weight[5] = -weight[5].abs()
    weight[6, : k // 2] = 0
    return weight


def nearest(weight, group, scale_dtype):
    """Values int64 [N, K] and scales float32 [N, G] by NumPy."""
    n, k = weight.shape
    groups = weight.float().numpy().reshape(n, k // group, group)
    scales = from_numpy(np.abs(groups).max(-1) / F32(7)).to(scale_dtype).float().numpy()
    scales = np.where(scales == 0, F32(1), scales)
    values = np.clip(np.rint(groups / scales[..., None]), -8, 7)
    return values.reshape(n, k).astype(np.int64), scales


def errors(weight, values, scales):
    """Squared error of each group, float64 [N, G]."""
    n, g = scales.shape
    difference = values.reshape(n, g, -1) * np.asarray(scales, np.float64)[..., None]
    return ((weight.double().numpy().reshape(n, g, -1) - difference) ** 2).sum(-1)


@pytest.mark.parametrize("scale_dtype", SCALE_TYPES, ids=str)
@pytest.mark.parametrize("group", [32, 64, 192, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nearest(dtype, group, scale_dtype):
    weight = awkward_weights(21, 192)
    weight[4] = 1  # huge values are not float16
    weight = weight.to(dtype)
    nibbles, scales = round_weight(weight, group, scale_dtype)
    values, want = nearest(weight, 192 if group == -1 else group, scale_dtype)
    assert_same_bits(scales, from_numpy(want).to(scale_dtype))
    assert np.array_equal(reference.unpack_nibbles(nibbles.numpy()), values)


def test_huge_weights():
    weight = awkward_weights(9, 64)
    values, want = nearest(weight, 32, torch.float32)
    nibbles, scales = round_weight(weight, 32)
    assert_same_bits(scales, from_numpy(want))
    assert np.array_equal(reference.unpack_nibbles(nibbles.numpy()), values)


@pytest.mark.parametrize("clip_search", [False, True], ids=["nearest", "search"])
def test_chunks_change_nothing(monkeypatch, clip_search):
    weight = awkward_weights(23, 96)
    want = round_weight(weight, 32, clip_search=clip_search)
    for chunk in (1, 96 * 5, 96 * 22):
        monkeypatch.setattr(rounding, "CHUNK", chunk)
        for got, expected in zip(round_weight(weight.t().contiguous().t(), 32, clip_search=clip_search), want):
            assert_same_bits(got, expected)


def tried(group, covering):
    """The least error in float64 that the scales the search is said to try can give, each refined once."""
    best = np.inf
    for i in range(21):
        q = np.clip(np.rint(group / covering / (1.2 - 0.04 * i)), -8, 7)
        if q.any():
            best = min(best, ((group - q * (group @ q) / (q @ q)) ** 2).sum())
    return best


def optimum(group):
    """The least error of any positive scale: between two scales where a value steps, the values are constant."""
    steps = np.concatenate([np.abs(group) / (level + 0.5) for level in range(8)])
    steps = np.sort(steps[steps > 0])[::-1]
    best = (group**2).sum()
    for upper, lower in zip(steps, [*steps[1:], 0.0]):
        q = np.clip(np.rint(group / ((upper + lower) / 2)), -8, 7)
        if q.any():
            best = min(best, ((group - q * (group @ q) / (q @ q)) ** 2).sum())
    return best


@pytest.mark.parametrize("group", [32, 96, -1])
def test_search(group):
    """Between the best of what is tried and the best there is on one side and plain rounding on the other."""
    weight = awkward_weights(12, 192)
    k = 192 if group == -1 else group
    nibbles, scales = round_weight(weight, group, clip_search=True)
    found = errors(weight, reference.unpack_nibbles(nibbles.numpy()), scales.numpy())
    values, covering = nearest(weight, k, torch.float32)
    plain = errors(weight, values, covering)
    assert (found <= plain).all()
    groups = weight.double().numpy().reshape(12, -1, k)
    for row, column in np.ndindex(*found.shape):
        parts = groups[row, column]
        # A float32 in the gain A * A / B, a float32 scale, and values that sat on a tie: each moves the error by a
        # few U of the sum of squares. Denormal scales have fewer bits.
        size = (parts**2).sum()
        allowed = (16 * reference.U if scales[row, column] > 1e-37 else 1e-2) * size
        assert found[row, column] <= min(tried(parts, np.float64(covering[row, column])), plain[row, column]) + allowed
        assert found[row, column] >= optimum(parts) * (1 - 1e-9)
    assert found[7:].sum() < 0.9 * plain[7:].sum()  # normal rows gain


@pytest.mark.parametrize("scale_dtype", SCALE_TYPES, ids=str)
def test_search_is_never_worse(scale_dtype):
    """Group by group, in the squared error of what is stored."""
    for exponent in (-3, 0, 3):
        weight = torch.randn(60, 256) ** 3 * 10.0**exponent
        for group in (32, 256):
            nibbles, scales = round_weight(weight, group, scale_dtype, clip_search=True)
            found = errors(weight, reference.unpack_nibbles(nibbles.numpy()), scales.float().numpy())
            plain = errors(weight, *nearest(weight, group, scale_dtype))
            assert (found <= plain).all()
            assert (found < plain).mean() > 0.9
            # The values are the nearest for the scale that is stored.
            values = np.rint(weight.numpy().reshape(60, -1, group) / scales.float().numpy()[..., None])
            assert np.array_equal(np.clip(values, -8, 7).reshape(60, 256), reference.unpack_nibbles(nibbles.numpy()))


def test_from_float_passes_the_options_on():
    linear = torch.nn.Linear(64, 24).bfloat16()
    for options in ({}, {"scale_dtype": torch.bfloat16}, {"clip_search": True}):
        layer = W4A8Linear.from_float(linear, 32, **options)
        nibbles, scales = round_weight(linear.weight, 32, **options)
        assert_same_bits(layer.packed, w4a8.dyn_quant_pack_4bit_weight(nibbles, scales, linear.bias, 32, 64, 24))
    packed = W4A8Linear.from_float(linear, scale_dtype=torch.bfloat16).packed
    assert w4a8.read_header(packed)["scale_dtype"] == "bfloat16"


def test_errors():
    weight = torch.randn(4, 64)
    for group in (0, -2, 48):
        with pytest.raises(ValueError, match=f"group_size is {group}, expected -1 or a divisor of in_features = 64"):
            round_weight(weight, group)
    with pytest.raises(ValueError, match=r"scale_dtype is torch.float16, expected torch.float32 or torch.bfloat16"):
        round_weight(weight, 32, torch.float16)
    for bad in (float("nan"), float("inf")):
        weight[3, 63] = bad
        with pytest.raises(ValueError, match="the weight has a NaN or an infinite element"):
            round_weight(weight, 32)


def test_meta():
    linears = torch.nn.Linear(64, 24, device="meta"), torch.nn.Linear(64, 24)
    empty, full = (W4A8Linear.from_float(linear, 32, scale_dtype=torch.bfloat16) for linear in linears)
    assert empty.packed.is_meta
    assert empty.packed.shape == full.packed.shape
