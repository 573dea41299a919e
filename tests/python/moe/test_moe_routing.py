"""select_experts and route against a float64 reference that goes token by token."""

import moe_reference
import pytest
import torch

from w4a8.core.routing import ROUTING_METHODS
from w4a8.moe import RoutingMethodType, route, select_experts

U = 2.0**-24
METHODS = sorted(ROUTING_METHODS)


def weight_bound(weights, logits, top_k):
    """How far float32 weights may be from the float64 ones.

    exp, sigmoid and log1p are granted 4 ulp; their argument is exact, or a difference of logits rounded once (its size,
    at most the range of the logits, is the condition). A softmax sums E terms, renormalizing k; then divide and scale.
    """
    spread = float(logits.max() - logits.min()) + float(logits.abs().max())
    return (8 + 2 * spread + logits.shape[1] + top_k + 4) * U * weights.abs()


# Scores are below 8 and their sums below 16: scores this far apart are in the same order in float32.
DECISIVE = 8 * 16 * U


def check(method, logits, top_k, **options):
    """Same experts in the same order, and weights within the bound."""
    weights, ids = route(
        method,
        torch.zeros(len(logits), 4),
        logits,
        top_k,
        num_expert_group=options.get("groups"),
        topk_group=options.get("keep"),
        e_score_correction_bias=options.get("bias"),
        routed_scaling_factor=options.get("scale"),
    )
    expected, expected_ids, gap = moe_reference.route(method.name, logits.float(), top_k, **options)
    assert gap > DECISIVE, "the test's logits are ambiguous: choose others"
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert torch.equal(ids.long(), expected_ids)
    excess = (weights.double() - expected).abs() - weight_bound(expected, logits.float(), top_k)
    assert excess.max() <= 0


def check_biased(method, top_k, tokens=17, experts=32, **options):
    """`check` with tied logits and a random bias; drawn again while two scores are too close for float32."""
    for _ in range(100):
        logits, bias = tied_logits(tokens, experts), torch.rand(experts) - 0.5
        if moe_reference.route(method.name, logits, top_k, bias=bias, **options)[2] > DECISIVE:
            check(method, logits, top_k, bias=bias, **options)
            return
    raise AssertionError("no unambiguous scores in 100 draws")


def distinct_logits(tokens, experts):
    """Rows without ties: a permutation of a grid of steps of 1/16 each."""
    grid = (torch.arange(experts) - experts / 2) / 16
    return torch.stack([grid[torch.randperm(experts)] for _ in range(tokens)])


def tied_logits(tokens, experts):
    """Rows of few values, so that most decisions are ties."""
    return torch.randint(-4, 4, (tokens, experts)) / 2


@pytest.mark.parametrize("make", [distinct_logits, tied_logits])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_matches_reference(method, dtype, make):
    logits = make(17, 64).to(dtype)
    for top_k in (1, 2, 8, 64):
        check(method, logits, top_k)


@pytest.mark.parametrize("make", [distinct_logits, tied_logits])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_groups_match_reference(method, make):
    logits = make(17, 64)
    for groups, keep, top_k in ((8, 4, 8), (8, 1, 8), (2, 1, 3), (1, 1, 6), (64, 5, 5)):
        check(method, logits, top_k, groups=groups, keep=keep)


BIASED = [
    m for m in METHODS if m.name in ("DeepSeekV3", "DeepseekV4", "MiniMax2", "Sigmoid", "SigmoidRenorm", "Default")
]


@pytest.mark.parametrize("method", BIASED, ids=lambda m: m.name)
def test_correction_bias_selects_but_does_not_weigh(method):
    check_biased(method, 4)
    check_biased(method, 4, scale=2.5)


@pytest.mark.parametrize("method", BIASED, ids=lambda m: m.name)
def test_groups_with_bias_rate_a_group_by_its_two_best(method):
    check_biased(method, 4, groups=8, keep=3, scale=2.5)


def test_groups_with_equal_bias_tie():
    """Ties between whole groups: the lower group wins, then the lower expert."""
    logits = torch.zeros(1, 16)
    _, ids = route(
        RoutingMethodType.DeepSeekV3,
        torch.zeros(1, 4),
        logits,
        4,
        num_expert_group=4,
        topk_group=2,
        e_score_correction_bias=torch.zeros(16),
    )
    assert ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_scaling_factor(method):
    logits = distinct_logits(5, 16)
    check(method, logits, 4, scale=2.5)


def test_lower_index_wins_ties():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, -0.0, 0.0]])
    _, ids = route(RoutingMethodType.TopK, torch.zeros(1, 4), logits, 7)
    assert ids.tolist() == [[1, 2, 4, 3, 0, 5, 6]]
    for method in METHODS:
        _, ids = route(method, torch.zeros(1, 4), logits, 3)
        assert ids.tolist() == [[1, 2, 4]]


def test_logits_apart_stay_apart_where_their_scores_are_equal():
    """In float32 the sigmoid of both is 1: the score cannot tell them apart, the logit does."""
    logits = torch.tensor([[20.0, 30.0, 0.0]])
    assert torch.sigmoid(logits)[0, 0] == torch.sigmoid(logits)[0, 1]
    _, ids = route(RoutingMethodType.Sigmoid, torch.zeros(1, 4), logits, 1)
    assert ids.tolist() == [[1]]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_extreme_finite_logits_give_finite_weights(method):
    logits = torch.tensor([[-1000.0, -1000.0, -1000.0, -1000.0], [1000.0, 900.0, -1000.0, 0.0]])
    weights, ids = route(method, torch.zeros(2, 4), logits, 2)
    assert torch.isfinite(weights).all()
    assert ids.tolist() == [[0, 1], [0, 1]]


def test_nan_logits_choose_experts_that_exist():
    logits = torch.full((1, 8), float("nan"))
    weights, ids = route(RoutingMethodType.Renormalize, torch.zeros(1, 4), logits, 3)
    assert ids.tolist() == [[0, 1, 2]]
    assert torch.isnan(weights).all()


def test_zero_tokens():
    weights, ids = route(RoutingMethodType.Default, torch.zeros(0, 4), torch.zeros(0, 8), 2)
    assert weights.shape == ids.shape == (0, 2)


def test_each_token_alone_and_in_a_batch():
    logits = torch.randn(33, 48)
    for method in METHODS:
        weights, ids = route(method, torch.zeros(33, 4), logits, 5)
        for token in (0, 17, 32):
            alone_weights, alone_ids = route(method, torch.zeros(1, 4), logits[token : token + 1], 5)
            assert torch.equal(alone_ids[0], ids[token])
            bound = weight_bound(weights[token].double(), logits, 5)
            assert ((alone_weights[0] - weights[token]).abs().double() <= 2 * bound).all()


def test_custom_routing_function_is_given_everything():
    seen = {}

    def custom(hidden_states, gating_output, topk, renormalize):
        seen.update(hidden=hidden_states, logits=gating_output, topk=topk, renormalize=renormalize)
        return torch.ones(2, 1, dtype=torch.float64), torch.tensor([[3], [1]])

    hidden, logits = torch.zeros(2, 4), torch.zeros(2, 8)
    weights, ids = select_experts(hidden, logits, 1, False, True, custom_routing_function=custom)
    assert seen["hidden"] is hidden and seen["logits"] is logits and seen["topk"] == 1 and seen["renormalize"] is True
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32 and ids.tolist() == [[3], [1]]


def test_deepseek_v2_is_softmax_in_groups():
    """use_grouped_topk with softmax: the best of a group rates it, and weights are those of the whole softmax."""
    logits = torch.tensor([[5.0, 0.0, 4.0, 4.5, 1.0, 1.0, 3.0, 3.5]])
    weights, ids = select_experts(
        torch.zeros(1, 4), logits, 3, use_grouped_topk=True, renormalize=False, topk_group=2, num_expert_group=4
    )
    assert ids.tolist() == [[0, 3, 2]]  # groups {0, 1} and {2, 3}
    expected = torch.softmax(logits.double(), -1)[0, [0, 3, 2]]
    assert ((weights[0].double() - expected).abs() <= weight_bound(expected, logits, 3)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "tanh"}, "Unsupported scoring function: tanh"),
        ({"top_k": 9}, r"top_k 9 is outside \[1, 8\], the number of experts"),
        ({"top_k": 0}, r"top_k 0 is outside \[1, 8\]"),
        ({"use_grouped_topk": True}, "grouped routing needs num_expert_group and topk_group"),
        (
            {"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 1},
            "8 experts cannot be divided into 3 groups",
        ),
        (
            {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 5},
            r"topk_group 5 is outside \[1, 4\]",
        ),
        (
            {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 1, "top_k": 3},
            "top_k 3 exceeds the 2 experts of 1 groups",
        ),
    ],
)
def test_errors(changes, message):
    args = {"top_k": 2, "use_grouped_topk": False, "renormalize": True, **changes}
    with pytest.raises(ValueError, match=message):
        select_experts(torch.zeros(1, 4), torch.zeros(1, 8), **args)


@pytest.mark.parametrize("method", [RoutingMethodType.Unspecified, RoutingMethodType.Custom])
def test_methods_without_arithmetic_are_refused(method):
    with pytest.raises(ValueError, match="does not say how to select experts: select them outside the layer"):
        route(method, torch.zeros(1, 4), torch.zeros(1, 8), 2)
