"""No test disappears unnoticed: W4A8_TESTS_REQUIRE, and the kernels that are run. Each runs pytest again."""

import os
import re
import sys
from pathlib import Path

import pytest

import w4a8

pytest_plugins = ["pytester"]
HERE = Path(__file__).resolve().parent
RUN = [kernel["name"] for kernel in w4a8.kernels() if kernel["supported"]]
OPTIONS = ["-rs", "-p", "no:cacheprovider"]


@pytest.fixture
def folder(pytester, monkeypatch):
    """pytester's, with copies of these tests' conftest.py and without their variables."""
    for name in ("W4A8_TESTS_REQUIRE", "W4A8_TEST_KERNELS", "W4A8_TEST_SEED", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    path = [str(HERE), str(HERE.parent), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(dict.fromkeys(filter(None, path))))
    monkeypatch.syspath_prepend(HERE.parent)
    pytester.makeini("[pytest]\nmarkers = sweep\n")
    (pytester.path / "python").mkdir()
    for source, copy in ((HERE.parent, pytester.path), (HERE, pytester.path / "python")):
        (copy / "conftest.py").write_text((source / "conftest.py").read_text())
    return pytester


@pytest.fixture
def run(folder, monkeypatch):
    """`run(text, *arguments, VARIABLE=value)`: pytest on a file of that text, in this process."""

    def run(text, *arguments, **variables):
        (folder.path / "python" / "test_file.py").write_text(text)
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            return folder.runpytest_inprocess(*OPTIONS, "-p", "no:hypothesispytest", *arguments)

    return run


GREEN = "def test_nothing():\n    pass\n"
SKIPS = """
import pytest

def test_runs():
    pass

def test_skips():
    pytest.skip("hypothesis 99 is needed")

@pytest.mark.skipif(True, reason="this torch has none, as compressed-tensors has")
def test_skips_by_a_mark():
    pass

@pytest.fixture
def package():
    return pytest.importorskip("safetensors.nothing")

def test_skips_by_a_fixture(package):
    pass
"""


@pytest.mark.parametrize("name", ["no_such_package", "x86_nothing", "avx9"])
def test_what_is_required_and_missing(run, name):
    assert run(GREEN).ret == 0
    done = run(GREEN, W4A8_TESTS_REQUIRE=f"torch {name}")
    assert done.ret != 0
    done.stderr.fnmatch_lines([f"*W4A8_TESTS_REQUIRE names {name}, which *"])


def test_a_kernel_of_another_machine_is_missing(run):
    lacking = [kernel["name"] for kernel in w4a8.kernels() if not kernel["supported"]]
    for name in [*lacking, "x86_avx2" if "arm_neon" in RUN else "arm_neon"]:
        assert run(GREEN, W4A8_TESTS_REQUIRE=name).ret != 0


@pytest.mark.parametrize(
    ("names", "failed", "errors"),
    [
        ("scalar", 0, 0),
        ("compressed_tensors", 0, 1),
        ("safetensors", 0, 1),
        ("hypothesis torch", 1, 1),
    ],
)
def test_what_is_required_may_not_be_skipped(run, monkeypatch, names, failed, errors):
    import required

    monkeypatch.setattr(required, "_is_here", lambda name: True)
    done = run(SKIPS, W4A8_TESTS_REQUIRE=names)
    assert done.parseoutcomes().get("passed") == 1
    counts = {"failed": failed, "errors": errors, "skipped": 3 - failed - errors}
    assert {name: done.parseoutcomes().get(name, 0) for name in counts} == counts
    assert done.ret == (failed + errors > 0)


MODULE = "import pytest\npytest.skip('numpy 9 is needed', allow_module_level=True)\n"


def test_a_module_that_is_skipped(run):
    assert run(MODULE).ret == 5  # no test has run
    done = run(MODULE, W4A8_TESTS_REQUIRE="numpy")
    assert done.ret == 2
    done.stdout.fnmatch_lines(["skipped: numpy 9 is needed, but W4A8_TESTS_REQUIRE names numpy"])


def test_a_module_that_a_worker_skips(folder, monkeypatch):
    """pytest-xdist's processes send their reports."""
    pytest.importorskip("xdist")
    (folder.path / "python" / "test_file.py").write_text(MODULE)
    monkeypatch.setenv("W4A8_TESTS_REQUIRE", "numpy")
    done = folder.runpytest_subprocess(*OPTIONS, "-n", "1")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["skipped: numpy 9 is needed, but W4A8_TESTS_REQUIRE names numpy"])


KERNELS = "def test_kernel(kernel):\n    print('ran', kernel)\n"


@pytest.mark.parametrize(
    ("given", "kernels"), [(None, RUN), ("best", RUN[:1]), ("scalar", ["scalar"]), ("scalar best", ["scalar", RUN[0]])]
)
def test_kernels_that_are_run(run, given, kernels):
    done = run(KERNELS, "-s", **({"W4A8_TEST_KERNELS": given} if given else {}))
    assert done.ret == 0
    text = done.stdout.str()
    assert re.findall(r"ran (\w+)", text) == kernels
    assert "skipped" not in text
    for kernel in w4a8.kernels():
        assert (f"kernel not run here: {kernel['name']}, this CPU lacks " in text) == (not kernel["supported"])


def test_kernels_that_do_not_exist(run):
    done = run(KERNELS, W4A8_TEST_KERNELS="best nothing")
    assert done.ret != 0
    done.stdout.fnmatch_lines(["*W4A8_TEST_KERNELS names nothing, but the kernels that run here are*"])
