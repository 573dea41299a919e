"""Which matrices get more bits (w4a8.quantization.recipe), beside what trying all ways gives; and batches of a text."""

import itertools

import pytest
import torch
from moe_blocks import FusedBlock
from torch import nn

import w4a8
from w4a8.nn import QuantOptions, W4A8Linear
from w4a8.nn.rounding import round_weight
from w4a8.ops import read_header
from w4a8.quantization import recipe
from w4a8.quantization.plan import make_plan
from w4a8.quantization.skip import Skipped
from w4a8.quantization.texts import PYDOC, text_of, windows

# Bits of a weight in groups of 32 with scales of bfloat16; of zero points a byte more. Headers and padding of a packed
# matrix of so few columns are some more.
KINDS = {"int4": 4.5, "zeros": 4.75, "int6": 6.5, "int8": 8.5}


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n, bias=False) for n in (width, 64, 64))
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        keys = self.k_proj(x) * self.v_proj(x)
        return self.o_proj(self.q_proj(x) * keys.repeat(1, x.shape[1] // 64))


class Layers(nn.Module):
    """Residual layers whose matrices matter more and less, and logits."""

    class Answer(tuple):
        logits = property(lambda self: self[0])

    def __init__(self, width=128, count=2):
        super().__init__()
        self.layers = nn.ModuleList(Attention(width) for _ in range(count))
        self.down_proj = nn.Linear(width, width)
        self.lm_head = nn.Linear(width, 16, bias=False)
        with torch.no_grad():
            for i, each in enumerate(self.parameters()):
                each *= 1 + i % 3

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.Answer([self.lm_head(x + self.down_proj(x))])


def planned(model, **options):
    options = QuantOptions(**options)
    return make_plan(model, options, Skipped()).jobs, options


def kind_of(options):
    return options.values if options.symmetric else "zeros"


def chosen(jobs):
    return {job.names[0]: kind_of(job.options) for job in jobs}


def packed_bits(model):
    layers = [module for module in model.modules() if hasattr(module, "packed")]
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    return 8 * sum(layer.packed.numel() for layer in layers) / weights


@pytest.mark.parametrize("calibrated", [False, True])
def test_bits_are_kept_and_used(calibrated):
    for bits in (5.1, 5.5, 6.0, 7.5):
        model = Layers()
        batches = [torch.randn(40, 128) for _ in range(2)] if calibrated else None
        w4a8.quantize_(model, bits=bits, calibration=batches)
        found = packed_bits(model)
        # The largest step is that of q, k and v to int8, 3/11 of all weights of a layer.
        assert bits - 4 * 3 / 11 < found <= bits
        for layer in model.layers:
            kinds = {read_header(each.packed)["values"] for each in (layer.q_proj, layer.k_proj, layer.v_proj)}
            assert len(kinds) == 1  # one layer in vLLM
    assert type(Layers().lm_head) is nn.Linear


@pytest.mark.parametrize("seed", range(4))
def test_near_the_best_of_all_ways(seed):
    """What is chosen loses no more than the best way with so many bits less as the largest step has."""
    torch.manual_seed(seed)
    model = Layers(count=3)
    jobs, options = planned(model, bits=6.2)
    moments = recipe.moments_of(model, jobs, [torch.randn(50, 128)])
    recipe.choose(model, jobs, options, moments)
    parts = {}
    for job in jobs:
        together = job.names[0].endswith(("q_proj", "k_proj", "v_proj"))
        parts.setdefault(job.names[0].rpartition(".")[0] if together else job.names[0], []).append(job)
    parts = list(parts.values())
    modules = {job.names[0]: model.get_submodule(job.names[0]) for job in jobs}
    costs, losses = [], []
    for part in parts:
        cost, lost = {}, {}
        for kind in KINDS:
            how = {"symmetric": False} if kind == "zeros" else {"values": kind}
            rounded = QuantOptions(scale_dtype=torch.bfloat16, **how)
            cost[kind] = lost[kind] = 0.0
            for job in part:
                linear, known = modules[job.names[0]], moments[id(job)]
                cost[kind] += (
                    8 * W4A8Linear.from_float(nn.Linear(*linear.weight.shape[::-1], False), rounded).packed.numel()
                )
                error = linear.weight.detach() - round_weight(linear.weight, rounded, importance=known.inputs).floats()
                lost[kind] += float(torch.einsum("n,nk,k->", known.slopes, error.square(), known.inputs))
        costs.append(cost)
        losses.append(lost)
    weights = sum(module.weight.numel() for module in modules.values())
    own = [kind_of(part[0].options) for part in parts]
    total = sum(cost[kind] for cost, kind in zip(costs, own))
    assert total <= 6.2 * weights
    step = max(cost["int8"] - cost["int4"] for cost in costs)
    best = min(
        sum(lost[kind] for lost, kind in zip(losses, way))
        for way in itertools.product(KINDS, repeat=len(parts))
        if sum(cost[kind] for cost, kind in zip(costs, way)) <= 6.2 * weights - step
    )
    assert sum(lost[kind] for lost, kind in zip(losses, own)) <= best * (1 + 1e-6)


def test_slopes_of_a_known_model():
    """One output with random signs: the derivative of the outputs of the first layer is the second's weight, squared
    for each token."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 1)).requires_grad_(True)
    model[0].weight.requires_grad_(False)
    jobs, _ = planned(model)
    batches = [torch.randn(7, 64), torch.randn(5, 64)]
    moments = recipe.moments_of(model, jobs, batches)
    first, second = (moments[id(job)] for job in jobs)
    rows = torch.cat(batches)
    assert torch.allclose(first.inputs, rows.square().sum(0))
    assert torch.allclose(first.slopes, 12 * model[1].weight[0].square())
    assert torch.allclose(second.slopes, torch.tensor([12.0]))
    with torch.no_grad():
        assert torch.allclose(second.inputs, model[0](rows).square().sum(0), rtol=1e-4)
    assert [each.requires_grad for each in model.parameters()] == [False, True, True, True]
    assert not any(module._forward_hooks for module in model.modules())


def test_slopes_of_logits():
    """The mean of (1 - p)^2 where a token is drawn and p^2 where it is not is p (1 - p); 40,000 draws are within 5
    standard errors, of at most 1/2 each."""
    model = Layers(count=1)
    jobs = make_plan(model, QuantOptions(), Skipped(default_skip=False)).jobs
    head = next(job for job in jobs if job.names == ["lm_head"])
    x = torch.randn(1, 128).expand(40000, 128) / 4
    slopes = recipe.moments_of(model, [head], [x])[id(head)].slopes
    p = model(x[:1]).logits[0].softmax(-1)
    assert torch.allclose(slopes / 40000, p * (1 - p), atol=5 * 0.5 / 200, rtol=0)


def test_experts_count_as_often_as_they_are_read():
    """Of eight experts with two per token: a fourth of their weights."""
    block = FusedBlock()
    model = nn.ModuleDict({"block": block, "down_proj": nn.Linear(64, 640, bias=False)})
    jobs, options = planned(model, bits=6.0)
    experts = next(job for job in jobs if job.kind == "fused")
    count = len(block.experts.down_proj)
    all_weights = sum(each.numel() for each in block.experts.parameters())
    assert recipe._matrices(model, experts)[1] == all_weights
    model.config = type("Config", (), {"num_experts_per_tok": 2})()
    assert recipe._matrices(model, experts)[1] == all_weights * 2 / count
    recipe.choose(model, jobs, options)
    assert all(job.options.scale_dtype == torch.bfloat16 for job in jobs)


def test_without_bits_nothing_is_chosen():
    model = Layers()
    jobs, options = planned(model, group_size=64, symmetric=False)
    recipe.choose(model, jobs, options)
    assert {job.options for job in jobs} == {QuantOptions(64, symmetric=False)}


def test_what_is_wrong():
    with pytest.raises(ValueError, match=r"bits is 4.1, expected 5\.\d+ or more: those of int4 in such groups"):
        w4a8.quantize_(Layers(), bits=4.1)
    with pytest.raises(TypeError, match="bits is '5', expected a number"):
        QuantOptions(bits="5")

    class Detached(Layers):
        def forward(self, x):
            return self.Answer([super().forward(x).logits.detach()])

    model = Detached()
    with pytest.raises(ValueError, match="calibration with bits needs derivatives of the model, which fails"):
        w4a8.quantize_(model, bits=5, calibration=[torch.randn(3, 128)])
    assert type(model.down_proj) is nn.Linear


class Letters:
    """A tokenizer: a token for each character, behind one for the beginning if asked."""

    bos_token_id = 0

    def __init__(self, begins):
        self.begins = begins

    def __call__(self, text, add_special_tokens=True):
        start = [0] if self.begins and add_special_tokens else []
        return {"input_ids": start + [ord(letter) for letter in text]}


def test_windows():
    text = "".join(map(chr, range(100, 200)))
    found = [each["input_ids"].tolist() for each in windows(Letters(False), text, 3, 10)]
    assert found == [[list(range(first, first + 10))] for first in (100, 145, 190)]
    found = [each["input_ids"].tolist() for each in windows(Letters(True), text, 2, 10)]
    assert found == [[[0, *range(first, first + 9)]] for first in (100, 191)]
    short = [each["input_ids"].tolist() for each in windows(Letters(False), text[:25], 3, 10)]
    assert short == [[list(range(a, b))] for a, b in ((100, 110), (110, 120), (120, 125))]
    with pytest.raises(ValueError, match="text is empty"):
        windows(Letters(True), "")
    assert len(text_of(PYDOC)) > 100_000
