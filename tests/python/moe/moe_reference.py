"""Routing in float64, one token at a time."""

import math
from itertools import pairwise

import torch

U = 2.0**-24


def assert_close(actual, expected, bound):
    """Every element within its bound, the worst one named."""
    excess = (actual.double() - expected).abs() - bound
    assert not torch.isnan(excess).any()
    worst = int(excess.argmax())
    assert excess.max() <= 0, (
        f"{int((excess > 0).sum())} of {excess.numel()} out of tolerance; worst at {divmod(worst, excess.shape[-1])}: "
        f"{actual.flatten()[worst].item()!r}, expected {expected.flatten()[worst].item()!r} "
        f"+- {bound.flatten()[worst].item()!r}"
    )


def route(method, logits, top_k, groups=None, keep=None, bias=None, scale=1.0):
    """One token at a time, by the table of routing methods; ties to the lower index.

    Args:
        method: name of a RoutingMethodType.
        logits: [T, E].
        top_k, groups, keep, bias, scale: as of the layer.

    Returns:
        weights float64 [T, k], ids [T, k], and the smallest difference of two scores that are not equal.
    """
    score = {
        "Default": lambda v: torch.softmax(v, 0),
        "Renormalize": lambda v: torch.softmax(v, 0),
        "RenormalizeNaive": lambda v: torch.softmax(v, 0),
        "TopK": lambda v: v,
        "DeepseekV4": lambda v: torch.log1p(torch.exp(v)).sqrt(),
    }.get(method, lambda v: 1 / (1 + torch.exp(-v)))
    renormalize = method in (
        "Renormalize",
        "RenormalizeNaive",
        "DeepSeekV3",
        "SigmoidRenorm",
        "MiniMax2",
        "DeepseekV4",
    )
    all_weights, all_ids, gap = [], [], math.inf
    for row in logits.double():
        scores = score(row)
        ranked = (scores if bias is None else scores + bias.double()).tolist()
        experts = range(len(ranked))
        distinct = sorted(set(ranked))
        gap = min([gap] + [b - a for a, b in pairwise(distinct)])
        if groups is not None:
            size = len(ranked) // groups
            value = []
            for group in range(groups):
                best = sorted(ranked[group * size : (group + 1) * size], reverse=True)
                value.append(best[0] if bias is None else sum(best[:2]))
            distinct = sorted(set(value))
            gap = min([gap] + [b - a for a, b in pairwise(distinct)])
            kept = sorted(range(groups), key=lambda group: (-value[group], group))[:keep]
            experts = [expert for expert in experts if expert // size in kept]
        chosen = sorted(experts, key=lambda expert: (-ranked[expert], expert))[:top_k]
        weights = scores[chosen]
        if renormalize:
            weights = weights / weights.sum()
        all_weights.append(weights * scale)
        all_ids.append(chosen)
    return torch.stack(all_weights), torch.tensor(all_ids), gap
