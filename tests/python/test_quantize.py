"""w4a8.quantize_ on plain modules. Experts: test_quantize_experts.py."""

import copy
import functools
import io
import pickle
import re
from pathlib import Path

import moe_blocks
import pytest
import torch
from common import TORCH_VERSION, assert_same_bits
from test_rounding import KINDS, kinds
from torch import nn

import w4a8
from w4a8.nn import W4A8Experts, W4A8Linear
from w4a8.quantization import DEFAULT_SKIP, QuantizationError

CUT = "group (block_size) is 32, expected k = 48 (channelwise), or 16 or a multiple of 32 that divides it"


def float_model():
    model = nn.Module()
    model.first = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64, bias=False))
    model.gate = nn.Linear(64, 4)
    model.lm_head = nn.Linear(64, 10)
    return model


# --- linear layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [32, 16, -1])
@pytest.mark.parametrize(
    "options",
    [{}, {"scale_dtype": torch.bfloat16}, {"effort": 0}, {"effort": 2}, {"symmetric": False}, {"values": "e2m1"}],
    ids=str,
)
def test_linear(group, options):
    model = float_model()
    want = {key: W4A8Linear.from_float(model.get_submodule(key), group, **options) for key in ("first.0", "first.2")}
    gate, head = model.gate, model.lm_head
    report = w4a8.quantize_(model, group, **options)
    for name, layer in want.items():
        got = model.get_submodule(name)
        assert_same_bits(got.packed, layer.packed)
        assert report.replaced[name] == repr(layer)
    assert list(report.replaced) == list(want)
    assert (model.gate, model.lm_head) == (gate, head)
    assert report.skipped == {"gate": "skip", "lm_head": "skip"}
    assert report.float_bytes == 4 * (64 * 96 * 2 + 96)
    assert report.packed_bytes == sum(layer.packed.numel() for layer in want.values())
    x = torch.randn(3, 64)
    assert_same_bits(model.first(x), want["first.2"](want["first.0"](x).relu()))


def test_report_as_text():
    model = float_model()
    report = w4a8.quantize_(model)
    packed = report.packed_bytes
    left = 4 * (64 * 4 + 4 + 64 * 10 + 10)
    assert (report.left_bytes, report.model_bytes) == (left, left + packed)
    assert str(report) == (
        f"2 replaced (49,536 bytes of weights to {packed:,}), 2 left alone; 3,640 bytes stay float, "
        f"{100 * left / (left + packed):.1f}% of the model now\n  gate: skip\n  lm_head: skip"
    )
    again = w4a8.quantize_(model)
    assert (again.replaced, again.left_bytes, again.model_bytes) == ({}, left, left + packed)
    assert str(w4a8.quantize_(nn.Module())) == (
        "0 replaced (0 bytes of weights to 0), 0 left alone; 0 bytes stay float, 0.0% of the model now"
    )


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        ((), []),
        ("first", ["first.0", "first.2"]),
        (["first.2", "gate"], ["first.2", "gate"]),
        (["re:first.0"], ["first.0"]),
        (["re:.*\\d$"], ["first.0", "first.2"]),
        (["re:firs", "gate"], ["first.0", "first.2", "gate"]),  # from the beginning of the name
        (DEFAULT_SKIP, ["gate", "lm_head"]),
        (lambda name, module: isinstance(module, nn.Sequential), ["first.0", "first.2"]),
        (lambda name, module: isinstance(module, nn.Linear) and module.out_features == 10, ["lm_head"]),
    ],
    ids=lambda value: "function" if callable(value) else str(value),  # no address: the same names in every process
)
@pytest.mark.parametrize("default", [True, False])
def test_skip(skip, left, default):
    """Besides what the default leaves alone, or instead of it."""
    model = float_model()
    report = w4a8.quantize_(model, skip=skip, default_skip=default)
    left = {*left, "gate", "lm_head"} if default else left
    assert report.skipped == dict.fromkeys(left, "skip")
    for name in ("first.0", "first.2", "gate", "lm_head"):
        assert isinstance(model.get_submodule(name), nn.Linear if name in left else W4A8Linear)


@pytest.mark.parametrize("entry", ["re:head", "irst.0", "first.01", "lm_heads", "first.0.weight", "re:.*experts$"])
def test_skip_that_matches_nothing(entry):
    """From the beginning of the name, and whole names: a slip of the pen is told before anything is replaced."""
    model = float_model()
    message = f"skip holds {entry!r}, which matches the name of no module of the model"
    for skip in (entry, ["first.0", entry]):
        with pytest.raises(ValueError, match=re.escape(message)):
            w4a8.quantize_(model, skip=skip)
    assert isinstance(model.first[2], nn.Linear)
    # The default may: not every model has a router; and what it says may be given by hand.
    assert list(w4a8.quantize_(nn.Sequential(nn.Linear(64, 8)), skip=DEFAULT_SKIP).replaced) == ["0"]


def test_default_skip():
    for name in ("lm_head", "model.lm_head", "h.0.gate", "gate", "x.router", "mlp.shared_expert_gate"):
        assert any(re.match(pattern[3:], name) for pattern in DEFAULT_SKIP), name
    for name in ("lm_head.0", "my_lm_head", "mlp.gate_proj", "investigate", "router.proj", "x.gate_up"):
        assert not any(re.match(pattern[3:], name) for pattern in DEFAULT_SKIP), name


def test_what_is_left_alone():
    model = nn.Module()
    model.embedding = nn.Embedding(10, 64)
    model.odd = nn.Linear(63, 4)
    model.width = nn.Linear(48, 4)
    model.double = nn.Linear(64, 4).double()
    model.hooked = nn.Linear(64, 4)
    model.hooked.register_forward_hook(lambda *arguments: None)
    model.wrapped = nn.Linear(64, 4)
    model.wrapped.forward = lambda x: x
    model.attention = nn.MultiheadAttention(64, 2)
    model.encoder = nn.TransformerEncoderLayer(64, 2, 96, batch_first=True)
    model.tied = nn.Linear(64, 10)
    model.tied.weight = model.embedding.weight
    model.none = None
    model.vector = nn.LayerNorm(64)
    model.small = nn.Conv1d(1, 1, 2)  # 8 bytes of some 170,000
    model.lazy = nn.LazyLinear(4)  # has no size yet
    model.integers = nn.Parameter(torch.zeros(9, 64, dtype=torch.int8), requires_grad=False)
    model.done = W4A8Linear.from_float(nn.Linear(64, 4), 32)
    before = dict(model.named_modules())
    report = w4a8.quantize_(model)
    subclass = "NonDynamicallyQuantizableLinear is a subclass of Linear, which may do something else"
    reads = "TransformerEncoderLayer reads its weight or bias itself"
    embedding = "weight of Embedding, which is not replaced"
    attention = "in_proj_weight of MultiheadAttention, which is not replaced"
    assert report.skipped == {
        "embedding": embedding,
        "attention": attention,
        "encoder.self_attn": attention,
        "odd": "k (in_features) is 63, expected an even number in 2..1048576",
        "width": CUT,
        "lazy": "LazyLinear is a subclass of Linear, which may do something else",
        "double": "its weight is a Parameter of torch.float64: not float32, bfloat16 or float16",
        "hooked": "it has hooks, which would be lost",
        "wrapped": "it has hooks, which would be lost",
        "attention.out_proj": subclass,
        "encoder.self_attn.out_proj": subclass,
        "encoder.linear1": reads,
        "encoder.linear2": reads,
        "tied": "its weight is shared with embedding",
    }
    assert report.replaced == {}
    assert dict(model.named_modules()) == before
    model.eval().encoder(torch.randn(1, 3, 64))
    del model.lazy
    floats = 4 * sum(p.numel() for p in model.parameters() if p.dtype == torch.float32) + 8 * (64 * 4 + 4)
    packed = model.done.packed.numel()
    assert (report.left_bytes, report.model_bytes) == (floats, floats + 9 * 64 + packed)
    # Channelwise, 48 is as good as any even number.
    assert list(w4a8.quantize_(model, -1).replaced) == ["width"]


def test_parameters_of_the_model_itself():
    model = float_model()
    model.positions = nn.Parameter(torch.randn(8, 64))
    report = w4a8.quantize_(model)
    assert report.skipped["positions"] == "positions of Module, which is not replaced"
    report = w4a8.quantize_(nn.ModuleList([moe_blocks.FusedBlock()]), skip="0")
    assert report.skipped == {"0.experts": "skip", "0.gate": "skip"}
    model = nn.ModuleDict({"a": nn.Embedding(4, 64), "b": nn.Sequential(nn.Embedding(4, 64))})
    report = w4a8.quantize_(model, skip=["b"])
    assert report.skipped == {"a": "weight of Embedding, which is not replaced", "b.0": "skip"}


def test_shared_modules():
    """One module under two names stays one; so do two modules of the same tensors."""
    model = nn.Module()
    model.a = nn.Linear(64, 8)
    model.block = nn.Sequential(model.a, nn.Linear(64, 8), nn.Linear(64, 8))
    model.again = model.block
    model.block[1].weight, model.block[1].bias = model.a.weight, model.a.bias
    model.block[2].weight = model.a.weight  # with a bias of its own
    x = torch.randn(2, 64)
    want = [W4A8Linear.from_float(model.a, 32)(x), W4A8Linear.from_float(model.block[2], 32)(x)]
    report = w4a8.quantize_(model)
    assert model.a is model.block[0] is model.block[1]
    assert model.again is model.block
    assert model.block[2] is not model.a
    assert_same_bits(model.a(x), want[0])
    assert_same_bits(model.block[2](x), want[1])
    assert set(report.replaced) == {"a", "again.0", "again.1", "again.2", "block.0", "block.1", "block.2"}
    assert report.packed_bytes == model.a.packed.numel() + model.block[2].packed.numel()


def test_sharing_with_what_is_skipped():
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(64, 8), nn.Linear(64, 8))
    model[1].weight = model[0].weight
    report = w4a8.quantize_(model, skip="0")
    assert report.skipped == {"0": "skip", "1": "its weight is shared with 0"}
    assert list(report.replaced) == ["2"]
    # A module that is to be left alone under one of its names is so under all.
    linear = nn.Linear(64, 8)
    model = nn.Sequential(linear, linear, nn.Sequential(linear))
    report = w4a8.quantize_(model, skip="1")
    assert report.skipped == {"0": "skip", "1": "skip", "2.0": "skip"}
    assert model[0] is model[1] is model[2][0] is linear


@kinds
def test_widest_layer(kind):
    """Zero points and e2m1 leave less room in the sums."""
    most = (1 << 20) if kind == "int4" else (1 << 19)
    model = nn.Sequential(*(nn.Linear(k, 1, bias=False, device="meta") for k in (most, most + 2)))
    report = w4a8.quantize_(model, -1, **KINDS[kind])
    assert list(report.replaced) == ["0"]
    assert report.skipped["1"].startswith(f"k (in_features) is {most + 2}, expected an even number in 2..{most}")


def test_bad_arguments():
    model = float_model()
    with pytest.raises(ValueError, match="values is 'nf4', expected 'int4', 'e2m1', 'int6' or 'int8'"):
        w4a8.quantize_(model, values="nf4")
    with pytest.raises(ValueError, match="symmetric is False, expected True for values = 'e2m1'"):
        w4a8.quantize_(model, symmetric=False, values="e2m1")
    for group in (0, 8, 24, 48, -2):
        with pytest.raises(ValueError, match=f"group_size is {group}, expected -1, 16 or a multiple of 32"):
            w4a8.quantize_(model, group)
    with pytest.raises(ValueError, match=r"scale_dtype is torch.float16, expected torch.float32 or torch.bfloat16"):
        w4a8.quantize_(model, scale_dtype=torch.float16)
    with pytest.raises(TypeError, match="skip holds 3, expected names, 're:' and a regular expression, or a callable"):
        w4a8.quantize_(model, skip=[3])
    with pytest.raises(ValueError, match=re.escape("skip holds 're:(', which is no regular expression: ")):
        w4a8.quantize_(model, skip="re:(")
    for itself in (nn.Linear(64, 8), moe_blocks.MixtralExperts()):
        with pytest.raises(ValueError, match=f"model is itself a {type(itself).__name__}, which cannot be replaced in"):
            w4a8.quantize_(itself)
    assert isinstance(model.first[0], nn.Linear)


def test_an_exception_leaves_the_model_usable():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight.data[3, 5] = float("inf")
    message = "1: the weight has a NaN or an infinite element; 1 modules were replaced before it and stay so"
    with pytest.raises(QuantizationError) as error:
        w4a8.quantize_(model)
    assert str(error.value) == message
    assert list(error.value.report.replaced) == ["0"]
    assert [type(layer) for layer in model] == [W4A8Linear, nn.Linear, nn.Linear]
    assert model(torch.randn(2, 64)).shape == (2, 64)
    model[1].weight.data[3, 5] = 0
    assert list(w4a8.quantize_(model).replaced) == ["1", "2"]


@kinds
def test_saved_and_loaded(kind):
    torch.manual_seed(1)
    model = nn.ModuleList([float_model(), moe_blocks.FusedBlock(), moe_blocks.Qwen2MoeSparseMoeBlock()])
    torch.manual_seed(2)
    other = nn.ModuleList([float_model(), moe_blocks.FusedBlock(), moe_blocks.Qwen2MoeSparseMoeBlock()])
    w4a8.quantize_(model, **KINDS[kind])
    w4a8.quantize_(other, scale_dtype=torch.bfloat16)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert other.load_state_dict(torch.load(file)) == ([], [])
    x = torch.randn(2, 3, 64)
    assert_same_bits(other[0].first(x), model[0].first(x))
    assert_same_bits(other[1](x), model[1](x))
    for got, want in zip(other[2](x), model[2](x)):
        assert_same_bits(got, want)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(again[2], moe_blocks.Qwen2MoeSparseMoeBlock)
        for got, want in zip(again[2](x), model[2](x)):
            assert_same_bits(got, want)


def test_loading_other_experts_is_refused():
    state = W4A8Experts.from_float(torch.randn(3, 64, 64), torch.randn(3, 64, 32), 32).state_dict()
    for hidden, intermediate, group, message in [
        (64, 64, 32, r"w13_packed\[0\]: n is 64, expected 128"),
        (64, 32, -1, r"w13_packed\[0\]: group is 32, expected 64"),
    ]:
        shapes = (3, 2 * intermediate, hidden), (3, hidden, intermediate)
        experts = W4A8Experts.from_float(*(torch.randn(*shape) for shape in shapes), group)
        with pytest.raises(RuntimeError, match=message):
            experts.load_state_dict(state)
    fewer = W4A8Experts.from_float(torch.randn(2, 64, 64), torch.randn(2, 64, 32), 32)
    with pytest.raises(RuntimeError, match=r"w13_packed is \[3, \d+\], expected \[2, bytes\]"):
        fewer.load_state_dict(state)
    with pytest.raises(ValueError, match=r"w2_packed is \[2, \d+\], expected \[3, bytes\]"):
        W4A8Experts(state["w13_packed"], state["w2_packed"][:2], 64, 32, 32)


@kinds
def test_meta(kind):
    """A model without storage becomes a quantized one without storage, which a state dict fills."""
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64, bias=False), moe_blocks.FusedBlock())
    empty = copy.deepcopy(model).to("meta")
    w4a8.quantize_(model, **KINDS[kind])
    w4a8.quantize_(empty, **KINDS[kind])
    assert all(isinstance(layer, W4A8Linear) and layer.packed.is_meta for layer in empty[:2])
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    assert {key: tensor.shape for key, tensor in empty.state_dict().items()} == shapes
    if TORCH_VERSION < (2, 1):
        pytest.skip(f"torch {TORCH_VERSION} has no load_state_dict(assign=True)")
    empty.load_state_dict(model.state_dict(), assign=True)
    x = torch.randn(3, 64)
    assert_same_bits(empty(x), model(x))


def test_progress_bar(capfd, monkeypatch):
    """Counts to the end, and leaves an empty line to write on."""
    bars = pytest.importorskip("tqdm.auto")
    monkeypatch.setattr(bars, "tqdm", functools.partial(bars.tqdm, mininterval=0))  # shows each step
    model = nn.ModuleList([float_model(), moe_blocks.FusedBlock()])
    w4a8.quantize_(model, progress=True)
    shown = capfd.readouterr().err
    assert "14/14" in shown and "\n" not in shown and "".join(shown.split("\r")[-2:]).isspace()
    w4a8.quantize_(float_model())
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(TORCH_VERSION < (2, 1), reason="torch 1.13 has no torch.device context and no assign=True")
def test_example_of_the_documentation(capsys):
    text = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    names = {}
    exec(code, names)
    assert capsys.readouterr().out.startswith("1 replaced (526,336 bytes of weights to ")
    assert names["y"].shape == (3, 10)
    x = torch.randn(3, 256)
    assert_same_bits(names["skeleton"](x), names["model"](x))
