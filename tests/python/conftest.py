"""Fixtures of the tests; see tests/README.md."""

import os

import pytest
import torch

import w4a8

SEED = int(os.environ.get("W4A8_TEST_SEED", "0"))


def pytest_report_header():
    kernels = ", ".join(k["name"] + ("" if k["supported"] else " (not supported here)") for k in w4a8.kernels())
    return [f"w4a8 {w4a8.__version__}, torch {torch.__version__}, seed {SEED} (W4A8_TEST_SEED)", f"kernels: {kernels}"]


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(SEED)


@pytest.fixture(params=w4a8.kernels(), ids=lambda kernel: kernel["name"])
def kernel(request):
    """Runs the test once with every kernel; one that this CPU cannot run is a visible skip."""
    if not request.param["supported"]:
        pytest.skip(f"{request.param['name']} needs {request.param['needs']}, which this CPU does not have")
    with w4a8.use_kernel(request.param["name"]) as name:
        assert name == request.param["name"]
        yield name


@pytest.fixture
def supported_kernels():
    return [kernel["name"] for kernel in w4a8.kernels() if kernel["supported"]]


@pytest.fixture
def set_threads():
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
