"""quantize_(calibration=...): what goes into each layer behind rounded ones, against models run step by step here."""

import copy

import moe_blocks
import pytest
import torch
from common import assert_same_bits
from torch import nn

import w4a8
from w4a8.nn import QuantOptions, W4A8Experts, W4A8Linear
from w4a8.nn.compensation import Inputs, round_compensated
from w4a8.nn.rounding import round_weight


class Experts(moe_blocks.MixtralExperts):
    """With the forward that the stand-in leaves out."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for token, (row, chosen, factors) in enumerate(zip(hidden_states, top_k_index, top_k_weights)):
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


class Layer(nn.Module):
    """A residual block: two matrices have one input, the third another."""

    runs = 0

    def __init__(self, width=64, inner=96, in_place=False, pair=False):
        super().__init__()
        self.left, self.right, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)
        self.in_place, self.pair = in_place, pair

    def forward(self, x, scale=1.0):
        self.runs += 1
        x = x.add_(0.25) if self.in_place else x + 0.25
        x = x + self.down(torch.tanh(self.left(x)) * self.right(x)) * scale
        return (x, None) if self.pair else x


class Model(nn.Module):
    """Layers in a list, each with the output of the one before; ``between`` makes the input another tensor."""

    def __init__(self, layers=3, between=False, **options):
        super().__init__()
        self.layers = nn.ModuleList([Layer(**options) for _ in range(layers)])
        self.between = between
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        x = torch.sin(3 * x)
        for layer in self.layers:
            out = layer(x, scale=0.5)
            x = out[0] if layer.pair else out
            x = 1.0 * x if self.between else x
        return self.head(x)


def sums(rows, exact=None, mean=None):
    """Of tensors [., K], one for each batch, filled."""
    found = Inputs.none(rows[0].shape[1])
    for each, beside in zip(rows, exact or [None] * len(rows)):
        found.add(each, beside)
    return found.filled(mean)


def rounded_by_hand(model, batches, options, chained=True):
    """What quantize_ should make of a Model: every layer with its own sums, float states beside the rounded ones."""
    states = [torch.sin(3 * x) for x in batches]
    exact = [x.clone() for x in states]
    for layer in model.layers:
        states, exact = [x + 0.25 for x in states], [x + 0.25 for x in exact]
        beside = exact if chained else None
        float_inner = [torch.tanh(layer.left(x)) * layer.right(x) for x in exact]
        exact = [x + 0.5 * layer.down(inner) for x, inner in zip(exact, float_inner)]
        found = sums(states, beside)
        left, right = (W4A8Linear.from_float(each, options, inputs=found) for each in (layer.left, layer.right))
        inner = [torch.tanh(left(x)) * right(x) for x in states]
        found = sums(inner, float_inner if chained else None)
        layer.down = W4A8Linear.from_float(layer.down, options, inputs=found)
        layer.left, layer.right = left, right
        states = [x + 0.5 * layer.down(y) for x, y in zip(states, inner)]
    model.head = W4A8Linear.from_float(model.head, options, inputs=sums(states))


def assert_same_packed(one, other):
    found, expected = dict(one.named_buffers()), dict(other.named_buffers())
    assert list(found) == list(expected) and found
    for name, tensor in expected.items():
        assert_same_bits(found[name], tensor, name)


BATCHES = [torch.randn(50, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)]


@pytest.mark.parametrize("options", [{}, {"effort": 1, "symmetric": False}, {"values": "e2m1"}], ids=str)
def test_layers_in_turn(options):
    """Each gets the outputs of rounded layers and those of float ones; a layer that is done is not run again."""
    model, options = Model(), QuantOptions(**options)
    want = copy.deepcopy(model)
    with torch.no_grad():
        rounded_by_hand(want, BATCHES, options)
    w4a8.quantize_(model, options, calibration=iter(BATCHES))
    assert_same_packed(model, want)
    # Once to see the order; then each batch as floats, for each of the two inputs inside, and for the output. The last
    # layer feeds none, and the output layer, which is no element of the list, has all of them before it.
    usual = 1 + 3 * (1 + 2 + 1)
    assert [layer.runs for layer in model.layers] == [usual + 3, usual + 3, usual - 3 + 3]
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("options", [{"in_place": True}, {"pair": True}], ids=str)
def test_other_layers(options):
    """Layers that change their input, or give more than one output, are rounded alike."""
    model = Model(**options)
    want = Model()
    want.load_state_dict(model.state_dict())
    for each in (model, want):
        w4a8.quantize_(each, calibration=BATCHES)
    assert_same_packed(model, want)


def test_layers_that_do_not_follow_each_other():
    """Something is between them, so the float states are not known."""
    model = Model(between=True)
    want = copy.deepcopy(model)
    with torch.no_grad():
        rounded_by_hand(want, BATCHES, QuantOptions(), chained=False)
    w4a8.quantize_(model, calibration=BATCHES)
    assert_same_packed(model, want)


def test_a_layer_that_is_used_twice():
    """Its inputs are those of both calls."""
    model = Model(layers=1)
    model.layers.append(model.layers[0])
    want = copy.deepcopy(model.layers[0])
    with torch.no_grad():
        first = [torch.sin(3 * x) for x in BATCHES]
        both = [x + 0.25 for each in first for x in (each, want(each, scale=0.5))]
        left = W4A8Linear.from_float(want.left, inputs=sums(both))
    w4a8.quantize_(model, calibration=BATCHES)
    assert model.layers[0] is model.layers[1]
    assert_same_bits(model.layers[0].left.packed, left.packed)


def test_behind_a_layer_that_is_used_twice():
    """The next one gets what the second call gives."""
    model = Model(layers=3)
    model.layers.insert(1, model.layers[1])
    last = copy.deepcopy(model.layers[3])
    w4a8.quantize_(model, calibration=BATCHES)
    with torch.no_grad():
        states = [torch.sin(3 * x) for x in BATCHES]
        for layer in model.layers[:3]:
            states = [layer(x, scale=0.5) for x in states]
        left = W4A8Linear.from_float(last.left, inputs=sums([x + 0.25 for x in states]))
    assert_same_bits(model.layers[3].left.packed, left.packed)


@pytest.mark.parametrize("options", [{}, {"effort": 1, "symmetric": False}, {"values": "e2m1"}], ids=str)
def test_linear(options):
    """Every form of a batch; layers that are in no list; nothing is left of it."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 96, bias=False))
    x = torch.randn(90, 64) * torch.logspace(-2, 2, 64)
    x[:, 7] = 0
    batches = [x[:16], (x[16:20],), [x[20:24]], {"input": x[24:]}]
    parts = list(x.split([16, 4, 4, 66]))
    first = W4A8Linear.from_float(model[0], 32, inputs=sums(parts), **options)
    second = W4A8Linear.from_float(model[2], 32, inputs=sums([first(part).relu() for part in parts]), **options)
    plain = W4A8Linear.from_float(model[0], 32, **options)
    report = w4a8.quantize_(model, 32, calibration=iter(batches), **options)
    assert_same_packed(model[0], first)
    assert_same_packed(model[2], second)
    assert not torch.equal(model[0].packed, plain.packed)
    assert "forward" not in vars(model[0]) and report.uncalibrated == {}


def test_what_is_not_reached():
    """Rounded by itself, and said; few inputs of the other are filled up."""
    model = nn.ModuleDict({"used": nn.Linear(64, 8), "idle": nn.Linear(64, 8)})
    model.forward = lambda x: model["used"](x)
    x = torch.randn(5, 64)
    want = W4A8Linear.from_float(model["idle"], 32)
    used = W4A8Linear.from_float(model["used"], 32, inputs=sums([x]))
    report = w4a8.quantize_(model, 32, calibration=[x])
    assert_same_packed(model["idle"], want)
    assert_same_packed(model["used"], used)
    assert report.uncalibrated == {"idle": "no batch reached it"}
    assert "idle: not calibrated: no batch reached it" in str(report)


def test_called_by_name():
    """``layer(input=x)``, as torch.nn.Linear takes it, before quantizing and after."""
    model = nn.ModuleDict({"linear": nn.Linear(64, 8), "experts": Experts()})
    ids, weights, x = torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5), torch.randn(5, 64)
    model.forward = lambda x: model["linear"](input=model["experts"](x, top_k_weights=weights, top_k_index=ids))
    linear = model["linear"]
    w4a8.quantize_(model, 32, calibration=[x])
    want = W4A8Linear.from_float(linear, 32, inputs=sums([model["experts"](x, ids, weights)]))
    assert_same_packed(model["linear"], want)
    assert_same_bits(model["linear"](input=x), model["linear"](x))


def between(w13, rows):
    gate, up = (rows @ w13.T).chunk(2, -1)
    return nn.functional.silu(gate) * up


@pytest.mark.parametrize("listed", [False, True], ids=["transformers 5", "transformers 4"])
def test_experts(listed):
    """Each by what is routed to it, w2 behind the rounded w13; the sixth, which gets none, by what the others get."""
    block = MixtralSparseMoeBlock() if listed else Block(Experts())
    batches = [torch.randn(100, 64), torch.randn(80, 64)]
    weights = [(w13.detach(), w2.detach()) for w13, _, w2, _ in moe_blocks.expert_weights(block.experts)]
    inputs = []
    for expert in range(6):
        inputs.append([])
        for x in batches:
            ids = (10 * x[:, :2]).long().abs() % 5
            ids[:, 1] = (ids[:, 0] + 1 + ids[:, 1] % 4) % 5
            inputs[expert] += [mine] if len(mine := x[(ids == expert).any(1)]) > 0 else []
    mean = [Inputs.none(64), Inputs.none(32)]
    for (w13, _), mine in zip(weights, inputs):
        for rows in mine:
            mean[0].add(rows)
            mean[1].add(between(w13, rows))
    few = sum(sum(map(len, mine)) < 64 for mine in inputs)
    assert 1 <= few < 6 and inputs[5] == []
    matrices = []
    for (w13, w2), mine in zip(weights, inputs):
        own = [Inputs.none(64), Inputs.none(32)]
        for rows in mine:
            own[0].add(rows)
        first, rounded = round_compensated(w13, QuantOptions(), own[0].filled(mean[0]))
        for rows in mine:
            own[1].add(between(rounded, rows))
        second, _ = round_compensated(w2, QuantOptions(), own[1].filled(mean[1]))
        matrices.append({"w13": first, "w2": second})
    stacks = [torch.stack([pair[which] for pair in weights]) for which in (0, 1)]
    want = W4A8Experts.from_float(*stacks, round_one=lambda name, expert, *_: matrices[expert][name])
    model = nn.ModuleList([block])
    model.forward = block.forward
    report = w4a8.quantize_(model, 32, calibration=batches)
    assert_same_packed(block.experts, want)
    said = f"{few} of 6 experts got fewer tokens than the hidden size: those of all experts stand in"
    assert report.uncalibrated == {"0.experts": said}


def test_experts_behind_rounded_layers():
    """Where a list of layers has experts, they get the float model's rows too, by the routing of the rounded one."""

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.block = nn.Linear(64, 64), Block(Experts())

        def forward(self, x):
            return x + self.block(self.before(x))

    model = nn.ModuleDict({"layers": nn.ModuleList([Routed(), Routed()])})
    model.forward = lambda x: model["layers"][1](model["layers"][0](x))
    block, x = copy.deepcopy(model["layers"][0].block), torch.randn(400, 64)
    exact = copy.deepcopy(model["layers"][0].before)(x).detach()
    w4a8.quantize_(model, 32, calibration=[x])
    rows = model["layers"][0].before(x).detach()
    found = [Inputs.none(64) for _ in range(6)]
    ids = (10 * rows[:, :2]).long().abs() % 5
    ids[:, 1] = (ids[:, 0] + 1 + ids[:, 1] % 4) % 5
    for expert in range(5):
        chosen = (ids == expert).any(1)
        assert chosen.sum() >= 64
        found[expert].add(rows[chosen], exact[chosen])
    w13, w2 = block.experts.gate_up_proj.detach()[:5], block.experts.down_proj.detach()[:5]
    rounded = [round_compensated(weight, QuantOptions(), each)[0] for weight, each in zip(w13, found)]
    plain = round_weight(w2[0], QuantOptions())  # what w2 is does not matter here
    want = W4A8Experts.from_float(w13, w2, round_one=lambda name, e, *_: rounded[e] if name == "w13" else plain)
    assert_same_bits(model["layers"][0].block.experts.w13_packed[:5], want.w13_packed)


def test_the_output_is_nearer():
    """On inputs that were not seen, through several layers."""
    model = Model(layers=4)
    mix = torch.randn(64, 64) * torch.logspace(-2, 0, 64)[:, None] / 20
    x = torch.randn(1000, 64) @ mix
    want, lost = model(x[800:]), []
    for calibration in (None, [x[:400], x[400:800]]):
        each = copy.deepcopy(model)
        w4a8.quantize_(each, calibration=calibration)
        lost.append(float((each(x[800:]) - want).detach().square().mean()))
    assert lost[1] < 0.6 * lost[0]


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
    with pytest.raises(w4a8.quantization.QuantizationError, match="0: calibration: its inputs have a NaN"):
        w4a8.quantize_(model, 32, calibration=[torch.full((2, 64), float("nan"))])
    assert isinstance(model[0], nn.Linear) and "forward" not in vars(model[0])
