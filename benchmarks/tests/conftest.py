"""Tests of the benchmarks (`make test-benchmarks`), which import their packages and reference.py of the other tests."""

import os
import sys
from pathlib import Path

import pytest
import torch
from required import pytest_make_collect_report, pytest_runtest_makereport, pytest_sessionstart  # noqa: F401

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "tests" / "python")]


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(int(os.environ.get("W4A8_TEST_SEED", "0")))
