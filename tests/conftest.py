"""What a run says of itself, and what it must have used (required.py). Beside tests/vllm, which has its own."""

import os

import torch
from required import pytest_make_collect_report, pytest_runtest_makereport, pytest_sessionstart  # noqa: F401

import w4a8

SEED = int(os.environ.get("W4A8_TEST_SEED", "0"))


def pytest_report_header():
    kernels = ", ".join(kernel["name"] for kernel in w4a8.kernels() if kernel["supported"])
    return [
        f"w4a8 {w4a8.__version__}, torch {torch.__version__}, seed {SEED} (W4A8_TEST_SEED; hypothesis without it: any)",
        f"kernels: {kernels}",
    ]


def pytest_terminal_summary(terminalreporter):
    for kernel in w4a8.kernels():
        if not kernel["supported"]:
            lacking = set(kernel["needs"].split()) - set(w4a8.cpu_features().split())
            terminalreporter.line(f"kernel not run here: {kernel['name']}, this CPU lacks {' '.join(sorted(lacking))}")
