"""vLLM keeps compiled graphs on disk. One made with the plugin calls its operators, one made without it does not; what
was compiled once is loaded at the next start.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import COMPILED, RELOADED
from compare import assert_same, check
from conftest import ALONE, Job, arguments, run_engines
from models import Case
from test_linear import make_layer

from w4a8.integrations.vllm import compile_cache

# Dense: without the plugin vLLM runs it as well, through scalar code.
DENSE = Case("qwen3", 32, "int-quantized", "float32", "symmetric")


def run(jobs, directory, start, **variables):
    """Results and log of engines in a process of its own, whose cache is the directory's."""
    variables["W4A8_VLLM_DECODER"] = "0"  # layers in one call are not compiled
    variables["VLLM_CACHE_ROOT"] = str(directory / "cache")
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "cache" / "inductor")
    return run_engines(jobs, directory / start, 1800, **ALONE, **variables)


@pytest.fixture(scope="module")
def starts(checkpoints, tmp_path_factory):
    """Jobs, and the results and the log of two starts; the engines of the first one get other weights, too."""
    directory = tmp_path_factory.mktemp("starts")
    jobs = [Job(checkpoints(case) / "checkpoint", arguments(case, compiled=True)) for case in COMPILED]
    again = [replace(job) for job in jobs]
    for case, job in zip(COMPILED, jobs):
        job.reload = checkpoints(case, seed=1) / "checkpoint" if case in RELOADED else None
    return jobs, run(jobs, directory, "first"), run(again, directory, "second")


compiled_cases = pytest.mark.parametrize("index", range(len(COMPILED)), ids=[case.name for case in COMPILED])


@compiled_cases
def test_answers_are_those_of_transformers(index, starts, checkpoints):
    jobs, (results, _), _ = starts
    check(COMPILED[index], checkpoints(COMPILED[index]), jobs[index].prompts, results[index])


@pytest.mark.parametrize("case", [case for case in RELOADED if case in COMPILED], ids=lambda case: case.name)
def test_other_weights_are_reloaded(case, starts, checkpoints):
    """No graph has any of the first ones in it."""
    jobs, (results, _), _ = starts
    job, result = jobs[COMPILED.index(case)], results[COMPILED.index(case)]
    assert "error" not in result, result["error"]
    check(case, checkpoints(case, seed=1), job.prompts, {**result, **result["reloaded"]})


@compiled_cases
def test_a_second_start_compiles_nothing(index, starts):
    """It loads the model, and answers the same bit for bit."""
    first, second = (results[index] for results, _ in starts[1:])
    assert_same(first, second)
    count = index + 1  # so far
    others = first["compiled"]["graphs"] - count  # functions of vLLM's sampler that it compiles by themselves
    assert first["compiled"] == {"models": count, "graphs": count + others, "loaded": 0}
    assert second["compiled"] == {"models": 0, "graphs": others, "loaded": count}


def test_says_what_it_compiles(starts):
    first, second = (log for _, log in starts[1:])
    assert first.count("saved AOT compiled function") == len(COMPILED)
    assert "Compiling model again" not in second and "saved AOT" not in second


@pytest.fixture(scope="module")
def runs(checkpoints, tmp_path_factory):
    """Results and logs of three starts, and their job."""
    directory, off = tmp_path_factory.mktemp("cache"), {"W4A8_VLLM": "0"}
    job = Job(checkpoints(DENSE) / "checkpoint", arguments(DENSE, compiled=True))
    return [run([job], directory, str(i), **variables) for i, variables in enumerate((off, {}, off))], job


@pytest.mark.parametrize("i", range(3), ids=["off", "on", "off again"])
def test_answers(i, runs, checkpoints):
    ((result,), log), job = runs[0][i], runs[1]
    check(DENSE, checkpoints(DENSE), job.prompts, result, stock=i != 1)
    assert ("linear layers (int4 in groups of " in log) == (i == 1)


def test_each_way_has_a_place_of_its_own(runs):
    off, on, again = (set(re.findall(r"torch_aot_compile/(\w+)", log)) for _, log in runs[0])
    assert len(off) == len(on) == 1
    assert off == again != on


def test_what_is_loaded_on_cpus():
    """A model of torch's inductor, unless it has the weights built in; what has the step of vLLM's backend goes it."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Saved

    compile_cache.load_from_disk()
    asked = []
    Saved(SimpleNamespace(serialize=None)).finalize_loading("config")
    Saved(SimpleNamespace(serialize=None, finalize_loading=asked.append)).finalize_loading("config")
    assert asked == ["config"]
    with torch._inductor.config.patch(freezing=True), pytest.raises(RuntimeError, match="weights are built into it"):
        Saved(SimpleNamespace(serialize=None)).finalize_loading("config")


def packed_layer(monkeypatch):
    """A model of one linear layer of this package's."""
    model = torch.nn.Module()
    model.linear = make_layer(monkeypatch, "int-quantized")
    model.linear.layer_name = "a"
    model.linear.scheme.k = 128
    model.linear.register_buffer("weight_packed", torch.zeros(128, dtype=torch.uint8))
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
    compile_cache.load_from_disk()

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
    monkeypatch.setattr(compile_cache, "__file__", str(root / "a" / "b" / "compile_cache.py"))
    names = []
    for path, content in (("core.so", "1"), ("core.so", "2"), ("a/ops.py", ""), ("a/ops.py", "x"), ("core.so", "1")):
        (root / path).write_text(content)
        names.append(compile_cache.package_digest.__wrapped__())
    assert len(set(names)) == 5
    (root / "notes.txt").write_text("not computed with")
    assert compile_cache.package_digest.__wrapped__() == names[-1]
