"""W4A8_TESTS_REQUIRE: what a run of the tests must have used, so that nothing disappears from CI unnoticed.

Names with spaces between them: Python packages as they are imported (transformers, vllm), kernels (x86_avx512vnni) and
features of the CPU as `w4a8 doctor` names them (gfni). The run fails at its start where one is missing, and a test
or a module that is skipped fails where the reason of the skip contains one of the names. A conftest.py imports the
hooks; tests/cpp/registry_test.cpp reads the kernels and the features.
"""

import importlib.util
import os
import re
import sys

import pytest

import w4a8

VARIABLE = "W4A8_TESTS_REQUIRE"


def required() -> list[str]:
    return os.environ.get(VARIABLE, "").split()


def _is_here(name: str) -> bool:
    kernels = {kernel["name"]: kernel["supported"] for kernel in w4a8.kernels()}
    if name in kernels:
        return kernels[name]
    return name in w4a8.cpu_features().split() or importlib.util.find_spec(name) is not None


def pytest_sessionstart(session):
    for name in required():
        if not _is_here(name):
            raise pytest.UsageError(
                f"{VARIABLE} names {name}, which is no kernel that runs here, no feature of this CPU "
                f"({w4a8.cpu_features()}) and no package of {sys.prefix}"
            )


def _refuse(report) -> None:
    """Makes the report of a skip that says a required name the report of a failure."""
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = re.sub("^Skipped: ", "", reason)
    words = re.findall(r"\w+", reason.replace("-", "_").lower())
    said = [name for name in required() if name.lower() in words]
    if said:
        report.outcome = "failed"
        report.longrepr = f"skipped: {reason}, but {VARIABLE} names {' '.join(said)}"


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    _refuse((yield).get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    _refuse((yield).get_result())
