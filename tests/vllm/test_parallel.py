"""Two ranks: experts cut in two, or dealt out. A bias of w2 must come in once, not once per rank."""

import pytest
from cases import PARALLEL
from compare import check
from conftest import ALONE, Job, arguments, run_engines

RANKS = [f"{case.name}-{'ep' if experts else 'tp'}2" for case, experts in PARALLEL]


def job(index, checkpoints):
    case, experts = PARALLEL[index]
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": experts}
    return Job(checkpoints(case) / "checkpoint", {**arguments(case), **parallel})


@pytest.fixture(scope="module")
def results(checkpoints, tmp_path_factory):
    jobs = [job(index, checkpoints) for index in range(len(PARALLEL))]
    done, log = run_engines(jobs, tmp_path_factory.mktemp("parallel"), 3600, ranks=2, **ALONE)
    assert log.count("world_size=2 rank=1 ") >= len(jobs)
    return jobs, done


@pytest.mark.parametrize("index", range(len(PARALLEL)), ids=RANKS)
def test_two_ranks(index, results, checkpoints):
    jobs, done = results
    case, _ = PARALLEL[index]
    check(case, checkpoints(case), jobs[index].prompts, done[index], ranks=2)


def test_two_ranks_that_vllm_starts(checkpoints, tmp_path):
    """In interpreters of their own, as in a server, which takes longer than all of the above. Both on one NUMA node."""
    case, asked = PARALLEL[0][0], job(0, checkpoints)
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "W4A8_VLLM_ATTENTION": "0"}
    (result,), log = run_engines([asked], tmp_path, 900, **variables)
    assert "world_size=2 rank=1 " in log
    check(case, checkpoints(case), asked.prompts, result, ranks=2)
