"""W4A8_TESTS_REQUIRE (../required.py) holds for these tests too: nothing of them disappears from CI unnoticed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from w4a8 import cpu_features


def run(required: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """One more pytest, of this folder."""
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-q", *arguments]
    environment = {**os.environ, "W4A8_TESTS_REQUIRE": required, **variables}
    return subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("required", ["vllm transformers compressed_tensors", "vllm no_such_package"])
def test_what_is_required_is_here(required):
    done = run(required, "--collect-only", "test_compare.py")
    assert (done.returncode == 0) == ("no_such_package" not in required), done.stdout + done.stderr
    assert ("W4A8_TESTS_REQUIRE names no_such_package" in done.stderr) == (done.returncode != 0)


def test_a_skip_of_what_is_required_fails():
    """AMX hidden: its tests are skipped, unless it is required."""
    test = ("test_stock.py", "-k", "test_refusal_with_amx")
    hidden = {"W4A8_TEST_HIDE_AMX": "1"}
    assert run("vllm", *test, **hidden).returncode == 0
    done = run("vllm amx_int8", *test, **hidden)
    assert done.returncode != 0
    expected = "skipped: this CPU has no AMX" if "amx_int8" in cpu_features().split() else "names amx_int8"
    assert expected in done.stdout + done.stderr
