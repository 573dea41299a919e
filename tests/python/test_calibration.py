"""quantize_(calibration=...): mean squares of input channels, of layers and of experts, against what NumPy adds up."""

import moe_blocks
import numpy as np
import pytest
import torch
from common import assert_same_bits
from torch import nn

import w4a8
from w4a8.nn import QuantOptions, W4A8Experts, W4A8Linear
from w4a8.quantization.calibration import calibrate
from w4a8.quantization.plan import make_plan
from w4a8.quantization.skip import Skipped


class Experts(moe_blocks.MixtralExperts):
    """With the forward that the stand-in leaves out."""

    def forward(self, rows, ids, weights):
        out = torch.zeros_like(rows)
        for token, (row, chosen, factors) in enumerate(zip(rows, ids, weights)):
            for expert, factor in zip(chosen, factors):
                gate, up = (self.gate_up_proj[expert] @ row).chunk(2)
                out[token] += factor * (self.down_proj[expert] @ (self.act_fn(gate) * up))
        return out


class Block(nn.Module):
    """Routes each token to two of the experts below 5; the sixth gets none."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x):
        ids = (10 * x[:, :2]).long().abs() % 5
        ids[:, 1] = (ids[:, 0] + 1 + ids[:, 1] % 4) % 5
        if isinstance(self.experts, nn.ModuleList):
            out = torch.zeros_like(x)
            for expert, module in enumerate(self.experts):
                mine = (ids == expert).any(1)
                out[mine] += module(x[mine]) / 2 if mine.any() else 0
            return out
        return self.experts(x, ids, torch.full(ids.shape, 0.5))


class MixtralSparseMoeBlock(Block):
    """As transformers 4 calls it."""

    def __init__(self):
        super().__init__(nn.ModuleList([moe_blocks.MLP(64, 32) for _ in range(6)]))
        self.gate, self.top_k = nn.Linear(64, 6), 2


def mean_squares(x):
    return from_mean((x.detach().numpy().astype(np.float64) ** 2).mean(0))


def from_mean(mean):
    return torch.from_numpy(np.where(mean > 0, mean, mean.mean()).astype(np.float32))


def calibrated(model, batches):
    """What calibrate finds of each job of quantize_'s plan."""
    return calibrate(model, make_plan(model, QuantOptions(), Skipped((), True)).jobs, batches)


def assert_near(found, expected):
    """float32 squares and sums in another order, also those of 64 products where a matrix is before."""
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, rtol=1e-5, atol=0)


def assert_same_packed(one, other):
    for (name, actual), (_, expected) in zip(one.named_buffers(), other.named_buffers()):
        assert_same_bits(actual, expected, name)


@pytest.mark.parametrize("options", [{}, {"effort": 1, "symmetric": False}, {"values": "e2m1"}], ids=str)
def test_linear(options):
    """Every form of a batch; a channel that is always 0 counts as the mean of the others; nothing is left of it."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 96, bias=False))
    x = torch.randn(40, 64) * torch.logspace(-2, 2, 64)
    x[:, 7] = 0
    batches = [x[:16], (x[16:20],), [x[20:24]], {"input": x[24:]}]
    counts = calibrated(model, batches)
    for found, inputs in zip(counts, (x, model[:2](x))):
        assert list(found) == ["importance"]
        assert_near(found["importance"], mean_squares(inputs))
    want = [W4A8Linear.from_float(model[i], 32, **count, **options) for i, count in zip((0, 2), counts)]
    plain = W4A8Linear.from_float(model[0], 32, **options)
    w4a8.quantize_(model, 32, calibration=iter(batches), **options)
    assert_same_packed(model[0], want[0])
    assert_same_packed(model[2], want[1])
    assert not torch.equal(model[0].packed, plain.packed)
    assert "forward" not in vars(model[0])


def test_what_is_not_reached_counts_alike():
    model = nn.ModuleDict({"used": nn.Linear(64, 8), "idle": nn.Linear(64, 8)})
    model.forward = lambda x: model["used"](x)
    want = W4A8Linear.from_float(model["idle"], 32)
    w4a8.quantize_(model, 32, calibration=[torch.randn(5, 64)])
    assert_same_packed(model["idle"], want)


def test_called_by_name():
    """``layer(input=x)``, as torch.nn.Linear takes it, before quantizing and after."""
    model = nn.ModuleDict({"linear": nn.Linear(64, 8), "experts": Experts()})
    ids, weights, x = torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5), torch.randn(5, 64)
    model.forward = lambda x: model["linear"](input=model["experts"](x, weights=weights, ids=ids))
    found = calibrated(model, [x])
    assert_near(found[0]["importance"], mean_squares(model["experts"](x, ids, weights)))
    assert_near(found[1]["w13_importance"][0], mean_squares(x))
    w4a8.quantize_(model, 32, calibration=[x])
    assert_same_bits(model["linear"](input=x), model["linear"](x))


@pytest.mark.parametrize("listed", [False, True], ids=["transformers 5", "transformers 4"])
def test_experts(listed):
    """Each by what is routed to it; the sixth, which gets nothing, by what all the others get."""
    block = MixtralSparseMoeBlock() if listed else Block(Experts())
    x = torch.randn(60, 64)
    ids = (10 * x[:, :2]).long().abs() % 5
    ids[:, 1] = (ids[:, 0] + 1 + ids[:, 1] % 4) % 5
    weights = moe_blocks.expert_weights(block.experts)
    inputs, between = [], []
    for expert in range(5):
        mine = x[(ids == expert).any(1)]
        assert len(mine) > 0
        gate, up = (mine @ weights[expert][0].T).chunk(2, -1)
        inputs.append(mine)
        between.append(nn.functional.silu(gate) * up)
    counts = {
        "w13_importance": torch.stack([*map(mean_squares, inputs), mean_squares(torch.cat(inputs))]),
        "w2_importance": torch.stack([*map(mean_squares, between), mean_squares(torch.cat(between))]),
    }
    w13, w2 = [w[0].detach() for w in weights], [w[2].detach() for w in weights]
    model = nn.ModuleList([block])
    model.forward = block.forward
    (found,) = calibrated(model, [x[:17], x[17:]])
    for name, expected in counts.items():
        assert_near(found[name], expected)
    want = W4A8Experts.from_float(w13, w2, 32, **found)
    w4a8.quantize_(model, 32, calibration=[x[:17], x[17:]])
    assert_same_packed(block.experts, want)
    assert not torch.equal(block.experts.w13_packed, W4A8Experts.from_float(w13, w2, 32).w13_packed)


def test_the_output_is_nearer():
    """Where input channels differ: that is what it is for."""
    x = torch.randn(256, 128) * torch.logspace(-1.5, 1.5, 128)[torch.randperm(128)]
    lost = []
    for calibration in (None, [x[:128]]):
        model = nn.Sequential(nn.Linear(128, 64))
        with torch.no_grad():
            model[0].weight.copy_(torch.randn(64, 128, generator=torch.Generator().manual_seed(1)))
        want = model(x[128:])
        codes = model[0].weight.detach()
        counts = None if calibration is None else mean_squares(x[:128])
        q, s, _ = w4a8.round_weights(codes, 32, importance=counts)
        values = torch.stack([q & 15, q >> 4], -1).flatten(1).float() - 8
        rounded = values * s.repeat_interleave(32, 1)
        lost.append(float((x[128:] @ rounded.T + model[0].bias - want).detach().square().mean()))
    assert lost[1] < 0.8 * lost[0]


@pytest.mark.parametrize("shape", [(4, 64), (2, 64), (64,), (3, 32)])
def test_importance_of_another_shape(shape):
    expected = rf"w13_importance is \[{', '.join(map(str, shape))}\], expected \[3, 64\]"
    with pytest.raises(ValueError, match=expected):
        W4A8Experts.from_float(torch.randn(3, 64, 64), torch.randn(3, 64, 32), 32, w13_importance=torch.ones(shape))


def test_errors():
    model = nn.Sequential(nn.Linear(64, 8))
    with pytest.raises(ValueError, match="calibration has no batches, expected one or more"):
        w4a8.quantize_(model, 32, calibration=[])
    with pytest.raises(ValueError, match="calibration is given, expected None for effort = 0"):
        w4a8.quantize_(model, 32, calibration=[torch.randn(2, 64)], effort=0)
    for batch in (torch.randn(2, 64), {"input": torch.randn(2, 64)}):
        with pytest.raises(TypeError, match=f"calibration is a {type(batch).__name__}, expected a list of batches"):
            w4a8.quantize_(model, 32, calibration=batch)
    with pytest.raises(RuntimeError):
        w4a8.quantize_(model, 32, calibration=[torch.randn(2, 63)])  # the model's own
    assert isinstance(model[0], nn.Linear) and "forward" not in vars(model[0])
    with pytest.raises(w4a8.quantization.QuantizationError, match=r"0: .*importance: element .* is nan"):
        w4a8.quantize_(model, 32, calibration=[torch.full((2, 64), float("nan"))])
