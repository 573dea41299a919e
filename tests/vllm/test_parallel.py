"""Two ranks: experts cut in two, or dealt out. A bias of w2 must come in once, not once per rank."""

import pytest
from cases import PARALLEL
from compare import check
from conftest import Job, eager, run_engines

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def results(checkpoints, tmp_path_factory):
    jobs = []
    for case, experts in PARALLEL:
        parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": experts}
        jobs.append(Job(checkpoints(case) / "checkpoint", {**eager(case), **parallel}))
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # both ranks on one NUMA node
    done, log = run_engines(jobs, tmp_path_factory.mktemp("parallel"), 1800, **binding)
    assert log.count("world_size=2 rank=1 ") >= len(jobs)
    return jobs, done


@pytest.mark.parametrize("index", range(len(PARALLEL)), ids=[f"{c.name}-{'ep' if ep else 'tp'}2" for c, ep in PARALLEL])
def test_two_ranks(index, results, checkpoints):
    jobs, done = results
    case, _ = PARALLEL[index]
    check(case, checkpoints(case), jobs[index].prompts, done[index], ranks=2)
