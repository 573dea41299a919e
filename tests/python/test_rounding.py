"""w4a8.nn.rounding: rounding to nearest bit for bit, the search of scales against loops over scales in NumPy."""

import numpy as np
import pytest
import reference
import torch
from common import DTYPES, assert_same_bits, from_numpy

import w4a8
from w4a8.nn import W4A8Experts, W4A8Linear, rounding
from w4a8.nn.rounding import round_weight

F32 = np.float32
SCALE_TYPES = [torch.float32, torch.bfloat16]
KINDS = {"int4": {}, "zeros": {"symmetric": False}, "e2m1": {"values": "e2m1"}}
kinds = pytest.mark.parametrize("kind", KINDS)
new_kinds = pytest.mark.parametrize("kind", ["zeros", "e2m1"])


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


def int4(matrix):
    assert (matrix.kind, matrix.zero_points) == ("int4", None)
    return matrix.nibbles, matrix.scales


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
@pytest.mark.parametrize("group", [16, 32, 64, 192, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nearest(dtype, group, scale_dtype):
    weight = awkward_weights(21, 192)
    weight[4] = 1  # huge values are not float16
    weight = weight.to(dtype)
    nibbles, scales = int4(round_weight(weight, group, scale_dtype))
    values, want = nearest(weight, 192 if group == -1 else group, scale_dtype)
    assert_same_bits(scales, from_numpy(want).to(scale_dtype))
    assert np.array_equal(reference.unpack_nibbles(nibbles.numpy()), values)


def test_huge_weights():
    weight = awkward_weights(9, 64)
    values, want = nearest(weight, 32, torch.float32)
    nibbles, scales = int4(round_weight(weight, 32))
    assert_same_bits(scales, from_numpy(want))
    assert np.array_equal(reference.unpack_nibbles(nibbles.numpy()), values)


@kinds
@pytest.mark.parametrize("clip_search", [False, True], ids=["nearest", "search"])
def test_chunks_change_nothing(monkeypatch, clip_search, kind):
    weight = awkward_weights(23, 96)
    options = {"clip_search": clip_search, **KINDS[kind]}
    want = round_weight(weight, 32, **options)
    for chunk in (1, 96 * 5, 96 * 22):
        monkeypatch.setattr(rounding, "CHUNK", chunk)
        got = round_weight(weight.t().contiguous().t(), 32, **options)
        assert got.kind == want.kind
        for part in ("nibbles", "scales", "zero_points"):
            if getattr(want, part) is not None:
                assert_same_bits(getattr(got, part), getattr(want, part))


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


@pytest.mark.parametrize("group", [16, 32, 96, -1])
def test_search(group):
    """Between the best of what is tried and the best there is on one side and plain rounding on the other."""
    weight = awkward_weights(12, 192)
    k = 192 if group == -1 else group
    nibbles, scales = int4(round_weight(weight, group, clip_search=True))
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
            nibbles, scales = int4(round_weight(weight, group, scale_dtype, clip_search=True))
            found = errors(weight, reference.unpack_nibbles(nibbles.numpy()), scales.float().numpy())
            plain = errors(weight, *nearest(weight, group, scale_dtype))
            assert (found <= plain).all()
            assert (found < plain).mean() > 0.9
            # The values are the nearest for the scale that is stored.
            values = np.rint(weight.numpy().reshape(60, -1, group) / scales.float().numpy()[..., None])
            assert np.array_equal(np.clip(values, -8, 7).reshape(60, 256), reference.unpack_nibbles(nibbles.numpy()))


def test_from_float_passes_the_options_on():
    linear = torch.nn.Linear(64, 24).bfloat16()
    for options in ({}, {"scale_dtype": torch.bfloat16}, {"clip_search": True}, *KINDS.values()):
        layer = W4A8Linear.from_float(linear, 32, **options)
        matrix = round_weight(linear.weight, 32, **options)
        want = w4a8.dyn_quant_pack_4bit_weight(
            matrix.nibbles, matrix.scales, linear.bias, 32, 64, 24, zero_points=matrix.zero_points, values=matrix.kind
        )
        assert_same_bits(layer.packed, want)
    packed = W4A8Linear.from_float(linear, scale_dtype=torch.bfloat16).packed
    assert w4a8.read_header(packed)["scale_dtype"] == "bfloat16"


def test_errors():
    weight = torch.randn(4, 64)
    for group in (0, -2, 48):
        with pytest.raises(ValueError, match=f"group_size is {group}, expected -1 or a divisor of in_features = 64"):
            round_weight(weight, group)
    with pytest.raises(ValueError, match=r"scale_dtype is torch.float16, expected torch.float32 or torch.bfloat16"):
        round_weight(weight, 32, torch.float16)
    with pytest.raises(ValueError, match="values is 'fp4', expected 'int4' or 'e2m1'"):
        round_weight(weight, 32, values="fp4")
    with pytest.raises(ValueError, match="symmetric is False, expected True for values = 'e2m1'"):
        round_weight(weight, 32, symmetric=False, values="e2m1")
    for bad in (float("nan"), float("inf")):
        weight[3, 63] = bad
        with pytest.raises(ValueError, match="the weight has a NaN or an infinite element"):
            round_weight(weight, 32)


@kinds
def test_meta(kind):
    linears = torch.nn.Linear(64, 24, device="meta"), torch.nn.Linear(64, 24)
    options = {"scale_dtype": torch.bfloat16, **KINDS[kind]}
    empty, full = (W4A8Linear.from_float(linear, 32, **options) for linear in linears)
    assert empty.packed.is_meta
    assert empty.packed.shape == full.packed.shape


# --- zero points and e2m1 -------------------------------------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # by code; the fourth bit is the sign


def levels(kind, zero):
    """The values that a group may take, ascending."""
    if kind == "e2m1":
        return np.concatenate([-E2M1[:0:-1], E2M1])
    return np.arange(16.0) - zero


def values_of(matrix):
    """float64 [N, K], by tests/python/reference.py."""
    zeros = None if matrix.zero_points is None else matrix.zero_points.numpy()
    integers = reference.integers(matrix.nibbles.numpy(), zeros, matrix.kind)
    return integers / 2 if matrix.kind == "e2m1" else integers.astype(np.float64)


def nearest_of_kind(weight, group, scale_dtype, kind):
    """Values float64 [N, K], scales float32 [N, G] and zero points int64 [N, G] (None), by NumPy and comparing."""
    n, k = weight.shape
    groups = weight.float().numpy().reshape(n, k // group, group)
    if kind == "zeros":
        low, high = np.minimum(groups.min(-1), F32(0)), np.maximum(groups.max(-1), F32(0))
        scales = high / F32(15) - low / F32(15)
    else:
        scales = np.abs(groups).max(-1) / F32(6)
    scales = from_numpy(scales).to(scale_dtype).float().numpy()
    if kind == "e2m1":  # halves of scales must be exact
        scales = (from_numpy(scales / F32(2)).to(scale_dtype) * 2).float().numpy()
    scales = np.where(scales == 0, F32(1), scales)
    u = groups / scales[..., None]
    if kind == "zeros":
        zeros = np.clip(np.rint(-low / scales), 0, 15)
        return (np.clip(np.rint(u) + zeros[..., None], 0, 15) - zeros[..., None]).reshape(n, k), scales, zeros
    distances = np.abs(np.abs(u.astype(np.float64))[..., None] - E2M1)
    nearest_two = distances == distances.min(-1, keepdims=True)
    even_first = np.where(np.arange(8) % 2 == 0, 2, 1) * nearest_two  # of two as near, the even code
    return (E2M1[even_first.argmax(-1)] * np.sign(u)).reshape(n, k), scales, None


@new_kinds
@pytest.mark.parametrize("scale_dtype", SCALE_TYPES, ids=str)
@pytest.mark.parametrize("group", [16, 32, 64, 192, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nearest_of_kind(dtype, group, scale_dtype, kind):
    """Bit for bit; with ties between two values, and groups that do not reach 0."""
    weight = awkward_weights(21, 192)
    if dtype == torch.float16:
        weight[4] = 1  # huge values are not float16
    weight[7] = 3 + torch.rand(192)
    weight[8] = -3 - torch.rand(192)
    weight[9] = torch.tensor([-6, -5, -3.5, -2.5, -1.75, -1.25, -0.75, -0.25, 0.25, 0.75, 1.75, 5]).repeat(16)
    weight[10] = torch.tensor([-7.5, 7.5, -6.5, 0.5, 1.5, 2.5]).repeat(32)
    weight = weight.to(dtype)
    matrix = round_weight(weight, group, scale_dtype, **KINDS[kind])
    values, scales, zeros = nearest_of_kind(weight, 192 if group == -1 else group, scale_dtype, kind)
    assert_same_bits(matrix.scales, from_numpy(scales).to(scale_dtype))
    assert np.array_equal(values_of(matrix), values)
    if kind == "zeros":
        assert np.array_equal(matrix.zero_points.numpy(), zeros)
        assert {0, 15} <= set(matrix.zero_points.unique().tolist())
    matrix.pack(scale_dtype)  # every scale is one that the operators take


def best_of(group, u_scales, level_sets):
    """The least error that values at these scales leave, each scale refined: one error for each of the level sets."""
    best = (group**2).sum()
    for scales, values in zip(u_scales, level_sets):
        middles = (values[1:] + values[:-1]) / 2
        q = values[np.searchsorted(middles, group / scales[:, None])]
        a, b = q @ group, (q * q).sum(1)
        best = min(best, ((group**2).sum() - np.divide(a * a, b, out=np.zeros_like(b), where=b > 0)).min())
    return best


def tried_of_kind(group, covering, kind):
    """The least error of the tries that docs/quantization.md states, without the second look at zero points."""
    if kind == "e2m1":
        return best_of(group, [covering * (1.6 - 0.05 * np.arange(21))], [levels(kind, None)])
    shares = 1.2 - 0.04 * np.arange(21)
    middle = (min(group.min(), 0) + max(group.max(), 0)) / 2
    zeros = np.clip(np.rint(7.5 - middle / covering / shares), 0, 15)
    return best_of(group, covering * shares[:, None], [levels(kind, zero) for zero in zeros])


def optimum_of_kind(group, kind):
    """The least error of any positive scale and any zero point: between two steps the values are constant."""
    scales, sets = [], []
    for zero in [None] if kind == "e2m1" else range(16):
        values = levels(kind, zero)
        steps = (group[:, None] / ((values[1:] + values[:-1]) / 2)).ravel()
        steps = np.append(np.sort(steps[steps > 0])[::-1], 0.0)
        if len(steps) > 1:
            scales.append((steps[1:] + steps[:-1]) / 2)
            sets.append(values)
    return best_of(group, scales, sets)


@new_kinds
@pytest.mark.parametrize("group", [16, 32, 96, -1])
def test_search_of_kind(group, kind):
    weight = awkward_weights(12, 192)
    weight[3] = torch.randn(192) + 2  # instead of denormals: one of them is not half of another
    weight[7] = torch.randn(192).exp()
    k = 192 if group == -1 else group
    matrix = round_weight(weight, group, clip_search=True, **KINDS[kind])
    found = errors(weight, values_of(matrix), matrix.scales.numpy())
    values, covering, _ = nearest_of_kind(weight, k, torch.float32, kind)
    plain = errors(weight, values, covering)
    assert (found <= plain).all()
    groups = weight.double().numpy().reshape(12, -1, k)
    for row, column in np.ndindex(*found.shape):
        parts = groups[row, column]
        allowed = 16 * reference.U * (parts**2).sum()  # as in test_search
        best = min(tried_of_kind(parts, np.float64(covering[row, column]), kind), plain[row, column])
        assert found[row, column] <= best + allowed
        assert found[row, column] >= optimum_of_kind(parts, kind) * (1 - 1e-9) - allowed
    assert found[7:].sum() < 0.95 * plain[7:].sum()


def test_search_looks_at_neighbouring_zero_points():
    """Long groups gain by it; without, the error is what the tries leave, or a little more."""
    weight = torch.randn(24, 1024)
    matrix = round_weight(weight, clip_search=True, symmetric=False)
    found = errors(weight, values_of(matrix), matrix.scales.numpy()).sum()
    _, covering, _ = nearest_of_kind(weight, 1024, torch.float32, "zeros")
    tried = sum(tried_of_kind(row.double().numpy(), np.float64(c[0]), "zeros") for row, c in zip(weight, covering))
    assert found < 0.997 * tried


@new_kinds
@pytest.mark.parametrize("scale_dtype", SCALE_TYPES, ids=str)
def test_search_of_kind_is_never_worse(scale_dtype, kind):
    for weight in (torch.randn(60, 256) ** 3, torch.randn(60, 256).exp() * 1e-3):
        for group in (32, 256):
            matrix = round_weight(weight, group, scale_dtype, clip_search=True, **KINDS[kind])
            found = errors(weight, values_of(matrix), matrix.scales.float().numpy())
            values, scales, _ = nearest_of_kind(weight, group, scale_dtype, kind)
            plain = errors(weight, values, scales)
            assert (found <= plain).all()
            assert (found < plain).mean() > 0.8


def test_which_kind_suits_what():
    """Zero points lower the error of normal weights, and of skewed ones more than twice; at one byte a group."""
    for weight, share in ((torch.randn(40, 512), 0.8), (torch.randn(40, 512).exp(), 0.3)):
        for group in (32, 128):
            lost = [
                errors(weight, values_of(matrix), matrix.scales.numpy()).sum()
                for matrix in (round_weight(weight, group, **KINDS[kind]) for kind in ("int4", "zeros"))
            ]
            assert lost[1] < share * lost[0]


@kinds
def test_experts_have_as_many_bytes_each(kind):
    """Also where the zero points of one expert are 8 everywhere."""
    w13, w2 = torch.randn(3, 8, 32), torch.randn(3, 32, 4)
    steps = torch.arange(-8.0, 8).repeat(2)
    w13[1], w2[1] = steps, torch.tensor([-8.0, 7, 0, 1])
    experts = W4A8Experts.from_float(w13, w2, **KINDS[kind])
    for index, weight in enumerate((w13, w2)):
        stack = (experts.w13_packed, experts.w2_packed)[index]
        for expert in range(3):
            matrix = round_weight(weight[expert], **KINDS[kind])
            if kind == "zeros" and expert == 1:
                assert (matrix.zero_points == 8).all()
            k = weight.shape[2]
            found = w4a8.dyn_quant_unpack_any_4bit_weight(stack[expert], k, k, weight.shape[1])
            assert_same_bits(found[0], matrix.nibbles)
            assert_same_bits(found[1], matrix.scales)
            if kind == "zeros":
                assert_same_bits(found[2], matrix.zero_points)
            assert found[4] == matrix.kind
    assert w4a8.read_header(experts.w13_packed[1])["has_zero_points"] == (kind == "zeros")
