"""Tiny models of every supported family, generated from and scored by vLLM, compiled and eagerly."""

import pytest
from cases import COMPILED, MORE, QUICK, RELOADED
from compare import check
from conftest import Job, arguments, run_engines

# (case, whether it is compiled). What is compiled runs eagerly as well with --full.
SHORT = [(case, case in COMPILED) for case in QUICK]
FULL = [(case, False) for case in [*COMPILED, *MORE]]


@pytest.fixture(scope="module")
def results(request, checkpoints, tmp_path_factory):
    runs = SHORT + (FULL if request.config.getoption("--full") else [])
    jobs = []
    for case, compiled in runs:
        reload = checkpoints(case, seed=1) / "checkpoint" if (case, compiled) in RELOADED else None
        jobs.append(Job(checkpoints(case) / "checkpoint", arguments(case, compiled), reload=reload))
    done, log = run_engines(jobs, tmp_path_factory.mktemp("models"), 3600, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    for (case, compiled), result in zip(runs, done):
        print(f"{result['seconds']:5.0f} s  {case.name}{' compiled' if compiled else ''}")
    return dict(zip(runs, zip(jobs, done))), log


def _name(run: tuple) -> str:
    return run[0].name + ("-compiled" if run[1] else "")


@pytest.mark.parametrize("run", [*SHORT, *(pytest.param(run, marks=pytest.mark.full) for run in FULL)], ids=_name)
def test_answers_are_those_of_transformers(run, results, checkpoints):
    case, (job, result) = run[0], results[0][run]
    check(case, checkpoints(case), job.prompts, result)


@pytest.mark.parametrize("run", RELOADED, ids=_name)
def test_other_weights_are_reloaded(run, results, checkpoints):
    """As training with vLLM does between two steps."""
    case, (job, result) = run[0], results[0][run]
    assert "error" not in result, result["error"]
    check(case, checkpoints(case, seed=1), job.prompts, {**result, **result["reloaded"]})


def test_says_once_what_it_runs(results):
    log = results[1]
    for message in (
        "w4a8: runs layers of int4 experts (groups of 32, silu), kernel ",
        "w4a8: runs layers of int4 experts (channelwise, silu), kernel ",
        "w4a8: runs layers of int4 experts (groups of 64, swigluoai), kernel ",
        "w4a8: runs int4 linear layers (groups of 32), kernel ",
        "w4a8: runs layers of int4 (with zero points) experts (groups of 128, silu), kernel ",
        "w4a8: runs layers of MXFP4 experts (groups of 32, swigluoai), kernel ",
        *(
            f"w4a8: {name} weights run with activations rounded to int8 per token; W4A8_VLLM_W4A16=0 leaves "
            for name in ("compressed-tensors", "GPTQ", "AWQ", "AutoRound", "MXFP4")
        ),
    ):
        assert log.count(message) == 1, message
    assert "goes on without the plugin" not in log


def test_what_is_compiled_is_compiled(results):
    """One graph per compiled model, made now or taken from the cache."""
    runs, log = results
    compiled = sum(compiled for _, compiled in runs)
    assert log.count("AOT compil") >= compiled
