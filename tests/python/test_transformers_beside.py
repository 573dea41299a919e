"""Models beside an accelerator: standin_cases.py (from_pretrained) and standin_uses.py, in a process of their own.

A device that stands in for hardware cannot be taken out of torch again.
"""

import os
import subprocess
import sys
from pathlib import Path

import available  # noqa: F401
import pytest

pytest.importorskip("accelerate", reason="transformers needs it for device_map")
utils = pytest.importorskip("torch.utils.backend_registration")
if not hasattr(utils, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch has no devices in Python", allow_module_level=True)


def test_on_a_device_that_stands_in():
    cases = [str(Path(__file__).with_name(f"standin_{name}.py")) for name in ("cases", "uses")]
    environment = {key: value for key, value in os.environ.items() if key != "W4A8_TESTS_REQUIRE"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
