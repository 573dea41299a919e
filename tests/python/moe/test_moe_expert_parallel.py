"""Expert parallelism for real: processes, gloo, all-reduce. The example is the test."""

import os
import subprocess
import sys
from pathlib import Path

import meter
import pytest
import torch.distributed
from format_checkpoints import FORMATS, QUERY, experts_checkpoint

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "expert_parallel" / "expert_parallel.py"

pytestmark = [
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
    ),
    pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are not here (installed tests)"),
]


def run(*arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        env=meter.environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo")),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_processes_each_with_half_of_the_experts():
    """The example exits with an error if the sum is outside the bound of float additions."""
    out = run("--dtype", "float32")
    assert "rank 0: 8 of 16 experts" in out and "rank 1: 8 of 16 experts" in out
    assert "largest difference from one process" in out


def test_experts_that_do_not_divide():
    out = run("--ranks", "3", "--experts", "7", "--top-k", "3", "--tokens", "9", "--dtype", "bfloat16")
    assert "rank 0: 3 of 7" in out and "rank 1: 2 of 7" in out and "rank 2: 2 of 7" in out


def test_from_a_checkpoint(tmp_path):
    pytest.importorskip("safetensors", reason="the safetensors package is not installed")
    made = experts_checkpoint(FORMATS["W4A8 pack"], 128, 256, 32, experts=8)
    made.add(QUERY, FORMATS["W4A8 pack"], 64, 128, 32)
    out = run("--checkpoint", str(made.write(tmp_path)))
    assert "rank 0: 4 of 8 experts" in out and "rank 1: 4 of 8 experts" in out
