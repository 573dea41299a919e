"""vLLM keeps compiled graphs on disk. One made with the plugin calls its operators, one made without it does not; what
was compiled once is loaded at the next start.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from cases import COMPILED, QUICK
from compare import assert_same, check
from conftest import ALONE, Job, arguments, run_engines
from models import Case
from test_linear import make_layer

from w4a8.integrations.vllm import compiled

# Dense: without the plugin vLLM runs it as well, through scalar code.
DENSE = Case("qwen3", 32, "int-quantized", "float32", "symmetric")


def run(checkpoint, case, directory, start, **variables):
    """(job, result, log) of an engine in a process of its own, whose cache is the directory's."""
    job = Job(checkpoint, arguments(case, compiled=True))
    variables["W4A8_VLLM_DECODER"] = "0"  # layers in one call are not compiled
    variables["VLLM_CACHE_ROOT"] = str(directory / "cache")
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "cache" / "inductor")
    (result,), log = run_engines([job], directory / start, 600, **ALONE, **variables)
    assert "error" not in result, result["error"]
    return job, result, log


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case is QUICK[0] else pytest.mark.full, id=case.name) for case in COMPILED],
)
def test_a_second_start_compiles_nothing(case, checkpoints, tmp_path):
    """It loads the model, and answers the same bit for bit."""
    first, second = (run(checkpoints(case) / "checkpoint", case, tmp_path, start)[1:] for start in ("first", "second"))
    others = first[0]["compiled"]["graphs"] - 1  # functions of vLLM's sampler that it compiles by themselves
    assert first[0]["compiled"] == {"models": 1, "graphs": 1 + others, "loaded": 0}
    assert "saved AOT compiled function" in first[1]
    assert second[0]["compiled"] == {"models": 0, "graphs": others, "loaded": 1}
    assert "Compiling model again" not in second[1] and "saved AOT" not in second[1]
    assert_same(first[0], second[0])


@pytest.fixture(scope="module")
def runs(checkpoints, tmp_path_factory):
    directory = tmp_path_factory.mktemp("cache")
    off = {"W4A8_VLLM": "0"}
    return [
        run(checkpoints(DENSE) / "checkpoint", DENSE, directory, str(i), **variables)
        for i, variables in enumerate((off, {}, off))
    ]


@pytest.mark.full
@pytest.mark.parametrize("i", range(3), ids=["off", "on", "off again"])
def test_answers(i, runs, checkpoints):
    job, result, log = runs[i]
    check(DENSE, checkpoints(DENSE), job.prompts, result, stock=i != 1)
    assert ("linear layers (int4 in groups of " in log) == (i == 1)


@pytest.mark.full
def test_each_way_has_a_place_of_its_own(runs):
    off, on, again = (set(re.findall(r"torch_aot_compile/(\w+)", log)) for _, _, log in runs)
    assert len(off) == len(on) == 1
    assert off == again != on


def test_what_is_loaded_on_cpus():
    """A model of torch's inductor, unless it has the weights built in; what has the step of vLLM's backend goes it."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Saved

    compiled.load_from_disk()
    asked = []
    Saved(SimpleNamespace(serialize=None)).finalize_loading("config")
    Saved(SimpleNamespace(serialize=None, finalize_loading=asked.append)).finalize_loading("config")
    assert asked == ["config"]
    with torch._inductor.config.patch(freezing=True), pytest.raises(RuntimeError, match="weights are built into it"):
        Saved(SimpleNamespace(serialize=None)).finalize_loading("config")


def packed_layer(monkeypatch, k=128, name="a", scheme=None):
    """A model of one linear layer of this package's."""
    model = torch.nn.Module()
    model.linear = make_layer(monkeypatch, "int-quantized")
    model.linear.layer_name = name
    model.linear.scheme = scheme or model.linear.scheme
    model.linear.scheme.k = k
    model.linear.register_buffer("weight_packed", torch.zeros(k, dtype=torch.uint8))
    return model


def test_a_graph_is_named_after_what_is_built_into_it(monkeypatch):
    """It is run without a look at the model: whatever differs in shape, type, number or layer has another name."""
    from vllm.compilation import decorators

    class Model(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layers = torch.nn.ModuleList([layer])
            self.float = 1.0

        def forward(self, x):
            return x

    monkeypatch.setattr(decorators, "_model_hash_key", decorators._model_hash_key)
    compiled.load_from_disk()

    def key(change=None):
        model = Model(packed_layer(monkeypatch))
        if change is not None:
            change(model, model.layers[0].linear)
        return decorators._model_hash_key(model.forward)

    def other_values(model, linear):
        linear.weight_packed.fill_(7)

    def other_rank(model, linear):
        linear.tp_rank = 1

    def shape(model, linear):
        linear.weight_packed = linear.weight_packed[:-1]

    def dtype(model, linear):
        linear.weight_packed = linear.weight_packed.view(torch.int8)

    def strides(model, linear):
        linear.weight_packed = torch.zeros(256, dtype=torch.uint8)[::2]

    def group(model, linear):
        linear.scheme.k = 64

    def name(model, linear):
        linear.layer_name = "b"

    def number(model, linear):
        model.float = 2.0

    def kind(model, linear):
        linear.scheme = torch.nn.Identity()

    def one_more(model, linear):
        model.layers.append(torch.nn.Identity())

    assert key() == key() == key(other_values) == key(other_rank)  # ranks have folders of their own there
    others = [key(change) for change in (shape, dtype, strides, group, name, number, kind, one_more)]
    assert len({key(), *others}) == 9
    cpu = key()
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: "another CPU")
    assert key() != cpu


def test_a_graph_is_named_after_the_files_of_the_package(monkeypatch, tmp_path):
    """Built or edited anew, of the same version: the operators' shapes may have changed."""
    root = tmp_path / "w4a8"
    (root / "a" / "b").mkdir(parents=True)
    (root / "core.so").write_bytes(b"1")
    monkeypatch.setattr(compiled, "__file__", str(root / "a" / "b" / "compiled.py"))
    names = []
    for path, content in (("core.so", "1"), ("core.so", "2"), ("a/ops.py", ""), ("a/ops.py", "x"), ("core.so", "1")):
        (root / path).write_text(content)
        names.append(compiled.package_digest.__wrapped__())
    assert len(set(names)) == 5
    (root / "notes.txt").write_text("not computed with")
    assert compiled.package_digest.__wrapped__() == names[-1]
