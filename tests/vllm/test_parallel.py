"""Two ranks: experts cut in two, or dealt out. A bias of w2 must come in once, not once per rank."""

import pytest
from cases import PARALLEL
from compare import check
from conftest import TWO_RANKS, Job, arguments, run_engines


@pytest.fixture(scope="module")
def results(request, checkpoints, tmp_path_factory):
    jobs = []
    for case, experts in PARALLEL if request.config.getoption("--full") else PARALLEL[:1]:
        parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": experts}
        jobs.append(Job(checkpoints(case) / "checkpoint", {**arguments(case), **parallel}))
    done, log = run_engines(jobs, tmp_path_factory.mktemp("parallel"), 3600, **TWO_RANKS)
    assert log.count("world_size=2 rank=1 ") >= len(jobs)
    return jobs, done


@pytest.mark.usual
@pytest.mark.parametrize(
    "index",
    [pytest.param(index, marks=[pytest.mark.full] if index else []) for index in range(len(PARALLEL))],
    ids=[f"{case.name}-{'ep' if experts else 'tp'}2" for case, experts in PARALLEL],
)
def test_two_ranks(index, results, checkpoints):
    jobs, done = results
    case, _ = PARALLEL[index]
    check(case, checkpoints(case), jobs[index].prompts, done[index], ranks=2)
