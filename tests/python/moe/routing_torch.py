"""Routing in PyTorch's operators: how experts are selected, whatever the logits are."""

import torch

SCORES = {
    "softmax": lambda logits: torch.softmax(logits, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
    "identity": lambda logits: logits,
}


def stable_topk(ranked, k):
    """The k largest of each row, descending, the lower index first among equals; a NaN is the largest."""
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :k]


def in_best_groups(ranked, groups, keep, sum_two):
    """Bool [T, E]: experts of the best groups."""
    grouped = ranked.view(len(ranked), groups, -1)
    best = grouped.topk(min(2, grouped.shape[-1]) if sum_two else 1, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, stable_topk(best, keep), True)
    return kept.unsqueeze(-1).expand_as(grouped).flatten(1)


def select(logits, k, scoring, groups=None, keep=None, bias=None):
    """Expert ids [T, k] by float32 scores (by logits without a bias)."""
    logits = logits.float()
    ranked = logits if bias is None else SCORES[scoring](logits) + bias.float()
    order = stable_topk(ranked, ranked.shape[1])
    if groups is not None:  # all others come behind, whatever the logits of the kept ones are
        kept = in_best_groups(ranked, groups, keep, bias is not None).gather(1, order)
        order = order.gather(1, stable_topk(kept.byte(), ranked.shape[1]))
    return order[:, :k]


def weigh(logits, ids, scoring, renormalize, scale=1.0):
    """The weights of chosen experts in float64 [T, k]; scores that float32 cannot hold are 0 before renormalizing."""
    logits = logits.double()
    if scoring == "softmax" and renormalize:
        return torch.softmax(logits.gather(1, ids), dim=-1) * scale
    weights = SCORES[scoring](logits).gather(1, ids)
    if renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / torch.where(total == 0, torch.ones_like(total), total)
    return weights * scale
