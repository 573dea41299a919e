"""Builds of w4a8 that meet in a process, or a library and Python files of different versions: errors in words.

Each case is a process of its own: what goes wrong here is a crash elsewhere.
"""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import w4a8
from w4a8 import compiled

PACKAGE = Path(w4a8.__file__).resolve().parent
STABLE = compiled.library.__name__ != "w4a8._C"
LIBRARY = PACKAGE / ("stable/libw4a8_stable.so" if STABLE else "libw4a8_torch.so")


def run(code, path):
    """Python with the packages of `path`; what a process writes to stderr, and how it ended."""
    start = f"import sys; sys.path.insert(0, {str(path)!r})\n"
    return subprocess.run([sys.executable, "-c", start + code], cwd="/", capture_output=True, text=True)


def last_line(process):
    assert process.returncode == 1, f"ended with {process.returncode}: {process.stderr}"
    return process.stderr.strip().splitlines()[-1]


@pytest.fixture
def copy(tmp_path):
    """The package once more, in another folder."""
    shutil.copytree(PACKAGE, tmp_path / "w4a8", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_a_second_import_of_the_same_build():
    again = "import w4a8\nfor name in [n for n in sys.modules if n.startswith('w4a8')]: del sys.modules[name]\n"
    use = "import torch\nprint(w4a8.active_kernel(), torch.ops.w4a8.topk_routing(torch.ones(1, 2), 1, True)[1].item())"
    process = run(again + "import w4a8\n" + use, PACKAGE.parent)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == [w4a8.active_kernel(), "0"]


def test_a_package_in_another_folder(copy):
    """Wheel and editable install, say, or two versions on one path."""
    code = f"import w4a8\nsys.path[0] = {str(copy)!r}\n"
    code += "for name in [n for n in sys.modules if n.startswith('w4a8')]: del sys.modules[name]\nimport w4a8"
    line = last_line(run(code, PACKAGE.parent))
    assert line.startswith("ImportError: this process has the operators of another build of w4a8, from ")
    assert str(LIBRARY) in line
    assert f"; {copy / LIBRARY.relative_to(PACKAGE.parent)} cannot be loaded beside it" in line


def test_operators_that_something_else_registered():
    code = "import torch\nlibrary = torch.library.Library('w4a8', 'DEF')\n"
    code += "library.define('dyn_quant_matmul_4bit(Tensor x) -> Tensor')\nimport w4a8"
    line = last_line(run(code, PACKAGE.parent))
    assert "another build of w4a8, from an unknown file" in line
    assert "Start a new process" in line


@pytest.mark.skipif(not STABLE, reason="only the library of the wheel says so itself")
def test_the_library_refuses_a_second_registration(copy):
    """Without the Python files, which ask before."""
    other = copy / LIBRARY.relative_to(PACKAGE.parent)
    code = f"import ctypes, w4a8\nlibrary = ctypes.CDLL({str(other)!r})\nlibrary.w4a8_text.restype = ctypes.c_char_p\n"
    code += "print(library.w4a8_register(), library.w4a8_text().decode())"
    process = run(code, PACKAGE.parent)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("2 torch refuses to register w4a8: another build of w4a8 may be in this process")


def test_no_compiled_part(copy):
    for library in (copy / "w4a8").rglob("*.so"):
        library.unlink()
    wanted = f"ImportError: w4a8 has no compiled part in {copy / 'w4a8'}. "
    assert last_line(run("import w4a8", copy)).startswith(wanted)


def test_an_operator_of_another_version(copy):
    """The Python files call it with an argument that the library does not know."""
    packing = copy / "w4a8" / "packing.py"
    text = packing.read_text().replace("    activation_group: int = -1,\n    minimums", "    minimums", 1)
    assert text != packing.read_text()
    packing.write_text(text)
    line = last_line(run("import w4a8", copy))
    assert "is of another version than the Python files beside it: operator dyn_quant_pack_4bit_weight takes (" in line
    assert "Install w4a8 again" in line


def test_an_operator_that_is_missing(copy):
    for name in ("packing.py", "ops.py", "__init__.py"):
        file = copy / "w4a8" / name
        file.write_text(file.read_text().replace("round_weights", "round_all_weights"))
    assert "operator round_all_weights is missing, expected (" in last_line(run("import w4a8", copy))


def test_a_function_that_is_missing(copy):
    file = copy / "w4a8" / "compiled.py"
    file.write_text(file.read_text().replace('    "kernels",\n', '    "kernels",\n    "later",\n', 1))
    assert f"{compiled.library.__name__.split('.')[-1]}" in last_line(run("import w4a8", copy))
    assert "lacks later: it is of another version" in last_line(run("import w4a8", copy))


@pytest.mark.skipif(not STABLE, reason="a library of the wheel")
def test_a_library_without_a_function(copy):
    """Of an older version than the Python files: a C function that they ask for is not there."""
    file = copy / "w4a8" / "stable" / "library.py"
    file.write_text(file.read_text().replace('"w4a8_version": [],', '"w4a8_version": [],\n    "w4a8_later": [],', 1))
    line = last_line(run("import w4a8", copy))
    assert "libw4a8_stable.so is of another version than the Python files beside it: " in line
    assert "w4a8_later" in line


@pytest.mark.skipif(not STABLE, reason="a library of the wheel")
def test_an_older_torch():
    line = last_line(run("import torch\ntorch.__version__ = '2.9.1'\nimport w4a8", PACKAGE.parent))
    assert line == "ImportError: this build of w4a8 needs torch 2.10 or newer, and torch is 2.9.1"


@pytest.mark.skipif(not STABLE, reason="a library of the wheel")
def test_a_file_that_is_no_library(copy):
    (copy / LIBRARY.relative_to(PACKAGE.parent)).write_bytes(b"not a library")
    line = last_line(run("import w4a8", copy))
    assert "libw4a8_stable.so could not be loaded with torch " + torch.__version__ in line


@pytest.mark.skipif(not STABLE, reason="the C functions are the wheel's")
def test_answers_of_the_c_functions():
    """Of one thread at a time: the text of an error stays until the next call."""
    library = ctypes.CDLL(str(LIBRARY))
    library.w4a8_text.restype = ctypes.c_char_p
    assert library.w4a8_use_kernel(b"nonsense") == 1
    assert library.w4a8_text().startswith(b"no kernel is called 'nonsense'") or b"nonsense" in library.w4a8_text()
    assert library.w4a8_register() == 0
    assert library.w4a8_text() == b"registered before"
