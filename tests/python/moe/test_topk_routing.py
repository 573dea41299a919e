"""The operator topk_routing: experts as PyTorch's stable sort gives them, weights within derived ulps of float64.

Hostile logits and biases: cpp/routing_test.cpp, fuzz_routing and test_fuzz_ops.py.
"""

import itertools

import pytest
import routing_torch
import torch
from common import DTYPES, assert_same_bits

import w4a8

U = 2.0**-24
DENORMAL = 2.0**-149
EXPERTS = [1, 5, 60, 64, 128, 256, 384]
SCORING = list(routing_torch.SCORES)


def top_ks(experts):
    return sorted({1, min(2, experts), min(8, experts), min(33, experts), experts})


def bound(weights, scoring, renormalize, scale=1.0):
    """Docs/numerics.md section 7: every score is computed in double and rounded where it says so.

    softmax and sqrtsoftplus round once; sigmoid rounds exp, the sum and the quotient. Renormalizing: the errors of the
    score and of the sum, the sum's rounding, the quotient. The factor: itself and the product. exp's own 2e-11 and
    products of errors are in the last hundredth.
    """
    score = {"softmax": 1, "sigmoid": 3, "sqrtsoftplus": 1, "identity": 0}[scoring]
    roundings = 2 * score + 2 if renormalize and scoring != "softmax" else score
    roundings += 2 if scale != 1 else 0
    return 1.01 * roundings * U * weights.abs() + 2 * max(1.0, abs(scale)) * DENORMAL


def check_weights(weights, ids, logits, scoring, renormalize, scale=1.0):
    expected = routing_torch.weigh(logits, ids.long(), scoring, renormalize, scale)
    error = (weights.double() - expected).abs()
    error = torch.where(torch.isinf(expected) & (weights.double() == expected), torch.zeros_like(error), error)
    same_nan = torch.isnan(weights) & torch.isnan(expected)
    assert (same_nan | (error <= bound(expected, scoring, renormalize, scale))).all()


def check(logits, top_k, renormalize, scoring, groups=None, keep=None, scale=1.0):
    """Without a bias: the same experts in the same order for every bit of a logit."""
    weights, ids = w4a8.topk_routing(logits, top_k, renormalize, scoring, groups, keep, scale)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert ids.tolist() == routing_torch.select(logits, top_k, scoring, groups, keep).tolist()
    check_weights(weights, ids, logits, scoring, renormalize, scale)


def tied(tokens, experts):
    return torch.randint(-4, 4, (tokens, experts)) / 2


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("scoring", SCORING)
def test_random_logits(scoring, experts):
    for top_k, renormalize in itertools.product(top_ks(experts), (False, True)):
        if scoring == "identity" and renormalize:
            continue  # signs cancel: no bound on a quotient by the sum
        for dtype in DTYPES:
            check((3 * torch.randn(9, experts)).to(dtype), top_k, renormalize, scoring)
            check(tied(9, experts).to(dtype), top_k, renormalize, scoring, scale=2.5)


@pytest.mark.parametrize("experts", [1, 5, 16, 64])
def test_sparsemixer(experts):
    """Of Phi-3.5-MoE: each weight is of a softmax over the experts that are left, whose logits are near the best one's."""
    for top_k, dtype in itertools.product(top_ks(experts), DTYPES):
        near = (torch.randint(0, 2, (9, 1)) * 4 - 2) * (1 + 0.03 * torch.randn(9, experts))
        for logits in (near.to(dtype), tied(9, experts).to(dtype), torch.randn(9, experts).to(dtype)):
            weights, ids = w4a8.topk_routing(logits, top_k, False, "sparsemixer", routed_scaling_factor=2.0)
            assert ids.tolist() == routing_torch.select(logits, top_k, "identity").tolist()
            left, x = logits.double(), logits.float()
            for j in range(top_k):
                chosen = ids[:, j : j + 1].long()
                best = x.gather(1, chosen)
                far = (best - x) / torch.maximum(x.abs(), best) > 0.02
                expected = left.masked_fill(far, -torch.inf).softmax(1).gather(1, chosen)[:, 0]
                assert ((weights[:, j] / 2 - expected).abs() <= 1.01 * U * expected).all()
                left = left.scatter(1, chosen, -torch.inf)


def test_identity_renormalized():
    check(torch.rand(9, 60), 7, True, "identity", scale=2.827)


@pytest.mark.parametrize(("experts", "groups", "keep"), [(5, 5, 2), (60, 3, 1), (64, 8, 4), (256, 8, 4), (384, 1, 1)])
@pytest.mark.parametrize("scoring", SCORING[:3])
def test_groups(scoring, experts, groups, keep):
    for top_k in top_ks(experts // groups * keep):
        check(torch.randn(9, experts), top_k, False, scoring, groups, keep)
        check(tied(9, experts), top_k, True, scoring, groups, keep)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scoring", SCORING[:3])
def test_bias(scoring, bias_dtype):
    """Selected by score + bias, each within its roundings; equal ones with the lower index first."""
    for experts, top_k in ((5, 5), (60, 4), (256, 8)):
        logits, bias = tied(30, experts), (torch.randint(-3, 3, (experts,)) / 8).to(bias_dtype)
        weights, ids = w4a8.topk_routing(logits, top_k, True, scoring, e_score_correction_bias=bias)
        check_weights(weights, ids, logits, scoring, True)
        scores = routing_torch.SCORES[scoring](logits.double())
        ranked = scores + bias.double()
        error = 1.01 * (3 * U * scores.abs() + U * ranked.abs())
        for token, chosen in enumerate(ids.tolist()):
            assert len(set(chosen)) == top_k
            rest = [e for e in range(experts) if e not in chosen]
            for before, after in [*itertools.combinations(chosen, 2), *itertools.product(chosen[-1:], rest)]:
                gap = ranked[token, before] - ranked[token, after]
                assert gap >= -(error[token, before] + error[token, after])
                same = logits[token, before] == logits[token, after] and bias[before] == bias[after]
                assert not same or before < after


def test_a_sum_that_underflows_gives_zeros():
    weights, ids = w4a8.topk_routing(torch.full((1, 4), -200.0), 2, True, "sigmoid")
    assert (weights.tolist(), ids.tolist()) == ([[0.0, 0.0]], [[0, 1]])


@pytest.mark.parametrize("options", [("softmax",), ("sigmoid", 4, 2, 2.5)], ids=["plain", "groups"])
def test_bits_depend_on_nothing_but_the_token(options):
    """Not on the batch, the threads or the strides; and bfloat16 is its float32."""
    logits = torch.randn(300, 64).to(torch.bfloat16)
    bias = torch.rand(64) if len(options) > 1 else None
    arguments = (6, options[0] == "sigmoid", *options)
    call = lambda x: w4a8.topk_routing(x, *arguments, e_score_correction_bias=bias)  # noqa: E731
    expected = call(logits)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            for x in (logits.float(), logits.t().contiguous().t(), logits.repeat(1, 2)[:, :64]):
                for got, want in zip(call(x), expected):
                    assert_same_bits(got, want)
    finally:
        torch.set_num_threads(threads)
    for token in (0, 150, 299):
        for got, want in zip(call(logits[token : token + 1]), expected):
            assert_same_bits(got, want[token : token + 1])


def test_no_tokens():
    weights, ids = w4a8.topk_routing(torch.zeros(0, 8), 2, True)
    assert weights.shape == ids.shape == (0, 2)


ERRORS = {
    "router_logits float64": ({"router_logits": torch.zeros(2, 8).double()}, "router_logits has dtype (Double|double), expected float32, bfloat16 or float16"),
    "router_logits 1-D": ({"router_logits": torch.zeros(8)}, r"router_logits has 1 dimensions, expected \[T, E\]"),
    "router_logits without experts": ({"router_logits": torch.zeros(2, 0)}, "router_logits has 0 experts, expected 1..2147483647"),
    "top_k 0": ({"top_k": 0}, "top_k is 0, expected 1..8, the number of experts of router_logits"),
    "top_k 9": ({"top_k": 9}, "top_k is 9, expected 1..8"),
    "scoring_func": ({"scoring_func": "tanh"}, "scoring_func is 'tanh', expected 'softmax', 'sigmoid', 'sqrtsoftplus', 'sparsemixer' or 'identity'"),
    "sparsemixer renormalized": ({"scoring_func": "sparsemixer"}, "renormalize, e_score_correction_bias or num_expert_group is given, expected none with 'sparsemixer'"),
    "sparsemixer with a bias": ({"scoring_func": "sparsemixer", "renormalize": False, "e_score_correction_bias": torch.zeros(8)}, "renormalize, e_score_correction_bias or"),
    "groups alone": ({"num_expert_group": 2}, "topk_group is not given, expected it with num_expert_group"),
    "topk_group alone": ({"topk_group": 1}, "num_expert_group is not given, expected it with topk_group"),
    "groups 0": ({"num_expert_group": 0, "topk_group": 1}, "num_expert_group is 0, expected a divisor of the number of experts, 8"),
    "groups 3": ({"num_expert_group": 3, "topk_group": 1}, "num_expert_group is 3, expected a divisor"),
    "topk_group 0": ({"num_expert_group": 2, "topk_group": 0}, "topk_group is 0, expected 1..2, num_expert_group"),
    "topk_group 3": ({"num_expert_group": 2, "topk_group": 3}, "topk_group is 3, expected 1..2"),
    "too few in the groups": ({"top_k": 5, "num_expert_group": 2, "topk_group": 1}, "top_k is 5, expected at most 4, the experts of 1 groups"),
    "bias integer": ({"e_score_correction_bias": torch.zeros(8, dtype=torch.int32)}, "e_score_correction_bias has dtype (Int|int), expected a floating point type"),
    "bias 2-D": ({"e_score_correction_bias": torch.zeros(1, 8)}, r"e_score_correction_bias has 2 dimensions, expected \[E\]"),
    "bias of 7": ({"e_score_correction_bias": torch.zeros(7)}, "e_score_correction_bias has 7 elements, expected 8, the number of experts"),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name, device):
    changes, message = ERRORS[name]
    arguments = {"router_logits": torch.zeros(2, 8), "top_k": 2, "renormalize": True, **changes}
    arguments = {n: a.to(device) if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    with pytest.raises(RuntimeError, match="w4a8::topk_routing: " + message):
        w4a8.topk_routing(**arguments)
