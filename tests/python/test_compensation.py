"""Rounding that makes up for earlier errors, against the method of the paper, weight by weight in float64."""

import numpy as np
import pytest
import rounding_reference
import torch
from common import assert_same_bits

import w4a8
from w4a8.nn import QuantOptions, W4A8Linear
from w4a8.nn.compensation import CORRECTION, DAMPING, Inputs, _nearest_e2m1, round_compensated

KINDS = {"int4": {}, "zeros": {"symmetric": False}, "e2m1": {"values": "e2m1"}}


def inputs_of(k, rows=600, drift=False):
    """Correlated inputs float32 [rows, K], some of them larger, and sums over them."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, k // 3, generator=random) @ torch.randn(k // 3, k, generator=random)
    x = (x + torch.randn(rows, k, generator=random)) * torch.logspace(-1, 1, k)[torch.randperm(k, generator=random)]
    found = Inputs.none(k)
    exact = x + 0.1 * x.roll(1, 1) + 0.1 * torch.randn(rows, k, generator=random) if drift else None
    found.add(x, exact)
    return x, exact, found


def lost(own, scale, zero, kind, importance):
    """The squared error of weights [N, g] by importance, for scales [N, 1] and zero points [N, 1]."""
    rounded = rounding_reference.nearest((own / scale).astype(np.float32), zero[:, 0], kind) * scale
    return (importance * (own - rounded) ** 2).sum(1)


def literal(weight, group, kind, x, exact, matrix):
    """GPTQ as the paper states it (Frantar et al. 2022, equation 3): float64 [N, K] of the rounded weights.

    What is left of the inverse Hessian shrinks by a row and a column with each weight. Scales and zero points are those
    of the matrix, which must be as good as those that the reference finds, but for one group in twenty: a search in
    weights that differ by 1e-6 can end elsewhere.
    """
    x = x.double().numpy()
    hessian = x.T @ x
    counts = np.diag(hessian) / np.diag(hessian).mean()
    damped = hessian + DAMPING * np.diag(hessian).mean() * np.eye(len(hessian))
    inverse = np.linalg.inv(damped)
    weight = weight.double().numpy().copy()
    if exact is not None:
        weight += CORRECTION * weight @ ((exact.double().numpy() - x).T @ x) @ inverse
    rounded, as_good = np.empty_like(weight), []
    for k in range(weight.shape[1]):
        if k % group == 0:
            own, importance = (each[..., k : k + group].astype(np.float32) for each in (weight, counts))
            _, *found = rounding_reference.round_weights(own, group, kind, effort=2, importance=importance)
            scale = matrix.scales.float().numpy()[:, k // group, None]
            zero = matrix.zero_points.float().numpy()[:, k // group, None] if kind == "zeros" else np.zeros_like(scale)
            as_good += list(lost(own, scale, zero, kind, importance) <= 1.001 * lost(own, *found, kind, importance))
        steps = (weight[:, k : k + 1] / scale).astype(np.float32)
        rounded[:, k] = rounding_reference.nearest(steps, zero[:, 0], kind)[:, 0] * scale[:, 0].astype(np.float64)
        weight[:, k:] -= np.outer((weight[:, k] - rounded[:, k]) / inverse[0, 0], inverse[0])
        inverse = (inverse - np.outer(inverse[:, 0], inverse[0]) / inverse[0, 0])[1:, 1:]
    assert np.mean(as_good) >= 0.95
    return rounded


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "group"), [(8, 160, 32), (7, 144, 16), (5, 192, 96), (6, 320, 160), (9, 154, -1)])
@pytest.mark.parametrize("drift", [False, True], ids=["", "drift"])
def test_as_the_paper_has_it(kind, n, k, group, drift):
    """One block and several, groups that do not divide a block or are larger, odd and round sizes."""
    x, exact, inputs = inputs_of(k, drift=drift)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(1))
    matrix, rounded = round_compensated(weight, QuantOptions(group, **KINDS[kind]), inputs)
    expected = literal(weight, k if group == -1 else group, kind, x, exact, matrix)
    # The same codes: another one is half a scale away at least.
    assert np.abs(rounded.numpy() - expected).max() < 1e-6


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_uncorrelated_inputs_compensate_nothing(kind, scale_dtype):
    """Then it is the rounding by importance, to the bit."""
    options = QuantOptions(scale_dtype=scale_dtype, **KINDS[kind])
    weight, bias, importance = torch.randn(24, 256), torch.randn(24), torch.rand(256) + 0.01
    inputs = Inputs(torch.diag(importance.double()), torch.zeros(256, 256, dtype=torch.float64), 256)
    matrix, rounded = round_compensated(weight, options, inputs, bias)
    scaled = (importance.double() / importance.double().mean()).float()
    codes, scales, zeros = w4a8.round_weights(
        weight,
        32,
        values=options.values,
        zero_points=kind == "zeros",
        scale_dtype=options.scale_dtype,
        importance=scaled,
    )
    assert_same_bits(matrix.codes, codes)
    assert_same_bits(matrix.scales, scales)
    assert kind != "zeros" or torch.equal(matrix.zero_points, zeros)
    assert matrix.bias is bias
    # The floats are those that the packed layer multiplies with: the identity has no other products.
    layer = W4A8Linear.from_matrix(matrix, options.scale_dtype)
    assert torch.allclose(layer(torch.eye(256)).T - bias[:, None], rounded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [16, 32, 128, -1])
def test_products_change_less(kind, group):
    """On other inputs of the same distribution, which have not been seen."""
    x, _, _ = inputs_of(256, rows=2000)
    weight = torch.randn(40, 256)
    inputs = Inputs.none(256)
    inputs.add(x[:1000])
    options = QuantOptions(group, **KINDS[kind])
    alone = Inputs(inputs.gram.diagonal().diag(), inputs.drift, 1000)
    lost = [
        float((x[1000:] @ (round_compensated(weight, options, each)[1] - weight).T).square().mean())
        for each in (inputs, alone)
    ]
    assert lost[0] < 0.6 * lost[1]


def test_products_are_those_of_the_float_inputs():
    """Where inputs differ from the float model's, weights go half of the way."""
    x, exact, inputs = inputs_of(128, rows=2000, drift=True)
    weight = torch.randn(64, 128)
    wanted = exact @ weight.T
    _, rounded = round_compensated(weight, QuantOptions(), inputs)
    _, plain = round_compensated(weight, QuantOptions(), Inputs(inputs.gram, torch.zeros_like(inputs.drift), 2000))
    lost = [float((x @ each.T - wanted).square().mean()) for each in (rounded, plain)]
    assert lost[0] < 0.8 * lost[1]


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_are_always_0(kind):
    """They count as the mean of the others, and make up for nothing; where all are, all count alike."""
    x, _, _ = inputs_of(128)
    x[:, 32:64] = 0
    inputs = Inputs.none(128)
    inputs.add(x)
    options, weight = QuantOptions(**KINDS[kind]), torch.randn(16, 128)
    matrix, _ = round_compensated(weight, options, inputs)
    arguments = {"values": options.values, "zero_points": kind == "zeros"}
    codes, scales, _ = w4a8.round_weights(weight, 32, **arguments, importance=torch.ones(128))
    assert_same_bits(matrix.codes[:, 16:32], codes[:, 16:32])
    assert torch.allclose(matrix.scales[:, 1], scales[:, 1], rtol=1e-6, atol=0)
    assert not torch.equal(matrix.codes, codes)
    silent = Inputs.none(128)
    silent.add(torch.zeros(128, 128))
    assert_same_bits(round_compensated(weight, options, silent)[0].codes, codes)


def test_halfway_between_numbers_of_e2m1():
    """The number with the even code, as everywhere else; and beside it the nearest."""
    numbers = rounding_reference.E2M1.astype(np.float32)
    middles = torch.from_numpy((numbers[1:] + numbers[:-1]) / 2)
    infinity = torch.tensor(float("inf"))
    x = torch.cat([middles, middles.nextafter(infinity), middles.nextafter(-infinity), torch.tensor([0.0, 7.0, 1e9])])
    x = torch.cat([x, -x])
    expected = rounding_reference.nearest_e2m1(x.numpy()[None])[0]
    assert np.array_equal(_nearest_e2m1(x).numpy(), expected)


def test_few_inputs():
    """The missing ones are uncorrelated, or like those of a mean."""
    x, exact, inputs = inputs_of(48, rows=16, drift=True)
    filled = inputs.filled()
    gram = x.double().T @ x.double()
    assert torch.allclose(filled.gram, gram + 2 * gram.diagonal().diag(), rtol=1e-5, atol=1e-3)
    assert filled.rows == 48 and torch.equal(filled.drift, inputs.drift)
    mean = Inputs.none(48)
    mean.add(2 * x, 2 * exact)
    filled = inputs.filled(mean)
    assert torch.allclose(filled.gram, gram * (1 + 2 * 4), rtol=1e-5, atol=1e-3)
    assert torch.allclose(filled.drift, inputs.drift * (1 + 2 * 4), rtol=1e-5, atol=1e-3)
    assert mean.filled(inputs).rows == 48 and filled.filled() is filled


def test_twice_is_the_same():
    _, _, inputs = inputs_of(192, drift=True)
    weight = torch.randn(32, 192)
    once, twice = (round_compensated(weight, QuantOptions(), inputs)[0] for _ in range(2))
    assert_same_bits(once.codes, twice.codes)
    assert_same_bits(once.scales, twice.scales)


def test_errors():
    _, _, inputs = inputs_of(96)
    weight = torch.randn(8, 96)
    with pytest.raises(ValueError, match=r"group .block_size. is 64, expected k = 96 .channelwise."):
        round_compensated(weight, QuantOptions(64), inputs)
    broken = weight.clone()
    broken[3, 5] = float("inf")
    with pytest.raises(ValueError, match="the weight has a NaN or an infinite element"):
        round_compensated(broken, QuantOptions(), inputs)
    with pytest.raises(ValueError, match="the bias has a NaN or an infinite element"):
        round_compensated(weight, QuantOptions(), inputs, broken[3])
    for value in ("nan", "inf"):
        inputs = Inputs.none(96)
        inputs.add(torch.full((2, 96), float(value)))
        with pytest.raises(ValueError, match="calibration: its inputs have a NaN or an infinite element"):
            round_compensated(weight, QuantOptions(), inputs)
