"""Tests of lab/ (`make test-benchmarks`), which import its packages and reference.py of the other tests."""

import os
import sys
from pathlib import Path

import pytest
import torch
from required import pytest_make_collect_report, pytest_runtest_makereport, pytest_sessionstart  # noqa: F401

LAB = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(LAB), str(LAB.parent / "tests" / "python")]
import folders  # noqa: E402, F401, which puts benchmarks/ on the path


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(int(os.environ.get("W4A8_TEST_SEED", "0")))
