"""w4a8.quantize_ on experts that hold all weights in two stacks: which are replaced, and why others are not.

They are told by what transformers' interface of experts says of them, not by name (stand-ins: moe_blocks.py).
"""

import moe_blocks
import pytest
import torch
from common import TORCH_VERSION, assert_same_bits, assert_within
from test_quantize_experts import expected_experts
from torch import nn

import w4a8
from w4a8.nn import W4A8Experts
from w4a8.quantization.moe_blocks import fused_experts


def other_experts(**attributes):
    """MixtralExperts of another kind, whose name says nothing of it."""
    return type("MixtralExperts", (moe_blocks.MixtralExperts,), attributes)()


def with_norm():
    experts = other_experts(has_post_expert_norm=True)
    experts.post_expert_norm = nn.LayerNorm(64)
    return experts


def with_another_parameter():
    experts = moe_blocks.MixtralExperts()
    experts.scale = nn.Parameter(torch.ones(6))
    return experts


def with_other_sizes():
    experts = moe_blocks.MixtralExperts()
    experts.down_proj = nn.Parameter(torch.randn(6, 64, 64))
    return experts


def patched():
    experts = moe_blocks.MixtralExperts()
    experts.forward = lambda *arguments: arguments
    return experts


def soft_capped(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return 10 * torch.tanh(gate / 10) * torch.sigmoid(gate) * 10 * torch.tanh(up / 10)


def clamped(self, gate_up, up=1):
    limit = getattr(self, "real_limit", self.limit)
    gate, added = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(1.702 * gate) * (added.clamp(-limit, limit) + up)


@pytest.mark.parametrize(
    "experts, reason",
    [
        (lambda: other_experts(has_gate=False), "its experts have other parameters than up_proj and down_proj"),
        (lambda: other_experts(has_bias=True),
         "its experts have other parameters than gate_up_proj, down_proj, gate_up_proj_bias and down_proj_bias"),
        (lambda: other_experts(is_concatenated=False), "its experts have is_concatenated = False"),
        (with_norm, "its experts have has_post_expert_norm = True"),
        (
            lambda: other_experts(_apply_gate=lambda self, x: x.relu()),
            "its experts join gate and up in a way of their own",
        ),
        (
            lambda: other_experts(_apply_gate=None),
            "MixtralExperts has not the common interface of experts, so what it computes is not known",
        ),
        (with_another_parameter, "its experts have other parameters than gate_up_proj and down_proj"),
        (
            with_other_sizes,
            "gate_up_proj is [6, 64, 64] beside a down_proj of [6, 64, 64], expected [6, 128, 64]",
        ),
        (lambda: other_experts(is_transposed=True),
         "gate_up_proj is [6, 64, 64] beside a down_proj of [6, 64, 32], expected [6, 32, 128]"),
        (patched, "it has a forward of its own"),
        (lambda: other_experts(_apply_gate=soft_capped), "its experts join gate and up in a way of their own"),
        (lambda: other_experts(_apply_gate=clamped, limit=7.5, real_limit=7.0),
         "its experts join gate and up in a way of their own"),
        (lambda: other_experts(_apply_gate=lambda self, x: clamped(self, x, up=1.25), limit=7.0),
         "its experts join gate and up in a way of their own"),
        (lambda: other_experts(_apply_gate=lambda self, x: self.missing),
         "its experts join gate and up in a way of their own"),
    ],
)  # fmt: skip
def test_other_experts_are_named(experts, reason):
    """What the operator does not compute stays float, and the report says why."""
    model = nn.ModuleDict({"experts": experts(), "linear": nn.Linear(64, 64)})
    before = model.experts
    report = w4a8.quantize_(model)
    assert model.experts is before
    assert report.skipped["experts"] == reason
    assert list(report.replaced) == ["linear"]
    assert report.left_bytes == 4 * sum(parameter.numel() for parameter in before.parameters())


@torch.no_grad()
def test_any_experts_of_the_interface():
    """By what the interface says of them, whatever the class is called; [H, 2I] and [I, H] as well."""
    x, ids, weights = torch.randn(5, 64), torch.tensor([[0, 5]] * 5), torch.rand(5, 2)
    plain = moe_blocks.MixtralExperts()
    del plain.act_fn
    plain.act_fn = nn.functional.silu  # a function, as some have it
    turned = type("AnyName", (moe_blocks.MixtralExperts,), {"is_transposed": True})()
    turned.gate_up_proj = nn.Parameter(plain.gate_up_proj.mT.contiguous())
    turned.down_proj = nn.Parameter(plain.down_proj.mT.contiguous())
    want, explained = expected_experts(moe_blocks.expert_weights(plain), x, ids, weights, 32)
    model = nn.ModuleDict({"a": plain, "b": turned})
    assert set(w4a8.quantize_(model).replaced) == {"a", "b"}
    assert_within(model["a"](x, ids, weights).numpy(), want, explained)
    assert_same_bits(model["b"](x, ids, weights), model["a"](x, ids, weights))


@torch.no_grad()
def test_any_gate_of_the_operator():
    """By what a class's own gate computes and by the numbers in its module, on the meta device as well."""
    x, ids, weights = 4 * torch.randn(5, 64), torch.tensor([[0, 5]] * 5), torch.rand(5, 2)
    made = {"_apply_gate": clamped, "limit": 0.75, "alpha": 1.702}
    want, explained = expected_experts(moe_blocks.expert_weights(one := other_experts(**made)), x, ids, weights, 32, 3,
                                       limit=0.75)  # fmt: skip
    found = fused_experts(other_experts(**made).to("meta"))
    assert (found.activation, found.numbers) == (w4a8.Activation.SWIGLU_OAI, (0.75, None, None))
    model = nn.ModuleDict({"a": one})
    report = w4a8.quantize_(model)
    assert "activation=SWIGLU_OAI, limit=0.75" in report.replaced["a"]
    assert_within(model["a"](x, ids, weights).numpy(), want, explained)


def test_rows_of_each_expert_in_turn():
    """As Llama 4 calls its experts: the same as with ids; rows of zeros give zeros."""
    experts = W4A8Experts.from_float(torch.randn(3, 64, 64), torch.randn(3, 64, 32))
    rows = torch.randn(2, 6, 64)
    rows[0, 1], rows[1, 5] = 0, -0.0
    ids = torch.arange(3).repeat_interleave(4)[:, None]
    want = experts(rows, ids, torch.ones(12, 1))
    got = experts(rows)
    zeros = (rows == 0).all(-1)
    assert_same_bits(got[~zeros], want[~zeros])
    assert zeros.sum() == 2 and not got[zeros].any()
    with pytest.raises(ValueError, match="hidden_states has 4 rows, expected a multiple of 3 experts"):
        experts(rows[0, :4])
    for missing in ({"top_k_index": ids}, {"top_k_weights": torch.ones(12, 1)}):
        with pytest.raises(ValueError, match="top_k_index and top_k_weights are given both or not at all"):
            experts(rows, **missing)


@pytest.mark.skipif(TORCH_VERSION < (2, 1), reason="torch.compile of 1.13 is another one")
@torch.no_grad()
def test_rows_of_each_expert_compiled():
    """In one graph, for any number of rows."""
    experts = W4A8Experts.from_float(torch.randn(3, 64, 64), torch.randn(3, 64, 32))
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    for count in (4, 7):
        rows = torch.randn(3 * count, 64)
        rows[2] = 0
        assert_same_bits(compiled(rows), experts(rows))
