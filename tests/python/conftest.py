"""Fixtures of the tests; see tests/README.md."""

import os
import tempfile

import pytest
import torch
from common import FUZZ_SEED, KERNELS

import w4a8

# Inductor keeps on disk what it compiled, with the sizes that the operators' Meta kernels gave then. Each run of the
# tests has a folder of its own, which all its processes share: another build may have had other sizes.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    INDUCTOR_CACHE = tempfile.TemporaryDirectory(prefix="w4a8-inductor-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = INDUCTOR_CACHE.name

SEED = int(os.environ.get("W4A8_TEST_SEED", "0"))


def kernels_of_the_fixture():
    """Names, of W4A8_TEST_KERNELS if there is one: `best` is the one that is chosen by default."""
    names = [KERNELS[0] if name == "best" else name for name in os.environ.get("W4A8_TEST_KERNELS", "").split()]
    for name in names:
        if name not in KERNELS:
            raise ValueError(f"W4A8_TEST_KERNELS names {name}, but the kernels that run here are: {KERNELS}")
    return names or KERNELS


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(SEED)


@pytest.fixture(params=kernels_of_the_fixture())
def kernel(request):
    """Runs the test once with every kernel that this CPU can run, or those of W4A8_TEST_KERNELS."""
    with w4a8.use_kernel(request.param) as name:
        assert name == request.param
        yield name


@pytest.fixture
def supported_kernels():
    return KERNELS


@pytest.fixture
def set_threads():
    """torch.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    report = (yield).get_result()
    if report.failed and item.get_closest_marker("hypothesis"):
        report.sections.append(("hypothesis", f"the same inputs again: W4A8_TEST_SEED={FUZZ_SEED}"))
