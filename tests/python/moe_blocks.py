"""Modules with the class names and attributes of transformers' mixture-of-experts blocks, for tests without it."""

import torch
from torch import nn

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class MLP(nn.Module):
    def __init__(self, hidden, intermediate, names=PROJECTIONS, bias=False, act=None):
        super().__init__()
        for name, shape in zip(names, ((hidden, intermediate), (hidden, intermediate), (intermediate, hidden))):
            setattr(self, name, nn.Linear(*shape, bias=bias))
        self.act_fn = act if act is not None else nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _default_apply_gate(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return self.act_fn(gate) * up


class MixtralExperts(nn.Module):
    """As in transformers 5, with what the decorator ``use_experts_implementation`` puts there."""

    has_gate, is_concatenated = True, True
    is_transposed, has_bias, has_post_expert_norm = False, False, False
    _apply_gate = _default_apply_gate

    def __init__(self, experts=6, hidden=64, intermediate=32):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * intermediate, hidden) / hidden**0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, intermediate) / intermediate**0.5)
        self.act_fn = nn.SiLU()


class FusedBlock(nn.Module):
    """Around them a router of its own kind, to see that it is not touched."""

    def __init__(self, **sizes):
        super().__init__()
        self.experts = MixtralExperts(**sizes)
        experts, _, hidden = self.experts.gate_up_proj.shape
        self.gate = nn.Linear(hidden, experts, bias=False)

    def route(self, tokens):
        return self.gate(tokens).sigmoid().topk(2, -1)

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        return self.experts(tokens, ids, weights).view(x.shape)


class MixtralSparseMoeBlock(nn.Module):
    """As in transformers 4."""

    def __init__(self, experts=6, hidden=64, intermediate=32, **kwargs):
        super().__init__()
        self.top_k = 2
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList([MLP(hidden, intermediate, **kwargs) for _ in range(experts)])

    def forward(self, x):
        return "the loop over experts"


class Qwen2MoeSparseMoeBlock(MixtralSparseMoeBlock):
    """As in transformers 4."""

    def __init__(self, norm_topk_prob=False, **kwargs):
        super().__init__(**kwargs)
        self.norm_topk_prob = norm_topk_prob
        hidden = self.gate.in_features
        self.shared_expert = MLP(hidden, 96)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)


class DeepseekV3MoE(nn.Module):
    """As in transformers 4: the loop over experts is a method of its own."""

    def __init__(self, experts=6, hidden=64, intermediate=32):
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList([MLP(hidden, intermediate) for _ in range(experts)])
        self.shared_experts = MLP(hidden, 96)

    def route(self, tokens):
        return self.gate(tokens).sigmoid().topk(2, -1)

    def moe(self, hidden_states, topk_indices, topk_weights):
        return "the loop over experts"

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        weights, ids = self.route(tokens)
        return self.moe(tokens, ids, weights).view(x.shape) + self.shared_experts(x)


def expert_weights(experts):
    """[(w13 [2I, H], w13 bias or None, w2 [H, I], w2 bias or None)] of either form of experts."""
    if hasattr(experts, "gate_up_proj_bias"):  # transposed; gpt-oss: gate and up in turns
        turns = type(experts).__name__ == "GptOssExperts"
        halves = [(0, 2), (1, 2)] if turns else [(0, 1)]
        w13 = [torch.cat([w.T[begin::step] for begin, step in halves]) for w in experts.gate_up_proj]
        b13 = [torch.cat([b[begin::step] for begin, step in halves]) for b in experts.gate_up_proj_bias]
        return list(zip(w13, b13, [w.T for w in experts.down_proj], experts.down_proj_bias))
    if type(experts).__name__ == "Llama4TextExperts":  # transposed
        return [(w13.T, None, w2.T, None) for w13, w2 in zip(experts.gate_up_proj, experts.down_proj)]
    if not getattr(experts, "has_gate", True):
        return [(w13, None, w2, None) for w13, w2 in zip(experts.up_proj, experts.down_proj)]
    if hasattr(experts, "gate_up_proj"):
        return [(w13, None, w2, None) for w13, w2 in zip(experts.gate_up_proj, experts.down_proj)]
    found = []
    for expert in experts:
        names = PROJECTIONS if hasattr(expert, PROJECTIONS[0]) else ("w1", "w3", "w2")
        gate, up, down = (getattr(expert, name) for name in names)
        bias = None if gate.bias is None else torch.cat((gate.bias, up.bias))
        found.append((torch.cat((gate.weight, up.weight)), bias, down.weight, down.bias))
    return found
