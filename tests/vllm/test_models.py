"""Tiny models of every supported family, generated from and scored by vLLM in eager mode."""

import pytest
from cases import MORE, QUICK
from compare import check
from conftest import Job, eager, run_engines


@pytest.fixture(scope="module")
def results(request, checkpoints, tmp_path_factory):
    cases = QUICK + (MORE if request.config.getoption("--full") else [])
    jobs = []
    for case in cases:
        opt_in = {"W4A8_VLLM_W4A16": "1"} if case.inputs == "none" else {}
        jobs.append(Job(checkpoints(case) / "checkpoint", eager(case), opt_in))
    done, log = run_engines(jobs, tmp_path_factory.mktemp("eager"), 1500, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    return {case: (job, result) for case, job, result in zip(cases, jobs, done)}, log


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)], ids=lambda c: c.name
)
def test_answers_are_those_of_transformers(case, results, checkpoints):
    job, result = results[0][case]
    check(case, checkpoints(case), job.prompts, result)


def test_says_once_what_it_runs(results):
    log = results[1]
    for message in (
        "w4a8: runs layers of int4 experts (groups of 32, silu), kernel ",
        "w4a8: runs layers of int4 experts (channelwise, silu), kernel ",
        "w4a8: runs layers of int4 experts (groups of 64, swigluoai), kernel ",
        "w4a8: runs int4 linear layers (groups of 32), kernel ",
        "w4a8: experts of a weight-only int4 model run with int8 activations (W4A8_VLLM_W4A16=1)",
    ):
        assert log.count(message) == 1, message
    assert "goes on without the plugin" not in log
