"""W4A8_TESTS_REQUIRE (../required.py, whose own tests are python/test_required.py) holds for these tests too: nothing
of them disappears from CI unnoticed.
"""

import os
import subprocess
import sys
from pathlib import Path

import conftest
import required

from w4a8 import cpu_features


def test_its_hooks_are_here():
    hooks = [name for name in dir(required) if name.startswith("pytest_")]
    assert len(hooks) == 3 and all(getattr(conftest, name) is getattr(required, name) for name in hooks)


def test_a_skip_of_what_is_required_fails():
    """AMX hidden: its tests are skipped, and it is required."""
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-q", "test_stock.py", "-k", "test_refusal_with_amx"]
    environment = {**os.environ, "W4A8_TESTS_REQUIRE": "vllm amx_int8", "W4A8_TEST_HIDE_AMX": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    expected = "skipped: this CPU has no AMX" if "amx_int8" in cpu_features().split() else "names amx_int8"
    assert expected in done.stdout + done.stderr
