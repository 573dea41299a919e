"""Architectures of GGUF files whose names need no table, in engines."""

import pytest
from compare import check
from conftest import ALONE, Job, prompts, run_engines
from gguf_architectures import EXPERTS, MODELS, VOCAB, model_of, write

from w4a8.checkpoint.gguf_architectures import NOT_IN_VLLM


class Case:
    """What compare.check reads."""

    compiled, inputs, attention, lm_head = False, "none", "w4a8", True

    def __init__(self, model):
        self.model = self.name = model
        self.dtype = "bfloat16" if model == "qwen3next" else "float32"  # its linear attention has no other in vLLM
        self.share_of_an_expert = 2 / EXPERTS if "experts" in str(MODELS[model][1]) else 1.0


CASES = sorted(name for name in MODELS if name.partition(",")[0] not in NOT_IN_VLLM)
# With --quick: joined matrices and latent attention; keys that are values, and norms of heads; Mamba; joined rows.
QUICK = ("deepseek2, GLM-4.7-Flash", "gemma4, experts", "granitehybrid", "minimax-m2", "phi3", "qwen3next")


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    cases = [name for name in CASES if name in QUICK or not request.config.getoption("--quick")]
    where = {name: tmp_path_factory.mktemp("gguf") for name in cases}
    jobs = []
    for name, folder in where.items():
        model = model_of(name)
        keys = {}
        if name == "cohere2":  # its layers see one token more in vLLM than in transformers and llama.cpp
            model.config.sliding_window = keys["cohere2.attention.sliding_window"] = 64
        path = write(name, model, folder, True, **keys)
        model.save_pretrained(folder / "reference")
        arguments = {"enforce_eager": True, "dtype": Case(name).dtype, "max_model_len": 128}
        if name.startswith("deepseek"):  # as in conftest.arguments
            arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
        few = [[token % (VOCAB - 3) + 3 for token in prompt] for prompt in prompts()]
        jobs.append(Job(path, arguments, few))
    done, _ = run_engines(jobs, tmp_path_factory.mktemp("engines"), 1800, **ALONE)
    return dict(zip(cases, zip(jobs, done))), where


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.usual]) for name in CASES]
)
def test_answers_are_those_of_the_weights(name, results):
    job, result = results[0][name]
    assert "error" not in result, result["error"]
    check(Case(name), results[1][name], job.prompts, result, size=32, few_layers=False)
