"""select_experts and route: what they give the operator topk_routing, by the table of docs/vllm_mirror.md.

The operator itself is in test_topk_routing.py.
"""

import pytest
import torch
from common import assert_same_bits

import w4a8
from w4a8.core.routing import ROUTING_METHODS, RoutingMethodType, route, select_experts

# Scoring function and whether the weights are divided by their sum.
TABLE = {
    "Default": ("softmax", False),
    "Renormalize": ("softmax", True),
    "RenormalizeNaive": ("softmax", True),
    "TopK": ("identity", False),
    "Sigmoid": ("sigmoid", False),
    "SigmoidRenorm": ("sigmoid", True),
    "Llama4": ("sigmoid", False),
    "MiniMax2": ("sigmoid", True),
    "DeepSeekV3": ("sigmoid", True),
    "DeepseekV4": ("sqrtsoftplus", True),
}
METHODS = sorted(ROUTING_METHODS)


def check(method, logits, top_k, groups=None, keep=None, scale=None, bias=None):
    hidden = torch.zeros(len(logits), 4)
    weights, ids = route(method, hidden, logits, top_k, groups, keep, bias, scale)
    scoring, renormalize = TABLE[method.name]
    factor = 1.0 if scale is None else scale
    want = w4a8.topk_routing(logits.float(), top_k, renormalize, scoring, groups, keep, factor, bias)
    assert ids.dtype == torch.int32
    assert_same_bits(weights, want[0])
    assert_same_bits(ids, want[1])


def test_every_method_is_in_the_table():
    assert {method.name for method in METHODS} == set(TABLE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_methods(method, dtype):
    logits, bias = (3 * torch.randn(17, 64)).to(dtype), torch.rand(64) - 0.5
    for top_k in (1, 8, 64):
        check(method, logits, top_k)
        check(method, logits, top_k, bias=bias)
    check(method, logits, 4, scale=2.5)
    for groups, keep, top_k in ((8, 4, 8), (1, 1, 6), (64, 5, 5)):
        check(method, logits, top_k, groups, keep)
        check(method, logits, top_k, groups, keep, scale=2.5, bias=bias)


def test_zero_tokens():
    weights, ids = route(RoutingMethodType.Default, torch.zeros(0, 4), torch.zeros(0, 8), 2)
    assert weights.shape == ids.shape == (0, 2)


def test_custom_routing_function_is_given_everything():
    seen = {}

    def custom(hidden_states, gating_output, topk, renormalize):
        seen.update(hidden=hidden_states, logits=gating_output, topk=topk, renormalize=renormalize)
        return torch.ones(2, 1, dtype=torch.float64), torch.tensor([[3], [1]])

    hidden, logits = torch.zeros(2, 4), torch.zeros(2, 8)
    weights, ids = select_experts(hidden, logits, 1, False, True, custom_routing_function=custom)
    assert seen["hidden"] is hidden and seen["logits"] is logits and seen["topk"] == 1 and seen["renormalize"] is True
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32 and ids.tolist() == [[3], [1]]


def test_groups_only_where_they_are_asked_for():
    """DeepSeek-V2 is softmax in groups; without use_grouped_topk their numbers say nothing."""
    logits = torch.tensor([[5.0, 0.0, 4.0, 4.5, 1.0, 1.0, 3.0, 3.5]])
    for grouped, chosen in ((True, [0, 1]), (False, [0, 3])):
        _, ids = select_experts(torch.zeros(1, 4), logits, 2, grouped, False, topk_group=1, num_expert_group=4)
        assert ids.tolist() == [chosen]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "tanh"}, "Unsupported scoring function: tanh"),
        ({"top_k": 9}, r"top_k 9 is outside \[1, 8\], the number of experts"),
        ({"top_k": 0}, r"top_k 0 is outside \[1, 8\]"),
        ({"use_grouped_topk": True}, "grouped routing needs num_expert_group and topk_group"),
        ({"num_expert_group": 3, "topk_group": 1}, "8 experts cannot be divided into 3 groups"),
        ({"num_expert_group": 4, "topk_group": 5}, r"topk_group 5 is outside \[1, 4\]"),
        ({"num_expert_group": 4, "topk_group": 1, "top_k": 3}, "top_k 3 exceeds the 2 experts of 1 groups"),
    ],
)
def test_errors(changes, message):
    args = {"top_k": 2, "use_grouped_topk": "topk_group" in changes, "renormalize": True, **changes}
    with pytest.raises(ValueError, match=message):
        select_experts(torch.zeros(1, 4), torch.zeros(1, 8), **args)


@pytest.mark.parametrize("method", [RoutingMethodType.Unspecified, RoutingMethodType.Custom])
def test_methods_without_arithmetic_are_refused(method):
    with pytest.raises(ValueError, match="does not say how to select experts: select them outside the layer"):
        route(method, torch.zeros(1, 4), torch.zeros(1, 8), 2)
