"""Architectures of GGUF files whose names need no table, in engines: from such files, and from safetensors of int4."""

import functools

import pytest
from compare import check
from conftest import ALONE, DEFAULT_HEAD, Job, prompts, run_engines
from gguf_architectures import EXPERTS, INT4, MODELS, NOT_INT4_IN_VLLM, STACKED, VOCAB, model_of, write, write_int4

from w4a8.checkpoint.gguf_architectures import NOT_IN_VLLM


class Case:
    """What compare.check reads."""

    compiled, inputs, attention, dtype = False, "none", "w4a8", "float32"

    def __init__(self, model, form):
        self.model = self.name = model
        self.lm_head = form == "gguf"  # int4 files have it in bfloat16, and engine.py leaves it so
        self.share_of_an_expert = 2 / EXPERTS if "experts" in str(INT4[model][1]) else 1.0


CASES = {
    "gguf": sorted(name for name in MODELS if name.partition(",")[0] not in NOT_IN_VLLM),
    "int4": sorted(name for name in INT4.keys() - STACKED if name.partition(",")[0] not in NOT_INT4_IN_VLLM),
}
# With --quick: joined matrices and latent attention; keys that are values, and norms of heads; Mamba; joined rows.


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """``results(form)``: by name of a model the job and its result; and by name the folder."""
    return functools.cache(lambda form: run(form, CASES[form], tmp_path_factory))


def run(form, cases, tmp_path_factory):
    where = {name: tmp_path_factory.mktemp(form) for name in cases}
    jobs = []
    for name, folder in where.items():
        # vLLM ties LFM2's output layer, whatever a config says.
        model, keys = model_of(name, **({"tie_word_embeddings": True} if name == "lfm2" else {})), {}
        if name == "cohere2":  # its layers see one token more in vLLM than in transformers and llama.cpp
            model.config.sliding_window = keys["cohere2.attention.sliding_window"] = 64
        if form == "gguf":
            path = write(name, model, folder, True, **keys)
        else:
            path = folder / "checkpoint"
            write_int4(model, path)
        model.save_pretrained(folder / "reference")
        arguments = {"enforce_eager": True, "dtype": Case(name, form).dtype, "max_model_len": 128}
        if name.startswith(("deepseek", "lfm2")):  # as in conftest.arguments
            arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
        few = [[token % (VOCAB - 3) + 3 for token in prompt] for prompt in prompts()]
        # vLLM's own linear attention has no float32.
        environment = {"W4A8_VLLM_ATTENTION": str(int("linear_attention" in str(INT4[name][1])))}
        jobs.append(Job(path, arguments, few, environment=environment | (DEFAULT_HEAD if form == "gguf" else {})))
    done, _ = run_engines(jobs, tmp_path_factory.mktemp("engines"), 1800, **ALONE)
    return dict(zip(cases, zip(jobs, done))), where


ALL = [(form, name) for form, names in CASES.items() for name in names]


@pytest.mark.parametrize(("form", "name"), ALL)
def test_answers_are_those_of_the_weights(form, name, results):
    found, where = results(form)
    job, result = found[name]
    assert "error" not in result, result["error"]
    check(Case(name, form), where[name], job.prompts, result, size=32, few_layers=False)
