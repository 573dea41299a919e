"""Models of GGUF files in engines: every architecture with blocks of every type, compiled, and on two ranks."""

import json
import re
from dataclasses import dataclass

import gguf_models
import numpy as np
import pytest
from compare import check
from conftest import ALONE, DEFAULT_HEAD, Job, prompts, run_engines
from gguf_models import EXPERTS, VOCAB, TinyModel
from server import SERVE, ask, serving
from test_gguf_files import TOKENIZER

from w4a8.checkpoint.gguf_architectures import NOT_IN_VLLM


@dataclass(frozen=True)
class Tiny:
    """A key of gguf_models.MODELS; what compare.check reads of a case."""

    model: str
    dtype: str = "float32"
    compiled: bool = False
    inputs = "none"
    attention = "w4a8"
    lm_head = True  # tied to the embeddings, too

    @property
    def name(self):
        return f"{self.model}, {self.dtype}{', compiled' * self.compiled}"

    @property
    def share_of_an_expert(self):
        return 2 / EXPERTS if "moe" in self.model or self.model in ("mixtral", "gpt-oss") else 1.0


# vLLM's latent attention has other sizes than these: test_gguf_architectures.py has one.
MODELS = [name for name in gguf_models.MODELS if not name.startswith("deepseek") and name not in NOT_IN_VLLM]
CASES = [*map(Tiny, MODELS), Tiny("qwen3moe", "bfloat16", compiled=True), Tiny("llama", "float32", True)]


# Tensors that a file lacks: what the error names.
LOST = {
    "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj",
    "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
}


def small_blocks(tiny):
    """In the matrix of attention that ranks cut by columns: half of them are no multiple of 256."""
    for index, layer in enumerate(tiny.model.model.layers):
        weight, name = layer.self_attn.o_proj.weight, f"blk.{index}.attn_output.weight"
        tiny.tensors[name], values = gguf_models.blocks("Q5_0", weight.shape, np.random.default_rng(index))
        weight.data.copy_(values)


def write(case, directory, lost=None, cut=False, **options):
    """A file with its reference in `directory`; a job without a tokenizer."""
    tiny = TinyModel(case.model)
    tiny.tensors.pop(lost, None)
    if cut:
        small_blocks(tiny)
    if case.model in ("gpt-oss", "olmoe"):  # vLLM takes this number for most norms, whatever a config says
        tiny.keys[f"{case.model}.attention.layer_norm_rms_epsilon"] = tiny.model.config.rms_norm_eps = 1e-5
    tiny.write(directory, **options)
    tiny.model.save_pretrained(directory / "reference")
    (path, *_) = sorted(directory.glob("*.gguf"))
    arguments = {"enforce_eager": not case.compiled, "dtype": case.dtype, "max_model_len": 128}
    few = [[token % (VOCAB - 3) + 3 for token in prompt] for prompt in prompts()]
    return Job(path, arguments, few, environment=DEFAULT_HEAD)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    where = {case: tmp_path_factory.mktemp("gguf") for case in CASES}
    jobs = [write(case, where[case], **({"split_max_tensors": 9} if case.model == "llama" else {})) for case in CASES]
    broken = [write(Tiny("qwen3"), tmp_path_factory.mktemp("lost"), lost=name) for name in LOST]
    engines = tmp_path_factory.mktemp("engines")
    done, log = run_engines([*jobs, *broken], engines, 1800, **ALONE)
    refused = dict(zip(LOST, (result.get("error", "") for result in done[len(jobs) :])))
    return dict(zip(CASES, zip(jobs, done))), where, log, refused


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answers_are_those_of_the_weights(case, results):
    job, result = results[0][case]
    assert "error" not in result, result["error"]
    check(case, results[1][case], job.prompts, result, size=32)


def test_says_what_it_runs(results):
    log = results[2]
    assert re.search(r"w4a8: runs 8 linear layers \(.*\), 1 output layer \(", log)  # llama
    assert re.search(r"w4a8: runs 4 linear layers \(.*\), 2 layers of experts \(", log)  # gpt-oss
    assert log.count("w4a8: GGUF weights run with activations rounded to int8 in groups of 32") == 1


@pytest.mark.parametrize("name", LOST)
def test_a_tensor_that_is_missing(name, results):
    assert f"model.gguf holds no tensor for {LOST[name]}" in results[3][name]


PARALLEL = [(Tiny("llama, biases"), False), (Tiny("qwen3moe"), False), (Tiny("gpt-oss"), True)]


@pytest.fixture(scope="module")
def parallel(tmp_path_factory):
    where = {case: tmp_path_factory.mktemp("parallel") for case, _ in PARALLEL}
    jobs = [write(case, where[case], cut=True) for case, _ in PARALLEL]
    for job, (_, experts) in zip(jobs, PARALLEL):
        job.arguments |= {"tensor_parallel_size": 2, "enable_expert_parallel": experts}
    done, _ = run_engines(jobs, tmp_path_factory.mktemp("engines"), 1800, ranks=2, **ALONE)
    return dict(zip(where, zip(jobs, done))), where


@pytest.mark.parametrize(("case", "experts"), PARALLEL, ids=[case.name for case, _ in PARALLEL])
def test_two_ranks(case, experts, parallel):
    job, result = parallel[0][case]
    assert "error" not in result, result["error"]
    check(case, parallel[1][case], job.prompts, result, ranks=2, size=32)


def test_server(tmp_path):
    """A conversation, with the tokenizer and the template of the file."""
    tiny = TinyModel("qwen3moe")
    tiny.keys |= {**TOKENIZER, "qwen3moe.context_length": 512}
    path, log = tiny.write(tmp_path), tmp_path / "serve.log"
    with serving(SERVE, path, log, VLLM_CACHE_ROOT=str(tmp_path / "cache")) as (address, _):
        messages = [{"role": "user", "content": "ab"}]
        with ask(address, "chat/completions", messages=messages, max_tokens=8) as response:
            answer = json.load(response)
    assert answer["usage"]["prompt_tokens"] == len("<user>") + 1  # "ab" is one token
    assert re.search(r"w4a8: runs 4 linear layers \(.*\), 2 layers of experts \(", log.read_text())
