"""What vLLM says to the same checkpoints without the plugin, which is why there is one."""

import pytest
from cases import QUICK
from conftest import Job, run_engines
from models import Case

INT, PACK = QUICK[0], Case("qwen3_moe", 32, "pack-quantized", "bfloat16", "symmetric")
WEIGHT_ONLY = next(case for case in QUICK if case.inputs == "none")

NO_BACKEND = "NotImplementedError: No W4A8 Int8 MoE backend supports the deployment configuration."
NOT_ARM = "kernel only supports Arm CPU"
NO_WNA16 = "NotImplementedError: No WNA16 MoE backend supports the deployment configuration."


def _job(checkpoints, case, **arguments):
    return Job(checkpoints(case) / "checkpoint", {"enforce_eager": True, "dtype": case.dtype, **arguments})


@pytest.fixture(scope="module")
def results(checkpoints, tmp_path_factory):
    jobs = [
        _job(checkpoints, INT),
        _job(checkpoints, INT, moe_backend="cpu"),
        _job(checkpoints, PACK),
        _job(checkpoints, WEIGHT_ONLY),
    ]
    off = {"W4A8_VLLM": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done, log = run_engines(jobs, tmp_path_factory.mktemp("stock"), 600, **off)
    assert "w4a8: runs" not in log
    return [result.get("error", "no error") for result in done]


@pytest.mark.parametrize(
    ("index", "message"),
    [(0, NO_BACKEND), (1, NOT_ARM), (2, NO_BACKEND), (3, NO_WNA16)],
    ids=["int-quantized", "moe_backend=cpu", "pack-quantized", "weight-only"],
)
def test_refusal(results, index, message):
    assert message in results[index]
