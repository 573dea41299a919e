"""w4a8.quantize_ on experts: on stand-ins for transformers' blocks (tests/python/moe_blocks.py)."""

import functools

import moe_blocks
import numpy as np
import pytest
import reference
import rounding_reference
import torch
from common import assert_same_bits, assert_within, default_activation_group
from test_quantize import CUT
from test_rounding import KINDS, new_kinds
from torch import nn

import w4a8
from w4a8.core.routing import RoutingMethodType, route
from w4a8.nn import W4A8Experts, W4A8Linear
from w4a8.packing import DEFAULT_EFFORT
from w4a8.quantization import QuantizationError


def rounded(weight, group):
    """(nibbles, scales) of a float matrix, in NumPy."""
    return _rounded(weight.detach().float().numpy().tobytes(), tuple(weight.shape), group)


@functools.lru_cache(maxsize=1024)  # the reference searches slowly, and the same experts are asked for several times
def _rounded(numbers, shape, group):
    width = shape[1] if group == -1 else group
    weight = np.frombuffer(numbers, np.float32).reshape(shape)
    values, scales, _ = rounding_reference.round_weights(weight, width, effort=DEFAULT_EFFORT)
    codes = (values + 8).astype(np.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales


def expected_experts(experts, tokens, ids, weights, group, kind=2, **numbers):
    """docs/numerics.md for float experts of either form, and the difference that the error of exp explains."""
    numpy = [[None if bias is None else bias.detach().numpy() for bias in (b13, b2)] for _, b13, _, b2 in experts]
    w13 = [(*rounded(w, group), bias[0]) for (w, _, _, _), bias in zip(experts, numpy)]
    w2 = [(*rounded(w, group), bias[1]) for (_, _, w, _), bias in zip(experts, numpy)]
    arguments = tokens.float().numpy(), ids.numpy(), weights.float().numpy(), w13, w2
    hidden, intermediate = experts[0][2].shape
    activation_groups = [default_activation_group(group, k) for k in (hidden, intermediate)]
    gated = len(experts[0][0]) != intermediate
    return reference.moe(*arguments, intermediate, gated, False, kind, activation_groups, numbers)


@pytest.mark.parametrize("group", [32, 16, -1])
@pytest.mark.parametrize("block_class", [moe_blocks.FusedBlock, moe_blocks.DeepseekV3MoE])
@torch.no_grad()
def test_experts_behind_their_own_router(block_class, group, kernel):
    block = block_class()
    x = torch.randn(2, 9, 64)
    tokens = x.view(-1, 64)
    weights, ids = block.route(tokens)
    want, explained = expected_experts(moe_blocks.expert_weights(block.experts), tokens, ids, weights, group)
    model = nn.ModuleList([block])
    report = w4a8.quantize_(model, group)
    assert report.replaced["0.experts"] == repr(block.experts)
    assert isinstance(block, block_class)
    got = block(x)
    if hasattr(block, "shared_experts"):
        assert isinstance(block.shared_experts.up_proj, W4A8Linear)
        shared = block.shared_experts(x)
        want = want + shared.view(-1, 64).numpy()
        explained = explained + reference.U * np.abs(want)
    assert got.shape == x.shape
    assert_within(got.view(-1, 64).numpy(), want, explained)


@new_kinds
@pytest.mark.parametrize("group", [32, 16, -1])
@torch.no_grad()
def test_experts_of_kind(group, kind):
    """docs/numerics.md for the codes of rounding_reference.py."""
    block = moe_blocks.FusedBlock()
    x = torch.randn(9, 64)
    weights, ids = block.route(x)

    def matrix(weight):
        width = weight.shape[1] if group == -1 else group
        values, scales, _ = rounding_reference.round_weights(
            weight.detach().numpy(), width, kind, effort=DEFAULT_EFFORT
        )
        factor = 2 if kind == "e2m1" else 1
        return (factor * values).astype(np.int64), scales / np.float32(factor), None

    experts = moe_blocks.expert_weights(block.experts)
    w13, w2 = [matrix(w) for w, _, _, _ in experts], [matrix(w) for _, _, w, _ in experts]
    activation_groups = [default_activation_group(group, k) for k in (64, 32)]
    options = (32, True, False, 2, activation_groups)
    want, explained = reference.moe(x.numpy(), ids.numpy(), weights.numpy(), w13, w2, *options)
    w4a8.quantize_(nn.ModuleList([block]), group, **KINDS[kind])
    assert w4a8.read_header(block.experts.w2_packed[5])["values"] == ("e2m1" if kind == "e2m1" else "int4")
    assert_within(block(x).numpy(), want, explained)


@pytest.mark.parametrize("norm_topk_prob", [None, False, True])
@torch.no_grad()
def test_softmax_blocks(norm_topk_prob):
    """[B, S, H] and the router's logits, with the shared expert behind its own gate; None is Mixtral."""
    if norm_topk_prob is None:
        block = moe_blocks.MixtralSparseMoeBlock()
    else:
        block = moe_blocks.Qwen2MoeSparseMoeBlock(norm_topk_prob=norm_topk_prob)
    x = torch.randn(2, 9, 64)
    tokens = x.view(-1, 64)
    logits = block.gate(tokens)
    probabilities = logits.softmax(-1)
    weights, ids = probabilities.topk(2, -1)
    if norm_topk_prob is not False:
        weights = weights / weights.sum(-1, keepdim=True)
    experts = moe_blocks.expert_weights(block.experts)
    want, explained = expected_experts(experts, tokens, ids, weights, 32)
    single = [expected_experts(experts, tokens, ids[:, j : j + 1], weights[:, j : j + 1], 32)[0] for j in (0, 1)]
    block.gate_before = [block.gate]
    w4a8.quantize_(nn.ModuleList([block]))
    assert block.gate is block.gate_before[0]
    got, got_logits = block(x)
    assert_same_bits(got_logits, logits)
    # The same weights in another order of float32 operations: two exp, a sum of six and two divisions.
    explained = explained + (2 * reference.EXP_ERROR + 10 * reference.U) * sum(np.abs(part) for part in single)
    if norm_topk_prob is not None:
        shared = torch.sigmoid(block.shared_expert_gate(tokens)) * block.shared_expert(tokens)
        want = want + shared.numpy()
        explained = explained + reference.U * np.abs(want)
    assert got.shape == x.shape
    assert_within(got.view(-1, 64).numpy(), want, explained)


@torch.no_grad()
def test_biases_and_activation():
    block = moe_blocks.MixtralSparseMoeBlock(bias=True, act=nn.GELU(approximate="tanh"))
    tokens = torch.randn(7, 64)
    weights, ids = route(RoutingMethodType.Renormalize, tokens, block.gate(tokens), 2)
    want, explained = expected_experts(moe_blocks.expert_weights(block.experts), tokens, ids, weights, 32, kind=6)
    w4a8.quantize_(nn.ModuleList([block]))
    assert block.experts.activation == w4a8.Activation.GELU_TANH
    assert_within(block(tokens[None])[0][0].numpy(), want, explained)


def test_blocks_that_cannot_be_fused():
    """Their experts are left alone, or quantized as the linear layers they are."""
    tanh = moe_blocks.MixtralSparseMoeBlock(act=nn.Tanh())
    narrow = moe_blocks.MixtralSparseMoeBlock(intermediate=48, experts=2)
    fused = moe_blocks.FusedBlock(intermediate=48)
    patched = moe_blocks.MixtralSparseMoeBlock(experts=1)
    patched.forward = lambda x: x
    model = nn.ModuleDict({"tanh": tanh, "narrow": narrow, "fused": fused, "patched": patched})
    report = w4a8.quantize_(model)
    width, linear = f"intermediate size = 48: {CUT}", CUT
    gates = {f"{name}.gate": "skip" for name in model}
    assert report.skipped == {
        **gates,
        "tanh.experts": "activation Tanh is not one of the operator",
        "narrow.experts": width,
        "fused.experts": width,
        "narrow.experts.0.down_proj": linear,
        "narrow.experts.1.down_proj": linear,
    }
    assert isinstance(tanh.experts[5].down_proj, W4A8Linear)
    assert isinstance(narrow.experts[1].up_proj, W4A8Linear)
    assert isinstance(patched.experts[0].up_proj, W4A8Linear)
    assert tanh(None) == "the loop over experts"


def test_skipping_experts():
    model = nn.ModuleDict({"a": moe_blocks.MixtralSparseMoeBlock(), "b": moe_blocks.FusedBlock()})
    report = w4a8.quantize_(model, skip="re:.*experts$", default_skip=False)
    assert isinstance(model["a"].experts[0].up_proj, nn.Linear)
    assert isinstance(model["b"].experts, moe_blocks.MixtralExperts)
    assert list(report.replaced) == ["a.gate", "b.gate"]


def test_a_slot_without_an_expert():
    experts = W4A8Experts.from_float(torch.randn(3, 64, 64), torch.randn(3, 64, 32), 32)
    x, weights = torch.randn(4, 64), torch.rand(4, 2)
    ids = torch.tensor([[0, 3], [3, 1], [2, -1], [3, 3]])
    got = experts(x, ids, weights)
    assert_same_bits(got, experts(x, torch.where(ids == 3, -1, ids), weights))
    assert not got[3].any()


def test_experts_with_a_nan_are_named():
    block = moe_blocks.FusedBlock()
    block.experts.down_proj.data[4, 1, 2] = float("nan")
    message = "experts: w2 of expert 4: the weight has a NaN or an infinite element; 0 modules were replaced before it"
    with pytest.raises(QuantizationError, match=message):
        w4a8.quantize_(block)
    assert isinstance(block.experts, moe_blocks.MixtralExperts)
